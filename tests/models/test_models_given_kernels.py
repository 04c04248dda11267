"""A given config.json can't choose the code that computes: no kernels of other packages or of the Hub, nothing that came with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, MixtralConfig, MixtralForCausalLM

from mlmclm.errors import UserError
from mlmclm.evaluation.language_model import LanguageModel
from mlmclm.models.folder import check_model_folder, load_encoder, load_tokenizer, read_config, read_model
from mlmclm.models.given import encoder_config, encoder_size, read_initial
from mlmclm.storage.files import read_json, write_json
from small_models import save_small_decoder, save_small_model

NAMES = (
    "attn_implementation", "_attn_implementation", "attn_implementation_internal", "_attn_implementation_internal",
    "experts_implementation", "_experts_implementation", "_experts_implementation_internal",
)  # fmt: skip
VALUES: list[Any] = [
    "flash_attention_2", "flash_attention_3", "kernels-community/flash-attn2", "someone/kernels:forward", "flex_attention",
    "paged|flash_attention_2", {"": "flash_attention_2"}, "deepgemm", "no_such_thing",
]  # fmt: skip


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where transformers would load kernels, as it would where their packages are installed."""
    from transformers import modeling_utils
    from transformers.integrations import hub_kernels

    def reached(*_: object, **__: object) -> None:
        raise AssertionError("kernels would be loaded")

    for module, name in (
        (modeling_utils, "lazy_import_flash_attention"),
        (hub_kernels, "load_and_register_attn_kernel"),
        (hub_kernels, "get_kernel"),
    ):
        monkeypatch.setattr(module, name, reached)


def ask(folder: Path, **values: Any) -> Path:
    write_json(folder / "config.json", {**read_json(folder / "config.json"), **values})
    return folder


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("value", VALUES, ids=str)
def test_a_configuration_cannot_choose_kernels(tmp_path: Path, value: Any) -> None:
    encoder = save_small_model(tmp_path / "encoder")
    decoder = save_small_decoder(tmp_path / "decoder")
    expected = load_encoder(encoder).state_dict()
    for name in NAMES:
        folder = ask(encoder, **{name: value})
        found = load_encoder(folder)
        assert found.config._attn_implementation == "mlmclm"
        assert all(torch.equal(expected[key], tensor) for key, tensor in found.state_dict().items())
        assert read_model(AutoModelForMaskedLM, folder)[0].config._attn_implementation == "sdpa"
        LanguageModel.load(ask(decoder, **{name: value}), "causal").likelihoods([("the film", " was")])
        read_initial(folder).model()
        encoder_size(encoder_config(folder))
        load_tokenizer(folder)


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("name", NAMES)
def test_nor_those_of_its_experts(tmp_path: Path, name: str) -> None:
    config = MixtralConfig(
        vocab_size=400, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2, max_position_embeddings=64,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(tmp_path)
    plain = read_model(AutoModelForCausalLM, tmp_path)[0].config
    for value in ("deepgemm", "sonicmoe", "no_such_thing", {"": "deepgemm"}):
        found = read_model(AutoModelForCausalLM, ask(tmp_path, **{name: value}))[0].config
        assert found._experts_implementation == plain._experts_implementation
        assert found._attn_implementation == plain._attn_implementation


@pytest.mark.parametrize("name", NAMES)
def test_nor_in_a_nested_configuration(tmp_path: Path, name: str) -> None:
    nested = {name: "flash_attention_2", "vocab_size": 400}
    write_json(
        tmp_path / "config.json", {"model_type": "gemma3", "text_config": nested, "vision_config": {name: "a/b"}}
    )
    config = read_config(tmp_path)
    every = [config, config.text_config, config.vision_config]
    assert (
        [each._attn_implementation for each in every] == [each._experts_implementation for each in every] == [None] * 3
    )


def test_a_configuration_that_contradicts_itself_is_the_user_s_mistake(tmp_path: Path) -> None:
    folder = ask(save_small_model(tmp_path), num_hidden_layers="many")
    with pytest.raises(UserError, match=r"config\.json: transformers cannot read it"):
        load_encoder(folder)


@pytest.mark.parametrize("place", [lambda asked: asked, lambda asked: {"text_config": asked}], ids=["own", "nested"])
@pytest.mark.parametrize("method", ["bitsandbytes", "fp8", "gptq", "no_such_thing"])
def test_quantized_weights_are_refused(tmp_path: Path, place: Callable[[Any], Any], method: str) -> None:
    folder = ask(save_small_model(tmp_path), **place({"quantization_config": {"quant_method": method}}))
    for use in (check_model_folder, load_encoder, read_initial):
        with pytest.raises(UserError, match=r"quantization_config: weights that are quantized are not supported"):
            use(folder)


def test_an_adapter_beside_the_weights_is_refused(tmp_path: Path) -> None:
    folder = save_small_model(tmp_path)
    write_json(folder / "adapter_config.json", {"peft_type": "LORA", "base_model_name_or_path": "a/b"})
    with pytest.raises(UserError, match="Merge the adapter"):
        load_encoder(folder)


def test_code_that_comes_with_a_known_model_is_not_run(tmp_path: Path) -> None:
    folder, ran = save_small_model(tmp_path / "model"), tmp_path / "ran"
    (folder / "code.py").write_text(f"from pathlib import Path\nPath({str(ran)!r}).touch()\n")
    ask(folder, auto_map={"AutoConfig": "code.Own", "AutoModel": "code.Own", "AutoModelForMaskedLM": "code.Own"})
    settings = read_json(folder / "tokenizer_config.json")
    write_json(folder / "tokenizer_config.json", {**settings, "auto_map": {"AutoTokenizer": [None, "code.Own"]}})
    load_encoder(folder)
    read_model(AutoModelForMaskedLM, folder)
    load_tokenizer(folder)
    assert not ran.exists()


def test_layers_are_not_fused_for_all_models_because_one_configuration_asks_for_it(tmp_path: Path) -> None:
    config = read_config(ask(save_small_model(tmp_path), fusion_config={"mlp": True}))
    assert not hasattr(config, "fusion_config")


@pytest.mark.usefixtures("no_kernels")
def test_sentence_encoders_take_torch_s_attention(tmp_path: Path) -> None:
    pytest.importorskip("mteb")
    pytest.importorskip("sentence_transformers")
    from mlmclm.evaluation.mteb_tasks import SentenceModel

    folder = ask(save_small_model(tmp_path), _attn_implementation="flash_attention_2")
    model = SentenceModel.load(folder, "cpu").model
    assert model.encode("Anna was in Paris").shape == (32,)

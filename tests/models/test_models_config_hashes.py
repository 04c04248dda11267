"""A model has one hash, whichever version of transformers wrote its configuration; results by the bytes' hash are found."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import transformers.configuration_utils
from transformers import EuroBertForMaskedLM

from mlmclm.corpora.tokenizer import SpecialTokens, save
from mlmclm.models.architectures import weights_of
from mlmclm.models.config_hashes import WRITER
from mlmclm.models.exported_folder import export_folder
from mlmclm.models.folder import content_hashes, tokenizer_hash, weights_hash, weights_hashes
from mlmclm.models.tokenizer_settings import SETTINGS
from mlmclm.storage.files import read_json, write_json
from small_models import save_small_model, small_tokenizer

FILES = ("config.json", "model.safetensors", "tokenizer.json")


def of_bytes(folder: Path) -> str:
    """The hash as it was defined before: of the configuration's bytes."""
    parts = [(folder / name).read_bytes() for name in FILES]
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def exported_by(version: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same model, exported under a version of transformers."""
    monkeypatch.setattr(transformers.configuration_utils, "__version__", version)
    folder.mkdir(parents=True)
    (folder / "corpus").mkdir()
    save(small_tokenizer().backend_tokenizer, SpecialTokens("<pad>", "<bos>", "<eos>", "<mask>"), folder / "corpus")
    model = EuroBertForMaskedLM.from_pretrained(save_small_model(folder / "source"))
    export_folder(folder / "model", weights_of(model), model.config, folder / "corpus", card="a card", context=64)
    assert read_json(folder / "model" / "config.json")["transformers_version"] == version
    return folder / "model"


def test_a_model_that_two_versions_of_transformers_export_has_one_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [exported_by(version, tmp_path / version, monkeypatch) for version in (WRITER, "5.24.0", "6.1.0")]
    for one in (weights_hashes, content_hashes):
        assert len({one(folder)[0] for folder in made}) == 1
    assert len({tokenizer_hash(folder) for folder in made}) == 1
    # What was filed under the first version keeps its key, and the others are found by theirs.
    assert [len(weights_hashes(folder)) for folder in made] == [1, 2, 2]
    assert [len(content_hashes(folder)) for folder in made] == [1, 2, 2]


@pytest.mark.parametrize("version", ["4.57.1", WRITER, "5.24.0"])
def test_the_hash_of_the_bytes_is_known_beside_today_s(tmp_path: Path, version: str) -> None:
    folder = save_small_model(tmp_path / "model")
    write_json(folder / "config.json", {**read_json(folder / "config.json"), "transformers_version": version})
    assert weights_hashes(folder)[-1] == of_bytes(folder)


def test_the_version_that_wrote_the_first_models_leaves_their_hashes_as_they_were(tmp_path: Path) -> None:
    folder = save_small_model(tmp_path / "model")
    config = {**read_json(folder / "config.json"), "transformers_version": WRITER}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    assert weights_hashes(folder) == (of_bytes(folder),)


CHANGES: list[tuple[dict[str, Any], bool]] = [
    ({"transformers_version": "4.48.0"}, False),
    ({"_name_or_path": "somebody/model"}, False),
    ({"_attn_implementation_autoset": True}, False),
    ({"text_config": {"transformers_version": "4.48.0", "_name_or_path": "x"}, "vision_config": {}}, True),
    ({"rms_norm_eps": 0.1}, True),
    ({"architectures": ["LlamaForCausalLM"]}, True),
    ({"dtype": "bfloat16"}, True),
    ({"tie_word_embeddings": True}, True),
    ({"is_causal": True}, True),
    ({"num_attention_heads": 4}, True),
    ({"bos_token_id": 3}, True),
    ({"id2label": {"0": "a"}}, True),
    ({"something_new": 1}, True),
]


@pytest.mark.parametrize(("change", "counts"), CHANGES, ids=str)
def test_only_what_can_change_a_result_counts(tmp_path: Path, change: dict[str, Any], counts: bool) -> None:
    folder = save_small_model(tmp_path / "model")
    config = read_json(folder / "config.json")
    before = weights_hash(folder), content_hashes(folder)[0]
    write_json(folder / "config.json", {**config, **change})
    assert ((weights_hash(folder), content_hashes(folder)[0]) != before) is counts
    if counts:
        return
    (folder / "config.json").write_text(json.dumps(dict(reversed({**config, **change}.items()))))
    assert (weights_hash(folder), content_hashes(folder)[0]) == before, "nor do order and layout"


def test_what_a_nested_configuration_says_of_its_writer_does_not_count(tmp_path: Path) -> None:
    folder = save_small_model(tmp_path / "model")
    config = read_json(folder / "config.json")
    write_json(folder / "config.json", {**config, "text_config": {"hidden_size": 3}})
    before = weights_hash(folder)
    write_json(folder / "config.json", {**config, "text_config": {"hidden_size": 3, "transformers_version": "4.1.0"}})
    assert weights_hash(folder) == before


def test_the_version_counts_where_transformers_corrects_tokenizers_by_it(tmp_path: Path) -> None:
    folder = save_small_model(tmp_path / "model")
    write_json(folder / SETTINGS, {**read_json(folder / SETTINGS), "fix_mistral_regex": True})
    config = read_json(folder / "config.json")
    hashes = set()
    for version in ("4.57.1", "5.23.0"):
        write_json(folder / "config.json", {**config, "transformers_version": version})
        hashes |= {weights_hash(folder)}
    assert len(hashes) == 2

"""Encoders as training scripts save them, with and without the layer over the first token that no task uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, PreTrainedModel

from mlmclm.backends.packing import Packing
from mlmclm.errors import UserError
from mlmclm.models.encoder import PADDED, encode, pack_ids
from mlmclm.models.folder import check_length, check_model_folder, load_encoder
from mlmclm.models.sources import longest
from mlmclm.storage.files import read_json
from small_models import small_tokenizer

SHAPE = {
    "vocab_size": 400, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 66, "initializer_range": 0.3, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "albert": {"embedding_size": 32},
    "bert": {},
    "camembert": {},
    "data2vec-text": {},
    "deberta": {},
    "deberta-v2": {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    "electra": {"embedding_size": 32},
    "ernie": {},
    "esm": {},
    "eurobert": {"num_key_value_heads": 2},
    "flaubert": {},
    "gte": {},
    "ibert": {},
    "layoutlm": {},
    "longformer": {"attention_window": 8},
    "luke": {"entity_vocab_size": 5, "entity_emb_size": 8},
    "megatron-bert": {},
    "mobilebert": {"embedding_size": 32, "true_hidden_size": 32, "intra_bottleneck_size": 32},
    "modernbert": {"cls_token_id": 0, "sep_token_id": 2},
    "mpnet": {},
    "nomic_bert": {},
    "rembert": {},
    "roberta": {},
    "roberta-prelayernorm": {},
    "roformer": {},
    "xlm-roberta": {},
}
"""Fields of small ones beside those of `SHAPE`, by model type."""
OWN = {"deberta", "deberta-v2", "esm", "flaubert", "ibert", "longformer", "luke", "megatron-bert", "mobilebert", "mpnet", "rembert", "roformer"}  # fmt: skip
"""Those whose attention can't be exchanged."""
POSITIONS = {"eurobert", "gte", "modernbert", "nomic_bert", "roformer"}
"""Those that have no table of positions, or one that grows."""


def saved(kind: str, folder: Path, auto: Any = AutoModelForMaskedLM) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = auto.from_config(AutoConfig.for_model(kind, **{**SHAPE, **KINDS[kind]})).eval()
    model.save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    return model


def states_of(folder: Path, rows: list[np.ndarray]) -> torch.Tensor:
    packing = Packing.of([len(row) for row in rows])
    with torch.no_grad():
        return encode(load_encoder(folder), pack_ids(rows, packing), packing, causal=False)[: packing.tokens]


@pytest.mark.parametrize(
    ("kind", "auto"),
    [*((kind, AutoModelForMaskedLM) for kind in KINDS), ("bert", AutoModel), ("modernbert", AutoModel)],
)
def test_a_saved_encoder_computes_what_transformers_base_model_does(kind: str, auto: Any, tmp_path: Path) -> None:
    saved(kind, tmp_path, auto)
    most = longest(read_json(tmp_path / "config.json"))
    assert most is not None
    rows = [np.arange(5, 25), np.arange(30, 37), np.arange(5, 5 + most)]
    found, stock = states_of(tmp_path, rows), AutoModel.from_pretrained(tmp_path).eval()
    for part, row in zip(found.split([len(row) for row in rows]), rows, strict=True):
        with torch.no_grad():
            alone = stock(input_ids=torch.from_numpy(row)[None]).last_hidden_state[0]
        assert (part - alone).abs().max() < 1e-4 * alone.abs().max()
    assert getattr(load_encoder(tmp_path), PADDED, False) == (kind in OWN)
    check_length(tmp_path, most)
    with pytest.raises(UserError, match=f"made for {most} positions at most"):
        check_length(tmp_path, most + 1)
    if kind not in POSITIONS:
        with pytest.raises((IndexError, RuntimeError)), torch.no_grad():
            stock(input_ids=torch.arange(5, 6 + most)[None])


@pytest.mark.parametrize("kind", ["deberta-v2", "mpnet"])
def test_an_encoder_with_its_own_forward_is_refused_as_a_decoder(kind: str, tmp_path: Path) -> None:
    saved(kind, tmp_path)
    packing = Packing.of([4])
    with pytest.raises(UserError, match=rf"attention: causal: a model of the architecture '{kind}' sees both sides"):
        encode(load_encoder(tmp_path), pack_ids([np.arange(5, 9)], packing), packing, causal=True)


def renamed(folder: Path, change: Any) -> None:
    """Write the weights under other names."""
    weights = load_file(folder / "model.safetensors")
    save_file({change(name): each for name, each in weights.items()}, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("wrapper", ["_orig_mod.", "module.", "module._orig_mod."])
@pytest.mark.parametrize("kind", ["roberta", "modernbert", "deberta-v2"])
def test_weights_that_were_saved_in_a_wrapper_are_the_model_s(kind: str, wrapper: str, tmp_path: Path) -> None:
    saved(kind, tmp_path)
    rows = [np.arange(5, 25), np.arange(30, 37)]
    before = states_of(tmp_path, rows)
    renamed(tmp_path, lambda name: wrapper + name)
    assert torch.equal(states_of(tmp_path, rows), before)


def test_weights_of_another_name_or_shape_are_refused(tmp_path: Path) -> None:
    saved("roberta", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "roberta.encoder.layer.0.output.dense.weight"
    save_file({**weights, name: weights[name][:, 1:].clone()}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        UserError, match=r"encoder\.layer\.0\.output\.dense\.weight have the shape 32 x 47; config\.json says 32 x 48"
    ):
        load_encoder(tmp_path)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    renamed(tmp_path, lambda name: name.replace("layer.1", "block.1"))
    with pytest.raises(UserError, match=r"the weights lack encoder\.layer\.1"):
        load_encoder(tmp_path)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            ["mp_rank_00_model_states.pt"],
            ["checkpoint of DeepSpeed", "zero_to_fp32.py CHECKPOINT OUTPUT --safe_serialization"],
        ),
        (["latest", "global_step5/mp_rank_00_model_states.pt", "zero_to_fp32.py"], ["checkpoint of DeepSpeed"]),
        (["global_step5/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"], ["checkpoint of DeepSpeed"]),
        (["pytorch_model_fsdp_0/__0_0.distcp"], ["checkpoint of FSDP", "accelerate merge-weights"]),
        (["model-q4.gguf"], ["an exported model (model-q4.gguf)"]),
        (["onnx/model.onnx"], ["an exported model (onnx/model.onnx)"]),
        (["tf_model.h5"], ["weights of TensorFlow or Flax"]),
        (["model.fp16.safetensors"], ["rename it to model.safetensors"]),
        (["0_Transformer/config.json", "modules.json"], ["a model (0_Transformer/config.json): give that folder"]),
        (["pytorch_model.bin"], ["the weights are a pickle (pytorch_model.bin)", "model.save_pretrained"]),
    ],
)
@pytest.mark.parametrize("configured", [True, False])
def test_what_is_no_model_folder_is_refused_with_the_way_to_one(
    configured: bool, files: list[str], words: list[str], tmp_path: Path
) -> None:
    if configured:
        saved("roberta", tmp_path)
        (tmp_path / "model.safetensors").unlink()
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(b"")
    with pytest.raises(UserError) as refused:
        check_model_folder(tmp_path)
    if configured or files != ["pytorch_model.bin"]:
        assert all(word in str(refused.value) for word in words)
    assert ("config.json is missing" in str(refused.value)) is not configured


def test_an_adapter_alone_is_refused_with_the_way_to_a_model(tmp_path: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(UserError, match=r"It has an adapter .*merge_and_unload"):
        check_model_folder(tmp_path)

"""Encoders as training scripts save them, with and without the layer over the first token that no task uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, PreTrainedModel

from mlmclm.backends.packing import Packing
from mlmclm.errors import UserError
from mlmclm.models.encoder import PADDED, encode, pack_ids
from mlmclm.models.folder import check_length, load_encoder
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


@pytest.mark.parametrize("auto", [AutoModelForMaskedLM, AutoModel], ids=["masked LM", "base"])
@pytest.mark.parametrize("kind", KINDS)
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
        with pytest.raises(IndexError), torch.no_grad():
            stock(input_ids=torch.arange(5, 6 + most)[None])


@pytest.mark.parametrize("kind", ["deberta-v2", "mpnet"])
def test_an_encoder_with_its_own_forward_is_refused_as_a_decoder(kind: str, tmp_path: Path) -> None:
    saved(kind, tmp_path)
    packing = Packing.of([4])
    with pytest.raises(UserError, match=rf"attention: causal: a model of the architecture '{kind}' sees both sides"):
        encode(load_encoder(tmp_path), pack_ids([np.arange(5, 9)], packing), packing, causal=True)

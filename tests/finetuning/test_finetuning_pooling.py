"""Tokens that are pooled, and those that a prediction depends on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_cells import SHORT, make, run
from tokenizers import Tokenizer, processors
from transformers import BertConfig, BertModel

from mlmclm.errors import UserError
from mlmclm.finetuning.cell import Cell
from mlmclm.finetuning.protocol import Protocol
from mlmclm.models.folder import weights_hash
from mlmclm.tasks.families.sequence_classification import ClassificationTask
from mlmclm.tasks.prepare_task import prepare_task
from mlmclm.tasks.prepared_task import Examples
from small_models import save_framed_model


@pytest.mark.parametrize("task", ["sst2", "reqa_squad"])
def test_the_token_before_a_text_is_pooled_only_where_there_is_one(place: Path, task: str) -> None:
    first = Protocol.model_validate({**SHORT.model_dump(), "special_tokens": "tokenizer", "pooling": "bos"})
    framed = save_framed_model(place / "framed")
    prepared = prepare_task(task, framed, first, place / "store", place / "data")
    ids = prepared.table("test")["input_ids"].to_pylist()
    assert {row[0] for row in ids} == {1} and {row[-1] for row in ids} == {2}
    cell = Cell("m", framed, weights_hash(framed), task, prepared.task_data, first, 1e-3, 0)
    assert run(place, cell)["status"] == "ok"
    with pytest.raises(UserError, match="adds no token to a text"):
        prepare_task(task, place / "model", first, place / "store", place / "data")
    tokenizer = Tokenizer.from_file(str(framed / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <eos>", pair="$A <eos> $B <eos>", special_tokens=[("<eos>", 2)]
    )
    tokenizer.save(str(framed / "tokenizer.json"))
    with pytest.raises(UserError, match="puts no token before a text"):
        prepare_task(task, framed, first, place / "store", place / "data")
    with pytest.raises(ValueError, match="no token is there to pool; use special_tokens: tokenizer"):
        Protocol(pooling="bos")
    with pytest.raises(UserError, match="special_tokens: tokenizer is not for token-classification"):
        prepare_task("conll2003", framed, first, place / "store", place / "data")


def test_token_types_reach_a_model_that_has_them_and_no_other(place: Path) -> None:
    framed = Protocol.model_validate({**SHORT.model_dump(), "special_tokens": "tokenizer"})
    curves = []
    for kind in ("bert", "bert with one type", "eurobert"):
        folder = save_framed_model(place / kind)
        if kind != "eurobert":
            config = BertConfig(
                vocab_size=400, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
                max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            )  # fmt: skip
            torch.manual_seed(0)
            model = BertModel(config, add_pooling_layer=False)
            types = model.embeddings.token_type_embeddings.weight.data
            types[1] = types[0] + (torch.linspace(-1, 1, 32) if kind == "bert" else 0.0)
            model.save_pretrained(folder)
        prepared = prepare_task("stsb", folder, framed, place / "store", place / "data")
        assert max(prepared.table("train")["token_types"][0].as_py()) == 1
        cell = Cell("m", folder, weights_hash(folder), "stsb", prepared.task_data, framed, 1e-3, 0)
        result = run(place, cell)
        assert result["status"] == "ok"
        curves.append(result["curve"])
    assert curves[0] != curves[1]


def test_direction_and_pooling_decide_which_tokens_a_prediction_depends_on(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[float] = []
    original = ClassificationTask.examples

    def watched(self: ClassificationTask, split: str, predictions: Any) -> Examples:
        if split == "validation":
            sequences = self.columns[split]["input_ids"]
            groups: dict[int, list[np.ndarray[Any, Any]]] = {}
            for row, prediction in enumerate(predictions):
                groups.setdefault(int(sequences[row][0]), []).append(prediction)
            found.append(max(np.ptp(np.stack(group), axis=0).max() for group in groups.values() if len(group) > 1))
        return original(self, split, predictions)

    monkeypatch.setattr(ClassificationTask, "examples", watched)

    framed = save_framed_model(place / "framed")

    def spread(**changes: Any) -> float:
        """How far predictions of sentences with the same first token lie apart."""
        protocol = Protocol.model_validate({**SHORT.model_dump(), "precision": "fp32", **changes})
        own = {"model_folder": framed, "weights": weights_hash(framed)} if "special_tokens" in changes else {}
        assert run(place, dataclasses.replace(make(place, "sst2"), protocol=protocol, **own))["status"] == "ok"
        return float(found[-1])

    # The first token of a causal model sees nothing but itself.
    first = {"special_tokens": "tokenizer", "pooling": "bos"}
    assert spread(attention="causal", **first) < 1e-5
    for changes in (first, {"attention": "causal", "pooling": "last"}, {"attention": "causal"}):
        assert spread(**changes) > 1e-4, changes

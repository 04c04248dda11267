"""Sequence classification: a text, or two joined by a template, into one of several classes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as functional
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from mlmclm.backends.packing import Packing
from mlmclm.models.encoder import pool
from mlmclm.tasks.family import (
    Array,
    Batch,
    Examples,
    Family,
    Linear,
    Lists,
    limited,
)
from mlmclm.tasks.load import RetrievalSet, TaskData
from mlmclm.tasks.settings import TaskSettings
from mlmclm.tasks.texts import encode_texts


class ClassifierHead(nn.Module):
    """Linear -> GELU -> Linear (the study's), or one Linear, on a pooled vector."""

    def __init__(self, hidden: int, classes: int, kind: str, linear: Linear) -> None:
        super().__init__()
        self.dense = linear(hidden, hidden) if kind == "dense-gelu" else None
        self.output = linear(hidden, classes)

    def forward(self, pooled: Tensor) -> Tensor:
        """[S, hidden] -> [S, classes]."""
        if self.dense is not None:
            pooled = functional.gelu(self.dense(pooled))
        logits: Tensor = self.output(pooled)
        return logits


def classification_scores(labels: Array, predicted: Array, classes: int) -> dict[str, float]:
    """Accuracy, macro F1 over all classes, Matthews' correlation (0 where only one class is predicted), and with two
    classes the F1 of the second, which is GLUE's positive one.

    Args:
        labels, predicted: int [rows], from 0.
    """
    every = np.arange(classes)
    scores = {
        "accuracy": float(accuracy_score(labels, predicted)),
        "f1_macro": float(f1_score(labels, predicted, labels=every, average="macro", zero_division=0.0)),
        "matthews": float(matthews_corrcoef(labels, predicted)),
    }
    if classes == 2:
        scores["f1"] = float(f1_score(labels, predicted, pos_label=1, zero_division=0.0))
    return scores


class SequenceClassification(Family):
    """Cross-entropy over classes; accuracy, macro-averaged F1, Matthews' correlation and, of two classes, the second's F1."""

    framed = True

    @classmethod
    def encode(cls, data: TaskData, tokenizer: PreTrainedTokenizerFast, settings: TaskSettings) -> dict[str, pa.Table]:
        template = data.task.pair_template
        tables = {}
        for split, table in (("train", data.train), ("validation", data.validation), ("test", data.test)):
            assert not isinstance(table, RetrievalSet)
            kept = limited(table, settings.max_train_examples if split == "train" else settings.max_evaluation_examples)
            seconds = kept["text_pair"].to_pylist() if template else None
            columns = encode_texts(kept["text"].to_pylist(), seconds, template, tokenizer, settings)
            tables[split] = pa.table({**columns, "label": kept["label"].combine_chunks()})
        return tables

    @cached_property
    def _splits(self) -> dict[str, tuple[Lists, Array]]:
        tables = {split: self.prepared.table(split) for split in ("train", "validation", "test")}
        return {split: (Lists.of(table, "input_ids"), table["label"].to_numpy()) for split, table in tables.items()}

    @cached_property
    def _types(self) -> dict[str, Lists | None]:
        tables = {split: self.prepared.table(split) for split in ("train", "validation", "test")}
        return {
            split: Lists.of(table, "token_types") if "token_types" in table.column_names else None
            for split, table in tables.items()
        }

    @property
    def train_size(self) -> int:
        return len(self._splits["train"][0])

    def batch(self, rows: Array) -> Batch:
        ids, labels = self._splits["train"]
        types = self._types["train"]
        return Batch(
            [ids[row] for row in rows],
            {"labels": labels[rows]},
            None if types is None else [types[row] for row in rows],
        )

    def token_types(self, split: str) -> Lists | None:
        return self._types[split]

    def head(self, hidden: int, linear: Linear) -> nn.Module:
        return ClassifierHead(hidden, len(self.prepared.label_names), self.settings.classifier, linear)

    def loss(self, head: nn.Module, hidden: Tensor, packing: Packing, targets: dict[str, Array]) -> Tensor:
        logits = head(pool(hidden, packing, self.settings.pooling)).float()
        return functional.cross_entropy(logits, torch.from_numpy(targets["labels"]).to(logits.device))

    def evaluation_sequences(self, split: str) -> Lists:
        return self._splits[split][0]

    def predict(self, head: nn.Module, hidden: Tensor, packing: Packing, split: str, rows: Array) -> list[Array]:
        logits = head(pool(hidden, packing, self.settings.pooling)).float().cpu().numpy()
        return list(logits)

    def examples(self, split: str, predictions: Sequence[Array]) -> Examples:
        labels = self._splits[split][1]
        predicted = np.stack(predictions).argmax(axis=1)
        return {"gold": labels, "prediction": predicted, "correct": labels == predicted}

    def scores(self, examples: Examples) -> dict[str, float]:
        return classification_scores(examples["gold"], examples["prediction"], len(self.prepared.label_names))

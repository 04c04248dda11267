"""Sequence classification: assign one of several classes to a text, or to two texts joined by a template."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from mlmclm.errors import UserError
from mlmclm.results.measures import Array, Measure, WeightedMean, divided
from mlmclm.tasks.columns import check_in_range
from mlmclm.tasks.declaration import Task
from mlmclm.tasks.family import Family
from mlmclm.tasks.prepared_task import Examples, Linear, PreparedTask

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mlmclm.backends.packing import Packing


class ClassificationTask(PreparedTask):
    """A task of sequence classification, trained with cross-entropy."""

    @property
    def outputs(self) -> int:
        """Number of outputs of the head per sequence."""
        return len(self.label_names)

    def head(self, hidden: int, linear: Linear) -> nn.Module:
        """Return Linear -> GELU -> Linear (the study's) or a single Linear, applied to the pooled vector."""
        from torch import nn

        dense = [linear(hidden, hidden), nn.GELU()] if self.settings.classifier == "dense-gelu" else []
        return nn.Sequential(*dense, linear(hidden, self.outputs))

    def logits(self, head: nn.Module, hidden: Tensor, packing: Packing) -> Tensor:
        """Compute the logits of each sequence, fp32 [S, outputs]."""
        from mlmclm.models.encoder import pool

        logits: Tensor = head(pool(hidden, packing, self.settings.pooling)).float()
        return logits

    def loss(self, head: nn.Module, hidden: Tensor, packing: Packing, targets: dict[str, Array]) -> Tensor:
        import torch

        logits = self.logits(head, hidden, packing)
        return torch.nn.functional.cross_entropy(logits, torch.from_numpy(targets["label"]).to(logits.device))

    def predict(self, head: nn.Module, hidden: Tensor, packing: Packing, split: str, rows: Array) -> list[Array]:
        return list(self.logits(head, hidden, packing).cpu().numpy())

    def examples(self, split: str, predictions: Sequence[Array]) -> Examples:
        labels = self.columns[split]["label"]
        predicted = np.stack(predictions).argmax(axis=1)
        return {"gold": labels, "prediction": predicted, "correct": labels == predicted}

    def blind(self) -> Iterator[tuple[str, Examples]]:
        for name, always in zip(self.label_names, np.eye(self.outputs), strict=True):
            yield f"always {name}", self.examples("test", [always] * self.rows["test"])


class SequenceClassification(Family):
    """Scored by accuracy, macro-averaged F1, Matthews' correlation and, with two classes, the F1 of the second.

    Macro F1 averages over all classes. Matthews' correlation is 0 if only one class is predicted. GLUE's positive class
    is the second.
    """

    name = "sequence-classification"
    title = "Sequence classification"
    prepared: ClassVar[type[PreparedTask]] = ClassificationTask
    columns: ClassVar = {"text": pa.string(), "text_pair": pa.string(), "label": pa.int64()}
    labels: ClassVar[str | None] = "label"
    metrics: ClassVar = {"accuracy": "accuracy", "f1_macro": "f1 macro", "f1": "F1", "matthews": "Matthews correlation"}
    study_metric: ClassVar[str | None] = "accuracy"
    signed: ClassVar[tuple[str, ...]] = ("matthews",)
    gold_columns = ("gold",)
    hub_task = "text-classification"
    framed = True

    @classmethod
    def check(cls, task: Task, where: str, table: pa.Table, names: tuple[str, ...]) -> None:
        if task.metric == "f1" and len(names) != 2:
            raise UserError(
                f"task {task.name}: the metric f1 is that of the second of two classes, and there are {len(names)} "
                f"({', '.join(names)}); use f1_macro."
            )
        check_in_range(where, "label", table["label"].to_numpy(), np.arange(table.num_rows), names)

    @classmethod
    def show(cls, row: dict[str, Any], names: tuple[str, ...], text: Callable[[list[int]], str]) -> dict[str, Any]:
        return {"text": text(row["input_ids"]), "label": names[row["label"]] if names else row["label"]}

    @classmethod
    def measures(cls, columns: Mapping[str, Array], classes: int) -> dict[str, Measure]:
        labels = np.arange(classes)
        gold, predicted = (columns[name][:, None] == labels for name in ("gold", "prediction"))  # [n, classes]
        counted = np.concatenate((gold & predicted, gold, predicted), axis=1).astype(np.float64)  # [n, 3 x classes]

        def sums(weights: Array) -> list[Array]:
            """Count the correct predictions, the examples and the predictions of each class: [R, classes] each."""
            # One matrix product counts for all resamples and all classes at once.
            return np.split(weights @ counted, 3, axis=1)

        def f1(weights: Array) -> Array:
            right, true, called = sums(weights)
            return divided(2 * right, true + called)

        def matthews(weights: Array) -> Array:
            right, true, called = sums(weights)
            n = weights.sum(axis=1)
            covariance = right.sum(axis=1) * n - (true * called).sum(axis=1)
            # Gorodkin's multi-class form of Matthews' correlation; for two classes it is the usual one.
            spread = [n**2 - (side**2).sum(axis=1) for side in (true, called)]
            return divided(covariance, np.sqrt(spread[0] * spread[1]))

        scores: dict[str, Measure] = {
            "accuracy": WeightedMean(columns["correct"]),
            "f1_macro": lambda weights: f1(weights).mean(axis=1),
            "matthews": matthews,
        }
        return scores | ({"f1": lambda weights: f1(weights)[:, 1]} if classes == 2 else {})

"""Sequence regression: predict one number for a text, or for two texts joined by a template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pyarrow as pa

from mlmclm.errors import UserError
from mlmclm.results.measures import Array, Measure, correlation, resampled_ranks
from mlmclm.tasks.declaration import Task
from mlmclm.tasks.families.sequence_classification import ClassificationTask, SequenceClassification
from mlmclm.tasks.prepared_task import Examples

if TYPE_CHECKING:
    from torch import Tensor, nn

    from mlmclm.backends.packing import Packing


class RegressionTask(ClassificationTask):
    """A task of sequence regression, trained with mean squared error on the labels' own scale."""

    outputs = 1

    def loss(self, head: nn.Module, hidden: Tensor, packing: Packing, targets: dict[str, Array]) -> Tensor:
        import torch

        values = self.logits(head, hidden, packing).squeeze(1)  # [S]
        return torch.nn.functional.mse_loss(values, torch.from_numpy(targets["label"]).to(values))

    def examples(self, split: str, predictions: Sequence[Array]) -> Examples:
        return {"gold": self.columns[split]["label"], "prediction": np.concatenate(predictions)}

    def blind(self) -> Iterator[tuple[str, Examples]]:
        same = [np.array([self.columns["test"]["label"].mean()])] * self.rows["test"]
        yield "always the mean, whose correlation is undefined and counts as 0", self.examples("test", same)


class SequenceRegression(SequenceClassification):
    """Scored by Spearman's and Pearson's correlation; both are 0 if either side is constant."""

    name = "sequence-regression"
    title = "Sequence regression"
    prepared = RegressionTask
    columns: ClassVar = {"text": pa.string(), "text_pair": pa.string(), "label": pa.float64()}
    labels = None
    metrics: ClassVar = {"spearman": "Spearman correlation", "pearson": "Pearson correlation"}
    signed = ("spearman", "pearson")
    study_metric = None
    hub_task = "sentence-similarity"

    @classmethod
    def check(cls, task: Task, where: str, table: pa.Table, names: tuple[str, ...]) -> None:
        labels = table["label"].to_numpy()
        bad = np.flatnonzero(~np.isfinite(labels))
        if len(bad):
            raise UserError(f"{where}: row {int(bad[0])}: the label is {labels[bad[0]]}, not a finite number.")
        if np.ptp(labels) == 0:
            raise UserError(
                f"{where}: every label is {labels[0]:g}; a correlation needs different ones (GLUE's test splits have none)."
            )

    @classmethod
    def label_counts(cls, table: pa.Table, names: tuple[str, ...]) -> dict[str, float]:
        """Return the smallest, mean and largest label."""
        values = table["label"].to_numpy()
        return {"min": float(values.min()), "mean": float(values.mean()), "max": float(values.max())}

    @classmethod
    def scores(cls, examples: Examples, classes: int) -> dict[str, float]:
        from scipy.stats import pearsonr, spearmanr

        sides = [np.asarray(examples[name], dtype=np.float64) for name in ("gold", "prediction")]
        if any(np.ptp(side) == 0 for side in sides):  # scipy returns NaN for it
            return {"spearman": 0.0, "pearson": 0.0}
        return {"spearman": float(spearmanr(*sides).statistic), "pearson": float(pearsonr(*sides).statistic)}

    @classmethod
    def measures(cls, columns: Mapping[str, Array], classes: int) -> dict[str, Measure]:
        x, y = (columns[name].astype(np.float64) for name in ("gold", "prediction"))
        return {
            "spearman": lambda weights: correlation(weights, resampled_ranks(weights, x), resampled_ranks(weights, y)),
            "pearson": lambda weights: correlation(weights, x, y),
        }

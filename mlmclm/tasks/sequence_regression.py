"""Sequence regression: a text, or two joined by a template, to one number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as functional
from scipy.stats import pearsonr, spearmanr
from torch import Tensor, nn

from mlmclm.backends.packing import Packing
from mlmclm.models.encoder import pool
from mlmclm.tasks.family import Array, Examples, Linear
from mlmclm.tasks.sequence_classification import ClassifierHead, SequenceClassification


def correlations(labels: Array, predicted: Array) -> dict[str, float]:
    """Spearman's and Pearson's correlation; 0 where either side is constant, as there is nothing that could correlate.

    Args:
        labels, predicted: [rows].
    """
    labels, predicted = np.asarray(labels, dtype=np.float64), np.asarray(predicted, dtype=np.float64)
    if np.ptp(labels) == 0 or np.ptp(predicted) == 0:
        return {"spearman": 0.0, "pearson": 0.0}
    return {
        "spearman": float(spearmanr(labels, predicted).statistic),
        "pearson": float(pearsonr(labels, predicted).statistic),
    }


class SequenceRegression(SequenceClassification):
    """Mean squared error of one output, on the labels' own scale; correlations."""

    def head(self, hidden: int, linear: Linear) -> nn.Module:
        return ClassifierHead(hidden, 1, self.settings.classifier, linear)

    def loss(self, head: nn.Module, hidden: Tensor, packing: Packing, targets: dict[str, Array]) -> Tensor:
        values = head(pool(hidden, packing, self.settings.pooling)).float().squeeze(1)  # [S]
        return functional.mse_loss(values, torch.from_numpy(targets["labels"]).to(values))

    def examples(self, split: str, predictions: Sequence[Array]) -> Examples:
        return {"gold": self._splits[split][1], "prediction": np.concatenate(predictions)}

    def scores(self, examples: Examples) -> dict[str, float]:
        return correlations(examples["gold"], examples["prediction"])

"""Evaluation during training: the weights with the best validation score are kept, and training may stop early."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn


class BestWeights:
    """The weights of the best evaluation so far.

    A tie goes to the earlier evaluation. A score that is not finite is never the best. For `patience` see `Protocol`.
    """

    def __init__(self, modules: Sequence[nn.Module], patience: int | None) -> None:
        self._modules, self._patience = modules, patience
        self._kept: list[torch.Tensor] = []
        self._best, self._since = -math.inf, 0
        self.step = 0
        """The step (from 1) of the best evaluation; 0 before there is one."""
        self.evaluations: list[list[float | None]] = []
        """Pairs [step, score]; None for a score that is not finite."""

    def add(self, step: int, score: float) -> bool:
        """Note an evaluation, keep the weights if it is the best, and return whether to stop."""
        finite = math.isfinite(score)
        self.evaluations.append([step, score if finite else None])
        if finite and score > self._best:
            self._best, self._since, self.step = score, 0, step
            # In the host's memory, because a GPU may be shared by as many cells as fit without these copies.
            self._kept = [tensor.detach().to("cpu", copy=True) for tensor in self._tensors()]
        else:
            self._since += 1
        return self._patience is not None and self._since >= self._patience

    def restore(self) -> None:
        """Put the kept weights back into the modules, if there are any."""
        for tensor, kept in zip(self._tensors(), self._kept, strict=False):
            tensor.data.copy_(kept)

    def _tensors(self) -> list[torch.Tensor]:
        return [tensor for module in self._modules for tensor in (*module.parameters(), *module.buffers())]

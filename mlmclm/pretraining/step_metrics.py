"""Metrics of optimiser steps: measured on each worker, and every few steps summed over all of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.distributed as distributed
from numpy.typing import NDArray
from torch import Tensor

from mlmclm.corpora.segments import document_lengths
from mlmclm.models.sizes import training_flops
from mlmclm.pretraining.job import StageJob
from mlmclm.pretraining.speed import matrix_peak

if TYPE_CHECKING:
    from mlmclm.pretraining.engine import Engine


class StepMetrics(NamedTuple):
    """Metrics of one step over all workers, by their names in `metrics.jsonl`.

    The last four are of all steps that were summed together.
    """

    step: int
    """From 1."""
    loss: float
    """Mean of the labelled tokens, in nats."""
    learning_rate: float
    gradient_norm: float
    """Before clipping; -1 where the gradient isn't finite, as DeepSpeed says it."""
    labelled: int
    step_seconds: float
    """From the end of the step before. Looking at losses and validating are not in it, the copy of a state to be written is."""
    tokens_per_second: float
    utilisation: float
    """Model FLOPs over the measured matrix peak."""
    memory: int
    """Peak of the fullest worker, in bytes."""
    data_wait: float
    """Share of the time that was spent waiting for batches."""

    @property
    def finite(self) -> bool:
        """Whether loss and gradient are finite."""
        return bool(np.isfinite(self.loss)) and 0 <= self.gradient_norm < np.inf


class _Step(NamedTuple):
    """A step on this worker, before anything is exchanged."""

    step: int
    loss: Tensor
    """Sum over this worker's labelled tokens."""
    labelled: Tensor
    """Labelled tokens of all workers."""
    tokens: int
    """Tokens of this worker."""
    norm: float
    waited: float
    """Seconds for the batch."""
    seconds: float


class StepMeter:
    """Measures the steps of a stage. Creating one and `take` are collective.

    Args:
        vocabulary: rows of the model's embedding.
    """

    def __init__(self, job: StageJob, engine: Engine, vocabulary: int) -> None:
        self.job, self.engine, self.vocabulary = job, engine, vocabulary
        self._steps: list[_Step] = []
        self._documents: list[NDArray[np.int64]] = []
        """Lengths of this worker's documents in these steps, where documents are isolated."""
        self._since = time.perf_counter()
        peak = torch.tensor(matrix_peak(engine.device, bf16=job.recipe.precision != "fp32"), device=engine.device)
        distributed.all_reduce(peak)
        self._peak = float(peak)  # FLOP/s of all workers

    def add(
        self,
        step: int,
        outcome: tuple[Tensor, Tensor, int, float],
        batches: Sequence[tuple[Tensor, Tensor]],
        waited: float,
    ) -> None:
        """Notes a step; nothing is exchanged yet.

        Args:
            outcome: what `Engine.step` returned.
            batches: (input_ids, labels) of this worker's micro batches.
            waited: seconds for the batch.
        """
        now = time.perf_counter()
        self._steps.append(_Step(step, *outcome, waited, now - self._since))
        self._since = now
        if self.engine.separator is not None:
            self._documents += [document_lengths(ids.numpy(), self.engine.separator) for ids, _ in batches]

    def take(self) -> list[StepMetrics]:
        """Return the metrics of the steps since the last call, at least one, and forget these steps."""
        steps, world, device = self._steps, self.engine.world, self.engine.device
        totals = torch.stack([each.loss for each in steps]).double()
        distributed.all_reduce(totals)
        losses = (totals / torch.stack([each.labelled for each in steps]).to(totals)).tolist()
        memory = torch.tensor(self.engine.backend.peak_memory(), device=device)
        distributed.all_reduce(memory, distributed.ReduceOp.MAX)
        # The sum above waits for the slowest worker, and for what an accelerator still has to do.
        seconds = sum(each.seconds for each in steps) + time.perf_counter() - self._since
        tokens_per_second = sum(each.tokens for each in steps) * world / seconds
        utilisation = self._flops() / seconds / self._peak
        data_wait = sum(each.waited for each in steps) / seconds
        self._steps, self._documents = [], []
        return [
            StepMetrics(
                each.step, loss, self.job.learning_rate(each.step), each.norm, int(each.labelled), each.seconds,
                tokens_per_second, utilisation, int(memory), data_wait,
            )
            for each, loss in zip(steps, losses, strict=True)
        ]  # fmt: skip

    def resume(self) -> None:
        """Starts the clock of the next step now: what happened since the last one is not part of it."""
        self._since = time.perf_counter()

    def _flops(self) -> int:
        """The model's, of the noted steps on all workers."""
        return training_flops(
            self.job.shape,
            tokens=sum(each.tokens for each in self._steps) * self.engine.world,
            labelled=sum(int(each.labelled) for each in self._steps),
            length=self.job.recipe.block_length,
            vocabulary=self.vocabulary,
            causal=self.job.objective.causal,
            documents=np.concatenate(self._documents) if self._documents else None,
        )

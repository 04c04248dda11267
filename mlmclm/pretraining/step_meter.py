"""Metrics of optimiser steps, measured on each worker and combined over all workers every few steps."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.distributed as distributed
from numpy.typing import NDArray
from torch import Tensor

from mlmclm.corpora.row_lengths import document_lengths
from mlmclm.models.sizes import training_flops
from mlmclm.plans.devices import published_device
from mlmclm.pretraining.job import StageJob
from mlmclm.pretraining.speed import matrix_peak
from mlmclm.pretraining.step_metrics import StepMetrics

if TYPE_CHECKING:
    from mlmclm.pretraining.engine import Engine


class _Step(NamedTuple):
    """Measurements of one step on this worker, before they are combined."""

    step: int
    loss: Tensor
    """Summed loss of this worker's labelled tokens."""
    labelled: Tensor
    """Number of labelled tokens on all workers."""
    tokens: int
    """Number of tokens on this worker."""
    norm: float | Tensor
    waited: float
    """Seconds spent waiting for the batch."""
    seconds: float


class StepMeter:
    """Measures the steps of a stage. The constructor and `take` are collective.

    Args:
        vocabulary: number of rows in the model's embedding.
    """

    def __init__(self, job: StageJob, engine: Engine, vocabulary: int) -> None:
        self.job, self.engine, self.vocabulary = job, engine, vocabulary
        self._steps: list[_Step] = []
        self._documents: list[NDArray[np.int64]] = []
        """Lengths of this worker's documents in these steps, if documents are isolated."""
        self._since = time.perf_counter()
        bf16 = job.recipe.precision != "fp32"
        device = published_device(engine.backend.title()) if bf16 else None
        peaks = (matrix_peak(engine.device, bf16=bf16), math.nan if device is None else device.peak)
        summed = torch.tensor(peaks, device=engine.device)
        distributed.all_reduce(summed)
        # FLOP/s of all workers. If one worker's device is unknown (NaN), so is the sum.
        self._peak, self._published = summed.tolist()

    def add(
        self,
        step: int,
        outcome: tuple[Tensor, Tensor, int, float | Tensor],
        batches: Sequence[tuple[Tensor, Tensor]],
        waited: float,
    ) -> None:
        """Record a step, without any communication.

        Args:
            outcome: the result of `Engine.step`.
            batches: the step's micro-batches on this worker, as (input_ids, labels).
            waited: seconds spent waiting for the batch.
        """
        # The loss stays a tensor on the device: reading it here would wait for the accelerator in every step.
        now = time.perf_counter()
        self._steps.append(_Step(step, *outcome, waited, now - self._since))
        self._since = now
        if self.engine.separator is not None:
            self._documents += [document_lengths(ids.numpy(), self.engine.separator) for ids, _ in batches]

    def take(self) -> list[StepMetrics]:
        """Return the metrics over all workers of the steps since the last call (at least one); collective."""
        steps, device = self._steps, self.engine.device
        # One all-reduce for all steps, in fp64 to keep the digits of the sums.
        tokens = torch.tensor([step.tokens for step in steps], device=device, dtype=torch.float64)
        totals = torch.stack([torch.stack([step.loss for step in steps]).double(), tokens])  # [2, steps]
        distributed.all_reduce(totals)
        labelled = torch.stack([step.labelled for step in steps])
        losses = (totals[0] / labelled.to(totals)).tolist()
        counts = totals[1].long().tolist()
        memory = torch.tensor(self.engine.backend.peak_memory(), device=device)
        distributed.all_reduce(memory, distributed.ReduceOp.MAX)
        # Read the clock only now: the all-reduce above waits for the slowest worker and for queued work on the
        # accelerator.
        seconds = sum(step.seconds for step in steps) + time.perf_counter() - self._since
        tokens_per_second = sum(counts) / seconds
        speed = self._flops(sum(counts), int(labelled.sum())) / seconds
        share = None if math.isnan(self._published) else speed / self._published
        data_wait = sum(step.waited for step in steps) / seconds
        self._steps, self._documents = [], []
        return [
            StepMetrics(
                step.step, loss if predicted else None, self.job.learning_rate(step.step), float(step.norm), predicted, count, step.seconds,
                tokens_per_second, speed / self._peak, share, int(memory), data_wait,
            )
            for step, loss, predicted, count in zip(steps, losses, labelled.tolist(), counts, strict=True)
        ]  # fmt: skip

    def resume(self) -> None:
        """Restart the clock of the next step, so that it excludes what has happened since the last one."""
        self._since = time.perf_counter()

    def _flops(self, tokens: int, labelled: int) -> int:
        """Return the model FLOPs of the recorded steps, given their numbers of tokens and labelled tokens on all workers."""
        return training_flops(
            self.job.shape,
            tokens=tokens,
            labelled=labelled,
            length=self.job.recipe.block_length,
            vocabulary=self.vocabulary,
            causal=self.job.stage.objective.causal,
            documents=np.concatenate(self._documents) if self._documents else None,
        )

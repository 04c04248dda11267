"""Metrics of one optimiser step over all workers."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np


class StepMetrics(NamedTuple):
    """Metrics of one step over all workers. Fields have the same names in `metrics.jsonl`.

    The last five cover all steps that were combined in one `StepMeter.take`.
    """

    step: int
    """Step, counted from 1."""
    loss: float | None
    """Mean loss per labelled token, in nats; None for a step without any, which has a gradient of 0."""
    learning_rate: float
    gradient_norm: float
    """Norm of the gradient before clipping; -1 if the gradient is not finite, as DeepSpeed reports it."""
    labelled: int
    tokens: int
    """Tokens of the global batch, without padding."""
    step_seconds: float
    """Seconds since the end of the step before. Excludes combining metrics and validation; includes copying a state. A GPU
    may still be computing a step that has ended on the host, so only the sum over several steps measures its speed."""
    tokens_per_second: float
    utilisation: float
    """Model FLOP/s as a share of the measured peak of matrix products."""
    published_utilisation: float | None
    """The same as a share of the devices' published peak of dense bf16 products; None if it's unknown, or in fp32."""
    memory: int
    """Highest peak memory of any worker, in bytes."""
    data_wait: float
    """Share of the time spent waiting for batches."""

    @property
    def finite(self) -> bool:
        """True if loss and gradient are finite, or there is no loss."""
        return (self.loss is None or bool(np.isfinite(self.loss))) and 0 <= self.gradient_norm < np.inf

    def reproduced(self) -> StepMetrics:
        """Return the metrics with NaN in place of those that differ each time the step is run (all but `REPRODUCED`)."""
        nothing: dict[str, Any] = {name: math.nan for name in self._fields if name not in REPRODUCED}
        return self._replace(**nothing)


REPRODUCED = ("step", "loss", "learning_rate", "gradient_norm", "labelled", "tokens")
"""Metrics that are the same each time a step is run."""

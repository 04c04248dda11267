"""A file of metrics as JSON lines, which the driver reads while the stage runs."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from mlmclm.pretraining import states
from mlmclm.pretraining.callbacks.callback import Callback
from mlmclm.pretraining.step_metrics import StepMetrics


class MetricsLog(Callback):
    """Writes a line per step and per validation to `StageJob.metrics_path`, up to the first that is not finite."""

    always = True

    def on_start(self) -> None:
        # A killed attempt may have logged steps after the checkpoint that this one resumes from. They will run again.
        path = self.stage.job.metrics_path
        kept = [record for record in states.read_metrics(path) if record["step"] <= self.stage.start]
        path.parent.mkdir(parents=True, exist_ok=True)
        self._write(kept, mode="w")

    def on_metrics(self, metrics: Sequence[StepMetrics]) -> None:
        # JSON has no NaN or infinity, and steps after a divergence mean nothing.
        finite = takewhile(lambda row: row.finite, metrics)
        self._write([row._asdict() | {"time": time.time()} for row in finite])

    def on_validation(self, step: int, loss: float, accuracy: float) -> None:
        if np.isfinite(loss):
            record = {
                "step": step,
                "validation_loss": loss,
                "validation_perplexity": float(np.exp(loss)),
                "validation_accuracy": accuracy,
                "time": time.time(),
            }
            self._write([record])

    def _write(self, records: Sequence[dict[str, Any]], mode: str = "a") -> None:
        with self.stage.job.metrics_path.open(mode, encoding="utf-8") as handle:
            handle.writelines(f"{json.dumps(record)}\n" for record in records)

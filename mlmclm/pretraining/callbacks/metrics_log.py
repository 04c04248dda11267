"""Metrics as lines of a file, which the driver reads while the stage runs."""

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
    """Writes a line a step and a line a validation (`StageJob.metrics_path`), of finite losses only."""

    def on_start(self) -> None:
        # An attempt that was killed may have written steps behind the state that this one goes on from.
        path = self.stage.job.metrics_path
        known = [record for record in states.read_metrics(path) if record["step"] <= self.stage.start]
        path.parent.mkdir(parents=True, exist_ok=True)
        self._write(known, mode="w")

    def on_metrics(self, metrics: Sequence[StepMetrics]) -> None:
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

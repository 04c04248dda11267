"""Live metrics of a stage for Prometheus and the dashboards."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlmclm.pretraining.callbacks.callback import Callback
from mlmclm.pretraining.step_metrics import StepMetrics
from mlmclm.tracking.live_metrics import counter, gauge

SHOWN = ("loss", "step", "tokens_per_second", "learning_rate", "gradient_norm", "utilisation", "data_wait")
"""Fields of `StepMetrics` that gauges are named after."""


class Gauges(Callback):
    """Exports the metrics of the latest step and the latest validation (`tracking.live_metrics`)."""

    def on_metrics(self, metrics: Sequence[StepMetrics]) -> None:
        last = metrics[-1]
        self._set(memory_bytes=last.memory, **{name: getattr(last, name) for name in SHOWN})
        # A gauge shows the latest step only; the counter must count every step since the last call.
        counter("mlmclm_pretraining_tokens_total").inc(sum(each.tokens for each in metrics), tags=self._labels())

    def on_validation(self, step: int, loss: float, accuracy: float) -> None:
        if np.isfinite(loss):
            self._set(validation_loss=loss, validation_accuracy=accuracy)

    def _set(self, **values: float) -> None:
        for name, value in values.items():
            gauge(f"mlmclm_pretraining_{name}").set(value, tags=self._labels())

    def _labels(self) -> dict[str, str]:
        stage = self.stage.job.stage
        # The first of the models that need the stage.
        return {"model": (*stage.models, stage.title)[0], "objective": str(stage.objective)}

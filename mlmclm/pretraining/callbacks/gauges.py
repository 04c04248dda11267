"""Live metrics of a stage for Prometheus and the dashboards."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlmclm.pretraining.callbacks.callback import Callback
from mlmclm.pretraining.step_metrics import StepMetrics
from mlmclm.tracking.live_metrics import counter, gauge


class Gauges(Callback):
    """Exports the metrics of the latest step and the latest validation (`tracking.live_metrics`)."""

    def on_metrics(self, metrics: Sequence[StepMetrics]) -> None:
        last = metrics[-1]
        self._set(
            loss=last.loss,
            step=last.step,
            tokens_per_second=last.tokens_per_second,
            learning_rate=last.learning_rate,
            gradient_norm=last.gradient_norm,
            utilisation=last.utilisation,
            memory_bytes=last.memory,
            data_wait=last.data_wait,
        )
        # A gauge shows the latest step only; the counter must count every step since the last call.
        counter("mlmclm_pretraining_tokens_total").inc(sum(each.tokens for each in metrics), tags=self._labels())

    def on_validation(self, step: int, loss: float, accuracy: float) -> None:
        if np.isfinite(loss):
            self._set(validation_loss=loss, validation_accuracy=accuracy)

    def _set(self, **values: float) -> None:
        for name, value in values.items():
            gauge(f"mlmclm_pretraining_{name}").set(value, tags=self._labels())

    def _labels(self) -> dict[str, str]:
        return {"model": self.stage.job.model, "objective": str(self.stage.job.objective)}

"""Live metrics of a stage for Prometheus and the dashboards."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlmclm.pretraining.callbacks.callback import Callback
from mlmclm.pretraining.step_metrics import StepMetrics

SHOWN = (
    "loss", "step", "tokens_per_second", "learning_rate", "gradient_norm", "utilisation", "published_utilisation", "data_wait",
)  # fmt: skip
"""Fields of `StepMetrics` that are shown as gauges of the same name, except where they are None."""


class Gauges(Callback):
    """Exports the metrics of the latest step and the latest validation (`cluster.live_metrics`)."""

    always = True

    def on_metrics(self, metrics: Sequence[StepMetrics]) -> None:
        last = metrics[-1]
        shown = {name: value for name in SHOWN if (value := getattr(last, name)) is not None}
        self._set(memory_bytes=last.memory, **shown)
        # A gauge shows the latest step only; the counter must count every step since the last call.
        self._set(tokens_total=sum(row.tokens for row in metrics))

    def on_validation(self, step: int, loss: float, accuracy: float) -> None:
        if np.isfinite(loss):
            self._set(validation_loss=loss, validation_accuracy=accuracy)

    def _set(self, **values: float) -> None:
        for name, value in values.items():
            self.stage.launcher.show(f"mlmclm_pretraining_{name}", value, self._labels())

    def _labels(self) -> dict[str, str]:
        stage = self.stage.job.stage
        # The first of the models that need the stage.
        return {"model": (*stage.models, stage.title)[0], "objective": str(stage.objective)}

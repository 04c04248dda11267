"""Early stop of a stage that has diverged."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlmclm.pretraining.callbacks.callback import Callback
from mlmclm.pretraining.job import VALIDATION_LOSS
from mlmclm.pretraining.step_metrics import StepMetrics
from mlmclm.storage.files import write_json


class StopRule(Callback):
    """Stops the stage if a loss or gradient is not finite, and records the step in `StageJob.stop_path`."""

    always = True
    everywhere = True  # losses and gradient norms are the same on all workers, so all stop at the same step

    def on_metrics(self, metrics: Sequence[StepMetrics]) -> None:
        wrong = next((row for row in metrics if not row.finite), None)
        if wrong is not None:
            self._stop(wrong.step, "gradient" if wrong.loss is None or np.isfinite(wrong.loss) else "loss")

    def on_validation(self, step: int, loss: float, accuracy: float) -> None:
        if not np.isfinite(loss):
            self._stop(step, VALIDATION_LOSS)

    def _stop(self, step: int, what: str) -> None:
        job = self.stage.job
        self.stage.stopped = True
        if self.stage.engine.rank == 0:
            write_json(job.stop_path, {"step": step, "what": what, "learning_rate": job.learning_rate(step)})

"""Ray Train's trainer without its callback for Ray Data."""

from __future__ import annotations

from ray.train.torch import TorchTrainer
from ray.train.v2._internal.callbacks import DatasetsCallback
from ray.train.v2._internal.execution.callback import RayTrainCallback


class Trainer(TorchTrainer):
    """A trainer whose workers read their data themselves."""

    def _create_default_callbacks(self) -> list[RayTrainCallback]:
        # The callback for Ray Data starts an actor in each run, even if there are no data sets to hand out.
        callbacks = super()._create_default_callbacks()
        return [callback for callback in callbacks if not isinstance(callback, DatasetsCallback)]

"""A cluster job that pretrains a study, records the number of workers at each step, and waits for a lost worker's return.

python elastic_job.py STUDY STORE DATA
"""

from __future__ import annotations

import sys
import time
from typing import Any

import mlmclm
from mlmclm.launches import run_stage
from mlmclm.pretraining.callbacks.callback import Callback

LAST_ALONE = 20
"""Number of steps that a single worker takes before it waits for a restart with two workers."""


class Noted(Callback):
    """Adds the number of workers to the file `steps` of the store before each step."""

    observes = True

    def __init__(self, stage: Any) -> None:
        super().__init__(stage)
        self.taken = 0

    def on_step_begin(self, step: int) -> None:
        with (self.stage.job.store / "steps").open("a", encoding="utf-8") as lines:
            lines.write(f"{self.stage.engine.world}\n")
        self.taken += 1
        if self.stage.engine.world == 1 and self.taken > LAST_ALONE:
            time.sleep(300)  # ended by the restart with two workers; otherwise the test fails
        time.sleep(0.1)


if __name__ == "__main__":
    study, store, data = sys.argv[1:]
    mlmclm.register("callback", "noted", Noted)
    run_stage.SECONDS_BETWEEN_RESIZES = 3.0
    run_stage.ELASTIC_START_LIMIT = 20.0
    mlmclm.pretrain(study, store=store, data=data)

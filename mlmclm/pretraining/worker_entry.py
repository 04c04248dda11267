"""The function that Ray Train starts in a stage's workers.

Ray's controller process loads this module too, so it imports torch and DeepSpeed only once it is called.
"""

from __future__ import annotations

import os
from typing import Any

from mlmclm.pretraining.job import StageJob


def run_in_worker(config: dict[str, Any]) -> None:
    """Ray Train's training function; `config["job"]` is the `StageJob`."""
    job: StageJob = config["job"]
    os.environ["DS_ACCELERATOR"] = job.device  # DeepSpeed would take a GPU that it sees, reserved or not

    from mlmclm.pretraining.worker import train_stage

    train_stage(job)

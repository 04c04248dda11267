"""The training function that Ray Train starts in a stage's workers.

Ray Train's controller process loads this module too, so torch and DeepSpeed are imported only when the function runs.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from mlmclm.backends.determinism import CUBLAS, NCCL, set_variables
from mlmclm.pretraining.job import StageJob


def run_in_worker(config: dict[str, Any]) -> None:
    """Run a stage in a worker; `config` has the `StageJob` as `job`, and the connection to the driver as `link`."""
    job: StageJob = config["job"]
    # By default DeepSpeed uses any GPU that it sees, reserved or not. It reads this variable when it is imported.
    os.environ["DS_ACCELERATOR"] = job.device
    if job.recipe.deterministic:
        set_variables(CUBLAS | NCCL)  # read when CUDA and the process group begin to compute
    import_deepspeed()
    from mlmclm.launches.live_files import sent
    from mlmclm.launches.ray_worker import RayWorker
    from mlmclm.pretraining.worker import train_stage

    with sent(job, config.get("link")):
        train_stage(job, RayWorker())


def import_deepspeed() -> None:
    """Import DeepSpeed without MLflow, which its autotuner, used by nothing, would import: a sixth of a worker's start-up time."""
    modules: dict[str, Any] = sys.modules
    modules.setdefault("mlflow", None)  # fails its import, as if it were not installed
    import deepspeed  # noqa: F401

    if modules["mlflow"] is None:
        del modules["mlflow"]

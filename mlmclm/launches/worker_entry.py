"""The training function that Ray Train starts in a stage's workers.

Ray Train's controller process loads this module too, so torch and DeepSpeed are imported only when the function runs.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from mlmclm.pretraining.job import StageJob


def run_in_worker(config: dict[str, Any]) -> None:
    """Run a stage in a worker; `config["job"]` is the `StageJob`."""
    job: StageJob = config["job"]
    # By default DeepSpeed uses any GPU that it sees, reserved or not. It reads this variable when it is imported.
    os.environ["DS_ACCELERATOR"] = job.device
    # DeepSpeed's autotuner would import MLflow, and transformers' losses for object detection SciPy: together a fifth of
    # a worker's start. With None in `sys.modules` an import fails, and both work without.
    hidden = [name for name in ("mlflow", "scipy") if sys.modules.setdefault(name, None) is None]  # type: ignore[arg-type]
    import deepspeed  # noqa: F401
    import transformers.modeling_utils  # noqa: F401

    for name in hidden:
        del sys.modules[name]
    from mlmclm.launches.ray_worker import RayWorker
    from mlmclm.pretraining.worker import train_stage

    train_stage(job, RayWorker())

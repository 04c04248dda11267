"""The training function that Ray Train starts in a stage's workers.

Ray Train's controller process loads this module too, so torch and DeepSpeed are imported only when the function runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
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
    # DeepSpeed's autotuner, which nothing uses, would import MLflow if it is installed: a sixth of a worker's start-up time.
    with not_found("mlflow"):
        import deepspeed  # noqa: F401
    from mlmclm.launches.live_files import sent
    from mlmclm.launches.ray_worker import RayWorker
    from mlmclm.pretraining.worker import train_stage

    with sent(job, config.get("link")):
        train_stage(job, RayWorker())


@contextmanager
def not_found(package: str) -> Iterator[None]:
    """Let imports of a package fail inside the block as if it were not installed, unless it is imported already."""

    class Absent(MetaPathFinder):
        def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
            if fullname == package:
                raise ModuleNotFoundError(f"No module named {package!r} here", name=package)

    absent = Absent()
    sys.meta_path.insert(0, absent)
    try:
        yield
    finally:
        sys.meta_path.remove(absent)

"""The training function that Ray Train starts in a stage's workers.

Ray Train's controller process loads this module too, so torch and DeepSpeed are imported only when the function runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mlmclm.pretraining.job import StageJob


@contextmanager
def _hidden(package: str) -> Iterator[None]:
    """Let imports of a package fail, unless it is imported already."""
    hidden = sys.modules.setdefault(package, None) is None  # type: ignore[arg-type]
    try:
        yield
    finally:
        if hidden:
            del sys.modules[package]


def run_in_worker(config: dict[str, Any]) -> None:
    """Run a stage in a worker; `config["job"]` is the `StageJob`."""
    job: StageJob = config["job"]
    # By default DeepSpeed uses any GPU that it sees, reserved or not. It reads this variable when it is imported.
    os.environ["DS_ACCELERATOR"] = job.device
    with _hidden("mlflow"):  # DeepSpeed's autotuner would import it, a sixth of a worker's start
        import deepspeed  # noqa: F401

    from mlmclm.pretraining.worker import train_stage

    train_stage(job)

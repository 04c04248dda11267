"""Trackio: a local project with one run for each run of the study."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from mlmclm.errors import UserError
from mlmclm.tracking.records import RunRecord

VARIABLE = "TRACKIO_DIR"


def trackio(study: str, runs: Sequence[RunRecord], folder: Path) -> str:
    """Write the study's project, without runs that have no metric; return the command that shows it."""
    os.environ[VARIABLE] = str(folder)  # Trackio reads it on import
    import trackio as package
    from trackio.utils import TRACKIO_DIR

    if folder != TRACKIO_DIR:
        raise UserError(f"trackio is loaded already, and writes to {TRACKIO_DIR}: use a process of its own.")
    for run in runs:
        package.init(
            study, run.name, run.kind, config=run.settings, embed=False, auto_log_gpu=False, auto_log_cpu=False
        )
        for step, values in run.by_step().items():
            package.log(values, step)
        package.finish()
    return f"{VARIABLE}={folder} trackio show --project {study}"

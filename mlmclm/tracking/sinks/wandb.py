"""Weights & Biases: offline runs, which `wandb sync` sends; with WANDB_MODE=online they are sent at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from mlmclm.tracking.records import RunRecord


def wandb(study: str, runs: Sequence[RunRecord], folder: Path) -> str:
    """Write each run under an id that depends on its key alone; return the command that sends them."""
    import wandb as package

    os.environ.setdefault("WANDB_MODE", "offline")
    settings = package.Settings(console="off", silent=True, disable_git=True, save_code=False, x_disable_stats=True)
    for run in runs:
        opened = package.init(
            project=study,
            dir=folder,
            id=run.key[:16],
            name=run.name,
            job_type=run.kind,
            notes=run.tags.get("mlmclm.verdict"),
            config=run.settings,
            settings=settings,
        )
        for step, values in run.by_step().items():
            opened.log(values, step)
        opened.finish()
    return f"wandb sync {folder}/wandb/offline-run-*"

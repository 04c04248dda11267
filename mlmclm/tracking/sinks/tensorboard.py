"""TensorBoard: event files, with parameters and metrics of all runs in its table HPARAMS."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mlmclm.tracking.records import RunRecord, latest


def tensorboard(study: str, runs: Sequence[RunRecord], folder: Path) -> str:
    """Write a folder of event files for each run; return the command that shows them."""
    from tensorboardX import SummaryWriter
    from tensorboardX.summary import hparams

    for run in runs:
        with SummaryWriter(str(folder / run.kind / run.name.replace("/", "_"))) as writer:
            for name, value, step, time in run.metrics:
                writer.add_scalar(name, value, step, walltime=time / 1000)
            for summary in hparams(run.settings, dict.fromkeys(latest(run.metrics))):
                writer.file_writer.add_summary(summary)
            if "mlmclm.verdict" in run.tags:
                writer.add_text("verdict", run.tags["mlmclm.verdict"])
    return f"tensorboard --logdir {folder}"

"""Options that several commands share. An option has its parameter's name; a flag declares its name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from mlmclm.errors import UserError
from mlmclm.plans.devices import DEFAULT_DEVICE, DEVICES, HERE
from mlmclm.storage.place import DATA, STORE, TASK_DIR, open_store
from mlmclm.storage.place import DEFAULT_STORE as DEFAULT_STORE

Study = Annotated[Path, Argument(help="The study file (YAML), or the name of a packaged study, such as quickstart.")]
Overrides = Annotated[
    list[str] | None,
    Argument(
        metavar="[KEY=VALUE]...",
        help="Settings in place of the file's, such as `recipe.batch=32 seeds=[0,1,2]`; the store keeps them with the study.",
    ),
]
StudyOrSweep = Annotated[
    str, Argument(metavar="NAME|FILE", help="The name of a study or sweep in the store, or its file (YAML).")
]
Store = Annotated[
    Path,
    Option(
        envvar=STORE,
        parser=open_store,
        metavar="FOLDER|URL",
        help="Folder or address (s3://bucket/prefix) that keeps everything: corpora, models, results.",
    ),
]
Data = Annotated[
    Path | None,
    Option(envvar=DATA, help="Folder of local data sets that stand in for the Hugging Face Hub."),
]
TaskDir = Annotated[
    list[Path] | None,
    Option(
        envvar=TASK_DIR,
        help="Folder of your own tasks, one YAML file each; may be given several times.",
    ),
]
WaitForStorage = Annotated[
    float | None,
    Option(
        metavar="SECONDS",
        min=0,
        help="How long an outage of a store at an address is waited for; by default 3600. The store remembers it.",
    ),
]
Models = Annotated[
    list[str] | None,
    Option(
        metavar="[NAME=]SOURCE",
        help="A model's folder, its name in a study of the store (NAME, STUDY/NAME, or STUDY/* for all), or its name on the Hugging Face Hub "
        "(OWNER/NAME[@REVISION]); may be given several times.",
    ),
]
Port = Annotated[int | None, Option(min=1, max=65535, help="Port to listen on; a free one by default.")]
Json = Annotated[bool, Option("--json", help="Print one JSON object for a program instead of text.")]
Suite = Annotated[
    str | None,
    Option(
        metavar="NAME|FILE",
        help="Take the models from a suite: `paper` (the published study's), `ettin` (Ettin's, with their phases), or a YAML file of your "
        "own.",
    ),
]
Rule = Annotated[
    str | None,
    Option(
        metavar="mean|per_seed|on_test",
        help="How the best learning rate is chosen, in place of the search space's rule: the one with the highest mean over seeds, "
        "each seed its own, or the one with the highest mean test score (optimistic).",
    ),
]
Chance = Annotated[
    list[str] | None,
    Option(
        metavar="TASK=VALUE",
        help="The score that a task gives without a model, on the scale of its scores, such as sst2=0.5: no verdict is based on a score that is not "
        "above it. May be given several times.",
    ),
]
Claims = Annotated[
    list[str] | None,
    Option(
        metavar="NAME|FILE",
        help="Test these claims: a packaged file (mlm-vs-clm, ettin) or one of your own (YAML); may be given several times.",
    ),
]
Metric = Annotated[str | None, Option(help="A score in place of the tasks' main one.")]
Reader = Annotated[
    str | None,
    Option(
        metavar="NAME",
        help="The format of the scores: table, lm-eval, mteb or encodeval; by default it is recognised.",
    ),
]
OneTask = Annotated[list[str] | None, Option(help="One of the tasks, in place of all; may be given several times.")]
Common = Annotated[
    bool, Option("--common", help="Leave out the examples that not all sides have; without this they are an error.")
]
Replace = Annotated[
    bool,
    Option(
        "--replace",
        help="Replace the report of an earlier run of this name, even if it had models, tasks, rates, seeds or settings that this one lacks.",
    ),
]
Part = Annotated[
    str | None,
    Option(metavar="NAME", help="Only one of the study file's `parts`, as a study of its own: NAME-PART."),
]
Device = Annotated[
    str | None,
    Option(
        help=f"What hours are counted on: {', '.join(DEVICES)}, or {HERE}: this machine, measured. By default {HERE} for a study "
        f"of your own, else {DEFAULT_DEVICE}."
    ),
]
DryRun = Annotated[
    bool,
    Option(
        "--dry-run",
        help="Show what would be computed, and compute nothing. If the store has too few results to estimate the time of a sweep, a few "
        "steps of training are measured.",
    ),
]
Workers = Annotated[
    int | None,
    Option(
        min=1,
        help="With --dry-run: number of cells computed at once, for the estimate; by default as many as this machine can.",
    ),
]
Price = Annotated[
    float | None,
    Option(min=0, help="With --dry-run: price of an hour of all workers, for the sweep's cost."),
]
Ray = Annotated[
    str | None,
    Option(
        help="Address of a running Ray cluster, or `local` to start Ray on this machine; by default the surrounding Ray job's, or RAY_ADDRESS, "
        "else `local`.",
    ),
]
WaitForNodes = Annotated[
    float,
    Option(metavar="SECONDS", min=0, help="How long to wait while the Ray cluster has no node for the work."),
]


def refuse_without_dry_run(*, dry_run: bool, **estimates: float | None) -> None:
    """Refuse options that only a dry run uses if they are given without one."""
    for name, value in estimates.items():
        if value is not None and not dry_run:
            raise UserError(f"--{name} is for estimates: give --dry-run too.")


def chance_levels(pairs: Sequence[str]) -> dict[str, float]:
    """Return the chance levels by task that `--chance` states; raise UserError for text that is not TASK=VALUE."""
    levels: dict[str, float] = {}
    for pair in pairs:
        task, equals, value = pair.rpartition("=")
        try:
            level = float(value)
        except ValueError:
            level = math.nan
        if not equals or not task or not math.isfinite(level):
            raise UserError(f"--chance {pair}: write TASK=VALUE with a number, such as sst2=0.5.")
        if task in levels:
            raise UserError(f"--chance: task {task} is there twice.")
        levels[task] = level
    return levels

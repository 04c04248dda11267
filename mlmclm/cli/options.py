"""Options that several commands share. An option takes its parameter's name; flags spell theirs out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from mlmclm.errors import UserError
from mlmclm.studies.place import Place
from mlmclm.sweeps.cluster_terms import ClusterTerms

if TYPE_CHECKING:
    from mlmclm.sweeps.space import Space

Study = Annotated[Path, Argument(help="The study file (YAML), or the name of a packaged study, such as quickstart.")]
StudyOrSweep = Annotated[
    str, Argument(metavar="NAME|FILE", help="The name of a study or sweep in the store, or its file (YAML).")
]
Store = Annotated[
    Path,
    Option(envvar="MLMCLM_STORE", help="Folder that keeps everything: corpora, models, results, MLflow."),
]
Data = Annotated[
    Path | None,
    Option(envvar="MLMCLM_DATA", help="Folder of local data sets that stand in for the Hugging Face Hub."),
]
TaskDir = Annotated[
    list[Path] | None,
    Option(
        envvar="MLMCLM_TASK_DIR",
        help="Folder of your own tasks, one YAML file each; may be given several times.",
    ),
]
Ledger = Annotated[
    str | None,
    Option(
        metavar="URL|FOLDER",
        help="Where results are kept in place of the store, such as s3://bucket/prefix; the store remembers it.",
    ),
]
WaitForStorage = Annotated[
    float | None,
    Option(
        metavar="SECONDS",
        min=0,
        help="How long an outage of the results' object store is waited for; by default 3600. The store remembers it.",
    ),
]
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
Replace = Annotated[
    bool,
    Option(
        "--replace",
        help="Replace the report of an earlier run of this name, even if it had models, tasks, rates, seeds or settings that this one lacks.",
    ),
]
DryRun = Annotated[
    bool,
    Option(
        "--dry-run",
        help="Show what would be computed. Nothing is computed but the speed of a model, for the time of a sweep.",
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
        help="Address of a running Ray cluster; by default the one of the surrounding Ray job, or RAY_ADDRESS, else Ray is started on this machine.",
    ),
]
WaitForNodes = Annotated[
    float,
    Option(metavar="SECONDS", min=0, help="How long to wait while the Ray cluster has no node for the work."),
]
Priority = Annotated[
    float,
    Option(
        metavar="NUMBER",
        min=0.01,
        help="With priority 2, fine-tuning gets twice as many workers as another study or sweep with 1 on the same cluster.",
    ),
]

DEFAULT_STORE = Path("store")
DEFAULT_TERMS = ClusterTerms()


@dataclass(frozen=True)
class Assumed:
    """Assumptions of the estimate of a sweep."""

    workers: int | None  # cells that are computed at once; None for as many as this machine can
    price: float | None  # of an hour of all workers, in any currency; None if costs aren't asked for


def place(
    store: Path,
    data: Path | None,
    task_dirs: Sequence[Path] | None = None,
    ledger: str | None = None,
    wait_for_storage: float | None = None,
) -> Place:
    """Return the `Place` that the options describe.

    If `--ledger` or `--wait-for-storage` is given, it is noted in the store.

    Raises:
        UserError: the data folder doesn't exist, or the results cannot be there.
        EnvironmentFault: the object store of the results cannot be reached.
    """
    if data is not None and not data.is_dir():
        raise UserError(f"--data {data}: no such folder.")
    if ledger is not None or wait_for_storage is not None:
        from mlmclm.sweeps.ledger_place import place_ledger

        if ledger is not None and ledger.startswith("memory://"):
            raise UserError(
                f"--ledger {ledger}: no other process would see these results. Give a folder, or s3://, gs:// or abfs://."
            )
        place_ledger(store.resolve(), ledger, wait=wait_for_storage)
    folders = tuple(folder.resolve() for folder in task_dirs or ())
    return Place(store.resolve(), data.resolve() if data is not None else None, folders)


def assumed(workers: int | None, price: float | None, *, dry_run: bool) -> Assumed | None:
    """Return what a dry run assumes, or None without `--dry-run`.

    Raises:
        UserError: an option that only a dry run uses is given without one.
    """
    if dry_run:
        return Assumed(workers, price)
    for option, value in (("--workers", workers), ("--price", price)):
        if value is not None:
            raise UserError(f"{option} is for estimates: give --dry-run too.")
    return None


def by_rule(space: Space, rule: str | None) -> Space:
    """Return the space with the rule that `--rule` gives, if any, in place of its own.

    Raises:
        UserError: there is no such rule.
    """
    from mlmclm.analysis.selection import check_rule

    return space if rule is None else space.model_copy(update={"rule": check_rule(rule)})

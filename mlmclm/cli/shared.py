"""Shared by verbs: work on a study that no other process does meanwhile, one Ray session, the report at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from mlmclm.cli.output import print_json, show, show_table
from mlmclm.progress import say
from mlmclm.service.ray_cluster import cluster_address
from mlmclm.storage.files import only_one
from mlmclm.storage.temporary import sweep_unfinished
from mlmclm.study.sweep import analyse_study

if TYPE_CHECKING:
    from pathlib import Path

    from mlmclm.analysis.analyse import Analysis
    from mlmclm.study.place import Place
    from mlmclm.study.prepared_study import PreparedStudy
    from mlmclm.study.study_file import StudyFile


@contextmanager
def at_work(study: StudyFile, place: Place) -> Iterator[None]:
    """Keeps other processes from the same study for the time of a block, and removes what killed ones left half made in the store.

    Raises:
        UserError: another process works on it.
    """
    with only_one(place.study_folder(study) / ".lock", f"study {study.name!r}"):
        sweep_unfinished(place.store)
        yield


def on_cluster(address: str | None) -> bool:
    """Whether there is a Ray cluster already: named by `--ray`, the surrounding Ray job or RAY_ADDRESS."""
    return cluster_address(address) is not None


def shared_session(stack: ExitStack, place: Place, address: str | None) -> Any:
    """A function that opens a Ray session the first time that it is called and leaves it open until `stack` ends.

    The address of a cluster is looked at now, before anything is prepared; raises as `check_cluster`.
    """
    from mlmclm.pretraining.run_stage import prepare_environment
    from mlmclm.service.ray_cluster import check_cluster, ray_session

    running = cluster_address(address)
    if running is not None:
        check_cluster(running)
    opened = False

    def session() -> AbstractContextManager[None]:
        nonlocal opened
        if not opened:
            say(f"Ray: {f'connecting to {running}' if running else 'starting on this machine'}")
            prepare_environment()
            found = stack.enter_context(ray_session(place.store, address=address, dashboard=True))
            if found.dashboard is not None:
                token = (
                    f" (it asks for a token, which is in {found.token_file})" if found.token_file is not None else ""
                )
                say(f"Ray dashboard: {found.dashboard}{token}")
            opened = True
        return nullcontext()

    return session


def command_of(file: Path, data: Path | None, task_dirs: Sequence[Path] | None) -> str:
    """The command line that a report names to compute its study again."""
    words = ["mlmclm study", str(file), *([f"--data {data}"] if data is not None else [])]
    return " ".join([*words, *(f"--task-dir {folder}" for folder in task_dirs or ())])


def write_study_report(
    prepared: PreparedStudy,
    space: Any,
    tasks: Any,
    results: list[dict[str, Any]],
    command: str,
    tracking: Any = None,
    *,
    folder: Path | None,
    as_json: bool = False,
) -> Analysis:
    """Analyses results, writes tables and report, tells MLflow, and prints what was found.

    Args:
        folder: where to write; None writes nothing, and MLflow gets no files.

    Returns:
        The analysis.
    """
    from mlmclm.analysis.summary import summary
    from mlmclm.reports.report import write_report
    from mlmclm.reports.wording import baseline_sentence, headline
    from mlmclm.study.facts import study_facts

    analysis = analyse_study(prepared, space, results)
    facts = study_facts(prepared, space, tasks, results, command)
    paths = write_report(analysis, facts, folder) if folder is not None else {}
    if tracking is not None:
        tracking.reported(space, analysis, paths, facts.provenance)
    if as_json:
        print_json(
            {"report": str(paths["report"]) if paths else None, "provenance": facts.provenance, **summary(analysis)}
        )
        return analysis
    found = headline(analysis)
    show(found.verdict, style="bold")
    show(found.detail)
    if prepared.study.baseline is not None:
        show(baseline_sentence(analysis))
    show_best(analysis)
    if paths:
        show(f"report:  {paths['report']}")
    elsewhere = tracking.elsewhere if tracking is not None else None
    show(f"compare: {elsewhere or f'mlmclm ui --store {prepared.place.store}'}")
    return analysis


def show_best(analysis: Any) -> None:
    """The model-by-task table."""
    from mlmclm.analysis.results import records
    from mlmclm.reports import text

    rates = "best rate" if analysis.rule == "mean" else "rates (seeds)"
    rows = []
    for row in records(analysis.best):
        known = row["n"] > 0
        score = f"{text.points(row['test_mean'])} {text.interval(row['test_low'], row['test_high'])}" if known else "–"
        spread = text.points(row["test_sd"]) if row["n"] > 1 else "–"
        rate = ", ".join(filter(None, (row["learning_rates"], row["setting"])))
        rows.append((row["model"], row["task"], text.metric(row["metric"]), rate, score, spread))
    columns = ("model", "task", "metric", rates, "test [95 %]", "sd over seeds")
    show_table(columns, rows, drop=("metric", "sd over seeds", rates))

"""`mlmclm study`: the whole way from a study file to its report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import typer

from mlmclm.cli import options
from mlmclm.cli.options import (
    AddressOption,
    DataOption,
    DryRunOption,
    JsonOption,
    StoreOption,
    StudyArgument,
    TaskDirOption,
)
from mlmclm.cli.output import print_json, show, show_table
from mlmclm.files import only_one
from mlmclm.pipeline import (
    Place,
    Prepared,
    analyse_study,
    export_models,
    plan_sweep,
    prepare,
    prepare_tasks,
    pretrain,
    study_space,
    sweep,
)
from mlmclm.progress import say
from mlmclm.service.ray_cluster import cluster_address
from mlmclm.study_file import StudyFile, load_study
from mlmclm.temporary import sweep_unfinished


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command("study")(study)


def study(
    file: StudyArgument,
    store: StoreOption = options.DEFAULT_STORE,
    data: DataOption = None,
    task_dir: TaskDirOption = None,
    ray: AddressOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Does all of a study: prepares the data, pretrains, fine-tunes the grid, chooses, reports.

    What is in the store already is not computed again: run the same command after a crash, a kill or a change of the file, and
    only what is missing is done.

    Example: mlmclm study examples/quickstart.yaml
    """
    loaded, place = load_study(file), options.place(store, data, task_dir)
    command = f"mlmclm study {file}" + (f" --data {data}" if data is not None else "")
    command += "".join(f" --task-dir {folder}" for folder in task_dir or ())
    if dry_run:
        from mlmclm.cli.dry_run import show_dry_run

        show_dry_run(loaded, place, as_json=as_json)
        return
    with at_work(loaded, place):
        _run(loaded, place, command=command, address=ray, as_json=as_json)


def _run(loaded: StudyFile, place: Place, *, command: str, address: str | None, as_json: bool) -> None:
    """The study from its first missing piece to its report."""
    from mlmclm.study_tracking import StudyTracking

    space = study_space(loaded, place.task_dirs)
    with ExitStack() as stack:
        tracking = stack.enter_context(StudyTracking(loaded, place))
        session = shared_session(stack, place, address)
        prepared = prepare(loaded, place, session=session if on_cluster(address) else None)
        tasks = prepare_tasks(prepared, space)
        if prepared.unfinished():
            session()
            pretrain(prepared, tracking.stage_lines(prepared))
        models = export_models(prepared)
        tracking.pretrained(prepared)
        tracking.sweep_begins(prepared, space)
        plan = partial(plan_sweep, space, models, tasks, place)
        outcome = sweep(prepared, space, plan, session=session, on_result=tracking.cell)
        write_study_report(prepared, space, tasks, outcome.results, command, tracking, as_json=as_json)


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
    from mlmclm.pretraining.launch import prepare_environment
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
                say(f"Ray dashboard: {found.dashboard}")
            opened = True
        return nullcontext()

    return session


def write_study_report(
    prepared: Prepared,
    space: Any,
    tasks: Any,
    results: list[dict[str, Any]],
    command: str,
    tracking: Any = None,
    *,
    as_json: bool = False,
) -> None:
    """Analyses results, writes tables and report, tells MLflow, and prints what was found."""
    from mlmclm.analysis.summary import summary
    from mlmclm.facts import study_facts
    from mlmclm.reports.report import write_report
    from mlmclm.reports.wording import baseline_sentence, headline

    analysis = analyse_study(prepared, space, results)
    paths = write_report(
        analysis, study_facts(prepared, space, tasks, command), prepared.place.study_folder(prepared.study)
    )
    if tracking is not None:
        tracking.reported(prepared, space, analysis, paths)
    if as_json:
        print_json({"report": str(paths["report"]), **summary(analysis)})
        return
    found = headline(analysis)
    show(found.verdict, style="bold")
    show(found.detail)
    if prepared.study.baseline is not None:
        show(baseline_sentence(analysis))
    show_best(analysis)
    show(f"report:  {paths['report']}")
    elsewhere = tracking.elsewhere if tracking is not None else None
    show(f"compare: {elsewhere or f'mlmclm ui --store {prepared.place.store}'}")


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

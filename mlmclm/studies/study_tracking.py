"""A study's runs, written to its folder for the process that sends them to MLflow, and links to all programs that show a study."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from mlmclm.analysis.summary import model_metrics, study_metrics
from mlmclm.answers.named_facts import phase_facts
from mlmclm.answers.study_results import Results
from mlmclm.cluster.ray_cluster import lasting_dashboard
from mlmclm.corpora.corpus_config import CorpusConfig
from mlmclm.corpora.hub_repository import HubRepository
from mlmclm.corpora.notes import UNTRAINED
from mlmclm.corpora.prepared_corpus import PreparedCorpus
from mlmclm.errors import MlmclmError, UserError
from mlmclm.plans.names import ModelName, parse_name
from mlmclm.plans.stages import Stage
from mlmclm.pretraining.state_facts import tokens_by_source
from mlmclm.progress import say
from mlmclm.registry import KINDS
from mlmclm.reports.provenance import cell_work
from mlmclm.reports.study_facts import RecordedRuns, StudyFacts
from mlmclm.reports.wording import task_verdicts
from mlmclm.service.state import MLFLOW, own_addresses, own_server
from mlmclm.storage.place import Place
from mlmclm.studies.follower import FollowedStage, TrackedStudy, all_runs, following, summaries, write_runs
from mlmclm.studies.prepare import PreparedStudy
from mlmclm.studies.study_file import AnyFile, SweepFile
from mlmclm.studies.study_record import last_run, read_about
from mlmclm.studies.study_sweep import space_of
from mlmclm.sweeps.zero_shot import zero_shot_results
from mlmclm.tasks.declared_tasks import get_task
from mlmclm.tasks.splits import data_source, hub_source
from mlmclm.tracking.address import (
    VARIABLE,
    check_address,
    chosen_address,
    default_address,
    experiment_id,
    without_password,
)
from mlmclm.tracking.records import DataSet, ModelRecord, Status
from mlmclm.tracking.saved_views import experiment_links
from mlmclm.tracking.views import (
    filter_of,
    group_record,
    last_finished_ms,
    model_record,
    run_pages,
    stage_record,
    sweep_record,
    zero_shot_record,
)

NO_PARAMETERS = dict.fromkeys(("objective", "size", "mask_ratio", "replicate", "tokens", "pretraining_data"), "")
"""The parameters of a model about which nothing is known."""


class StudyRuns:
    """The runs of one study or sweep as trackers show them, in its folder (`TrackedStudy`)."""

    def __init__(self, study: AnyFile, place: Place) -> None:
        self._file, self._place, self.told = study, place, TrackedStudy()
        self.tell()

    @property
    def elsewhere(self) -> str | None:
        """Address at which MLflow shows them; None if they are in the store's own database."""
        address, _ = chosen_address(self._file.tracking, self._place.store, os.environ)
        return None if address == default_address(self._place.store) else without_password(address)

    def tell(self, **changes: Any) -> None:
        """Change fields of `TrackedStudy`; an `EnvironmentFault` if the disk is full or not writable."""
        self.told = replace(self.told, **changes)
        write_runs(self._place.study_folder(self._file.name), self.told)

    def stages(self, prepared: PreparedStudy) -> None:
        """Follow the stages of a study that trains its models."""
        study, corpus = prepared.study, prepared.corpus
        if study.corpus is not None:
            text = {"corpus": study.corpus.model_dump(mode="json")}
        else:
            text = {"corpora": {name: corpus.model_dump(mode="json") for name, corpus in study.sources.items()}}

        ends: dict[str, list[ModelName]] = {}
        for name in study.parsed:
            ends.setdefault(prepared.target(name).key(prepared.fingerprint), []).append(name)
        data = [
            DataSet(source.source, stored.key, _corpus_source(source, stored, self._place.store), "pretraining")
            for name, source in study.sources.items()
            for stored in [corpus.sources[name]]
        ]

        def completed(name: ModelName) -> ModelRecord:
            tokens = sum(tokens_by_source(prepared.target(name), study.recipe, corpus).values())
            about = {"model": str(name), **named_parameters(name), "tokens": str(tokens)}
            return ModelRecord(str(name), "pretrained", about, {"mlmclm.folder": str(prepared.model_folder(name))})

        def followed(stage: Stage) -> FollowedStage:
            initial, key = prepared.initial.get(stage.end.size), stage.end.key(prepared.fingerprint)
            record = stage_record(
                study.name,
                stage=key,
                title=stage.title,
                settings={
                    "objective": str(stage.objective),
                    "size": stage.end.size,
                    "steps": f"{stage.start.step} to {stage.end.step}",
                    "recipe": study.recipe.model_dump(mode="json"),
                    **text,
                    "tokenizer": study.tokenizer.model_dump(mode="json") if study.tokenizer else None,
                    **({} if initial is None else {"initial": initial.source}),
                },
                models=stage.models,
                inputs=data,
                outputs=list(map(completed, ends.get(key, ()))),
            )
            return FollowedStage(record, key, stage.start.step)

        self.tell(stages=tuple(map(followed, prepared.plan.stages)))

    def recorded(self, results: Results | None = None, pages: Mapping[str, str] | None = None) -> None:
        """Follow what the study's folder records (`runs_of_record`)."""
        runs = runs_of_record(self._file, self._place, results, pages or other_pages(self._file, self._place.store))
        self.tell(records=runs.records, sources=runs.sources, rule=runs.rule)


def runs_of_record(file: AnyFile, place: Place, results: Results | None, pages: Mapping[str, str]) -> TrackedStudy:
    """Return the runs of a study's sweep, models, (model, task) pairs and zero-shot evaluations, as its folder records them.

    Args:
        results: those of all cells, whose analysis the runs get, and the report's files; None while the runs have not ended.
        pages: links to programs that show the study, by name.
    """
    name, folder = file.name, place.study_folder(file.name)
    run = last_run(folder)
    if results is None:
        setting, facts, _ = read_about(folder, run)
    else:
        setting, facts = results.record.setting, results.facts
    grid, space = setting.grid, space_of(file, place)
    status: Status = "RUNNING" if results is None else "FINISHED"
    time_ms = 0 if results is None else last_finished_ms(results.rows)
    numbers = {} if results is None else model_metrics(results.analysis)
    answer: dict[str, Any] = {}
    if results is not None:
        answer = {
            "artifacts": [(path, "") for path in results.files.values()],
            "provenance": results.facts.provenance,
            "answer": results.advice.lines(),
            "cells": int(results.analysis.coverage["expected"].sum()),
            "metrics": study_metrics(results.analysis),
            "time_ms": time_ms,
        }
    sweep = sweep_record(
        name,
        models=grid.models,
        tasks=grid.tasks,
        learning_rates=grid.learning_rates,
        seeds=grid.seeds,
        baseline=setting.baseline,
        points=sum(len(grid.settings_of(task)) for task in grid.tasks),
        settings=space.common_settings(),
        main_metrics=space.metrics,
        rule=setting.rule,
        given=isinstance(file, SweepFile),
        grid=space.axes(),
        pages={page: link for page, link in pages.items() if page != MLFLOW},
        status=status,
        **answer,
    )
    abouts = _abouts(file, facts)
    models = [
        model_record(
            name, model, about=about, source=source, metrics=numbers.get(model), time_ms=time_ms, status=status
        )
        for model, (about, source) in abouts.items()
    ]
    families = {task.name: task.family for task in facts.tasks}
    groups = [
        group_record(name, model, task, about={**about, "family": families[task]}, status="RUNNING")
        for model, (about, _) in abouts.items()
        for task in grid.tasks
    ]
    tasks = {task: get_task(task, place.task_dirs) for task in grid.tasks}
    sources = {task: data_source(declared, place.store, place.data_root) for task, declared in tasks.items()}
    study = TrackedStudy(records=(sweep, *models), sources=sources, rule=setting.rule)
    if results is not None:
        groups += summaries(name, study, results.analysis, results.rows, verdicts=task_verdicts(results.analysis))
    zero_shot = [
        zero_shot_record(name, row, about=study.abouts.get(row["model"], {}))
        for row in zero_shot_results(run, place.store)
    ]
    # A summary replaces the run that announced it.
    by_key = {record.key: record for record in (sweep, *models, *groups, *zero_shot)}
    return replace(study, records=tuple(by_key.values()))


def _abouts(file: AnyFile, facts: StudyFacts) -> dict[str, tuple[dict[str, str], str | None]]:
    """Return the parameters of each model, and the source of a model that is given."""
    if isinstance(file, SweepFile):
        return {name: (given_parameters(source), source) for name, source in file.models.items()}
    tokens = {model.name: str(model.tokens) for model in facts.models}
    return {
        str(name): (
            named_parameters(name)
            | {"tokens": tokens[str(name)], "pretraining_data": file.source if name.steps else ""},
            None if name.steps else file.initial.get(name.size, UNTRAINED),
        )
        for name in file.parsed
    }


@contextmanager
def tracked(study: AnyFile, place: Place) -> Iterator[StudyRuns]:
    """Yield the runs of a study, which a process writes to MLflow meanwhile; the end of the block waits for it.

    A server that doesn't answer is an error at once, before anything is computed. One that stops answering later
    doesn't make the study fail.
    """
    address, shown = _address(study, place.store)
    runs = StudyRuns(study, place)
    with following(place.store, study.name, address, shown, on_end=lambda status: runs.tell(status=status)):
        yield runs


def follow_study(study: AnyFile, store: Path) -> None:
    """Write to MLflow what it lacks of a study, and if another process works on it, go on until that has ended."""
    with following(store, study.name, *_address(study, store), niceness=0):
        pass


def _address(study: AnyFile, store: Path) -> tuple[str, str]:
    """Return the address to write to, once it answers, and the address to show."""
    address, source = chosen_address(study.tracking, store, os.environ)
    shown = without_password(address)
    if address == default_address(store):
        return address, shown
    if address == own_server(store):
        # The server reads the store's database; writing to the database directly is a hundred times as fast.
        address = default_address(store)
    else:
        try:
            check_address(address)
        except MlmclmError as error:
            remedy = f" Unset {VARIABLE} to write to the store." if source == VARIABLE else ""
            raise type(error)(f"{source}: {error}{remedy}") from error
    say(f"MLflow: runs are written to {shown} ({source}).")
    return address, shown


def send_to_sink(study: AnyFile, store: Path, sink: str) -> None:
    """Write all runs of a study that has ended to a sink; a `UserError` if the package that it writes with is not installed."""
    write, folder = KINDS["sink"][sink], store / "tracking" / sink / study.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        with redirect_stdout(StringIO()):  # stdout is for the command's results
            how = write(study.name, all_runs(store, study.name), folder)
    except ModuleNotFoundError as missing:
        raise UserError(f"The sink {sink} needs the package {missing.name}, which is not installed.") from missing
    say(f"{sink}: {how}")


def _corpus_source(corpus: CorpusConfig, prepared: PreparedCorpus, store: Path) -> str | dict[str, str]:
    """Return where a corpus is: the data set of the Hub and its commit, or else its packed sequences in the store."""
    commit = HubRepository(corpus.source, "dataset", corpus.revision).pinned(store)
    if commit is None:
        return str(prepared.folder)
    return hub_source(corpus.source, commit, corpus.config_name)


def given_parameters(source: str) -> dict[str, str]:
    """Return the pretraining parameters of a given model whose source ends in a model name of this package, else empty ones.

    Such a name doesn't say how many tokens a step had, nor on which data the model was trained.
    """
    with suppress(UserError):
        return NO_PARAMETERS | named_parameters(parse_name(source.partition("@")[0].rsplit("/", 1)[-1]))
    return NO_PARAMETERS


def named_parameters(name: ModelName) -> dict[str, str]:
    """Return what a model's name says of its pretraining, as the parameters of its runs in MLflow.

    `objective` joins the objectives in order (`clm+mlm`); it is `untrained` without any.
    `mask_ratio` is the last masked objective's share of hidden tokens, from 0 to 1.
    """
    phases = phase_facts(name)
    ratios = [share for phase in phases if (share := phase.hidden_share) is not None]
    return {
        "objective": "+".join(dict.fromkeys(phase.kind for phase in phases)) or UNTRAINED,
        "size": name.size,
        "mask_ratio": f"{ratios[-1]:g}" if ratios else "",
        "replicate": str(name.replicate),
    }


DASHBOARD, GRAFANA = "Ray dashboard", "Grafana"
GRAFANA_VARIABLES = ("RAY_GRAFANA_IFRAME_HOST", "RAY_GRAFANA_HOST")
"""Ray's own variables with Grafana's address: as browsers reach it, or else as the head node does."""


def other_pages(file: AnyFile, store: Path, rows: Iterable[Mapping[str, Any]] = ()) -> dict[str, str]:
    """Return the name of each program with its link to a study.

    Args:
        rows: the study's results, whose times Grafana shows; without any, its last half hour.
    """
    service = own_addresses(store)
    pages = {
        MLFLOW: _mlflow_page(file, store, service.get("mlflow")),
        DASHBOARD: lasting_dashboard() or service.get("dashboard"),
        GRAFANA: _grafana_page(file.name, store, rows),
    }
    return {name: page for name, page in pages.items() if page}


def recorded_runs(file: AnyFile, store: Path, tasks: Sequence[str]) -> RecordedRuns:
    """Return links to a study's runs if an MLflow server other than the store's own has them, else how to find them.

    The server is asked for the id of the study's experiment, for a few seconds at most. Runs may not be written yet, so links
    search for a model and task.
    """
    address, _ = chosen_address(file.tracking, store, os.environ)
    search = filter_of("MODEL", "TASK")
    if address in (default_address(store), own_server(store)):
        return RecordedRuns(f"mlmclm tracking ui starts its web interface and prints the link to {file.name}.", search)
    shown = without_password(address)
    if not address.startswith(("http://", "https://")):
        how = f"mlflow ui --backend-store-uri {shown} starts its web interface; they are in the experiment {file.name}."
        return RecordedRuns(how, search)
    number = experiment_id(address, file.name, os.environ)
    if number is None:
        return RecordedRuns(f"They are in the experiment {file.name} at {shown}.", search)
    how = f"They are in the experiment {file.name} at {shown}; models and scores in the tables are links to them."
    return RecordedRuns(how, search, run_pages(shown, number, file.models, tasks))


def _mlflow_page(file: AnyFile, store: Path, server: str | None) -> str | None:
    """Return the page of a study's experiment, or the list of experiments if the server doesn't have it yet."""
    address, _ = chosen_address(file.tracking, store, os.environ)
    if address == default_address(store):
        address = server or ""
    if not address.startswith(("http://", "https://")):
        return None
    number = experiment_id(address, file.name, os.environ)
    return next(iter(experiment_links(without_password(address), {file.name: number} if number else {}).values()))


def _grafana_page(study: str, store: Path, rows: Iterable[Mapping[str, Any]]) -> str | None:
    host = next((os.environ[name] for name in GRAFANA_VARIABLES if os.environ.get(name)), "")
    if not host.startswith(("http://", "https://")):  # Ray's word for none is DISABLED
        return None
    works = [cell_work(row) for row in rows]
    span = {}
    if works:
        span = {"from": f"{1000 * min(w.began for w in works):.0f}", "to": f"{1000 * max(w.ended for w in works):.0f}"}
    query = urlencode({"var-store": str(store), "var-study": study, **span})
    return f"{host.rstrip('/')}/d/mlmclm-sweep?{query}"

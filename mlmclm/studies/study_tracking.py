"""A study as MLflow shows it, told to the process that writes there, and links to all programs that show a study."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
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
from mlmclm.plans.names import ModelName, parse
from mlmclm.plans.stages import Stage
from mlmclm.progress import say
from mlmclm.registry import KINDS
from mlmclm.reports.provenance import cell_work
from mlmclm.reports.scores_page import task_verdicts
from mlmclm.reports.study_facts import ModelFacts, RecordedRuns
from mlmclm.service.state import MLFLOW, own_addresses, own_server
from mlmclm.storage.retrying import RetryPolicy
from mlmclm.studies.facts import tokens_by_source
from mlmclm.studies.follower import CellGroup, FollowedStage, TrackedStudy, all_runs, summaries
from mlmclm.studies.follower_process import NICE, FollowerProcess
from mlmclm.studies.place import Place
from mlmclm.studies.prepare import PreparedStudy
from mlmclm.studies.study_file import AnyFile, StudyFile, SweepFile
from mlmclm.sweeps.cells import ListedCell
from mlmclm.sweeps.space import Space
from mlmclm.tasks.declared_tasks import get_task
from mlmclm.tasks.splits import hub_source, source_of
from mlmclm.tracking.address import (
    VARIABLE,
    check_address,
    chosen_address,
    default_address,
    experiment_id,
    without_password,
)
from mlmclm.tracking.records import DataSet, ModelRecord, RunRecord
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

OWN_TIMEOUT, TIMEOUT = RetryPolicy().seconds, 120.0
"""Seconds without any run being written after which the end of a study leaves the rest, which the next run or
`mlmclm tracking sync` writes: to the store's own database, and to another address."""
NO_PARAMETERS = dict.fromkeys(("objective", "size", "mask_ratio", "replicate", "tokens", "pretraining_data"), "")
"""Those of a model about which nothing is known."""


class StudyTracking(FollowerProcess):
    """MLflow tracking of one study or sweep: tells the process that follows the store what to look for, and the end.

    A server that doesn't answer is an error at once, before anything is computed. One that stops answering later
    doesn't make the study fail.

    Args:
        niceness: of the process (`FollowerProcess`); 0 where nothing is computed beside it.
    """

    def __init__(self, study: StudyFile | SweepFile, place: Place, *, niceness: int = NICE) -> None:
        self._file, self._place = study, place
        address, source = chosen_address(study.tracking, place.store, os.environ)
        self.elsewhere: str | None = None
        """Address of the server that shows the runs; None if they are in the store's own database."""
        if address != default_address(place.store):
            self.elsewhere = without_password(address)
            if address == own_server(place.store):
                # The server reads the store's database, which takes runs a hundred times as fast as it does.
                address = default_address(place.store)
            else:
                try:
                    check_address(address)
                except MlmclmError as error:
                    remedy = f" Unset {VARIABLE} to write to the store." if source == VARIABLE else ""
                    raise type(error)(f"{source}: {error}{remedy}") from error
            say(f"MLflow: runs are written to {self.elsewhere} ({source}).")
        timeout = OWN_TIMEOUT if address == default_address(place.store) else TIMEOUT
        shown = self.elsewhere or without_password(address)
        super().__init__(TrackedStudy(place.store, study.name, shown, timeout), address, niceness=niceness)

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
            DataSet(source.source, own.key, _corpus_source(source, own, self._place.store), "pretraining")
            for each, source in study.sources.items()
            for own in [corpus.sources[each]]
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

    def sweep(self, space: Space, models: Iterable[ModelFacts] = ()) -> None:
        """Record the sweep and its (model, task) pairs, which are the parents of its cells.

        Args:
            models: what the report says of models that the study trains; without it, their tokens are not known.
        """
        tasks = {name: get_task(name, self._place.task_dirs).measured_by(space.metrics) for name in space.tasks}
        if isinstance(self._file, StudyFile):
            tokens, data = {each.name: str(each.tokens) for each in models}, self._file.source
            abouts = {
                str(name): named_parameters(name)
                | {"tokens": tokens.get(str(name), ""), "pretraining_data": data if name.steps else ""}
                for name in self._file.parsed
            }
        else:
            abouts = {name: given_parameters(source) for name, source in self._file.models.items()}
        self._about = abouts
        places = {name: source_of(task, self._place.store, self._place.data_root) for name, task in tasks.items()}
        groups = tuple(
            CellGroup(model, name, {**facts, "family": task.family}, task.kind.score_range(task.metric), places[name])
            for model, facts in abouts.items()
            for name, task in tasks.items()
        )
        announced = [
            model_record(self._file.name, name, about=facts, status="RUNNING") for name, facts in abouts.items()
        ]
        announced += [
            group_record(self._file.name, group.model, group.task, about=group.about, status="RUNNING")
            for group in groups
        ]
        pages = other_pages(self._file, self._place.store)
        self._put([self._sweep(space, pages, status="RUNNING"), *announced], groups=groups, rule=space.rule)

    def evaluated(self, results: Iterable[dict[str, Any]]) -> None:
        """Record the results of zero-shot tasks; `sweep` comes before."""
        abouts = {model: facts for (model, _), facts in self.told.abouts.items()}
        self._put(zero_shot_record(self._file.name, each, about=abouts.get(each["model"], {})) for each in results)

    def cells(self, cells: tuple[ListedCell, ...]) -> None:
        """Follow the results of cells; `sweep` comes before."""
        self.tell(cells=cells)

    def reported(self, space: Space, found: Results, pages: Mapping[str, str]) -> None:
        """Record the analysis: the metrics of every (model, task), and with the sweep the report's files and all that its page says.

        Args:
            pages: links to programs that show the study, by name.
        """
        analysis, name = found.analysis, self._file.name
        groups = summaries(self.told, analysis, found.rows, verdicts=task_verdicts(analysis))
        time_ms, numbers = last_finished_ms(found.rows), model_metrics(analysis)
        models = [
            model_record(
                name,
                model,
                about=about,
                metrics=numbers.get(model),
                source=self._source_of(model),
                time_ms=time_ms,
            )
            for model, about in self._about.items()
        ]
        sweep = self._sweep(
            space,
            pages,
            artifacts=[(path, "") for path in found.files.values()],
            provenance=found.facts.provenance,
            answer=found.advice.lines(),
            baseline=analysis.baseline,
            cells=int(analysis.coverage["expected"].sum()),
            metrics=study_metrics(analysis),
            time_ms=time_ms,
        )
        self._put([*models, *groups, sweep])

    def _source_of(self, model: str) -> str | None:
        """Return where a model is from; None if a stage of the study trains it."""
        if isinstance(self._file, SweepFile):
            return self._file.models[model]
        name = {str(each): each for each in self._file.parsed}[model]
        return None if name.steps else self._file.initial.get(name.size, UNTRAINED)

    def _put(self, records: Iterable[RunRecord], **changes: Any) -> None:
        """Tell records, parents before their children; one replaces one with its key."""
        known = {record.key: record for record in (*self.told.records, *records)}
        self.tell(records=tuple(known.values()), **changes)

    def _sweep(self, space: Space, pages: Mapping[str, str], **outcome: Any) -> RunRecord:
        return sweep_record(
            self._file.name,
            models=tuple(self._file.models),
            tasks=space.tasks,
            learning_rates=space.learning_rates,
            seeds=space.seeds,
            points=sum(len(space.settings_for(task)) for task in space.tasks),
            settings=space.common_settings(),
            main_metrics=space.metrics,
            rule=space.rule,
            given=isinstance(self._file, SweepFile),
            grid=space.axes(),
            pages={name: page for name, page in pages.items() if name != MLFLOW},
            **{"baseline": self._file.baseline} | outcome,
        )


class SinkTracking(StudyTracking):
    """A study for a sink, which gets all of it at the end of the block, in this process.

    Raises:
        UserError: there is no such sink, or the package that it writes with is not installed.
    """

    def __init__(self, study: StudyFile | SweepFile, place: Place, sink: str) -> None:
        self._file, self._place, self.elsewhere = study, place, None
        self._name, self._sink = sink, KINDS["sink"][sink]
        self.told = TrackedStudy(place.store, study.name)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            return
        folder = self._place.store / "tracking" / self._name / self.told.experiment
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            with redirect_stdout(StringIO()):  # which has the command's results
                how = self._sink(self.told.experiment, all_runs(self.told), folder)
        except ModuleNotFoundError as missing:
            raise UserError(
                f"The sink {self._name} needs the package {missing.name}, which is not installed."
            ) from missing
        say(f"{self._name}: {how}")

    def tell(self, **changes: Any) -> None:
        """Change what the sink gets: fields of `TrackedStudy`."""
        self.told = replace(self.told, **changes)


def _corpus_source(corpus: CorpusConfig, prepared: PreparedCorpus, store: Path) -> str | dict[str, str]:
    """Return where a text is: the data set of the Hub and its commit, or else its packed sequences in the store."""
    commit = HubRepository(corpus.source, "dataset", corpus.revision).pinned(store)
    if commit is None:
        return str(prepared.folder)
    return hub_source(corpus.source, commit, corpus.config_name)


def given_parameters(source: str) -> dict[str, str]:
    """Return what the source of a given model says of its pretraining if its last part is a model name of ours.

    It doesn't say how many tokens a step had, and on which data.
    """
    with suppress(UserError):
        return NO_PARAMETERS | named_parameters(parse(source.partition("@")[0].rsplit("/", 1)[-1]))
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

    The server is asked for the id of the study's experiment, for a few seconds at most. Runs may still be on their way, so
    links search for a model and task.
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


def _mlflow_page(file: AnyFile, store: Path, own: str | None) -> str | None:
    """Return the page of a study's experiment, or the list of experiments if the server doesn't have it yet."""
    address, _ = chosen_address(file.tracking, store, os.environ)
    if address == default_address(store):
        address = own or ""
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

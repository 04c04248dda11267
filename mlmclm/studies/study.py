"""A study whose models are trained or given: one pipeline from its file to its report."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlmclm.answers.record import StudyRecord
from mlmclm.answers.study_results import Results
from mlmclm.arguments import SECONDS_FOR_NODES
from mlmclm.cluster.ray_cluster import LostNode
from mlmclm.errors import EnvironmentFault, MlmclmError, UserError, for_each, unknown
from mlmclm.plans.stages import Stage, make_plan
from mlmclm.progress import say
from mlmclm.registry import KINDS
from mlmclm.storage.files import only_one
from mlmclm.storage.place import LOCK, Place
from mlmclm.studies.exports import export_models, exported_models
from mlmclm.studies.plan import PlannedStage, StudyPlan, plan_of_sweep
from mlmclm.studies.prepare import (
    PreparedStudy,
    check_models_to_continue,
    check_sources,
    find_prepared,
    prepare_study,
    with_suite,
)
from mlmclm.studies.study_file import AnyFile, StudyFile, SweepFile
from mlmclm.studies.study_record import (
    check_last,
    completed,
    grid_of_study,
    kept_file,
    kept_record,
    last_run,
    record_value,
    to_publish,
    write_record,
)
from mlmclm.studies.study_sweep import (
    StudySweep,
    expand_studies,
    find_given,
    given_model,
    open_tasks,
    prepare_tasks,
    study_space,
    sweep_of,
    with_tasks,
)
from mlmclm.sweeps.cells import SweepModel, recorded_cell
from mlmclm.sweeps.find_model import model_in
from mlmclm.sweeps.manifest import write_manifest
from mlmclm.sweeps.results_store import Evaluations, ResultsStore
from mlmclm.sweeps.zero_shot import evaluate_models, listed_evaluations, zero_shot_tasks
from mlmclm.tasks.declared_tasks import get_task
from mlmclm.tasks.generator import GENERATORS
from mlmclm.tasks.load import load_task
from mlmclm.tasks.prepared_task import PreparedTask
from mlmclm.tasks.splits import reader

if TYPE_CHECKING:
    from mlmclm.finetuning.cell import Cell
    from mlmclm.studies.study_tracking import StudyRuns
    from mlmclm.studies.work import SharedSession


class Study:
    """A study: its models (trained by it, or given), its tasks, and the grid over which the models are fine-tuned.

    What the store already has is not computed again: `run` resumes wherever an earlier one stopped.

    Attributes:
        file: its settings.
        place: its folders.
        source: its file or its name, for messages.
        command: the command that computes it again, which the report shows.
    """

    def __init__(self, file: AnyFile, place: Place, *, source: str = "", command: str = "") -> None:
        """Replace each source `STUDY/*` by the models of that study; errors as of `expand_studies`."""
        self.file = expand_studies(file, place.store) if isinstance(file, SweepFile) else file
        self.place, self.source, self.command = place, source or file.name, command

    def __repr__(self) -> str:
        return f"<{self.file.kind} {self.file.name!r}: {len(self.file.models)} models, in {self.place.store}>"

    @property
    def name(self) -> str:
        """Name of the folder in the store and of the MLflow experiment."""
        return self.file.name

    @property
    def folder(self) -> Path:
        """The folder in the store that has the report and the tables."""
        return self.place.study_folder(self.name)

    @property
    def results(self) -> Results:
        """The results so far of the study's last run; nothing is computed, and its models and data need not exist.

        Raises:
            UserError: there are none; the message says what to run.
        """
        return self._results()

    def publish(self, folder: Path, *, examples: bool = True) -> StudyRecord:
        """Write the record of the results so far as a folder that others can analyse and check (docs/publish.md), and return it.

        Args:
            folder: it must not exist yet, or be empty.
            examples: whether outcomes of test examples go with it; they hold the tasks' expected answers.

        Raises:
            UserError: as `results`; or the folder is not empty, or the study has a setting that no record has.
            EnvironmentFault: the disk is full or not writable.
        """
        record, (file, place) = self.results.record, self._last_run()
        published = to_publish(record, file, place, examples=examples)
        published.write(folder)
        return published

    def export_best(self, model: str, task: str, to: Path) -> tuple[Cell, dict[str, dict[str, float]]]:
        """Train a model's best cell on a task again and write its encoder as a folder for sentence-transformers; return it and its scores.

        The best cell is the one with the best validation score among the seeds of the best learning rate.

        Raises:
            UserError: the study has no such model or task, none of its cells has a score, the task is not retrieval, or the folder is not
                empty.
        """
        from mlmclm.finetuning.sentence_encoder import check_target, export_sentence_encoder
        from mlmclm.sweeps.cells import cell_name
        from mlmclm.sweeps.one_cell import keep_start, make_ready, steps_bar

        row, place = _best_row(self.results, model, task), self.place
        cell = self._cell(row)
        check_target(cell, to)
        if cell.start is not None and (start := ResultsStore(place.store).find(cell.start.key)) is not None:
            keep_start(self._cell({**start, "model": row["model"]}), place)
        make_ready(cell)
        with steps_bar(f"{cell_name(cell)}, trained again") as on_step:
            result = export_sentence_encoder(cell, to, store=place.store, data_root=place.data_root, on_step=on_step)
        if row["scores"] != result["scores"]:
            say(
                f"{cell_name(cell)}: trained again, it does not score exactly as before; another machine or version computed "
                f"the {self.file.kind}. Before: {row['scores']}"
            )
        return cell, dict(result["scores"])

    @property
    def trained_file(self) -> StudyFile:
        """The file of a study that trains its models; a `UserError` if they are given."""
        if isinstance(self.file, SweepFile):
            raise UserError(f"{self.source}: its models are given; there is nothing to pretrain.")
        return self.file

    def plan(self, *, workers: int | None = None, price: float | None = None) -> StudyPlan:
        """Return what the store has, what a run would compute now, and the time and cost of that; nothing is computed.

        The time is estimated from results in the store or, if there are too few, from a few steps of training. It covers
        only models that exist.

        Args:
            workers: number of cells computed at once; by default as many as this machine can.
            price: of an hour of all workers, in any currency.

        Raises:
            UserError: a name or a setting is wrong.
        """
        file, place = self.file, self.place
        if isinstance(file, SweepFile):
            sweep = self.sweep(prepare=False)
            sources = {swept.model.name: swept.source for swept in sweep.models}
            plan = StudyPlan(file.kind, self.name, place.store, models=sources)
        else:
            sweep = StudySweep(file, place, study_space(file, place.task_dirs))
            plan, prepared = self._planned()
            if prepared is not None:
                # A cell's key contains hashes of its model and data, so no cell can be looked up before both exist.
                tasks = open_tasks(prepared.corpus.tokenizer, sweep.space, place, prepare=False)
                sweep = sweep_of(prepared, sweep.space, exported_models(prepared), tasks)
            else:
                for_each(sweep.space.tasks, self._check_data)
        return dataclasses.replace(plan, sweep=plan_of_sweep(sweep, workers=workers, price=price))

    def _check_data(self, name: str) -> None:
        """Read and check a task's data as the run will, if they are files on this machine."""
        task, place = get_task(name, self.place.task_dirs), self.place
        if GENERATORS.find(task.source) is None and not reader(task, place.store, place.data_root)[1]:
            load_task(task, store=place.store, data_root=place.data_root)

    def plan_pretraining(self) -> StudyPlan:
        """Return the plan without the sweep; a study that is only pretrained needs no search space."""
        if self.trained_file.space is not None:
            study_space(self.trained_file, self.place.task_dirs)
        return self._planned()[0]

    def prepare(
        self, *, ray: str | None = None, wait_for_nodes: float = SECONDS_FOR_NODES
    ) -> tuple[PreparedStudy, dict[str, PreparedTask]]:
        """Prepare the corpus, the tokenizer and the tasks; a study without a search space has no tasks.

        Args:
            ray: address of a Ray cluster whose nodes tokenise; otherwise this machine does, unless the study says
                `corpus.workers: ray`.
            wait_for_nodes: seconds for which the cluster may have no node for the work.

        Raises:
            UserError: something is wrong with the corpus, the tokenizer, a model's name, a task or its data.
        """
        from mlmclm.studies.work import SharedSession

        file = self.trained_file
        space = None if file.space is None else study_space(file, self.place.task_dirs)
        with closing(SharedSession(self.place, ray, wait_for_nodes)) as session:
            prepared = self._prepared(session)
        return prepared, {} if space is None else prepare_tasks(prepared, space)

    def pretrain(self, *, ray: str | None = None, wait_for_nodes: float = SECONDS_FOR_NODES) -> list[SweepModel]:
        """Train what is missing of the models, and return all of them, each with its Hugging Face folder.

        Args:
            ray, wait_for_nodes: as in `run`.

        Raises:
            UserError: a setting is wrong, or another process is working on the study.
            EnvironmentFault: the machine or the cluster failed. What is finished is kept.
        """
        from mlmclm.studies.work import work_on

        with work_on(self.trained_file, self.place, ray, wait_for_nodes) as (session, runs):
            return self._trained(self._prepared(session), session, runs)

    def narrowed(self, models: Sequence[str], suite: str | None = None) -> Study:
        """Return the study with the named models only, or with all if none is named; with a suite, its models (`with_suite`).

        Raises:
            UserError: there is no such model, or something is wrong with the suite.
        """
        file = self.trained_file if suite is None else with_suite(self.trained_file, suite)
        if models:
            where = self.source if suite is None else f"--suite {suite}"
            file = file.narrowed([file.model_of(name, where=where) for name in models])
        return Study(file, self.place, source=self.source, command=self.command)

    def sweep(self, *, prepare: bool) -> StudySweep:
        """Find and check given models, and open every task for every tokenizer among them (`study_sweep.with_tasks`).

        Raises:
            UserError: a model, a task or a setting is wrong; one error covers all of them.
        """
        if isinstance(self.file, StudyFile):
            raise UserError(f"{self.source}: it trains its models, so `run` makes its sweep.")
        return with_tasks(find_given(self.file, self.place), prepare=prepare)

    def run(
        self,
        *,
        pretrain: bool = True,
        replace: bool = False,
        ray: str | None = None,
        wait_for_nodes: float = SECONDS_FOR_NODES,
        check: bool = True,
    ) -> Results:
        """Compute what is missing, and write the tables and the report.

        Args:
            pretrain: whether to train the models; otherwise they must be trained already.
            replace: whether the report of another grid under this name may be replaced.
            ray: address of a running Ray cluster; by default that of the surrounding Ray job, or RAY_ADDRESS, else Ray
                is started on this machine if it is needed.
            wait_for_nodes: seconds for which the cluster may have no node for the work.
            check: whether to raise the error of zero-shot evaluations that failed; otherwise it is the results' `failure`.

        Raises:
            UserError: a setting or an input is wrong, the study was last run over another grid, or another process is
                working on it.
            EnvironmentFault: the machine, the network or a server failed. What is finished is kept.
        """
        from mlmclm.studies.work import compute_missing, work_on

        begun = self._begun()
        evaluations = zero_shot_tasks(self.file.zero_shot, self.file.folder, self.place)
        check_last(self.folder, grid_of_study(begun), replace=replace)
        self.file.find_claims()  # the report reads them again, but an error then would come late
        with work_on(self.file, self.place, ray, wait_for_nodes) as (session, runs):
            sweep = self._made(begun, session, runs, pretrain=pretrain)
            models = [swept.model for swept in sweep.models]
            wanted = evaluations.of_models(models, Evaluations(self.place.store)) if evaluations is not None else []
            write_record(sweep, self.command, record_value(sweep) | listed_evaluations(wanted))
            runs.recorded()
            failure = None
            if evaluations is not None:
                # Evaluations may take long; without this, the list of cells would be the last run's until they end.
                write_manifest(self.folder, self.name, sweep.plan())
                asked, device, cpus = evaluations.asked, self.file.device, sweep.space.cpus_per_cell
                failure = evaluate_models(wanted, asked, self.place, session=session, device=device, cpus=cpus)
                runs.recorded()
            outcome = compute_missing(sweep, session, wait_for_nodes=wait_for_nodes)
            results = self._written(self._results(outcome.results, failure), self.folder, runs)
        results.grids = outcome.grids
        if failure is not None and check:
            raise failure
        return results

    def report(self, *, rule: str | None = None, to: str | Path | None = None, track: bool | str = False) -> Results:
        """Write tables and report from the results so far; nothing is computed.

        Args:
            rule: as in `Results.by_rule`.
            to: the folder to write; by default the study's own in the store, unless it is read-only.
            track: whether to write to MLflow what it lacks of the study; or the sink that gets all of it: `tensorboard`,
                `trackio`, `wandb`, or one of your own.

        Raises:
            UserError: `track` is given and another process works on the study, which writes its runs itself.
        """
        results = self.results.by_rule(rule)
        existing = next(place for place in (self.folder, *self.folder.parents) if place.exists())
        default = self.folder if os.access(existing, os.W_OK) else None
        folder = default if to is None else Path(to)
        if not track:
            return self._written(results, folder)
        from mlmclm.studies.study_tracking import StudyRuns, follow_study, send_to_sink

        if isinstance(track, str):
            KINDS["sink"][track]  # raises an error at once if there is no such sink
        file, place = self.file, self.place
        with only_one(self.folder / LOCK, f"{file.kind} {self.name!r}"):
            runs = StudyRuns(file, place)
            if isinstance(file, StudyFile) and (prepared := find_prepared(file, place)) is not None:
                runs.stages(prepared)
            self._written(results, folder, runs)
            runs.tell(status="FINISHED")
            if isinstance(track, str):
                send_to_sink(file, place.store, track)
            else:
                follow_study(file, place.store)
            return results

    def _results(self, rows: Sequence[dict[str, Any]] | None = None, failure: MlmclmError | None = None) -> Results:
        remedy = f"run `mlmclm {self.file.kind} {self.source}` first."
        record = kept_record(self.file, self.place, self.command, rows, remedy=remedy)
        runs, page = f"mlmclm tracking ui --store {shlex.quote(str(self.place.store))}", self.folder / "report.html"
        return Results(record, runs, failure, {"report": page} if page.is_file() else {})

    def _last_run(self) -> tuple[AnyFile, Place]:
        """Return the study's file as it was last run, and its folders with those of that run."""
        run = last_run(self.folder)
        return kept_file(self.folder, run), completed(self.place, self.folder, run)

    def _cell(self, row: Mapping[str, Any]) -> Cell:
        """Return the cell of a result, rebuilt from the result, with its model under the study's name."""
        (file, place), name = self._last_run(), row["model"]
        if isinstance(file, SweepFile):
            model = given_model(file, name, place)
        else:
            model = model_in(self.folder / "models" / name, name)
        return recorded_cell(row, model, place.task_dirs, where=f"result {row['key']}")

    def _written(self, results: Results, folder: Path | None, tracking: StudyRuns | None = None) -> Results:
        """Write the tables and the report to a folder and log them to MLflow; without a folder, MLflow gets no files."""
        from mlmclm.service.state import MLFLOW
        from mlmclm.studies.study_tracking import other_pages, recorded_runs

        pages = other_pages(self.file, self.place.store, results.rows)
        results.files = {}
        if folder is not None:
            tasks = dict.fromkeys((*results.analysis.grid.tasks, *(fact.task for fact in results.facts.zero_shot)))
            results.write(folder, recorded=recorded_runs(self.file, self.place.store, tuple(tasks)), pages=pages)
        if tracking is not None:
            tracking.recorded(results, pages)
            results.runs = pages.get(MLFLOW) or tracking.elsewhere or results.runs
        return results

    def _begun(self) -> StudySweep:
        """Return the sweep as far as it is known without any work; check all settings and names."""
        file, place = self.file, self.place
        if isinstance(file, StudyFile):
            return StudySweep(file, place, study_space(file, place.task_dirs))
        if (self.folder / "models").is_dir():
            raise UserError(
                f"name {self.name!r}: a study of this name is in {place.store}; its report would be overwritten. Choose another name."
            )
        return find_given(file, place)

    def _made(self, begun: StudySweep, session: SharedSession, runs: StudyRuns, *, pretrain: bool) -> StudySweep:
        """Return the sweep with all models and the tasks' data; train and prepare what is missing."""
        if isinstance(self.file, SweepFile):
            return with_tasks(begun, prepare=True)
        prepared = self._prepared(session)
        models = None if pretrain else export_models(prepared)
        tasks = prepare_tasks(prepared, begun.space)  # before training, so that bad data cost no time
        if models is None:
            models = self._trained(prepared, session, runs)
        return sweep_of(prepared, begun.space, models, tasks)

    def _planned(self) -> tuple[StudyPlan, PreparedStudy | None]:
        """Return the plan of pretraining, and the prepared study if nothing is left to prepare."""
        file, place, fault = self.trained_file, self.place, None
        # First, so that a wrong name fails before all else.
        plan = make_plan(file.parsed, file.recipe, beside=file.beside)
        prepared = find_prepared(file, place)
        if prepared is None:
            check_models_to_continue(file, place, plan)
            try:
                check_sources(file, place)
            except EnvironmentFault as error:
                fault = error  # the plan can be shown without the network, but the command could not run now
        else:
            plan = prepared.plan

        def planned(stage: Stage) -> PlannedStage:
            left = [stage] if prepared is None else prepared.left(stage)
            return PlannedStage(stage.title, stage.models, stage.steps, sum(part.steps for part in left))

        study_plan = StudyPlan(
            file.kind,
            self.name,
            place.store,
            corpus_source=file.source,
            corpus="prepared" if prepared is not None else "to be prepared",
            initial=file.initial,
            stages=tuple(map(planned, plan.stages)),
            fault=fault,
        )
        return study_plan, prepared

    def _prepared(self, session: SharedSession) -> PreparedStudy:
        # Without a cluster, `prepare_study` opens a session of its own if the study asks for `corpus.workers: ray`.
        return prepare_study(self.trained_file, self.place, session=session if session.running else None)

    def _trained(self, prepared: PreparedStudy, session: SharedSession, runs: StudyRuns) -> list[SweepModel]:
        from mlmclm.studies.work import train_missing_stages

        runs.stages(prepared)
        losses = 0
        while prepared.unfinished():  # else Ray need not start
            session()
            try:
                train_missing_stages(prepared, session.wait_for_nodes)
                break
            except LostNode as error:
                losses += 1
                if losses > prepared.study.recipe.max_failures:
                    raise
                say(f"{error} Ray starts again, {losses} of at most {prepared.study.recipe.max_failures} times.")
                session.close()
        return export_models(prepared)


def _best_row(results: Results, model: str, task: str) -> Mapping[str, Any]:
    """Return the result with the best validation score among the seeds of the best learning rate."""
    from mlmclm.analysis.results import cell_columns, records

    tasks = results.analysis.grid.tasks
    model = results.model_of(model, where=results.name)
    if task not in tasks:
        raise unknown("task", task, tasks, where=results.name)
    chosen = [row for row in records(results.analysis.chosen) if (row["model"], row["task"]) == (model, task)]
    if not chosen:
        raise UserError(
            f"{results.name}: no cell of {model} on {task} has a score; `mlmclm {results.record.kind}` computes them."
        )
    best = cell_columns(max(chosen, key=lambda row: row["validation"]))
    key = next(row["key"] for row in records(results.cells) if cell_columns(row) == best)
    return next(row for row in results.rows if (row["key"], row["model"]) == (key, model))

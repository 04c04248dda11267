"""The sweep of a study: its models (trained or given), each with its search space and the tasks' data, and the plan of its cells."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mlmclm.answers.named_facts import named_facts
from mlmclm.answers.record import AnalysisSetting
from mlmclm.errors import UserError, for_each, unknown
from mlmclm.finetuning.cell import Cell
from mlmclm.models.folder import check_length, context_of, load_encoder
from mlmclm.models.sources import local_folder
from mlmclm.plans.names import ModelName, parse_name, replicates_among
from mlmclm.progress import say
from mlmclm.reports.study_facts import ModelFacts, StudyFacts, TaskFacts
from mlmclm.results.examples import GROUP
from mlmclm.results.metrics import value_of
from mlmclm.seeds import Seed
from mlmclm.storage.files import read_json
from mlmclm.storage.place import Place
from mlmclm.studies.prepare import PreparedStudy, facts_of_trained, plain
from mlmclm.studies.study_file import AnyFile, StudyFile, SweepFile
from mlmclm.sweeps.cells import SweepModel
from mlmclm.sweeps.find_model import find_model, models_of_study
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.sweeps.space import FIXED, Space
from mlmclm.sweeps.starts import Extend, ModelGrid, Planned, plan_cells
from mlmclm.sweeps.trial import with_trainings
from mlmclm.tasks.declaration import Task, titles
from mlmclm.tasks.declared_tasks import get_task
from mlmclm.tasks.prepare_task import find_task
from mlmclm.tasks.prepared_task import PreparedTask, check_vocabulary

LENGTHS = ("max_length", "stride")
"""Settings that depend on a model's context if the protocol states lengths as a share of it."""
QUESTION = "Which of these models suits these tasks best, at which learning rate, and how sure can we be?"
"""The question of a study whose models are given."""


@dataclass(frozen=True)
class SweptModel:
    """A model to fine-tune, and what depends on its tokenizer and context.

    Attributes:
        space: the search space; for a given model, with lengths resolved for its context.
        tasks: the tasks' data, tokenised for it, as far as they are prepared.
        source: where a given model comes from, for display; with the commit if it is from the Hub.
    """

    model: SweepModel
    space: Space
    tasks: Mapping[str, PreparedTask]
    source: str = ""

    @property
    def commit(self) -> str | None:
        """The commit of a folder in the Hub's cache; None for other folders."""
        folder = self.model.folder
        return folder.name if folder.parent.name == "snapshots" else None


@dataclass(frozen=True)
class StudySweep:
    """The sweep of a study, with the models and the tasks' data that exist already.

    Attributes:
        prepared: the corpus and the plan of a study that trains its models; None before they are prepared, and where
            models are given.
    """

    file: AnyFile
    place: Place
    space: Space
    models: tuple[SweptModel, ...] = ()
    prepared: PreparedStudy | None = None

    @property
    def tasks(self) -> Mapping[str, PreparedTask]:
        """The tasks' data, tokenised for the first model."""
        return self.models[0].tasks

    def plan(self) -> Planned:
        """Return the cells of all models whose tasks are prepared, and count those that must wait (`plan_sweep`)."""
        return plan_sweep(self._ready, self.place, absent=len(self._ready) != len(self.file.models))

    @property
    def _ready(self) -> list[SweptModel]:
        return [swept for swept in self.models if len(swept.tasks) == len(self.space.tasks)]

    @property
    def compared(self) -> list[str]:
        """The models that a power plan compares: no replicates, and no baseline if there are two other models."""
        models = [name for name in self.file.models if name not in self.replicate_of]
        others = [name for name in models if name != self.file.baseline]
        return others if len(others) > 1 else models

    @cached_property
    def plans(self) -> dict[str, ModelName]:
        """The plans of the models, by name, as far as they are known."""
        if isinstance(self.file, StudyFile):
            return {str(name): name for name in self.file.parsed}
        return plans_of_given(self.models, self.place.store)

    @property
    def replicate_of(self) -> dict[str, str]:
        """The model of each replicate, by the replicate's name."""
        return replicates_among(self.plans)

    def declared(self) -> dict[str, Task]:
        """Return the declaration of each task, with the metric that the space chooses for it."""
        space, task_dirs = self.space, self.place.task_dirs
        return {name: get_task(name, task_dirs).measured_by(space.metrics) for name in space.tasks}

    def setting(self) -> AnalysisSetting:
        """Return how its results are analysed."""
        file, metrics = self.file, {name: task.metric for name, task in self.declared().items()}
        return setting_of(
            tuple(file.models), file.baseline, self.space, metrics, tasks=self.tasks, replicate_of=self.replicate_of
        )


def plans_of_given(models: Sequence[SweptModel], store: Path) -> dict[str, ModelName]:
    """Return the plans of given models that a study of the store has trained; none if they are of several studies.

    Models of several studies can differ in their recipe or corpus, which their plans don't say.
    """
    studies, plans = (store / "studies").resolve(), dict[str, ModelName]()
    owners: set[Path] = set()
    for swept in models:
        folder = swept.model.folder.resolve()
        if folder.parent.name == "models" and folder.parent.parent.parent == studies:
            owners.add(folder.parent.parent)
            with suppress(UserError):  # it continues a given model, whose plan is unknown
                plans[swept.model.name] = parse_name(folder.name)
    return plans if len(owners) == 1 else {}


def study_space(study: StudyFile, task_dirs: Sequence[Path] = ()) -> Space:
    """Return the study's search space, with the study's own tasks and overrides.

    Raises:
        UserError: the space, a task or a model is unknown, a task's sequences are longer than the models are trained
            for, or an override for a model would change how a task is tokenised.
    """
    space = study.find_space().at_context(study.context)
    # Shares in models' names become steps, as in the study's own list.
    per_model = {study.spelled(name): changes for name, changes in space.per_model.items()}
    # Replicates are fine-tuned with the settings of their model.
    for run in study.parsed:
        if str(first := replace(run, replicate=1)) in per_model:
            per_model.setdefault(str(run), per_model[str(first)])
    space = space.model_copy(update={"per_model": per_model})
    space.check_models(study.models)
    for model, changes in space.per_model.items():
        for name in (name for name in changes if name in FIXED):
            raise UserError(
                f"per_model.{model}: {name} cannot differ between a study's models, which share a task's tokens; give it "
                "to a task, or compare the models in a sweep file."
            )

    def check(task: str) -> None:
        kind, protocol = get_task(task, task_dirs).kind, space.protocol_for(task)
        for variant in (protocol, *(space.for_model(model).protocol_for(task) for model in space.per_model)):
            kind.check_settings(task, variant)
        length = protocol.max_length
        if length > study.context:
            raise UserError(
                f"task {task!r}: max_length {length} is longer than the models' sequences (recipe.block_length {study.context})."
            )

    for_each(space.tasks, check)
    return space


def space_of(file: AnyFile, place: Place) -> Space:
    """Return a study's search space; errors as of `study_space` or `StudyFile.find_space`."""
    return study_space(file, place.task_dirs) if isinstance(file, StudyFile) else file.find_space()


def prepare_tasks(prepared: PreparedStudy, space: Space) -> dict[str, PreparedTask]:
    """Load, check and tokenise every task of a space, before anything is trained; one error covers all tasks."""
    from mlmclm.tasks.prepare_task import prepare_task

    bare = [task for task in space.tasks if space.protocol_for(task).special_tokens == "end"]
    if bare and prepared.study.recipe.rows == "chunks":
        say(
            f"{', '.join(bare)}: the models have seen BOS before each chunk, and the protocol (special_tokens: end) puts none before a text; "
            f"special_tokens: tokenizer does, in {titles(lambda family: family.framed)}"
        )

    def prepare_one(task: str) -> PreparedTask:
        protocols = [space.for_model(model).protocol_for(task) for model in ("", *space.per_model)]
        return prepare_task(
            get_task(task, prepared.place.task_dirs),
            prepared.corpus.tokenizer,
            # The tokens are the same for all models, but `bos` needs a tokenizer that adds BOS.
            next((protocol for protocol in protocols if protocol.pooling == "bos"), protocols[0]),
            prepared.place.store,
            prepared.place.data_root,
        )

    return dict(zip(space.tasks, for_each(space.tasks, prepare_one), strict=True))


def sweep_of(
    prepared: PreparedStudy, space: Space, models: Sequence[SweepModel], tasks: Mapping[str, PreparedTask]
) -> StudySweep:
    """Return the sweep of a study that trains its models, for these trained models and prepared tasks."""
    swept = tuple(SweptModel(model, space, tasks) for model in models)
    return StudySweep(prepared.study, prepared.place, space, swept, prepared)


def given_model(file: SweepFile, name: str, place: Place) -> SweepModel:
    """Find a given model by its name in the file; errors as of `find_model`."""
    model = find_model(file.models[name], place.store, data_root=place.data_root, beside=file.folder)
    # A worker need not have the driver's working directory.
    return replace(model, name=name, folder=model.folder.absolute())


def find_given(file: SweepFile, place: Place) -> StudySweep:
    """Find and check given models and the space, without any tasks' data; one error covers all models."""
    space = file.find_space()
    space.check_models(file.models)
    for_each(space.tasks, lambda task: get_task(task, place.task_dirs))

    def find(name: str) -> SweptModel:
        model, source = given_model(file, name, place), file.models[name]
        swept = SweptModel(model, space, {}, source)
        if local_folder(source, beside=file.folder) is not None:
            return replace(swept, source=f"the folder {model.folder.name}")  # a report names no path of a machine
        return replace(swept, source=f"{source}, commit {swept.commit}") if swept.commit else swept

    def settle(swept: SweptModel) -> SweptModel:
        folder, grid = swept.model.folder, space.for_model(swept.model.name)
        context = context_of(folder)
        if context is None and any(grid.protocol_for(task).length_share is not None for task in grid.tasks):
            raise UserError(f"{folder}: config.json doesn't say the model's context; use a protocol with a max_length.")
        resolved = grid if context is None else grid.at_context(context)
        for task in space.tasks:
            get_task(task, place.task_dirs).kind.check_settings(task, resolved.protocol_for(task))
        return replace(swept, space=resolved)

    models = for_each(file.models, find)
    if file.baseline is not None and file.baseline not in file.models:
        raise unknown("model", file.baseline, file.models, where="baseline")
    return StudySweep(file, place, space, tuple(for_each(models, settle)))


def with_tasks(made: StudySweep, *, prepare: bool) -> StudySweep:
    """Return a sweep of given models with the tasks' data, tokenised for each; one error covers all models and tasks.

    Args:
        prepare: whether to prepare what isn't prepared yet; otherwise a few examples are tokenised, and thrown away.
    """

    def tokenise(swept: SweptModel) -> SweptModel:
        return replace(swept, tasks=open_tasks(swept.model.folder, swept.space, made.place, prepare=prepare))

    made = replace(made, models=tuple(for_each(made.models, tokenise)))
    _check_loading(made)
    return made


def expand_studies(file: SweepFile, store: Path) -> SweepFile:
    """Return the sweep with each source `STUDY/*` replaced by the study's models.

    Raises:
        UserError: there is no such study, or two models have one name.
    """
    named: dict[str, str] = {}
    for name, source in file.models.items():
        study = source.removesuffix("/*")
        models = [name] if study == source else models_of_study(study, store)
        for model in models:
            where = source if study == source else f"{study}/{model}"
            if model in named:
                raise UserError(
                    f"two models are called {model!r} ({named[model]} and {where}); give one a name of its own: "
                    "`--model NAME=SOURCE`, or a mapping of names to sources in a sweep file."
                )
            named[model] = where
    return file.model_copy(update={"models": named})


def open_tasks(folder: Path, space: Space, place: Place, *, prepare: bool) -> dict[str, PreparedTask]:
    """Return the tasks that are prepared for a folder's tokenizer, by name, and check the others, or `prepare` them."""

    def find_or_prepare(name: str) -> PreparedTask | None:
        task, settings = get_task(name, place.task_dirs), space.protocol_for(name)
        # Another model with this tokenizer may have prepared the task.
        check_length(folder, settings.max_length)
        prepared = find_task(task, folder, settings, place.store, place.data_root, check=not prepare)
        if prepared is not None:
            check_vocabulary(prepared, folder)
        if not prepare or (prepared is not None and (settings.pooling != "bos" or prepared.starts)):
            return prepared
        # Imported late because it loads torch, which isn't needed if the data are tokenised already.
        from mlmclm.tasks.prepare_task import prepare_task

        return prepare_task(task, folder, settings, place.store, place.data_root)

    tasks = dict(zip(space.tasks, for_each(space.tasks, find_or_prepare), strict=True))
    return {name: task for name, task in tasks.items() if task is not None}


def _check_loading(sweep: StudySweep) -> None:
    """Load each model that is needed, so that one that can't be fine-tuned is refused before anything is trained."""
    from mlmclm.models.encoder import check_direction

    planned = sweep.plan()
    needed = set(planned.needed(ResultsStore(sweep.place.store).missing(planned.cells)))
    needed |= {swept.model.name for swept in sweep.models if len(swept.tasks) < len(sweep.space.tasks)}

    def load(swept: SweptModel) -> None:
        encoder = load_encoder(swept.model.folder)  # not kept, because all of them may not fit into memory
        space = swept.space.for_model(swept.model.name)
        for task in space.tasks:
            check_direction(encoder, causal=space.protocol_for(task).attention == "causal")

    for_each([swept for swept in sweep.models if swept.model.name in needed], load)


def plan_sweep(models: Sequence[SweptModel], place: Place, *, absent: bool = False) -> Planned:
    """Return the cells of all models in the order in which workers take them, and count those that must wait.

    A cell waits until the results that choose its starting weights exist; only then is its key known.

    Args:
        models: with all of their tasks prepared.
        absent: whether the sweep has models beside these, whose cells cannot be planned yet.
    """
    if not models:
        return Planned([])
    space = models[0].space

    def grid(swept: SweptModel) -> ModelGrid:
        model_space = swept.space.for_model(swept.model.name)
        return ModelGrid(
            swept.model,
            model_space,
            {name: task.task_data for name, task in swept.tasks.items()},
            {name: get_task(name, place.task_dirs).measured_by(model_space.metrics) for name in model_space.tasks},
            [name for name, task in swept.tasks.items() if task.recut],
        )

    extend = extending(space) if space.learning_rates.most else None
    planned = plan_cells([grid(swept) for swept in models], ResultsStore(place.store), extend, absent=absent)
    by_model: dict[str, list[Cell]] = {swept.model.name: [] for swept in models}
    for cell in planned.cells:
        by_model[cell.model].append(cell)
    cells = [cell for swept in models for cell in with_trainings(by_model[swept.model.name], swept.tasks)]
    return replace(planned, cells=cells)


def extending(space: Space) -> Extend:
    """Return a function that determines which learning rates the results of a (task, setting) add to the space's list."""
    from mlmclm.analysis.extension import extension

    rates, split = space.learning_rates, "test" if space.rule == "on_test" else "validation"

    def extend(
        results: Sequence[Mapping[tuple[float, Seed], Mapping[str, Any]]], seeds: Sequence[Seed]
    ) -> tuple[Collection[float], int]:
        scores = [
            {
                point: value_of(result["scores"][split], result["metric"]) if result["status"] == "ok" else None
                for point, result in grid.items()
            }
            for grid in results
        ]
        extended = extension(scores, rates, rates.lower, rates.higher, seeds, rule=space.rule)
        return extended.added, extended.to_come

    return extend


def setting_of(
    models: Sequence[str],
    baseline: str | None,
    space: Space,
    metrics: Mapping[str, str],
    *,
    tasks: Mapping[str, PreparedTask],
    replicate_of: Mapping[str, str] = MappingProxyType({}),
) -> AnalysisSetting:
    """Return how the results of a sweep are analysed, with tables in the order of `models`.

    Args:
        metrics: the main score of each task.
        tasks: the tasks' data, from which chance levels are computed.
        replicate_of: as in `analysis.analyse`.
    """
    from mlmclm.analysis.results import Grid

    levels = {
        name: replace(task, settings=space.protocol_for(name)).chance(metrics[name]) for name, task in tasks.items()
    }
    grid = Grid(
        tuple(models),
        space.tasks,
        space.learning_rates,
        space.seeds,
        {task: tuple(space.settings_for(task)) for task in space.tasks},
        grows=space.learning_rates.most > 0,
    )
    chances = {name: level for name, level in levels.items() if level is not None}
    return AnalysisSetting(grid, space.rule, baseline, chances, replicate_of)


def study_facts(sweep: StudySweep) -> StudyFacts:
    """Return facts that the report shows beside the results, without command, zero-shot results, claims, costs and provenance."""
    file, space, prepared = sweep.file, sweep.space, sweep.prepared
    settings: dict[str, Any] = {"metrics": space.metrics, "rule": space.rule}
    if space.start_from:
        settings["start_from"] = space.start_from
    settings |= space.common_settings() | space.axes() | space.of_models()
    if prepared is None and not _one_length(sweep):  # then the lengths differ between models
        settings = {key: value for key, value in settings.items() if key not in LENGTHS}
    return StudyFacts(
        name=file.name,
        command="",
        tasks=tuple(_task_facts(task, sweep.tasks[name].folder) for name, task in sweep.declared().items()),
        protocol={key: plain(value) for key, value in settings.items()},
        **(_of_given(sweep) if prepared is None else facts_of_trained(prepared)),
    )


def _of_given(sweep: StudySweep) -> dict[str, Any]:
    """Return the facts of a study whose models are given."""

    def about(swept: SweptModel) -> str:
        length = "" if shared else f" Its sequences have at most {swept.space.protocol.max_length} tokens."
        return f"Is {swept.source}.{length}"

    shared, plans = _one_length(sweep), sweep.plans
    models = tuple(
        ModelFacts(
            swept.model.name,
            "external",
            description=about(swept),
            **named_facts(plans.get(swept.model.name, ModelName(""))),
        )
        for swept in sweep.models
    )
    return {"models": models, "question": QUESTION}


def _one_length(sweep: StudySweep) -> bool:
    """Return whether the sequences of all given models have the length of the protocol."""
    protocol = sweep.space.protocol
    return protocol.length_share is None and all(
        swept.space.protocol.max_length == protocol.max_length for swept in sweep.models
    )


def _task_facts(task: Task, folder: Path) -> TaskFacts:
    rows = read_json(folder / "meta.json")["rows"].items()
    source = f"{task.source} ({task.licence})" if task.licence else task.source
    source += f"; test examples grouped by {task.group}" if task.group else ""
    counts = {part: int(count) for part, count in rows if part != GROUP}
    return TaskFacts(task.name, task.title, task.family, task.metric, counts, source)

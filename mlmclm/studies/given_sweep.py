"""A sweep of given models: each with its own tokenizer and context, on the same tasks and search space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from mlmclm.errors import UserError, for_each, unknown
from mlmclm.models.folder import check_length, context_of, load_encoder
from mlmclm.models.sources import local_folder
from mlmclm.progress import bars
from mlmclm.reports.study_facts import ModelFacts, StudyFacts
from mlmclm.storage.files import first_there, places_of
from mlmclm.studies.facts import sweep_facts
from mlmclm.studies.last_grid import grid_of
from mlmclm.studies.place import Place
from mlmclm.studies.study_sweep import plan_sweep, together
from mlmclm.studies.sweep_file import SweepFile
from mlmclm.studies.zero_shot import zero_shot_facts
from mlmclm.sweeps.cells import SweepModel
from mlmclm.sweeps.find_model import find_model, models_of_study
from mlmclm.sweeps.ledger import Ledger
from mlmclm.sweeps.space import Space
from mlmclm.sweeps.starts import Planned
from mlmclm.tasks.prepared_task import PreparedTask, check_vocabulary, find_task
from mlmclm.tasks.registry import get_task

LENGTHS = ("max_length", "stride")
"""Settings that follow from a model's context where the protocol gives lengths as a share of it."""
QUESTION = "Which of these models suits these tasks best, at which learning rate, and how sure can we be?"


@dataclass(frozen=True)
class GivenModel:
    """A model to fine-tune, and what depends on its tokenizer and context.

    Attributes:
        source: where it comes from, for display; with the commit if it is from the Hub.
        space: the search space with lengths settled for its context.
        tasks: the tasks' data, tokenised for it, as far as they are prepared.
    """

    model: SweepModel
    source: str
    space: Space
    tasks: Mapping[str, PreparedTask]


@dataclass(frozen=True)
class GivenSweep:
    """A sweep whose models are found and whose tasks are prepared."""

    file: SweepFile
    place: Place
    space: Space
    models: tuple[GivenModel, ...]

    def plan(self) -> Planned:
        """Return the cells of all prepared models, and count those that must wait (`studies.study_sweep.plan_sweep`)."""
        ready = [each for each in self.models if len(each.tasks) == len(self.space.tasks)]
        return together(plan_sweep(each.space, [each.model], dict(each.tasks), self.place) for each in ready)

    def grid(self) -> dict[str, Any]:
        """Return the sweep's grid as `last_grid` records it."""
        return grid_of(self.space, {each.model.name: each.model.weights for each in self.models})

    def as_file(self) -> str:
        """Return the sweep as YAML for `mlmclm report`: folders are absolute, and models of the Hub have their commits."""
        values = self.file.model_dump(mode="json", exclude_defaults=True)
        for each in self.models:
            source, commit = values["models"][each.model.name], _commit(each.model.folder)
            if local_folder(source, self.place.data_root, self.file.folder) is not None:
                values["models"][each.model.name] = str(each.model.folder)
            elif commit is not None:
                values["models"][each.model.name] = f"{source.partition('@')[0]}@{commit}"
        if isinstance(self.file.space, str):
            space = first_there(places_of(self.file.space, self.file.folder))
            if space is not None and space.is_file():
                values["space"] = str(space.resolve())
        return str(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))

    def check_prepared(self) -> None:
        """Raise one `UserError` that names every task that is not prepared for some model."""
        lacking = [
            f"task {task!r} is not prepared for model {each.model.name!r} yet: run the sweep first."
            for each in self.models
            for task in self.space.tasks
            if task not in each.tasks
        ]
        if lacking:
            raise UserError("\n".join(lacking))


def expand_studies(file: SweepFile, store: Path) -> SweepFile:
    """Return the sweep with each source `STUDY/*` replaced by the study's models.

    Raises:
        UserError: there is no such study, or two models have one name.
    """
    named: dict[str, str] = {}
    for name, source in file.models.items():
        study = source.removesuffix("/*")
        several = [name] if study == source else models_of_study(study, store)
        for one in several:
            where = source if study == source else f"{study}/{one}"
            if one in named:
                raise UserError(
                    f"two models are called {one!r} ({named[one]} and {where}); give one a name of its own: "
                    "`--model NAME=SOURCE`, or a mapping of names to sources in a sweep file."
                )
            named[one] = where
    return file.model_copy(update={"models": named})


def open_sweep(file: SweepFile, place: Place, *, prepare: bool) -> GivenSweep:
    """Find and check the models, and open every task for every tokenizer among them (`find_sweep`, `with_tasks`)."""
    return with_tasks(find_sweep(file, place), prepare=prepare)


def find_sweep(file: SweepFile, place: Place) -> GivenSweep:
    """Find and check the models and the space, without any tasks' data; one error covers all models."""
    space = file.find_space()
    space.check_models(file.models)
    for_each(space.tasks, lambda task: get_task(task, place.task_dirs))

    def find(name: str) -> GivenModel:
        source = file.models[name]
        found = find_model(source, place.store, data_root=place.data_root, beside=file.folder)
        # A worker need not have the driver's working directory.
        model = replace(found, name=name, folder=found.folder.absolute())
        commit = _commit(model.folder)
        if local_folder(source, beside=file.folder) is not None:
            source = f"the folder {model.folder.name}"  # a report names no path of a machine
        elif commit:
            source = f"{source}, commit {commit}"
        return GivenModel(model, source, space, {})

    def settle(each: GivenModel) -> GivenModel:
        folder, own = each.model.folder, space.for_model(each.model.name)
        context = context_of(folder)
        if context is None and any(own.protocol_for(task).length_share is not None for task in own.tasks):
            raise UserError(f"{folder}: config.json doesn't say the model's context; use a protocol with a max_length.")
        settled = own if context is None else own.at_context(context)
        for task in space.tasks:
            get_task(task, place.task_dirs).kind.check_settings(task, settled.protocol_for(task))
        return replace(each, space=settled)

    found = for_each(file.models, find)
    if file.baseline is not None and file.baseline not in file.models:
        raise unknown("model", file.baseline, file.models, where="baseline")
    return GivenSweep(file, place, space, tuple(for_each(found, settle)))


def with_tasks(made: GivenSweep, *, prepare: bool) -> GivenSweep:
    """Return a found sweep with the tasks' data, tokenised for each model; one error covers all models and tasks.

    Args:
        prepare: whether to prepare what isn't prepared yet, and to load models whose cells are missing; otherwise
            nothing is computed.
    """
    with bars() as progress:

        def tokenise(each: GivenModel) -> GivenModel:
            tasks = _tasks(each.model.folder, each.space, made.place, prepare=prepare, progress=progress)
            return replace(each, tasks=tasks)

        made = replace(made, models=tuple(for_each(made.models, tokenise)))
    if prepare:
        _check_loading(made)
    return made


def _commit(folder: Path) -> str | None:
    """Return the commit of a folder in the Hub's cache; None for other folders."""
    return folder.name if folder.parent.name == "snapshots" else None


def _tasks(folder: Path, space: Space, place: Place, *, prepare: bool, progress: Any) -> dict[str, PreparedTask]:
    def one(name: str) -> PreparedTask | None:
        task, settings = get_task(name, place.task_dirs), space.protocol_for(name)
        # Another model with this tokenizer may have prepared the task.
        check_length(folder, settings.max_length)
        found = find_task(task, folder, settings, place.store, place.data_root)
        if found is not None:
            check_vocabulary(found, folder)
        if not prepare or (found is not None and (settings.pooling != "bos" or found.starts)):
            return found
        # Imported late because it loads torch, which isn't needed if the data are tokenised already.
        from mlmclm.tasks.prepare_task import prepare_task

        return prepare_task(task, folder, settings, place.store, place.data_root, progress=progress)

    found = dict(zip(space.tasks, for_each(space.tasks, one), strict=True))
    return {name: task for name, task in found.items() if task is not None}


def _check_loading(made: GivenSweep) -> None:
    """Load each model with missing cells, so that one that can't be fine-tuned is refused before anything is trained."""
    missing = {cell.model for cell in Ledger(made.place.store).missing(made.plan().cells)}

    def load(each: GivenModel) -> None:
        load_encoder(each.model.folder)  # not kept, because all of them may not fit into memory

    for_each([each for each in made.models if each.model.name in missing], load)


def given_facts(made: GivenSweep, results: Sequence[dict[str, Any]], command: str) -> StudyFacts:
    """Return the facts that the report shows beside the results; arguments as in `facts.study_facts`."""
    facts = sweep_facts(made.space, made.models[0].tasks, made.place.task_dirs, results)
    given = made.space.protocol
    shared = given.length_share is None and all(
        each.space.protocol.max_length == given.max_length for each in made.models
    )
    if not shared:  # then each model has lengths of its own
        facts["protocol"] = {key: value for key, value in facts["protocol"].items() if key not in LENGTHS}
    return StudyFacts(
        name=made.file.name,
        command=command,
        models=tuple(
            ModelFacts(
                each.model.name,
                "external",
                description=f"Is {each.source}."
                + ("" if shared else f" Its sequences have at most {each.space.protocol.max_length} tokens."),
            )
            for each in made.models
        ),
        baseline=made.file.baseline,
        question=QUESTION,
        zero_shot=zero_shot_facts(made.file, made.place),
        **facts,
    )

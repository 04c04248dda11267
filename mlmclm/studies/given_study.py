"""A study of given models: each with its own tokenizer and context, on the same tasks and search space."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlmclm.errors import UserError, for_each, unknown
from mlmclm.models.folder import check_length, context_of, load_encoder
from mlmclm.models.sources import local_folder
from mlmclm.progress import bars
from mlmclm.studies.place import Place
from mlmclm.studies.study import Study
from mlmclm.studies.study_file import SweepFile
from mlmclm.studies.study_plan import StudyPlan, plan_of_sweep
from mlmclm.studies.study_sweep import StudySweep, SweptModel
from mlmclm.sweeps.find_model import find_model, models_of_study
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.sweeps.space import Space
from mlmclm.tasks.declared_tasks import get_task
from mlmclm.tasks.prepare_task import find_task
from mlmclm.tasks.prepared_task import PreparedTask, check_vocabulary

if TYPE_CHECKING:
    from mlmclm.studies.work import StudyWork


class GivenStudy(Study):
    """A study of models that are there already: folders, models of the store's studies, or models of the Hub."""

    file: SweepFile

    def __init__(self, file: SweepFile, place: Place, *, source: str = "", command: str = "") -> None:
        """Name all models of each source `STUDY/*`; raise what `expand_studies` does."""
        super().__init__(expand_studies(file, place.store), place, source=source, command=command)

    def plan(self, *, workers: int | None = None, price: float | None = None) -> StudyPlan:
        """Return what `Study.plan` does, with where each model comes from."""
        made = self.sweep(prepare=False)
        return StudyPlan(
            self.file.kind,
            self.name,
            self.place.store,
            models={each.model.name: each.source for each in made.models},
            sweep=plan_of_sweep(made, workers=workers, price=price),
        )

    def sweep(self, *, prepare: bool) -> StudySweep:
        """Find and check the models, and open every task for every tokenizer among them.

        Args:
            prepare: whether to prepare what isn't prepared yet; otherwise a few examples are tokenised, and thrown away.

        Raises:
            UserError: a model, a task or a setting is wrong; one error covers all of them.
        """
        return self._with_tasks(self.find_models(), prepare=prepare)

    def _begun(self) -> StudySweep:
        if (self.folder / "models").is_dir():
            raise UserError(
                f"name {self.name!r}: a study of this name is in {self.place.store}; its report would be overwritten. Choose another name."
            )
        return self.find_models()

    def _made(self, begun: StudySweep, work: StudyWork, *, pretrain: bool) -> StudySweep:
        return self._with_tasks(begun, prepare=True)

    def find_models(self) -> StudySweep:
        """Find and check the models and the space, without any tasks' data; one error covers all models."""
        file, place = self.file, self.place
        space = file.find_space()
        space.check_models(file.models)
        for_each(space.tasks, lambda task: get_task(task, place.task_dirs))

        def find(name: str) -> SweptModel:
            source = file.models[name]
            found = find_model(source, place.store, data_root=place.data_root, beside=file.folder)
            # A worker need not have the driver's working directory.
            model = replace(found, name=name, folder=found.folder.absolute())
            swept = SweptModel(model, space, {}, source)
            if local_folder(source, beside=file.folder) is not None:
                return replace(swept, source=f"the folder {model.folder.name}")  # a report names no path of a machine
            return replace(swept, source=f"{source}, commit {swept.commit}") if swept.commit else swept

        def settle(each: SweptModel) -> SweptModel:
            folder, own = each.model.folder, space.for_model(each.model.name)
            context = context_of(folder)
            if context is None and any(own.protocol_for(task).length_share is not None for task in own.tasks):
                raise UserError(
                    f"{folder}: config.json doesn't say the model's context; use a protocol with a max_length."
                )
            resolved = own if context is None else own.at_context(context)
            for task in space.tasks:
                get_task(task, place.task_dirs).kind.check_settings(task, resolved.protocol_for(task))
            return replace(each, space=resolved)

        found = for_each(file.models, find)
        if file.baseline is not None and file.baseline not in file.models:
            raise unknown("model", file.baseline, file.models, where="baseline")
        return StudySweep(file, place, space, tuple(for_each(found, settle)))

    def _with_tasks(self, made: StudySweep, *, prepare: bool) -> StudySweep:
        """Return a found sweep with the tasks' data, tokenised for each model; one error covers all models and tasks."""
        with bars() as progress:

            def tokenise(each: SweptModel) -> SweptModel:
                tasks = _tasks(each.model.folder, each.space, made.place, prepare=prepare, progress=progress)
                return replace(each, tasks=tasks)

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


def _tasks(folder: Path, space: Space, place: Place, *, prepare: bool, progress: Any) -> dict[str, PreparedTask]:
    def one(name: str) -> PreparedTask | None:
        task, settings = get_task(name, place.task_dirs), space.protocol_for(name)
        # Another model with this tokenizer may have prepared the task.
        check_length(folder, settings.max_length)
        found = find_task(task, folder, settings, place.store, place.data_root, check=not prepare)
        if found is not None:
            check_vocabulary(found, folder)
        if not prepare or (found is not None and (settings.pooling != "bos" or found.starts)):
            return found
        # Imported late because it loads torch, which isn't needed if the data are tokenised already.
        from mlmclm.tasks.prepare_task import prepare_task

        return prepare_task(task, folder, settings, place.store, place.data_root, progress=progress)

    found = dict(zip(space.tasks, for_each(space.tasks, one), strict=True))
    return {name: task for name, task in found.items() if task is not None}


def _check_loading(made: StudySweep) -> None:
    """Load each model that is needed, so that one that can't be fine-tuned is refused before anything is trained."""
    from mlmclm.models.encoder import check_direction

    planned = made.plan()
    needed = set(planned.needed(ResultsStore(made.place.store).missing(planned.cells)))
    needed |= {each.model.name for each in made.models if len(each.tasks) < len(made.space.tasks)}

    def load(each: SweptModel) -> None:
        encoder = load_encoder(each.model.folder)  # not kept, because all of them may not fit into memory
        own = each.space.for_model(each.model.name)
        for task in own.tasks:
            check_direction(encoder, causal=own.protocol_for(task).attention == "causal")

    for_each([each for each in made.models if each.model.name in needed], load)

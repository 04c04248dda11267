"""A study that trains its models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mlmclm.arguments import SECONDS_FOR_NODES
from mlmclm.cluster.ray_cluster import LostNode
from mlmclm.errors import EnvironmentFault, for_each
from mlmclm.plans.stages import Stage, make_plan
from mlmclm.progress import say
from mlmclm.studies.exports import export_models, exported_model, is_exported
from mlmclm.studies.prepare import PreparedStudy, check_models_to_continue, check_sources, find_prepared, prepare
from mlmclm.studies.study import Study
from mlmclm.studies.study_file import StudyFile
from mlmclm.studies.study_plan import PlannedStage, StudyPlan, plan_of_sweep
from mlmclm.studies.study_sweep import StudySweep, SweptModel, prepare_tasks, study_space
from mlmclm.sweeps.cells import SweepModel
from mlmclm.sweeps.space import Space
from mlmclm.tasks.declared_tasks import get_task
from mlmclm.tasks.generator import GENERATORS
from mlmclm.tasks.load import load_task
from mlmclm.tasks.prepare_task import find_task
from mlmclm.tasks.prepared_task import PreparedTask
from mlmclm.tasks.splits import reader

if TYPE_CHECKING:
    from mlmclm.studies.work import OpenSession, StudyWork


class TrainedStudy(Study):
    """A study that trains its models, and may fine-tune them."""

    file: StudyFile

    def plan(self, *, workers: int | None = None, price: float | None = None) -> StudyPlan:
        """Return what `Study.plan` does; the time of a sweep is that of the models that are trained."""
        space = study_space(self.file, self.place.task_dirs)
        plan, prepared = self._planned()
        sweep = StudySweep(self.file, self.place, space)
        if prepared is not None:
            # A cell's key contains hashes of its model and data, so none can be looked up before.
            sweep = _sweep(prepared, space, list(find_models(prepared).values()), _find_tasks(prepared, space))
        else:
            for_each(space.tasks, self._check_data)
        return replace(plan, sweep=plan_of_sweep(sweep, workers=workers, price=price))

    def _check_data(self, name: str) -> None:
        """Read and check a task's data where they are files of this machine, as the run will."""
        task, place = get_task(name, self.place.task_dirs), self.place
        if GENERATORS.find(task.source) is None and not reader(task, place.store, place.data_root, None)[1]:
            load_task(task, store=place.store, data_root=place.data_root)

    def plan_pretraining(self) -> StudyPlan:
        """Return the plan without the sweep; a study that is only pretrained needs no search space."""
        if self.file.space is not None:
            study_space(self.file, self.place.task_dirs)
        return self._planned()[0]

    def _planned(self) -> tuple[StudyPlan, PreparedStudy | None]:
        plan, fault = make_plan(self.file.parsed, self.file.recipe, beside=self.file.beside), None
        prepared = find_prepared(self.file, self.place)
        if prepared is None:
            check_models_to_continue(self.file, self.place, plan)
            try:
                check_sources(self.file, self.place)
            except EnvironmentFault as error:
                fault = error  # the plan can be shown without the network, but the command could not run now
        else:
            plan = prepared.plan
        return (
            StudyPlan(
                self.file.kind,
                self.name,
                self.place.store,
                corpus_source=self.file.source,
                corpus="prepared" if prepared is not None else "to be prepared",
                initial=self.file.initial,
                stages=tuple(_stage(stage, prepared) for stage in plan.stages),
                fault=fault,
            ),
            prepared,
        )

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
        from mlmclm.studies.work import one_session

        space = None if self.file.space is None else study_space(self.file, self.place.task_dirs)
        with one_session(self.place, ray, wait_for_nodes) as opened:
            prepared = self._prepared(opened)
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

        with work_on(self.file, self.place, ray, wait_for_nodes) as work:
            return self._trained(self._prepared(work), work)

    def narrowed(self, models: Sequence[str], suite: str | None = None) -> TrainedStudy:
        """Return the study with some of its models, or of those of a suite (`with_suite`), or with all of these.

        Raises:
            UserError: there is no such model, or something is wrong with the suite.
        """
        file = self.file if suite is None else with_suite(self.file, suite)
        if models:
            where = self.source if suite is None else f"--suite {suite}"
            file = file.narrowed([file.model_of(name, where=where) for name in models])
        return TrainedStudy(file, self.place, source=self.source, command=self.command)

    def _prepared(self, opened: OpenSession) -> PreparedStudy:
        # Without a cluster, `prepare` opens a session of its own if the study asks for `corpus.workers: ray`.
        return prepare(self.file, self.place, session=opened.session if opened.cluster else None)

    def _trained(self, prepared: PreparedStudy, work: StudyWork) -> list[SweepModel]:
        from mlmclm.studies.pretrain_models import pretrain

        work.tracking.stages(prepared)
        losses = 0
        while prepared.unfinished():  # else Ray need not start
            work.session()
            try:
                pretrain(prepared, work.wait_for_nodes)
                break
            except LostNode as error:
                losses += 1
                if losses > prepared.study.recipe.max_failures:
                    raise
                say(f"{error} Ray starts again, {losses} of at most {prepared.study.recipe.max_failures} times.")
                work.close()
        return export_models(prepared)

    def _begun(self) -> StudySweep:
        return StudySweep(self.file, self.place, study_space(self.file, self.place.task_dirs))

    def _made(self, begun: StudySweep, work: StudyWork, *, pretrain: bool) -> StudySweep:
        prepared = self._prepared(work)
        there = None if pretrain else export_models(prepared)
        tasks = prepare_tasks(prepared, begun.space)  # before training, so that bad data cost no time
        return _sweep(prepared, begun.space, self._trained(prepared, work) if there is None else there, tasks)


def with_suite(study: StudyFile, suite: str) -> StudyFile:
    """Return the study with a suite's models, and with the recipe fields that the suite sets.

    Raises:
        UserError: the suite doesn't exist, is invalid, or doesn't fit the study's recipe.
    """
    from mlmclm.plans.suite import find_suite

    chosen = find_suite(suite, study.sizes)
    if lacking := chosen.lacking(study.corpora):
        say(
            f"--suite {suite}: its mixes are left out, and all phases read the study's own text: the study's corpora lack {', '.join(lacking)}."
        )
    recipe = chosen.recipe_over(study.recipe, where=f"--suite {suite}: recipe", sources=study.corpora)
    models = tuple(str(name) for name in chosen.parsed)
    return study.model_copy(update={"models": models, "parts": {}, "baseline": None, "recipe": recipe})


def find_models(prepared: PreparedStudy) -> dict[str, SweepModel]:
    """Return the models that are exported already, by name."""
    return {str(name): exported_model(prepared, name) for name in prepared.plan.models if is_exported(prepared, name)}


def _find_tasks(prepared: PreparedStudy, space: Space) -> dict[str, PreparedTask]:
    """Return the tasks that are prepared already, by name, and check the others."""
    place, tokenizer = prepared.place, prepared.corpus.tokenizer

    def one(name: str) -> PreparedTask | None:
        task = get_task(name, place.task_dirs)
        protocol = space.protocol_for(name)
        return find_task(task, tokenizer, protocol, place.store, place.data_root, check=True)

    found = zip(space.tasks, for_each(space.tasks, one), strict=True)
    return {name: task for name, task in found if task is not None}


def _sweep(
    prepared: PreparedStudy, space: Space, models: Sequence[SweepModel], tasks: Mapping[str, PreparedTask]
) -> StudySweep:
    swept = tuple(SweptModel(model, space, tasks) for model in models)
    return StudySweep(prepared.study, prepared.place, space, swept, prepared)


def _stage(stage: Stage, prepared: PreparedStudy | None) -> PlannedStage:
    left = [stage] if prepared is None else prepared.left(stage)
    return PlannedStage(stage.title, stage.models, stage.steps, sum(part.steps for part in left))

"""Work on a study: one process at a time, whose phases all share one Ray session and one MLflow tracker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from mlmclm.corpora.prepare_corpus import Session
from mlmclm.errors import UserError
from mlmclm.progress import say
from mlmclm.service.ray_cluster import cluster_address
from mlmclm.storage.files import only_one, write_atomic
from mlmclm.storage.temporary import sweep_unfinished
from mlmclm.study.model_folders import export_models
from mlmclm.study.prepare import prepare

if TYPE_CHECKING:
    from mlmclm.study.place import Place
    from mlmclm.study.prepared_study import PreparedStudy
    from mlmclm.study.study_file import StudyFile
    from mlmclm.study.sweep_file import SweepFile
    from mlmclm.study.tracking import StudyTracking
    from mlmclm.study.zero_shot import ZeroShotTasks
    from mlmclm.sweeps.cells import SweepModel
    from mlmclm.sweeps.space import Space
    from mlmclm.tasks.prepared_task import PreparedTask


@dataclass(frozen=True)
class Work:
    """A prepared study that this process works on; its methods are the remaining phases."""

    prepared: PreparedStudy
    tracking: StudyTracking
    session: Session

    def pretrain(self) -> list[SweepModel]:
        """Train the missing stages and export all models."""
        from mlmclm.study.pretrain import pretrain

        if self.prepared.unfinished():  # else Ray need not start
            self.session()
            pretrain(self.prepared, self.tracking.stage_lines(self.prepared))
        models = export_models(self.prepared)
        self.tracking.pretrained(self.prepared)
        return models

    def sweep(
        self,
        space: Space,
        models: list[SweepModel],
        tasks: dict[str, PreparedTask],
        evaluations: ZeroShotTasks | None,
        *,
        command: str,
        as_json: bool,
    ) -> None:
        """Evaluate the models as they are, fine-tune them over the search space, and write the report.

        Args:
            evaluations: the zero-shot tasks, if the study has any.
            command: the command that computes the study again, which the report shows.
        """
        from mlmclm.cli.study_report import write_study_report
        from mlmclm.study.facts import study_facts
        from mlmclm.study.last_grid import remember
        from mlmclm.study.sweep import analyse_sweep, plan_sweep, study_grid, sweep
        from mlmclm.study.zero_shot import evaluate, zero_shot_results

        prepared, place = self.prepared, self.prepared.place
        remember(place.study_folder(prepared.study), study_grid(prepared.study, space))
        self.tracking.sweep_begins(space, prepared)
        failure = evaluate(
            prepared.study,
            place,
            evaluations,
            models,
            cpus=space.cpus_per_cell,
            session=self.session,
        )
        self.tracking.evaluated(zero_shot_results(prepared.study, place))
        # A function, because a sweep plans again once the results that choose starting weights are there.
        plan = partial(plan_sweep, space, models, tasks, place)
        outcome = sweep(prepared, space, plan, session=self.session, on_result=self.tracking.cell)
        study, results = prepared.study, outcome.results
        write_study_report(
            analyse_sweep(study.models, study.baseline, space, results),
            study_facts(prepared, space, tasks, results, command),
            space,
            place,
            self.tracking,
            folder=place.study_folder(study),
            as_json=as_json,
        )
        if failure is not None:
            raise failure


@contextmanager
def work_on(study: StudyFile, place: Place, address: str | None) -> Iterator[Work]:
    """Prepare a study, and lock it against other processes for the duration of the block.

    Unfinished files that killed processes left in the store are removed first.

    Args:
        address: a Ray cluster's address, as `--ray` gives it.

    Raises:
        UserError: another process is working on the study. Besides, whatever `prepare` raises.
    """
    from mlmclm.study.tracking import StudyTracking

    with only_one(place.study_folder(study) / ".lock", f"study {study.name!r}"):
        sweep_unfinished(place.store)
        with StudyTracking(study, place) as tracking, prepared_for(study, place, address) as (prepared, session):
            yield Work(prepared, tracking, session)


def sweep_given(
    file: SweepFile, place: Place, address: str | None, *, command: str, as_json: bool, replace: bool = False
) -> None:
    """Fine-tune given models over a search space on Ray Tune, and write the report.

    Args:
        address: a Ray cluster's address, as `--ray` gives it.
        command: the command that computes the sweep again, which the report shows.
        replace: whether the report of another sweep of this name may be replaced.

    Raises:
        UserError: another process is working on a sweep or study of this name, or one was run over another grid.
            Besides, whatever `open_sweep` raises.
    """
    from mlmclm.cli.study_report import write_study_report
    from mlmclm.study.given_sweep import find_sweep, given_facts, with_tasks
    from mlmclm.study.last_grid import check_last, remember
    from mlmclm.study.sweep import analyse_sweep, run_plan
    from mlmclm.study.tracking import StudyTracking
    from mlmclm.study.zero_shot import evaluate, zero_shot_results, zero_shot_tasks

    folder = place.study_folder(file)
    if (folder / "models").is_dir():
        raise UserError(
            f"name {file.name!r}: a study of this name is in {place.store}; its report would be overwritten. Choose another name."
        )
    with only_one(folder / ".lock", f"sweep {file.name!r}"):
        sweep_unfinished(place.store)
        with StudyTracking(file, place) as tracking, one_session(place, address) as (session, _):
            made = find_sweep(file, place)
            check_last(folder, made.grid(), replace=replace)
            evaluations = zero_shot_tasks(file, place)
            made = with_tasks(made, prepare=True)
            remember(folder, made.grid())
            # For `mlmclm report` of a sweep that was given by options.
            write_atomic(folder / "sweep.yaml", made.as_file())
            tracking.sweep_begins(made.space)
            failure = evaluate(
                file,
                place,
                evaluations,
                [each.model for each in made.models],
                cpus=made.space.cpus_per_cell,
                session=session,
            )
            tracking.evaluated(zero_shot_results(file, place))
            outcome = run_plan(file, place, made.space, made.plan, session=session, on_result=tracking.cell)
            write_study_report(
                analyse_sweep(tuple(file.models), file.baseline, made.space, outcome.results),
                given_facts(made, outcome.results, command),
                made.space,
                place,
                tracking,
                folder=folder,
                as_json=as_json,
            )
            if failure is not None:
                raise failure


@contextmanager
def prepared_for(study: StudyFile, place: Place, address: str | None) -> Iterator[tuple[PreparedStudy, Session]]:
    """Prepare a study, and yield it with a function that opens a Ray session (`one_session`)."""
    with one_session(place, address) as (session, running):
        # Without a running cluster, `prepare` opens a session of its own if the study asks for `corpus.workers: ray`.
        yield prepare(study, place, session=session if running else None), session


@contextmanager
def one_session(place: Place, address: str | None) -> Iterator[tuple[Session, bool]]:
    """Yield a function that opens a Ray session, and whether the session is of a running cluster.

    The first call opens the session, which stays open until the block ends. A cluster's address is checked
    (`check_cluster`) at once.
    """
    from mlmclm.service.ray_cluster import check_cluster

    # The running cluster that `--ray`, the surrounding Ray job or RAY_ADDRESS names, if any.
    running = cluster_address(address)
    if running is not None:
        check_cluster(running)
    with ExitStack() as stack:
        opened = False

        def session() -> AbstractContextManager[None]:
            nonlocal opened
            if not opened:
                say(f"Ray: {f'connecting to {running}' if running else 'starting on this machine'}")
                _open_session(stack, place, address)
                opened = True
            return nullcontext()  # whose end leaves the session open for the next phase

        yield session, running is not None


def _open_session(stack: ExitStack, place: Place, address: str | None) -> None:
    from mlmclm.pretraining.run_stage import prepare_environment
    from mlmclm.service.ray_cluster import ray_session

    prepare_environment()
    found = stack.enter_context(ray_session(place.store, address=address, dashboard=True))
    if found.dashboard is not None:
        token = f" (it asks for a token, which is in {found.token_file})" if found.token_file is not None else ""
        say(f"Ray dashboard: {found.dashboard}{token}")

"""Work on a study: no other process does any on it meanwhile, and all its phases share one Ray session and one tracking."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from mlmclm.corpora.prepare_corpus import Session
from mlmclm.progress import say
from mlmclm.service.ray_cluster import cluster_address
from mlmclm.storage.files import only_one
from mlmclm.storage.temporary import sweep_unfinished
from mlmclm.study.model_folders import export_models
from mlmclm.study.prepare import prepare

if TYPE_CHECKING:
    from mlmclm.study.place import Place
    from mlmclm.study.prepared_study import PreparedStudy
    from mlmclm.study.study_file import StudyFile
    from mlmclm.study.tracking import StudyTracking
    from mlmclm.sweeps.cells import SweepModel
    from mlmclm.sweeps.space import Space
    from mlmclm.tasks.prepared_task import PreparedTask


@dataclass(frozen=True)
class Work:
    """A prepared study that this process works on; its methods are the phases that follow."""

    prepared: PreparedStudy
    tracking: StudyTracking
    session: Session

    def pretrain(self) -> list[SweepModel]:
        """Trains what is missing of the models and exports all of them."""
        from mlmclm.study.pretrain import pretrain

        if self.prepared.unfinished():
            self.session()
            pretrain(self.prepared, self.tracking.stage_lines(self.prepared))
        models = export_models(self.prepared)
        self.tracking.pretrained(self.prepared)
        return models

    def sweep(
        self, space: Space, models: list[SweepModel], tasks: dict[str, PreparedTask], *, command: str, as_json: bool
    ) -> None:
        """Fine-tunes the models over the search space, and reports.

        Args:
            command: that computes the study again, for the report.
        """
        from mlmclm.cli.study_report import write_study_report
        from mlmclm.study.sweep import plan_sweep, sweep

        prepared, place = self.prepared, self.prepared.place
        self.tracking.sweep_begins(prepared, space)
        plan = partial(plan_sweep, space, models, tasks, place)
        outcome = sweep(prepared, space, plan, session=self.session, on_result=self.tracking.cell)
        folder = place.study_folder(prepared.study)
        write_study_report(
            prepared, space, tasks, outcome.results, command, self.tracking, folder=folder, as_json=as_json
        )


@contextmanager
def work_on(study: StudyFile, place: Place, address: str | None) -> Iterator[Work]:
    """Prepares a study and keeps other processes from it for the time of a block.

    What killed processes left half made in the store is removed first.

    Args:
        address: of a Ray cluster, as `--ray` gives it.

    Raises:
        UserError: another process works on it, or what `prepare` raises.
    """
    from mlmclm.study.tracking import StudyTracking

    with only_one(place.study_folder(study) / ".lock", f"study {study.name!r}"):
        sweep_unfinished(place.store)
        with StudyTracking(study, place) as tracking, prepared_for(study, place, address) as (prepared, session):
            yield Work(prepared, tracking, session)


@contextmanager
def prepared_for(study: StudyFile, place: Place, address: str | None) -> Iterator[tuple[PreparedStudy, Session]]:
    """Prepares a study, and yields with it a function that opens a Ray session.

    The session is opened at the first call and left open until the block ends. The address of a cluster is looked at now, before
    anything is prepared; raises as `check_cluster`.
    """
    from mlmclm.service.ray_cluster import check_cluster

    # Named by `--ray`, the surrounding Ray job or RAY_ADDRESS.
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
            return nullcontext()

        yield prepare(study, place, session=session if running is not None else None), session


def _open_session(stack: ExitStack, place: Place, address: str | None) -> None:
    from mlmclm.pretraining.run_stage import prepare_environment
    from mlmclm.service.ray_cluster import ray_session

    prepare_environment()
    found = stack.enter_context(ray_session(place.store, address=address, dashboard=True))
    if found.dashboard is not None:
        token = f" (it asks for a token, which is in {found.token_file})" if found.token_file is not None else ""
        say(f"Ray dashboard: {found.dashboard}{token}")

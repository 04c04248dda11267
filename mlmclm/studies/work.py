"""Work on a study: one process at a time, whose phases all share one Ray session and one MLflow tracker."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

from mlmclm.arguments import SECONDS_FOR_NODES
from mlmclm.cluster.live_metrics import ascii_label, gauge, metrics_labelled
from mlmclm.cluster.private_cluster import sweep_clusters
from mlmclm.cluster.ray_cluster import Session, check_cluster, cluster_address, prepare_environment, ray_session
from mlmclm.progress import Bar, say
from mlmclm.service.state import MLFLOW
from mlmclm.storage.addresses import send_files
from mlmclm.storage.files import only_one
from mlmclm.storage.temporary import sweep_unfinished
from mlmclm.studies.exports import restore_exports
from mlmclm.studies.place import LOCK, Place
from mlmclm.studies.study_file import AnyFile
from mlmclm.studies.study_sweep import StudySweep
from mlmclm.studies.study_tracking import DASHBOARD, GRAFANA, StudyRuns, other_pages, tracked
from mlmclm.sweeps.manifest import write_manifest
from mlmclm.sweeps.outcome import SweepOutcome
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.sweeps.starts import Planned
from mlmclm.sweeps.sweep_options import SweepOptions


@dataclass(frozen=True)
class OpenSession:
    """Ray for the phases of one piece of work: the first call of `session` opens it, and it stays open until the end."""

    session: Session
    cluster: bool
    """Whether it is a running cluster rather than Ray started on this machine."""
    wait_for_nodes: float
    """Seconds for which the cluster may lack nodes (`SweepOptions.wait_for_nodes`)."""
    close: Callable[[], None]
    """Ends the session, so that the next call opens another."""


@dataclass(frozen=True)
class StudyWork(OpenSession):
    """A study that this process, and no other, works on."""

    tracking: StudyRuns


@contextmanager
def work_on(
    file: AnyFile, place: Place, address: str | None, wait_for_nodes: float = SECONDS_FOR_NODES
) -> Iterator[StudyWork]:
    """Lock a study against other processes for the duration of the block.

    Unfinished files in the store and Ray's temporary folders that killed processes left behind are removed first. At the
    end, the study's lists and reports are sent to the store's address, if it has one.

    Raises:
        UserError: another process is working on it.
    """
    with only_one(place.study_folder(file.name) / LOCK, f"{file.kind} {file.name!r}"):
        sweep_unfinished(place.store)
        sweep_clusters()
        with (
            metrics_labelled(place.store, file.name),
            tracked(file, place) as tracking,
            one_session(place, address, wait_for_nodes, on_open=lambda: _show_pages(file, place)) as opened,
        ):
            yield StudyWork(opened.session, opened.cluster, opened.wait_for_nodes, opened.close, tracking)
        send_files(place.study_folder(file.name))


@contextmanager
def one_session(
    place: Place,
    address: str | None,
    wait_for_nodes: float = SECONDS_FOR_NODES,
    on_open: Callable[[], None] = lambda: None,
) -> Iterator[OpenSession]:
    """Yield a Ray session that is opened when it is first needed.

    Args:
        address: a Ray cluster's, as `--ray` gives it; it is checked (`check_cluster`) at once.
        on_open: called when the session is open.
    """
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
                with Bar("waiting for Ray", brief=math.inf):
                    _open_session(stack, place, address, wait_for_nodes)
                opened = True
                on_open()
            return nullcontext()  # whose end leaves the session open for the next phase

        def close() -> None:
            nonlocal opened
            stack.close()
            opened = False

        yield OpenSession(session, running is not None, wait_for_nodes, close)


def _open_session(stack: ExitStack, place: Place, address: str | None, wait_for_nodes: float) -> None:
    from mlmclm.cluster.cluster import await_nodes, cluster_view

    prepare_environment()
    ray = stack.enter_context(ray_session(place.store, address=address, dashboard=True))
    if ray.dashboard is not None:
        token = f" (it asks for a token, which is in {ray.token_file})" if ray.token_file is not None else ""
        say(f"Ray dashboard: {ray.dashboard}{token}")
    if not ray.local:
        await_nodes(cluster_view(), wait_for_nodes)


def _show_pages(file: AnyFile, place: Place) -> None:
    """Print the link to Grafana, and tell Grafana where else the study is shown."""
    pages = other_pages(file, place.store)
    if GRAFANA in pages:
        say(f"Grafana: {pages[GRAFANA]}")
    report = place.study_folder(file.name) / "report.html"
    tags = {"mlflow": pages.get(MLFLOW, ""), "dashboard": pages.get(DASHBOARD, ""), "report": report}
    gauge("mlmclm_study_info").set(1, tags={label: ascii_label(value) for label, value in tags.items()})


def compute_missing(sweep: StudySweep, session: Session, *, wait_for_nodes: float = SECONDS_FOR_NODES) -> SweepOutcome:
    """Compute the missing cells of a sweep; open a Ray session only if there are any.

    Models that the study trained are verified first, if cells of theirs are missing.

    Args:
        wait_for_nodes: as in `SweepOptions`.

    Raises:
        MlmclmError: some cells failed; the results of all others are kept.
    """
    from mlmclm.sweeps.run_layers import run_layers

    place, space = sweep.place, sweep.space
    if sweep.prepared is not None:  # only models that are needed, because verifying one reads its whole folder
        planned = sweep.plan()
        restore_exports(sweep.prepared, planned.needed(ResultsStore(place.store).missing(planned.cells)))
    options = SweepOptions(
        store=place.store,
        data_root=place.data_root,
        name=f"{sweep.file.name}-sweep",
        cpus_per_cell=space.cpus_per_cell,
        gpus_per_cell=space.gpus_per_cell,
        device=sweep.file.device,
        max_concurrent=space.max_concurrent,
        retries=space.retries,
        time_limit=space.time_limit,
        wait_for_nodes=wait_for_nodes,
        session=session,
    )

    def plan() -> Planned:
        planned = sweep.plan()
        write_manifest(place.study_folder(sweep.file.name), sweep.file.name, planned)
        return planned

    # `plan` is called again once the results that choose starting weights are there.
    outcome = run_layers(plan, options)
    outcome.check()
    return outcome

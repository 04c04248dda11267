"""Work on a study: one process at a time, which trains models and computes cells in one Ray session and writes to one MLflow tracker."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from typing import Any

from mlmclm.arguments import SECONDS_FOR_NODES
from mlmclm.backends.device_kinds import Device
from mlmclm.cluster.cluster import await_nodes, cluster_view, report_waits
from mlmclm.cluster.live_metrics import ascii_label, metrics_labelled, show
from mlmclm.cluster.placement import check_workers, choose_device, worker_bundle
from mlmclm.cluster.private_cluster import sweep_clusters
from mlmclm.cluster.ray_cluster import (
    Session,
    check_cluster,
    check_node,
    cluster_address,
    explain_ray_failures,
    prepare_environment,
    ray_session,
)
from mlmclm.launches.run_stage import run_stage, set_aside_damaged, stage_leases
from mlmclm.launches.side_by_side import run_stages, stages_at_once
from mlmclm.plans.stages import Stage
from mlmclm.pretraining import states
from mlmclm.pretraining.state_facts import tokens_by_source
from mlmclm.progress import Bar, say
from mlmclm.service.state import MLFLOW
from mlmclm.storage.addresses import leases_of, send_files
from mlmclm.storage.files import only_one
from mlmclm.storage.place import LOCK, Place
from mlmclm.storage.temporary import sweep_unfinished
from mlmclm.studies.exports import restore_exports
from mlmclm.studies.prepare import PreparedStudy
from mlmclm.studies.study_file import AnyFile
from mlmclm.studies.study_sweep import StudySweep
from mlmclm.studies.study_tracking import DASHBOARD, GRAFANA, StudyRuns, other_pages, tracked
from mlmclm.sweeps.manifest import write_manifest
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.sweeps.starts import Planned
from mlmclm.sweeps.sweep_options import SweepOptions, SweepOutcome


class SharedSession:
    """Ray for all phases of a piece of work: the first call opens it, and it stays open until it is closed.

    Args:
        address: a Ray cluster's, as `--ray` gives it; it is checked (`check_cluster`) at once.
        wait_for_nodes: seconds for which the cluster may lack nodes (`SweepOptions.wait_for_nodes`).
        on_open: called when it is open.
    """

    def __init__(
        self, place: Place, address: str | None, wait_for_nodes: float, on_open: Callable[[], None] = lambda: None
    ) -> None:
        # The running cluster that `--ray`, the surrounding Ray job or RAY_ADDRESS names, if any.
        self.running = cluster_address(address)
        if self.running is not None:
            check_cluster(self.running)
        self.wait_for_nodes = wait_for_nodes
        self._store, self._address, self._on_open = place.store, address, on_open
        self._stack, self._open = ExitStack(), False

    def __call__(self) -> AbstractContextManager[None]:
        """Open Ray unless it is open, and return a context whose end leaves it open for the next phase."""
        if not self._open:
            say(f"Ray: {f'connecting to {self.running}' if self.running else 'starting on this machine'}")
            with Bar("waiting for Ray", brief=math.inf):
                prepare_environment()
                ray = self._stack.enter_context(ray_session(self._store, address=self._address, dashboard=True))
                if ray.dashboard is not None:
                    token = (
                        f" (it asks for a token, which is in {ray.token_file})" if ray.token_file is not None else ""
                    )
                    say(f"Ray dashboard: {ray.dashboard}{token}")
                if not ray.local:
                    await_nodes(cluster_view(), self.wait_for_nodes)
            self._open = True
            self._on_open()
        return nullcontext()

    def close(self) -> None:
        """End Ray; another call opens it again."""
        self._stack.close()
        self._open = False


@contextmanager
def work_on(
    file: AnyFile, place: Place, address: str | None, wait_for_nodes: float = SECONDS_FOR_NODES
) -> Iterator[tuple[SharedSession, StudyRuns]]:
    """Lock a study against other processes for the duration of the block, and yield its Ray session and its runs in MLflow.

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
            closing(SharedSession(place, address, wait_for_nodes, lambda: _show_pages(file, place))) as session,
        ):
            yield session, tracking
        send_files(place.study_folder(file.name))


def _show_pages(file: AnyFile, place: Place) -> None:
    """Print the link to Grafana, and tell Grafana where else the study is shown."""
    pages = other_pages(file, place.store)
    if GRAFANA in pages:
        say(f"Grafana: {pages[GRAFANA]}")
    report = place.study_folder(file.name) / "report.html"
    tags = {"mlflow": pages.get(MLFLOW, ""), "dashboard": pages.get(DASHBOARD, ""), "report": report}
    show("mlmclm_study_info", 1, **{label: ascii_label(value) for label, value in tags.items()})


def train_missing_stages(prepared: PreparedStudy, wait_for_nodes: float = 0.0) -> int:
    """Train the missing stages in the current Ray session, as many at once as the cluster can hold or scale up to.

    Returns their number.

    Args:
        wait_for_nodes: seconds to wait for nodes that may still join, if those of the cluster cannot hold a stage's workers.

    Raises:
        UserError: the cluster can never hold a stage's workers (`placement.check_workers`). Also whatever
            `run_stage` raises.
        LostNode: the Ray node of this machine has died.
    """
    store, recipe = prepared.place.store, prepared.study.recipe
    leases = leases_of(store)
    # `unfinished` checks the sizes of files only; this also verifies the checksums of states to start from.
    set_aside_damaged(prepared.plan.stages, store, prepared.fingerprint)
    unfinished = prepared.unfinished()
    if not unfinished:
        return 0
    view, fewest = cluster_view(), recipe.possible_workers[0]
    device = choose_device(recipe.device, view())  # chosen once: all stages use the same, even if nodes come and go
    if wait_for_nodes:
        await_nodes(view, wait_for_nodes, lambda _: worker_bundle(device), places=fewest)
    check_workers(fewest, recipe.device, device, view())

    def train(stage: Stage) -> None:
        title = f"pretraining {unfinished.index(stage) + 1}/{len(unfinished)}: {stage.title}"
        _train(prepared, stage, title, device)

    def ready(stage: Stage) -> bool:
        # A start without segments is the initialisation, which needs no earlier stage.
        return not stage.start.segments or states.exists(store, stage.start.key(prepared.fingerprint))

    def held(stage: Stage) -> str | None:
        # Another study on this store may be training the same states.
        names = stage_leases(stage, store, prepared.fingerprint)
        return next((holder for holder in map(leases.holder, names) if holder is not None), None)

    def at_once(running: int) -> int:
        return stages_at_once(view(), worker_bundle(device), workers=recipe.workers, running=running)

    with explain_ray_failures(), report_waits("pretraining", view):
        run_stages(unfinished, run=train, ready=ready, at_once=at_once, held=held, check=check_node)
    return len(unfinished)


def _train(prepared: PreparedStudy, stage: Stage, title: str, device: Device) -> None:
    """Train one stage, and show its progress."""
    left = prepared.left(stage)
    if not left:
        say(f"{title}: another process has trained it")
        return
    recipe = prepared.study.recipe

    total = sum(tokens_by_source(stage.end, recipe, prepared.corpus).values())
    filled = total / stage.end.tokens(recipe)

    def tokens(step: int) -> int:
        return round(filled * sum(segment.tokens(step, recipe) for segment in stage.end.segments))

    with Bar(title, total, unit="tokens") as bar:
        bar.start_at(tokens(left[0].start.step))

        def follow(records: list[dict[str, Any]]) -> None:
            trained = [record for record in records if record.get("loss") is not None]  # a validation's record has none
            if trained:
                last = trained[-1]
                note = f"loss {last['loss']:.3f}, {last['tokens_per_second']:,.0f} tokens/s"
                if device != "cpu":
                    note += f", {utilisation(last)}"
                bar.update(tokens(last["step"]), note=note, rate=last["tokens_per_second"])

        run_stage(
            stage,
            store=prepared.place.store,
            corpus=prepared.corpus,
            recipe=recipe,
            fingerprint=prepared.fingerprint,
            device=device,
            initial=prepared.initial.get(stage.end.size),
            observer=follow,
        )


def utilisation(record: Mapping[str, Any]) -> str:
    """Return the share of the GPUs' peak that a step of `metrics.jsonl` reached, in words."""
    text = f"{record['utilisation']:.0%} of the measured peak"
    share = record.get("published_utilisation")
    return text + (", no published one is known" if share is None else f", {share:.0%} of the published one")


def compute_missing(sweep: StudySweep, session: Session, *, wait_for_nodes: float = SECONDS_FOR_NODES) -> SweepOutcome:
    """Compute the missing cells of a sweep; open a Ray session only if there are any.

    Models that the study trained are verified first, if cells of theirs are missing.

    Args:
        wait_for_nodes: as in `SweepOptions`.

    Raises:
        MlmclmError: some cells failed; the results of all others are kept.
    """
    from mlmclm.sweeps.run_sweep import run_layers

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

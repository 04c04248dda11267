"""The pool of a sweep's workers grows and shrinks with the cluster, and waits for results that are seen late."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import ActorDiedError, RayTaskError
from ray.tune.schedulers import TrialScheduler

from mlmclm.errors import EnvironmentFault
from mlmclm.finetuning.cell import Cell, cell_key
from mlmclm.sweeps import heartbeats, worker_pool
from mlmclm.sweeps.cell_failures import Failure, Retries, failure_of
from mlmclm.sweeps.heartbeats import Heartbeats
from mlmclm.sweeps.room import Room
from mlmclm.sweeps.sweep_options import SweepOptions
from mlmclm.sweeps.sweep_progress import SweepProgress
from mlmclm.sweeps.table import SweepTable
from mlmclm.sweeps.trainable import COMPUTED
from mlmclm.sweeps.worker_pool import WorkerPool
from sweep_cells import make_cells


class Actor:
    """Stands for a worker's actor, and notes what it is told to take."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, ...]] = []
        self.failures: list[dict[str, str]] = []
        self.take = SimpleNamespace(options=self._named)

    def _named(self, name: str) -> Any:
        def remote(cells: Mapping[str, Cell], failures: list[dict[str, str]]) -> None:
            self.taken.append((name, *cells))
            self.failures = list(failures)

        return SimpleNamespace(remote=remote)


class Statuses(dict[str, str]):
    """The statuses of the results that are visible; the others have none."""

    def __call__(self, keys: Collection[str]) -> dict[str, str]:
        return {key: self[key] for key in keys if key in self}


PoolOfOne = Callable[[int], tuple[WorkerPool, Any, Actor, Statuses]]
"""Makes a pool of so many cells with one worker; returns it, the worker's trial and actor, and the results' statuses."""


@pytest.fixture
def pool_of_one() -> PoolOfOne:
    def make(count: int) -> tuple[WorkerPool, Any, Actor, Statuses]:
        cells = {cell_key(cell): cell for cell in make_cells(count)}
        visible, actor = Statuses(), Actor()
        trial = SimpleNamespace(trial_id="0", temporary_state=SimpleNamespace(ray_actor=actor))
        progress = SweepProgress(cells.values(), table=SweepTable(cells.values()), visible=False)
        pool = WorkerPool(cells, progress, visible, SweepOptions(Path(), retries=Retries(crash=1)))
        pool.callback.on_trial_start(0, [], trial)
        return pool, trial, actor, visible

    return make


def report(pool: WorkerPool, trial: Any) -> str:
    outcomes = [COMPUTED for _ in trial.temporary_state.ray_actor.taken[-1][1:]]
    result = {"outcome": COMPUTED, "outcomes": outcomes, "backend": "cpu", "seconds": 1.0, "hostname": "node-a"}
    return pool.on_trial_result(None, trial, result)


def test_a_worker_gets_its_next_cell_before_its_last_result_is_seen_to(pool_of_one: PoolOfOne) -> None:
    pool, trial, actor, visible = pool_of_one(2)
    assert [name for name, _ in actor.taken] == ["a/sst2/lr1e-03/s0"]
    assert report(pool, trial) == TrialScheduler.CONTINUE
    assert [name for name, _ in actor.taken] == ["a/sst2/lr1e-03/s0", "a/sst2/lr1e-03/s1"]
    visible.update(dict.fromkeys((key for _, key in actor.taken), "ok"))
    assert report(pool, trial) == TrialScheduler.STOP
    assert pool.computed == 2 and not pool.late and pool.broken is None


def test_results_in_an_object_store_are_looked_for_together(pool_of_one: PoolOfOne) -> None:
    pool, trial, actor, visible = pool_of_one(2)
    asked = list[list[str]]()

    def on_done(keys: Collection[str]) -> dict[str, str]:
        asked.append(list(keys))
        return visible(keys)

    pool._on_done, pool._at_once = on_done, False
    report(pool, trial)
    report(pool, trial)
    keys = [key for _, key in actor.taken]
    visible.update(dict.fromkeys(keys, "ok"))
    assert len(pool.late) == 2 and not asked
    pool._looked -= 2  # seconds
    pool.tick()
    assert asked == [keys] and not pool.late


def ended(pool: WorkerPool, trial: Any, error: Exception, folder: Path) -> None:
    """End a trial's worker with an error, as Tune tells it."""
    (folder / "error.pkl").write_bytes(ray.cloudpickle.dumps(error))
    trial.pickled_error_file, trial.error_file = str(folder / "error.pkl"), None
    pool.callback.on_trial_recover(0, [], trial)


def actor_died(words: str) -> ActorDiedError:
    error = ActorDiedError()
    error.error_msg = words
    return error


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), Failure.OUT_OF_MEMORY),
        (MemoryError(), Failure.OUT_OF_MEMORY),
        (
            RayTaskError("take", "Traceback", torch.OutOfMemoryError("CUDA")).as_instanceof_cause(),
            Failure.OUT_OF_MEMORY,
        ),
        (actor_died("Task was killed due to the node running low on memory."), Failure.OUT_OF_MEMORY),
        (actor_died("The actor died because its node has died. Node Id: 12"), Failure.LOST_NODE),
        (actor_died("The actor died because the worker process was killed."), Failure.CRASH),
        (RuntimeError("its node has died"), Failure.CRASH),
    ],
)
def test_failures_are_classed_by_what_ended_the_worker(error: Exception, failure: Failure) -> None:
    assert failure_of(error) is failure


def test_each_class_of_failure_has_its_own_bound_and_is_told_to_the_worker(
    pool_of_one: PoolOfOne, tmp_path: Path
) -> None:
    pool, trial, actor, _ = pool_of_one(1)
    for error in (RuntimeError("one"), actor_died("its node has died"), MemoryError("three")):
        ended(pool, trial, error, tmp_path)
        pool.callback.on_trial_start(0, [], trial)
    assert len(actor.taken) == 4 and not pool.errors
    assert [each["failure"] for each in actor.failures] == ["crash", "lost node", "out of memory"]
    ended(pool, trial, RuntimeError("two crashes are one too many"), tmp_path)
    (error,) = pool.errors.values()
    assert str(error) == "two crashes are one too many"


def test_after_running_out_of_memory_fewer_cells_run_at_once(pool_of_one: PoolOfOne, tmp_path: Path) -> None:
    pool, trial, _, _ = pool_of_one(9)
    others = [SimpleNamespace(trial_id=str(n), temporary_state=trial.temporary_state) for n in (1, 2)]
    assert all(pool.give(other) for other in others)
    ended(pool, trial, MemoryError(), tmp_path)
    assert not pool.give(trial), "two run, and that is all that there is memory for"
    assert report(pool, others[0]) == TrialScheduler.CONTINUE, "those that run go on"
    ended(pool, others[0], MemoryError(), tmp_path)
    assert pool._most_busy == 2, "the same cell, which may simply be too large"


def test_with_a_gpu_of_its_own_for_each_cell_all_go_on_running(pool_of_one: PoolOfOne, tmp_path: Path) -> None:
    pool, trial, _, _ = pool_of_one(3)
    pool._shares_memory = False
    other = SimpleNamespace(trial_id="1", temporary_state=trial.temporary_state)
    assert pool.give(other)
    ended(pool, trial, MemoryError(), tmp_path)
    assert pool.give(trial)


def test_a_failure_is_noted_with_its_node_once_the_worker_has_reported(pool_of_one: PoolOfOne, tmp_path: Path) -> None:
    pool, trial, _, visible = pool_of_one(2)
    noted = list[tuple[str, ...]]()
    pool._on_failure = lambda *note: noted.append(note)
    visible.update(dict.fromkeys(pool._cells, "ok"))
    report(pool, trial)
    visible.clear()
    for _ in range(2):
        ended(pool, trial, RuntimeError("broken"), tmp_path)
        pool.callback.on_trial_start(0, [], trial)  # where, isn't known yet
    key = list(pool._cells)[1]
    assert noted == [(key, "RuntimeError: broken", "crash", "node-a"), (key, "RuntimeError: broken", "crash", "")]


def test_cells_of_a_training_that_failed_are_kept_where_they_have_results_and_tried_one_by_one(
    tmp_path: Path,
) -> None:
    cells = [replace(make_cells(1, task=task)[0], training_data="rows") for task in ("msmarco", "nq", "mldr")]
    by_key, visible, actor = {cell_key(cell): cell for cell in cells}, Statuses(), Actor()
    trial = SimpleNamespace(trial_id="0", temporary_state=SimpleNamespace(ray_actor=actor))
    progress = SweepProgress(cells, table=SweepTable(cells), visible=False)
    pool = WorkerPool(by_key, progress, visible, SweepOptions(Path(), retries=Retries(crash=0)))
    pool.callback.on_trial_start(0, [], trial)
    keys = list(by_key)
    assert actor.taken[0][1:] == tuple(keys)
    visible[keys[0]] = "ok"  # filed before the second evaluation failed
    ended(pool, trial, RuntimeError("the corpus is too large"), tmp_path)
    assert pool.computed == 1 and not pool.errors and set(pool.waiting) == set(keys[1:])
    for _ in keys[1:]:
        pool.callback.on_trial_start(0, [], trial)
        ended(pool, trial, RuntimeError("the corpus is too large"), tmp_path)
    assert set(pool.errors) == set(keys[1:]) and not pool.waiting


class Hearts(dict[str, bytes]):
    """The heartbeats of workers, as they were sent; a cluster that does not answer raises an error."""

    answers = True

    def beat(self, lost: float = 0.0, notice: str = "") -> None:
        self["0"] = json.dumps([lost, notice, str(time.monotonic_ns())]).encode()

    def __call__(self) -> dict[str, bytes]:
        if not self.answers:
            raise ConnectionError("no answer")
        return self


class Clock:
    """A clock that only the test moves."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


Watched = tuple[WorkerPool, Any, Hearts, Clock, list[Any]]


@pytest.fixture
def watched(pool_of_one: PoolOfOne, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """A pool with a worker that has taken one of two cells, its heartbeats, a clock, and the actors that were killed."""
    clock, hearts, killed = Clock(), Hearts(), list[Any]()
    for module in (worker_pool, heartbeats):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(ray, "kill", killed.append)
    pool, trial, *_ = pool_of_one(2)
    pool._heartbeats = Heartbeats(hearts)
    return pool, trial, hearts, clock, killed


def test_a_worker_without_a_heartbeat_is_ended_once_and_its_cell_retried(watched: Watched, tmp_path: Path) -> None:
    pool, trial, hearts, clock, killed = watched
    actor = trial.temporary_state.ray_actor
    pool._look_at_workers()
    clock.now += 1000.0
    pool._look_at_workers()
    assert killed == [], "none has come yet"
    hearts.beat()
    for seconds in (0.0, *(5.0,) * 24):
        clock.now += seconds
        pool._look_at_workers()
    assert killed == []
    clock.now += 1.0
    pool._look_at_workers()
    pool._look_at_workers()
    assert killed == [actor]
    ended(pool, trial, actor_died("killed"), tmp_path)
    pool.callback.on_trial_start(0, [], trial)
    assert actor.failures[0]["failure"] == "hung" and len(actor.taken) == 2
    pool._look_at_workers()
    assert killed == [actor], "the latest heartbeat is that of the worker before it"


def test_a_worker_that_waits_for_storage_is_not_hung_and_is_shown_and_its_time_limit_stands_still(
    watched: Watched,
) -> None:
    pool, _, hearts, clock, killed = watched
    pool._time_limit = 10.0
    for waited in range(0, 600, 5):
        clock.now += 5.0
        hearts.beat(lost=waited, notice="waiting for storage since 10:00:00")
        pool._look_at_workers()
        assert pool._progress.waiting == "waiting for storage since 10:00:00 (1 of 1 workers)"
        assert pool._progress._note(None).startswith("waiting for storage since 10:00:00 (1 of 1 workers)")
    assert killed == [] and not pool.errors
    hearts.beat(lost=595.0)
    clock.now += 6.0
    pool._look_at_workers()
    assert list(pool.errors.values()) and len(killed) == 1 and "over the time limit of 10 s" in str(pool.errors)
    pool._look_at_workers()
    assert pool._progress.waiting == ""


def test_a_worker_is_over_the_time_limit_by_its_own_heartbeats_only(watched: Watched) -> None:
    pool, _, hearts, clock, killed = watched
    pool._time_limit = 10.0
    hearts.beat()
    pool._look_at_workers()
    clock.now += 60.0
    pool._look_at_workers()
    assert killed == [], "it may have waited for storage since"
    hearts.beat(lost=55.0)
    pool._look_at_workers()
    assert killed == []


def test_no_worker_is_hung_while_the_cluster_does_not_answer(watched: Watched) -> None:
    pool, _, hearts, clock, killed = watched
    hearts.beat()
    pool._look_at_workers()
    hearts.answers = False
    for _ in range(60):
        clock.now += 5.0
        pool._look_at_workers()
    hearts.answers = True
    for seconds in (0.0, *(5.0,) * 24):
        clock.now += seconds
        pool._look_at_workers()
    assert killed == []
    clock.now += 1.0
    pool._look_at_workers()
    assert len(killed) == 1


def test_no_worker_is_hung_when_the_whole_cluster_was_stopped_for_a_while(watched: Watched) -> None:
    pool, _, hearts, clock, killed = watched
    hearts.beat()
    pool._look_at_workers()
    clock.now += 1000.0
    pool._look_at_workers()
    assert killed == [], "the worker has had no time to send another one"
    hearts.beat()
    pool._look_at_workers()
    for _ in range(25):
        clock.now += 5.0
        pool._look_at_workers()
    assert len(killed) == 1


class Crowded(Room):
    """Has room for so many workers."""

    def __init__(self, most: float) -> None:
        self.most = most


class Controller:
    """Stands for Tune's, with trials in these states."""

    def __init__(self, *states: str) -> None:
        self.trials = [SimpleNamespace(status=state) for state in states]
        self._max_pending_trials = 99.0
        self.search_alg = SimpleNamespace(set_finished=lambda: None)
        self.stopped: list[Any] = []

    def get_trials(self) -> list[Any]:
        return self.trials

    def stop_trial(self, trial: Any) -> None:
        trial.status = "TERMINATED"
        self.stopped.append(trial)


@pytest.mark.parametrize(
    ("most", "requests", "withdrawn"), [(9, 3, 0), (4, 2, 0), (2, 0, 2), (1, 0, 2), (0, 0, 2), (3, 1, 1)]
)
def test_no_more_workers_are_asked_for_than_there_is_room_for_and_others_are_withdrawn(
    pool_of_one: PoolOfOne, most: float, requests: int, withdrawn: int
) -> None:
    pool, *_ = pool_of_one(9)
    pool._most_requests, pool._room = 3, Crowded(most)
    tune = Controller("RUNNING", "TERMINATED", "RUNNING", "PENDING", "PENDING")
    pool._limit_requests(tune)
    assert (tune._max_pending_trials, len(tune.stopped)) == (requests, withdrawn)
    assert tune.stopped == tune.trials[5 - withdrawn :], "the latest ones"


def test_a_worker_beyond_the_sweep_s_share_ends_between_two_cells(pool_of_one: PoolOfOne) -> None:
    pool, trial, _, visible = pool_of_one(9)
    other = SimpleNamespace(trial_id="1", temporary_state=SimpleNamespace(ray_actor=Actor()))
    assert pool.give(other)
    visible.update(dict.fromkeys(pool._cells, "ok"))
    pool._room = Crowded(1)
    assert report(pool, trial) == TrialScheduler.STOP, "and its cell is done"
    assert report(pool, other) == TrialScheduler.CONTINUE
    assert pool.computed == 2 and len(pool.waiting) == 6


def test_a_result_that_is_seen_late_is_waited_for(pool_of_one: PoolOfOne) -> None:
    pool, trial, actor, visible = pool_of_one(1)
    report(pool, trial)
    pool.look_again()
    assert pool.late
    visible[actor.taken[0][1]] = "ok"
    pool.look_again()
    assert not pool.late and not pool.fault


def test_a_result_that_is_never_seen_is_an_error_that_says_so(
    pool_of_one: PoolOfOne, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlmclm.sweeps.worker_pool.SECONDS_UNTIL_VISIBLE", -1.0)
    pool, trial, *_ = pool_of_one(1)
    report(pool, trial)
    assert pool.fault
    with pytest.raises(EnvironmentFault, match=r"a/sst2/lr1e-03/s0: a worker filed this result.*shared by all nodes"):
        raise pool.broken or AssertionError

"""The pool of workers behind a sweep, as a Ray Tune experiment whose trials are workers that take trainings from a queue.

With a trial per cell and Tune's `reuse_actors`, a freed actor is given the trial whose own actor is still starting, and
that actor is removed. Wherever actors start more slowly than cells end, one worker would compute everything, and
neither a dead worker's place nor a new node would be used. A trial that is a worker has none of these problems: Tune
starts as many as the cluster has room for, restarts dead ones, and gives those that wait to nodes that join.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle, tune
from ray.tune.experiment import Trial
from ray.tune.progress_reporter import TrialProgressCallback
from ray.tune.schedulers import FIFOScheduler, TrialScheduler

from mlmclm.cluster.placement import Cluster, Resources, most_places, places_now
from mlmclm.errors import EnvironmentFault, StorageFault, UserError
from mlmclm.finetuning.cell import Cell
from mlmclm.progress import say_once
from mlmclm.sweeps.cell_failures import Failure, describe, failure_of
from mlmclm.sweeps.cell_queue import CellQueue
from mlmclm.sweeps.cells import cell_name
from mlmclm.sweeps.heartbeats import Heartbeats
from mlmclm.sweeps.room import Room
from mlmclm.sweeps.sweep_options import SweepOptions
from mlmclm.sweeps.sweep_progress import SweepProgress
from mlmclm.sweeps.trainable import COMPUTED, ENVIRONMENT_FAULT, STORAGE_FAULT, TAKEN, USER_ERROR
from mlmclm.sweeps.trainings import Training, trainings_of

WAITING_WORKERS = 8
"""Workers to request beyond those that are known to fit, at any time, for nodes that join later."""
MOST_FAILED_STARTS = 10
"""Workers that fail to start before the sweep gives up, unless a cell ends in between."""
SECONDS_UNTIL_VISIBLE = 120.0
"""How long a result that a worker has filed may stay invisible here: NFS caches names for up to a minute."""
SECONDS_UNTIL_HUNG = 120.0
"""How long a worker may send no heartbeat before it is replaced."""


def workers_to_ask_for(cluster: Cluster, bundle: Resources) -> int:
    """Return how many workers may wait for a place: as many as the cluster can have, and some for unknown nodes."""
    known = most_places(cluster, bundle)
    return WAITING_WORKERS + (places_now(cluster, bundle) if math.isinf(known) else int(known))


class WorkerPool(FIFOScheduler, tune.Stopper):
    """Tune's scheduler, stopper and, by `callback`, its callback for one experiment.

    Args:
        cells: the cells to compute, by key.
        on_done: called with the keys of cells whose results are filed; returns the statuses of those that are visible here,
            by key.
        at_once: whether to look for a result as soon as it is filed; otherwise once a second, for all of that second.
        options: of them, `retries`, `time_limit` and `max_concurrent`.
        shares_memory: whether workers share memory (the GPU's or the machine's), so that running fewer of them helps.
        heartbeats: those of the workers.
        most_requests: the most workers that may wait for a place at once.
        room: says how many workers the cluster has room for, beside other work.
        on_failure: called when a cell failed, even if it will be retried, with its key, the reason, its class, and the
            name of the node (empty if unknown).
    """

    def __init__(
        self,
        cells: Mapping[str, Cell],
        progress: SweepProgress,
        on_done: Callable[[Collection[str]], Mapping[str, str]],
        options: SweepOptions,
        *,
        at_once: bool = True,
        shares_memory: bool = True,
        heartbeats: Heartbeats | None = None,
        most_requests: float = math.inf,
        room: Room | None = None,
        on_failure: Callable[[str, str, str, str], None] = lambda key, reason, kind, node: None,
    ) -> None:
        super().__init__()
        self._cells = cells
        self._queue = CellQueue(trainings_of(cells))
        self._progress = progress
        self._on_done, self._at_once = on_done, at_once
        self._retries, self._time_limit, self._shares_memory = options.retries, options.time_limit, shares_memory
        self._most_workers = min(len(cells), options.max_concurrent or len(cells))
        self._heartbeats, self._on_failure = heartbeats or Heartbeats(), on_failure
        self._most_requests, self._room = most_requests, room or Room()
        self._failures: dict[tuple[str, ...], list[dict[str, str]]] = defaultdict(list)
        """Failures of each training so far, as they will stand in its results."""
        self._ended: dict[str, Failure] = {}
        """Workers that this pool ended, and why."""
        self._since: dict[str, float] = {}
        """When each worker took its training, on the monotonic clock."""
        self._trials: dict[str, Trial] = {}
        self._nodes: dict[str, str] = {}
        """Name of each worker's node, once it has reported."""
        self._most_held = 0
        """The most workers that have computed at once."""
        self._most_busy: int | None = None
        """The most workers that may compute at once, since one ran out of memory; None for no limit."""
        self._failed_starts = 0
        self._looked = time.monotonic()
        self.late: dict[str, tuple[float, float | None]] = {}
        """Key -> time by which its result must be visible here, and how long it took if it was computed here."""
        self.callback = _Callback(self)
        self.computed = 0
        self.errors: dict[str, Exception] = {}
        """Errors of failed cells, by key."""
        self.taken: dict[str, Cell] = {}
        """The cells that other processes are computing, by key."""
        self.fault = False
        """True once a fault of the machine would make every further cell fail."""
        self.broken: BaseException | None = None
        """An error in the driver itself."""

    def __getstate__(self) -> dict[str, Any]:
        # Tune pickles its scheduler and stopper into a state that is never read.
        return {}

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Stop no worker by its result."""
        return False

    def stop_all(self) -> bool:
        """Return whether to end the experiment."""
        return self.fault

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        """Give a trial its path now: Tune asks for it at the end, even if the trial was stopped before it started."""
        trial.init_local_path()

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        """Ask for as many workers as there may be, and for none once nothing is left to take; Tune starts them."""
        if not self._queue or self._full:
            tune_controller.search_alg.set_finished()  # or it would replace those that are stopped here
            for trial in tune_controller.get_trials():
                if trial.status == Trial.PENDING:
                    tune_controller.stop_trial(trial)
        else:
            self._limit_requests(tune_controller)
        return super().choose_trial_to_run(tune_controller)

    def _limit_requests(self, tune_controller: Any) -> None:
        """Limit the workers that wait for a place, and withdraw those beyond it, so that others get the next place."""
        trials = tune_controller.get_trials()
        running = sum(trial.status == Trial.RUNNING for trial in trials)
        room = max(0, min(self._most_workers, self._room.most) - running)
        # Tune's own way to set this takes 0 for its default.
        tune_controller._max_pending_trials = min(self._most_requests, room)
        waiting = [trial for trial in trials if trial.status == Trial.PENDING]
        if len(waiting) > room:
            for trial in waiting[int(room) :]:
                tune_controller.stop_trial(trial)

    @property
    def _full(self) -> bool:
        return self._most_busy is not None and len(self._queue.held) >= self._most_busy

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        """Give the worker its next training, or end it if there is none; then handle the one that it reports on."""
        training = self._queue.give_up(trial.trial_id)
        self.fault = self.fault or result.get("outcome") in (ENVIRONMENT_FAULT, STORAGE_FAULT)
        busy = self.give(trial, result["hostname"])
        if training is not None:
            self.keeping_errors(lambda: self._report(training, result))
        return TrialScheduler.CONTINUE if busy else TrialScheduler.STOP

    def give(self, trial: Trial, node: str = "") -> bool:
        """Give a started worker its next training; return whether there was one. Its first report names its `node`."""
        self._nodes[trial.trial_id] = node
        given_up = len(self._queue.held) >= self._room.most
        stopped = self.fault or self._full or given_up or trial.trial_id in self._ended
        training = None if stopped else self._queue.take(trial.trial_id)
        if training is None:
            return False
        self._most_held = max(self._most_held, len(self._queue.held))
        self._trials[trial.trial_id], self._since[trial.trial_id] = trial, time.monotonic()
        # Tune has no public way to a trial's actor. Its calls run in order, so Tune's next `train` reports on this one.
        actor = trial.temporary_state.ray_actor
        actor.take.options(name=training.name).remote(training.cells, self._failures[training.keys])
        for cell in training.cells.values():
            self._progress.started(cell, worker=f"{trial} on {node}" if node else str(trial))
        return True

    def lost(self, trial: Trial) -> None:
        """Put back the training of a worker that has ended, unless it has failed too often."""
        error, ended = _error_of(trial), self._ended.pop(trial.trial_id, None)
        training, node = self._queue.give_up(trial.trial_id), self._nodes.get(trial.trial_id, "")
        self._queue.forget(trial.trial_id)
        if training is None:
            # All others may fail to start as well, and nothing else would end the sweep. As long as some worker computes,
            # the sweep goes on: a single bad node must not end it.
            self._failed_starts += ended is None
            if self._failed_starts >= MOST_FAILED_STARTS and not self._queue.held:
                self.broken = self.broken or EnvironmentFault(f"workers of the sweep do not start: {describe(error)}")
                self.fault = True
            return
        failure = ended or failure_of(error)
        failures = self._failures[training.keys]
        again = any(each["failure"] == Failure.OUT_OF_MEMORY for each in failures)
        # At most once per training: one that is too large by itself must not slow down all others.
        if failure is Failure.OUT_OF_MEMORY and self._shares_memory and not again and self._most_held > 1:
            self._most_busy = max(1, (self._most_busy or self._most_held) - 1)
            self._progress.note(f"a worker ran out of memory: from now on at most {self._most_busy} cells run at once")
        failures.append({"failure": str(failure), "error": describe(error)})
        times, bound = sum(each["failure"] == failure for each in failures), self._retries.bound(failure)
        if times > bound:
            self._failed(training, error, failure, node)
            return
        for key in training.keys:
            self._on_failure(key, describe(error), failure, node)
        self._queue.put_back(training)
        message = f"{training.name}: {failure} {times} of at most {bound + 1}, will run again ({describe(error)})"
        self._progress.retried(training.first, message)
        for cell in list(training.cells.values())[1:]:
            self._progress.given_back(cell)

    def tick(self) -> None:
        """Update the progress and, every second, look for late results and for workers that must be ended."""
        self._progress.tick()
        if self._room.most < 1 and not self._queue.held:
            time.sleep(0.1)  # without any worker, Tune would turn its loop as fast as it can
        if time.monotonic() > self._looked + 1:
            self._looked = time.monotonic()
            self.keeping_errors(self.look_again)
            self.keeping_errors(self._look_at_workers)

    def look_again(self) -> None:
        """Look for results that were not visible here when their workers had filed them.

        Raises:
            EnvironmentFault: one is still not visible after `SECONDS_UNTIL_VISIBLE`.
        """
        statuses = self._on_done(list(self.late))
        for key, (deadline, seconds) in list(self.late.items()):
            if key in statuses:
                del self.late[key]
                self._progress.finished(self._cells[key], statuses[key] if seconds is not None else "reused", seconds)
            elif time.monotonic() > deadline:
                raise EnvironmentFault(
                    f"{cell_name(self._cells[key])}: a worker filed this result {SECONDS_UNTIL_VISIBLE:.0f} s ago, but it "
                    f"isn't visible here (key {key}). Is the store shared by all nodes?"
                )

    def _look_at_workers(self) -> None:
        """End workers that hang or are over the time limit, and the sweep if it has had no node for too long."""
        self._heartbeats.look()
        waiting = []
        for worker, training in self._queue.held.items():
            heartbeat, seen = self._heartbeats.latest(worker)
            waiting += [heartbeat.notice] if heartbeat.notice else []
            limit = math.inf if self._time_limit is None else self._time_limit * len(training.cells)
            # The time is that of the heartbeat, which knows how much of it was lost; without any more, the worker hangs.
            if seen > self._since[worker] + limit + heartbeat.lost:
                self._end(worker, Failure.TIME_LIMIT)
                # This error names the limit; that of the actor's death doesn't.
                self._queue.give_up(worker)
                error = EnvironmentFault(f"over the time limit of {limit:g} s (the space's time_limit)")
                self._failed(training, error, Failure.TIME_LIMIT, self._nodes[worker])
                continue
            # Count from when it took the training: a worker that was ended may have sent the latest one.
            heard = max(seen, self._since[worker], self._heartbeats.deaf)
            if time.monotonic() - heard > SECONDS_UNTIL_HUNG:
                self._end(worker, Failure.HUNG)
        busy = len(self._queue.held)
        self._progress.waiting = f"{min(waiting)} ({len(waiting)} of {busy} workers)" if waiting else ""
        self._progress.situation = self._room.look(int(min(self._most_workers, len(self._queue) + busy)), busy)

    def _end(self, worker: str, reason: Failure) -> None:
        if worker not in self._ended:
            self._ended[worker] = reason
            ray.kill(self._trials[worker].temporary_state.ray_actor)

    @property
    def waiting(self) -> dict[str, Cell]:
        """The cells that no worker has taken, by key."""
        return {key: cell for training in self._queue.waiting for key, cell in training.cells.items()}

    def _report(self, training: Training, result: Mapping[str, Any]) -> None:
        self._failed_starts = 0
        if result["outcome"] == STORAGE_FAULT:
            self._queue.put_back(training)
            for cell in training.cells.values():
                self._progress.given_back(cell)
            raise (UserError if result["exit_code"] == UserError.exit_code else StorageFault)(result["message"])
        if result["outcome"] in (USER_ERROR, ENVIRONMENT_FAULT):
            kind = UserError if result["outcome"] == USER_ERROR else EnvironmentFault
            self._failed(training, kind(result["message"]), result["outcome"], result["hostname"])
            return
        if result["backend"]:
            say_once(f"fine-tuning computes with the backend {result['backend']}")
        for key, outcome in zip(training.keys, result["outcomes"], strict=True):
            if outcome == TAKEN:
                self.taken[key] = self._cells[key]
                self._progress.given_back(self._cells[key])
                continue
            self.computed += outcome == COMPUTED
            seconds = result["seconds"] / len(training.cells) if outcome == COMPUTED else None
            self.late[key] = (time.monotonic() + SECONDS_UNTIL_VISIBLE, seconds)
        if self._at_once:
            self.look_again()

    def keeping_errors(self, act: Callable[[], None]) -> None:
        """Keep an error for the caller and end the experiment; Tune would wrap it in an error of its own."""
        try:
            act()
        except Exception as error:
            self.broken = self.broken or error
            self.fault = True

    def _failed(self, training: Training, error: Exception, kind: str, node: str) -> None:
        """Note that the cells of a training without a result failed; several are first tried one by one."""
        left = dict(training.cells)
        for key, status in self._on_done(training.keys).items():
            self.computed += 1
            self._progress.finished(left.pop(key), status)
        if len(training.cells) > 1 and not self.fault:
            self._progress.note(f"{training.name} failed: {describe(error)}; its cells are computed one by one")
            for key, cell in left.items():
                self._queue.put_back(Training({key: cell}))
                self._progress.given_back(cell)
            return
        for key, cell in left.items():
            self.errors[key] = error
            self._on_failure(key, describe(error), kind, node)
            self._progress.finished(cell, "failed")
            self._progress.note(f"{cell_name(cell)} failed: {describe(error)}")


class _Callback(TrialProgressCallback):
    """Receives what only callbacks are told: that a worker has started or crashed, and that time passes.

    It replaces Tune's own progress callback, which prints a line for each trial that ends, at any verbosity.
    Tune pickles its callbacks into a state that is never read, so this one pickles to nothing.
    """

    def __init__(self, pool: WorkerPool) -> None:
        super().__init__()
        self._pool = pool

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        self._pool.tick()

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._pool.give(trial)

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._pool.keeping_errors(lambda: self._pool.lost(trial))

    def log_result(self, *args: Any, **options: Any) -> None:
        """Print nothing."""

    on_trial_complete = log_result


def _error_of(trial: Any) -> Exception:
    """Return the error that ended a trial's last attempt.

    Tune's own accessor looks only where the file is put at the end of the experiment.
    """
    path = Path(trial.pickled_error_file or "")
    if path.is_file():
        error = cloudpickle.loads(path.read_bytes())
        if isinstance(error, Exception):
            return error
    text = Path(trial.error_file or "")
    return RuntimeError(text.read_text("utf-8").strip() if text.is_file() else "the worker ended without an error")

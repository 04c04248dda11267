"""The pool of workers behind a sweep, as a Ray Tune experiment whose trials are workers that take cells from a queue.

With a trial per cell and Tune's `reuse_actors`, a freed actor is given the trial whose own actor is still starting, and
that actor is removed. Wherever actors start more slowly than cells end, one worker would compute everything, and
neither a dead worker's place nor a new node would be used. A trial that is a worker has none of these problems: Tune
starts as many as the cluster has room for, starts a dead one again, and gives those that wait to nodes that join.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ray import cloudpickle, tune
from ray.tune.experiment import Trial
from ray.tune.progress_reporter import TrialProgressCallback
from ray.tune.schedulers import FIFOScheduler, TrialScheduler

from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.finetuning.cell import Cell
from mlmclm.progress import say_once
from mlmclm.service.placement import Cluster, Resources, most_places, places_now
from mlmclm.sweeps.cell_queue import CellQueue
from mlmclm.sweeps.cells import cell_name
from mlmclm.sweeps.outcome import describe
from mlmclm.sweeps.sweep_progress import SweepProgress
from mlmclm.sweeps.trainable import COMPUTED, ENVIRONMENT_FAULT, TAKEN, USER_ERROR

WAITING_WORKERS = 8
"""Workers to ask for beyond those that are known to fit, at any time, for nodes that join later."""
MOST_FAILED_STARTS = 10
"""Workers that fail to start before the sweep gives up, unless a cell ends in between."""
SECONDS_UNTIL_VISIBLE = 120.0
"""How long a result that a worker has filed may stay invisible here: NFS caches names for up to a minute."""


def workers_to_ask_for(cluster: Cluster, bundle: Resources) -> int:
    """Return how many workers may wait for a place: as many as the cluster can have, and some for unknown nodes."""
    known = most_places(cluster, bundle)
    return WAITING_WORKERS + (places_now(cluster, bundle) if math.isinf(known) else int(known))


class WorkerPool(FIFOScheduler):
    """Tune's scheduler and, by `callback` and `stopper`, its callback and stopper for one experiment.

    `errors` holds the errors of failed cells and `taken` the cells that other processes are computing, both by key.
    `fault` is true once a fault of the machine would fail every further cell. `broken` is an error in the driver itself.

    Args:
        cells: the cells to compute, by key.
        progress: what to tell of their progress.
        on_done: called with the key of a cell whose result is filed; returns its status, or None if the result isn't
            visible here yet.
        max_failures: how often a crashed cell is retried.
    """

    def __init__(
        self,
        cells: Mapping[str, Cell],
        progress: SweepProgress,
        on_done: Callable[[str], str | None],
        max_failures: int,
    ) -> None:
        super().__init__()
        self._cells = cells
        self._queue = CellQueue(cells)
        self._progress = progress
        self._on_done = on_done
        self._max_failures = max_failures
        self._crashes: Counter[str] = Counter()
        self._failed_starts = 0
        self._looked = time.monotonic()
        self._late: dict[str, tuple[float, float | None]] = {}
        """Key -> time by which its result must be visible, and how long it took if it was computed here."""
        self.callback, self.stopper = _Callback(self), _Stopper(self)
        self.computed = 0
        self.errors: dict[str, Exception] = {}
        self.taken: dict[str, Cell] = {}
        self.fault = False
        self.broken: BaseException | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Tune pickles its scheduler into a state that is never read.
        return {}

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        """Stop workers that haven't started once every cell is taken; leave the choice among others to Tune."""
        if not self._queue:
            tune_controller.search_alg.set_finished()  # or it would replace those that are stopped here
            for trial in tune_controller.get_trials():
                if trial.status == Trial.PENDING:
                    tune_controller.stop_trial(trial)
        return super().choose_trial_to_run(tune_controller)

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        """Give the worker its next cell, or end it if there is none, and then see to the cell that it reports on."""
        key = self._queue.give_up(trial.trial_id)
        self.fault = self.fault or result.get("outcome") == ENVIRONMENT_FAULT
        busy = self.give(trial, result["hostname"])
        if key is not None:
            self._keeping_errors(lambda: self._report(key, result))
        return TrialScheduler.CONTINUE if busy else TrialScheduler.STOP

    def give(self, trial: Trial, node: str = "") -> bool:
        """Give a started worker its next cell; return whether there was one.

        Args:
            node: the name of the worker's node, once that is known.
        """
        key = None if self.fault else self._queue.take(trial.trial_id)
        if key is None:
            return False
        cell = self._cells[key]
        # Tune has no public way to a trial's actor. Its calls run in order, so Tune's next `train` reports on this one.
        trial.temporary_state.ray_actor.take.options(name=cell_name(cell)).remote(key)
        self._progress.started(cell, worker=f"{trial} on {node}" if node else str(trial))
        return True

    def lost(self, trial: Trial) -> None:
        """Put the cell of a worker that crashed back, unless it has crashed too often."""
        error = _error_of(trial)
        key = self._queue.give_up(trial.trial_id)
        self._queue.forget(trial.trial_id)
        if key is None:
            # All others may fail to start as well, and nothing else would end the sweep. As long as some worker computes,
            # the sweep goes on: a single bad node must not end it.
            self._failed_starts += 1
            if self._failed_starts >= MOST_FAILED_STARTS and not self._queue.held:
                self.broken = self.broken or EnvironmentFault(f"workers of the sweep do not start: {describe(error)}")
                self.fault = True
            return
        self._crashes[key] += 1
        name = cell_name(self._cells[key])
        if self._crashes[key] > self._max_failures:
            self._failed(key, error)
            return
        crash = f"crash {self._crashes[key]} of at most {self._max_failures + 1}"
        self._queue.put_back(key)
        self._progress.retried(self._cells[key], f"{name}: {crash}, will run again ({describe(error)})")

    def tick(self) -> None:
        """Update the progress and, every second, look for late results."""
        self._progress.tick()
        if self._late and time.monotonic() > self._looked + 1:
            self._looked = time.monotonic()
            self._keeping_errors(self.look_again)

    def look_again(self) -> None:
        """Look for results that were not visible here when their workers had filed them.

        Raises:
            EnvironmentFault: one is still not there after `SECONDS_UNTIL_VISIBLE`.
        """
        for key, (deadline, seconds) in list(self._late.items()):
            status = self._on_done(key)
            if status is not None:
                del self._late[key]
                self._progress.finished(self._cells[key], status if seconds is not None else "reused", seconds)
            elif time.monotonic() > deadline:
                raise EnvironmentFault(
                    f"{cell_name(self._cells[key])}: a worker filed this result {SECONDS_UNTIL_VISIBLE:.0f} s ago, but it "
                    f"isn't visible here (key {key}). Is the store shared by all nodes?"
                )

    @property
    def late(self) -> bool:
        """Whether there are results that aren't visible here yet."""
        return bool(self._late)

    def _report(self, key: str, result: Mapping[str, Any]) -> None:
        cell, outcome = self._cells[key], result["outcome"]
        self._failed_starts = 0
        if outcome in (USER_ERROR, ENVIRONMENT_FAULT):
            self._failed(key, (UserError if outcome == USER_ERROR else EnvironmentFault)(result["message"]))
        elif outcome == TAKEN:
            self.taken[key] = cell
            self._progress.given_back(cell)
        else:
            if outcome == COMPUTED:
                self.computed += 1
                say_once(f"fine-tuning computes with the backend {result['backend']}")
            self._late[key] = (
                time.monotonic() + SECONDS_UNTIL_VISIBLE, result["seconds"] if outcome == COMPUTED else None,
            )  # fmt: skip
            self.look_again()

    def _keeping_errors(self, act: Callable[[], None]) -> None:
        """Keep an error for the caller and end the experiment; Tune would wrap it in an error of its own."""
        try:
            act()
        except Exception as error:
            self.broken = self.broken or error
            self.fault = True

    def _failed(self, key: str, error: Exception) -> None:
        self.errors[key] = error
        self._progress.finished(self._cells[key], "failed")
        self._progress.note(f"{cell_name(self._cells[key])} failed: {describe(error)}")


class _Callback(TrialProgressCallback):
    """Receiver of what only callbacks are told: that a worker has started or crashed, and that time passes.

    It takes the place of Tune's own progress callback, which prints a line for each trial that ends, at any verbosity.
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
        self._pool.lost(trial)

    def log_result(self, *args: Any, **options: Any) -> None:
        """Print nothing."""

    def on_trial_complete(self, *args: Any, **options: Any) -> None:
        """Print nothing."""


class _Stopper(tune.Stopper):
    """Ends the experiment after a fault: with a full disk, every further cell would be computed in vain."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self._pool.fault


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
    return RuntimeError(
        text.read_text(encoding="utf-8").strip() if text.is_file() else "the worker ended without an error"
    )

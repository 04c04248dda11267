"""Tune callbacks in the driver: count cells, announce results, report crashes, and stop on a fault of the machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ray import cloudpickle, tune

from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.finetuning.cell import Cell
from mlmclm.progress import say_once
from mlmclm.sweeps.cells import cell_name
from mlmclm.sweeps.outcome import describe
from mlmclm.sweeps.sweep_progress import SweepProgress
from mlmclm.sweeps.trainable import COMPUTED, ENVIRONMENT_FAULT, TAKEN, USER_ERROR


class StopOnFault(tune.Stopper):
    """Ends the experiment once `set` is true: with a full disk, every further cell would be computed in vain."""

    def __init__(self) -> None:
        self.set = False

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self.set


class Watch(tune.Callback):
    """Tune's callback in the driver.

    `errors` holds the errors of failed cells and `taken` the cells that other processes are computing, both by key.
    `broken` is an error in the driver itself.

    Tune pickles its callbacks into a state that is never read, so this one pickles to nothing.
    """

    def __init__(
        self,
        cells: Mapping[str, Cell],
        progress: SweepProgress,
        on_done: Callable[[str], str],
        fault: StopOnFault,
        max_failures: int,
    ) -> None:
        self._cells = cells
        self._progress = progress
        self._on_done = on_done
        self._fault = fault
        self._max_failures = max_failures
        self._crashes: Counter[str] = Counter()
        self.computed = 0
        self.errors: dict[str, Exception] = {}
        self.taken: dict[str, Cell] = {}
        self.broken: BaseException | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        self._progress.tick()

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._progress.started(self._cells[trial.config["cell"]])

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        key = trial.config["cell"]
        cell = self._cells[key]
        outcome = result.get("outcome")
        if outcome in (USER_ERROR, ENVIRONMENT_FAULT):
            kind = UserError if outcome == USER_ERROR else EnvironmentFault
            self.errors[key] = kind(result["message"])
            self._fault.set = self._fault.set or outcome == ENVIRONMENT_FAULT
            self._progress.finished(cell, "failed")
            self._progress.note(f"{cell_name(cell)} failed: {result['message']}")
            return
        if outcome == TAKEN:
            self.taken[key] = cell
            self._progress.given_back(cell)
            return
        self.computed += outcome == COMPUTED
        if outcome == COMPUTED:
            say_once(f"fine-tuning computes with the backend {result['backend']}")
        try:
            status = self._on_done(key)
        except Exception as error:  # kept for the caller, because Tune would wrap it in an error of its own
            self.broken = self.broken or error
            self._progress.given_back(cell)
            self._fault.set = True
            return
        seconds = result["time_this_iter_s"] if outcome == COMPUTED else None
        self._progress.finished(cell, status if outcome == COMPUTED else "reused", seconds)

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        cell = self._cells[trial.config["cell"]]
        # Counted for the message only; Tune itself keeps to the limit (`FailureConfig`).
        self._crashes[trial.trial_id] += 1
        crash = f"crash {self._crashes[trial.trial_id]} of at most {self._max_failures + 1}"
        self._progress.retried(cell, f"{cell_name(cell)}: {crash}, will run again ({describe(_error_of(trial))})")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        # Called when Tune gives the trial up; before a retry it calls `on_trial_recover`.
        cell = self._cells[trial.config["cell"]]
        error = _error_of(trial)
        self.errors[trial.config["cell"]] = error
        self._progress.finished(cell, "failed")
        self._progress.note(f"{cell_name(cell)} failed: {describe(error)}")


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

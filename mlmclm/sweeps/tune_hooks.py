"""Ray Tune's hooks of a sweep: they pass Tune's calls on to `SweepTrials`, which decides."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

from ray import cloudpickle, tune
from ray.tune.experiment import Trial
from ray.tune.progress_reporter import TrialProgressCallback
from ray.tune.schedulers import FIFOScheduler
from ray.tune.search import Searcher

from mlmclm.sweeps.sweep_trials import SweepTrials


class CellSearch(Searcher):
    """Gives Tune the configs of a sweep's trials, in its order.

    Tune pickles all hooks into a state that is never read, so each pickles as empty.
    """

    def __init__(self, trials: SweepTrials) -> None:
        super().__init__()
        self._trials = trials

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def set_search_properties(self, *args: Any, **options: Any) -> bool:
        """Take no notice of metric, mode and `param_space`: configs are given."""
        return True

    def suggest(self, trial_id: str) -> Any:
        """Return the next config; None if there is none now."""
        trial = self._trials.next(trial_id)
        if trial is not None:
            return trial.config
        return Searcher.FINISHED if self._trials.over else None

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        """Do nothing: the callback gets more details."""

    def save(self, checkpoint_path: str) -> None:
        """Save nothing: the store has every result."""

    def restore(self, checkpoint_path: str) -> None:
        """Restore nothing."""


class SweepScheduler(FIFOScheduler, tune.Stopper):
    """Runs trials in their order, withdraws those that wait for a place where there is no room for them any more, and ends the
    experiment once a fault would make every further cell fail.

    Tune gives a free actor to a trial whose own actor is still starting, and removes the starting one. If cells are short, one
    actor would then compute all, and no node that joins would be used. So the actor gets the newest trial, which has asked for none yet.
    """

    def __init__(self, trials: SweepTrials) -> None:
        super().__init__()
        self._trials = trials
        self._new: deque[Trial] = deque()

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        """Give a trial its path now: Tune asks for it at the end, even if the trial was stopped before it started."""
        trial.init_local_path()
        self._new.append(trial)

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        """Return a trial that has asked for no actor yet.

        End trials that hang or take too long, and withdraw the last ones that wait if there are more than `SweepTrials.most`.
        """
        while self._trials.to_end:
            name = self._trials.to_end.pop()
            tune_controller.stop_trial(next(trial for trial in tune_controller.get_trials() if trial.trial_id == name))
        if (excess := self._trials.asked - self._trials.most) > 0:
            pending = [trial for trial in tune_controller.get_trials() if trial.status == Trial.PENDING]
            for trial in pending[-int(excess) :]:
                tune_controller.stop_trial(trial)
        while self._new:
            trial = self._new.popleft()
            if trial.status == Trial.PENDING:
                return trial
        return None

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Stop no trial by its result."""
        return False

    def stop_all(self) -> bool:
        """Return whether to end the experiment."""
        return self._trials.fault

    def on_trial_complete(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> None:
        """Let Tune fail a trial that this sweep has ended: it then kills the actor instead of giving it another trial.

        Raises:
            TimeoutError: this is such a trial.
        """
        if reason := self._trials.reason_to_end(trial.trial_id):
            raise TimeoutError(reason)


class SweepCallback(TrialProgressCallback):
    """Reports to `SweepTrials` what happens to its trials, and calls its `tick` regularly.

    It replaces Tune's own progress callback, which prints a line for each trial that ends, at any verbosity.
    """

    def __init__(self, trials: SweepTrials) -> None:
        super().__init__()
        self._trials = trials

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        self._trials.tick()

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._trials.begun(trial.trial_id)

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        # Tune keeps every report in memory, so the results are taken out of it.
        self._trials.reported(trial.trial_id, {**result, "results": result.pop("results", ())})

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        trial.metric_n_steps.clear()  # Tune keeps all trials; its lists for running means took 30 kB of each
        self._trials.ended(trial.trial_id)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        # Before a trial's first report, `last_result` has what Ray knows of its actor, such as the host.
        self._trials.ended(trial.trial_id, error_of(trial), trial.last_result.get("hostname", ""))

    def log_result(self, *args: Any, **options: Any) -> None:
        """Print nothing."""


def error_of(trial: Any) -> Exception:
    """Return the error that ended a trial.

    Tune's own accessor looks only where the file is put at the end of the experiment.
    """
    path = Path(trial.pickled_error_file or "")
    if path.is_file():
        error = cloudpickle.loads(path.read_bytes())
        if isinstance(error, Exception):
            return error
    text = Path(trial.error_file or "")
    return RuntimeError(text.read_text("utf-8").strip() if text.is_file() else "the worker ended without an error")

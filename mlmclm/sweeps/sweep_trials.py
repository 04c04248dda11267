"""The trials of a sweep, as Ray Tune asks for them: what is computed next, what failed, and what must end.

`SweepTrials` uses none of Tune's classes. Tune's hooks (`tune_hooks`) call it: the searcher asks it for configs, the callback
reports to it, and the scheduler withdraws trials that there is no room for.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlmclm.cluster.placement import Cluster, Resources, most_places, places_now
from mlmclm.cluster.ray_cluster import check_node
from mlmclm.errors import EnvironmentFault, StorageFault, UserError
from mlmclm.finetuning.cell import Cell
from mlmclm.progress import say, say_once
from mlmclm.sweeps.cell_failures import Failure, describe_error, failure_of, record
from mlmclm.sweeps.cells import cell_name
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.sweeps.shared_cluster import SharedCluster
from mlmclm.sweeps.sweep_options import SweepOptions
from mlmclm.sweeps.sweep_progress import SweepProgress
from mlmclm.sweeps.trial import (
    COMPUTED,
    ENVIRONMENT_FAULT,
    STORAGE_FAULT,
    TAKEN,
    USER_ERROR,
    WAITING,
    SweepTrial,
    Training,
    seeds_together,
    trainings_of,
)

Results = Mapping[str, dict[str, Any]]
"""Results by key."""
WAITING_TRIALS = 8
"""Number of trials that may wait for a place beyond those that are known to fit, for nodes that join later."""
MOST_FAILED_STARTS = 10
"""Number of actors that fail to start, while no cell ends, before the sweep gives up."""
TIMES_THE_LONGEST, SECONDS_UNTIL_HUNG = 10.0, 600.0
"""A cell counts as hung if it takes this many times as long as the longest one of its task so far, and at least these seconds."""


def trials_to_ask_for(cluster: Cluster, bundle: Resources) -> int:
    """Return how many trials may wait for a place: as many as the cluster can have, and some for unknown nodes."""
    most = most_places(cluster, bundle)
    return WAITING_TRIALS + (places_now(cluster, bundle) if math.isinf(most) else int(most))


def in_order(trainings: Collection[Training]) -> list[Training]:
    """Return trainings in the order in which trials take them.

    Those of a model follow each other, because an actor keeps one model's weights. Models with the most work come first. Within a
    model the longest trainings come first, so that none of them is left alone at the end; equally long ones keep their order.
    """
    work: dict[str, float] = defaultdict(float)
    for training in trainings:
        work[training.first.weights] += training.work
    places = {weights: place for place, weights in enumerate(sorted(work, key=lambda weights: -work[weights]))}
    return sorted(trainings, key=lambda training: (places[training.first.weights], -training.work))


@dataclass
class _Asked:
    """A trial that Tune has, with the trainings that it has not reported yet.

    Attributes:
        since: when it began the first of them, on the monotonic clock; None if it has not.
        lost: seconds for which storage had not answered in this sweep by then.
        ahead: whether its trainings were the first of the queue; a trial beyond the known places takes the queue's last one.
        ended: why this sweep has ended it; None if it has not.
        notice: message that it waits for storage; empty if it does not.
    """

    trainings: list[Training]
    since: float | None = None
    lost: float = 0.0
    ahead: bool = True
    ended: Failure | None = None
    notice: str = ""


class SweepTrials:
    """Decides about the trials of one experiment.

    Args:
        cells: the cells to compute, by key.
        on_filed: called with results that are filed now, by key.
        results_store: where their results are filed, and failures are noted.
        options: `retries` and `time_limit` of these are used.
        like: a template of all trials; their trainings are set here.
        shared: says how many trials the cluster has room for, beside other jobs.
        failures: failures of each training so far, by the keys of its cells, in the form of `retried_after` in its results; new
            ones are appended.
    """

    def __init__(
        self,
        cells: Mapping[str, Cell],
        progress: SweepProgress,
        on_filed: Callable[[Results], None],
        results_store: ResultsStore,
        options: SweepOptions,
        *,
        like: SweepTrial,
        shared: SharedCluster,
        failures: defaultdict[tuple[str, ...], list[dict[str, str]]],
    ) -> None:
        self._like, self._shared = like, shared
        self._waiting = deque(in_order(trainings_of(cells)))
        self._asked: dict[str, _Asked] = {}
        self._progress, self._on_filed, self._results_store = progress, on_filed, results_store
        self._retries, self._time_limit = options.retries, options.time_limit
        self._failures, cluster = failures, shared.view()
        self._places, self._to_ask = places_now(cluster, like.resources), trials_to_ask_for(cluster, like.resources)
        """How many trials run at once, and how many may run or wait for a place, as far as is known."""
        # Several cells run on one GPU, or on a machine's cores, so that running fewer of them helps.
        self._shares_memory = like.resources.get("GPU", 0) < 1
        self._seconds: dict[tuple[str, str], float] = {}
        """Time that the latest cell of these weights on this task took."""
        self._longest: dict[str, float] = {}
        """Time that the longest cell of each task took."""
        self._most_held = 0
        """The most trials that have computed at once."""
        self._most_busy: int | None = None
        """The most trials that may compute at once, since one ran out of memory; None for no limit."""
        self._failed_starts = 0
        self._looked = time.monotonic()
        self.to_end: list[str] = []
        """Ids of the trials that hang or are over the time limit."""
        self.computed = 0
        self.errors: dict[str, Exception] = {}
        """Errors of failed cells, by key."""
        self.taken: dict[str, Cell] = {}
        """The cells that other processes are computing, by key."""
        self.fault = False
        """True once a fault of the machine would make every further cell fail."""
        self.broken: BaseException | None = None
        """An error in the driver itself."""
        self.hands_over = False
        """True once there is room for fewer trials than have run at once, or no node for any. Tune keeps the actors of ended
        trials until its experiment ends. So this experiment ends, and the next one uses the room that is left."""

    @property
    def most(self) -> float:
        """The most trials that Tune may have now: those that run, and some that wait for nodes that join."""
        if self.hands_over:
            return 0
        wanted = max(self._to_ask, self._most_held + WAITING_TRIALS)
        return min(wanted, self._shared.most, math.inf if self._most_busy is None else self._most_busy)

    @property
    def asked(self) -> int:
        """The number of trials that Tune has."""
        return len(self._asked)

    @property
    def _lost(self) -> float:
        """Seconds for which storage has not answered in this sweep."""
        return self._results_store.availability.lost

    @property
    def _busy(self) -> list[_Asked]:
        return [trial for trial in self._asked.values() if trial.since is not None]

    @property
    def waiting(self) -> dict[str, Cell]:
        """The cells that no trial has, by key."""
        return {key: cell for training in self._waiting for key, cell in training.cells.items()}

    @property
    def over(self) -> bool:
        """Whether no further trial begins: after a fault, if the sweep loses its places, or once no training waits or is in a trial."""
        return self.fault or self.hands_over or not (self._waiting or self._asked)

    def next(self, trial_id: str) -> SweepTrial | None:
        """Return the next trial, or None if there is none now."""
        if not self._asked:
            self.tick()  # Tune does nothing else while it waits for a trial
        if self.over or not self._waiting or len(self._asked) >= self.most:
            return None
        ahead = sum(trial.ahead for trial in self._asked.values()) < max(self._places, self._most_held)
        trainings = [self._waiting.popleft() if ahead else self._waiting.pop()]
        failures = self._failures[trainings[0].keys]
        if ahead and not failures and len(trainings[0].cells) == 1:
            first = trainings[0].first
            seconds = self._seconds.get((first.weights, first.task))
            number = seeds_together(seconds, 1 + len(self._waiting), max(self._places, self._most_held))
            while len(trainings) < number and self._is_like(trainings[0]):
                trainings.append(self._waiting.popleft())
        self._asked[trial_id] = _Asked(list(trainings), ahead=ahead)
        return replace(self._like, trainings=tuple(trainings), failures=tuple(failures))

    def _is_like(self, training: Training) -> bool:
        """Return whether the next training differs in its seed alone and has not failed."""
        following = self._waiting[0]
        return following.all_but_seed == training.all_but_seed and not self._failures.get(following.keys)

    def begun(self, trial_id: str) -> None:
        """Note that a trial begins the first of its trainings that are left."""
        asked = self._asked[trial_id]
        asked.since, asked.lost = time.monotonic(), self._lost
        self._most_held = max(self._most_held, len(self._busy))
        for cell in asked.trainings[0].cells.values():
            self._progress.started(cell)

    def reported(self, trial_id: str, result: Mapping[str, Any]) -> None:
        """Handle a trial's report: that it waits, or the outcome of its first training."""
        asked = self._asked[trial_id]
        asked.notice = result["notice"] if result["outcome"] == WAITING else ""
        if asked.notice:
            asked.since, asked.lost = time.monotonic(), self._lost
            return
        training = asked.trainings.pop(0)
        self.fault = self.fault or result["outcome"] in (ENVIRONMENT_FAULT, STORAGE_FAULT)
        if asked.trainings and not result.get("done"):
            self.begun(trial_id)
        else:
            asked.since = None
        self.keeping_errors(lambda: self._report(training, result))

    def ended(self, trial_id: str, error: Exception | None = None, node: str = "") -> None:
        """Handle the end of a trial, with its error and node if it failed, and put back the trainings on which it has not reported."""
        asked = self._asked.pop(trial_id, None)
        if asked is None or not asked.trainings:
            return
        for training in reversed(asked.trainings[1:]):
            self._waiting.appendleft(training)
        if asked.since is None and error is not None and asked.ended is None:
            # All others may fail to start as well, and nothing else would end the sweep. As long as some trial computes,
            # the sweep goes on: a single bad node must not end it.
            self._failed_starts += 1
            if self._failed_starts >= MOST_FAILED_STARTS and not self._busy:
                self.broken = self.broken or EnvironmentFault(
                    f"workers of the sweep do not start: {describe_error(error)}"
                )
                self.fault = True
        training = asked.trainings[0]
        if asked.since is None or error is None:
            self._waiting.appendleft(training)
            if asked.since is not None:
                for cell in training.cells.values():
                    self._progress.given_back(cell)
            return
        self._crashed(training, error, asked, node)

    def _crashed(self, training: Training, error: Exception, asked: _Asked, node: str) -> None:
        failure = asked.ended or failure_of(error)
        if failure is Failure.TIME_LIMIT:
            limit = (self._time_limit or 0.0) * len(training.cells)
            error = EnvironmentFault(f"over the time limit of {limit:g} s (the space's time_limit)")
        elif failure is Failure.HUNG:
            error = EnvironmentFault(f"no result after {TIMES_THE_LONGEST:g} times the longest cell of the task")
        failures = self._failures[training.keys]
        again = any(earlier["failure"] == Failure.OUT_OF_MEMORY for earlier in failures)
        # At most once per training: one that is too large by itself must not slow down all others.
        if failure is Failure.OUT_OF_MEMORY and self._shares_memory and not again and self._most_held > 1:
            self._most_busy = max(1, (self._most_busy or self._most_held) - 1)
            say(f"a worker ran out of memory: from now on at most {self._most_busy} cells run at once")
        failures.append({"failure": str(failure), "error": describe_error(error)})
        times, bound = sum(earlier["failure"] == failure for earlier in failures), self._retries.bound(failure)
        if times > bound:
            self._failed(training, error, failure, node)
            return
        for key in training.keys:
            self._note_failure(key, error, failure, node)
        self._waiting.appendleft(training)
        message = f"{training.name}: {failure} {times} of at most {bound + 1}, will run again ({describe_error(error)})"
        self._progress.retried(training.first, message)
        for cell in list(training.cells.values())[1:]:
            self._progress.given_back(cell)

    def tick(self) -> None:
        """Update the progress and, every second, look for trials that must be ended."""
        self._progress.tick()
        if time.monotonic() > self._looked + 1:
            self._looked = time.monotonic()
            for check in (check_node, self._look_at_trials):
                self.keeping_errors(check)

    def _look_at_trials(self) -> None:
        """End trials that hang or are over the time limit, and the experiment if more have run at once than there is room for, or no node is left."""
        now, lost = time.monotonic(), self._lost
        for name, asked in self._asked.items():
            if asked.since is None:
                continue
            training = asked.trainings[0]
            spent = now - asked.since - (lost - asked.lost)
            if self._time_limit is not None and spent > self._time_limit * len(training.cells):
                self._end(name, Failure.TIME_LIMIT)
            longest = self._longest.get(training.first.task, math.inf)
            if spent > max(SECONDS_UNTIL_HUNG, TIMES_THE_LONGEST * longest * len(training.cells)):
                self._end(name, Failure.HUNG)
        busy, shared = len(self._busy), self._shared
        self.hands_over = self.hands_over or self._most_held > shared.most or not (busy or shared.has_nodes)
        notices = [trial.notice for trial in self._busy if trial.notice]
        self._progress.waiting = f"{min(notices)} ({len(notices)} of {busy} workers)" if notices else ""
        words = "shares the cluster with another job" if busy else "waiting for its turn: another job uses the cluster"
        self._progress.situation = "" if shared.most == math.inf else words

    def _end(self, trial_id: str, reason: Failure) -> None:
        if self._asked[trial_id].ended is None:
            self._asked[trial_id].ended = reason
            self.to_end.append(trial_id)

    def reason_to_end(self, trial_id: str) -> str | None:
        """Return why the sweep has ended a trial; None if it has not."""
        return asked.ended if (asked := self._asked.get(trial_id)) is not None else None

    def _report(self, training: Training, result: Mapping[str, Any]) -> None:
        self._failed_starts = 0
        if result["outcome"] == STORAGE_FAULT:
            self._waiting.appendleft(training)
            for cell in training.cells.values():
                self._progress.given_back(cell)
            raise (UserError if result["exit_code"] == UserError.exit_code else StorageFault)(result["message"])
        if result["outcome"] in (USER_ERROR, ENVIRONMENT_FAULT):
            kind = UserError if result["outcome"] == USER_ERROR else EnvironmentFault
            self._failed(training, kind(result["message"]), result["outcome"], result["hostname"])
            return
        if result["backend"]:
            say_once(f"fine-tuning computes with the backend {result['backend']}")
        seconds = result["seconds"] / len(training.cells)
        for (key, cell), outcome, filed in zip(
            training.cells.items(), result["outcomes"], result["results"], strict=True
        ):
            if outcome == TAKEN:
                self.taken[key] = cell
                self._progress.given_back(cell)
                continue
            self._on_filed({key: filed})
            computed = outcome == COMPUTED
            self.computed += computed
            if computed:
                self._seconds[cell.weights, cell.task] = seconds
                self._longest[cell.task] = max(seconds, self._longest.get(cell.task, 0.0))
            self._progress.finished(cell, filed["status"] if computed else "reused", seconds if computed else None)

    def keeping_errors(self, act: Callable[[], None]) -> None:
        """Keep an error for the caller and end the experiment; Tune would wrap it in an error of its own."""
        try:
            act()
        except Exception as error:
            self.broken = self.broken or error
            self.fault = True

    def _failed(self, training: Training, error: Exception, kind: str, node: str) -> None:
        """Note that a training failed: its cells without a result fail with it, or are tried one by one if it has several."""
        left = dict(training.cells)
        filed = self._results_store.find_all(training.keys, listed=True)
        self._on_filed(filed)
        self.computed += len(filed)
        for key, result in filed.items():
            self._progress.finished(left.pop(key), result["status"])
        if len(training.cells) > 1 and not self.fault:
            say(f"{training.name} failed: {describe_error(error)}; its cells are computed one by one")
            for key, cell in left.items():
                self._waiting.appendleft(Training({key: cell}))
                self._progress.given_back(cell)
            return
        for key, cell in left.items():
            self.errors[key] = error
            self._note_failure(key, error, kind, node)
            self._progress.finished(cell, "failed")
            say(f"{cell_name(cell)} failed: {describe_error(error)}")

    def _note_failure(self, key: str, error: Exception, kind: str, node: str) -> None:
        record(self._results_store.folder, key, describe_error(error), kind, node)

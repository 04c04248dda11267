"""Process that follows a study in its store, and writes to MLflow what MLflow lacks.

It looks for new states and results every few seconds, so nobody tells it of them. Killed at any moment, it leaves
nothing behind that the next one does not continue. It ends with the process that started it (`FollowerProcess`), and
however that ends, no run of the study is left marked as running.
"""

from __future__ import annotations

import math
import os
import pickle
import queue
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from mlmclm.errors import MlmclmError, UserError
from mlmclm.pretraining import states
from mlmclm.storage.retrying import RetryPolicy
from mlmclm.sweeps.cells import ListedCell, named
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.tracking.experiment import writer_of
from mlmclm.tracking.failures import passing, refused
from mlmclm.tracking.records import RunRecord, Status
from mlmclm.tracking.views import cell_record, group_record, trained
from mlmclm.tracking.writer import Writer

NICE = 19
"""Added to the process's niceness beside a sweep: if all cores are busy, the sweep goes first. Ray's workers have a niceness
of 15."""
SECONDS_BETWEEN_LOOKS, SHARE_OF_LOOKS = 2.0, 0.05
"""Pause between two looks at the store, which is longer if a look takes more than this share of the time."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds between attempts while nothing can be written; the pause doubles each time."""
GIVE_UP_AFTER = 3
"""Consecutive failures at the end, none of which looks as if it could pass, after which the rest is left."""
SECONDS_ALONE = 5.0
"""Seconds that it goes on after the study's process has ended without a word."""
RESULTS_AT_ONCE, BATCHES_AT_ONCE = 500, 20
"""Results that are read together: so many, or what the writer takes in so many calls. After them it is time to look for more."""


@dataclass(frozen=True)
class FollowedStage:
    """A stage of pretraining: its run without metrics, the key of the state in which it ends, and its first step."""

    record: RunRecord
    state: str
    start: int


@dataclass(frozen=True)
class CellGroup:
    """The summary that a (model, task) gets: its parameters (`group_record`'s `about`), and its number of cells."""

    about: Mapping[str, str]
    cells: int
    limits: tuple[float, float]
    """The lowest and the highest possible main score."""


@dataclass(frozen=True)
class Backlog:
    """The number of runs that MLflow lacks, and the last error unless it has passed."""

    left: int
    error: str | None = None


class Follower:
    """Writer of a study's runs, summaries before cells; what cannot be written is tried again.

    Args:
        experiment: the name of the study's experiment.
        address: an MLflow tracking address.
    """

    def __init__(self, store: Path, experiment: str, address: str) -> None:
        self._store, self._experiment, self._address = store, experiment, address
        self._results_store = ResultsStore(store)
        # The study itself waits for an object store, and says so.
        self._results_store.availability.retry = RetryPolicy(0.0, silent=math.inf)
        self._open = ExitStack()
        self._writer: Writer | None = None
        self._queue: dict[str, RunRecord] = {}
        self._stages: dict[str, FollowedStage] = {}
        self._lines: dict[str, int] = defaultdict(int)  # lines of metrics of running stages that are written
        self._groups: Mapping[tuple[str, str], CellGroup] = {}
        self._rule = ""
        self._awaited: dict[tuple[str, str], ListedCell] = {}
        self._there: dict[tuple[str, str], list[ListedCell]] = defaultdict(list)  # cells with a result, by group
        # What the last look found.
        self._due: list[FollowedStage] = []
        self._whole: list[tuple[str, str]] = []
        self._ready: list[ListedCell] = []
        self._look_at = 0.0
        self._refused: dict[str, RunRecord] = {}
        self._final: set[str] = set()  # keys of runs that the study has told whole
        self._running: set[str] = set()  # keys of records whose runs this has marked as running
        self._stopped: Status | None = None  # the status for these
        self._until = math.inf  # when a stopped one leaves the rest
        self._error: str | None = None
        self._failures_in_a_row = self._hopeless_in_a_row = 0
        self.ended = False

    def put(self, records: Iterable[RunRecord]) -> None:
        """Take records to write, parents before their children; one replaces a queued one with its key."""
        for record in records:
            self._queue[record.key] = record
            self._refused.pop(record.key, None)
            if not record.running:
                self._final.add(record.key)

    def stages(self, stages: Iterable[FollowedStage]) -> None:
        """Follow stages of pretraining, by the metrics that they write and the states in which they end."""
        self._stages = {stage.state: stage for stage in stages}

    def groups(self, groups: Mapping[tuple[str, str], CellGroup], rule: str) -> None:
        """Summarise each (model, task) as soon as all of its cells are there.

        Args:
            rule: how the best learning rate is chosen (`analysis.selection`).
        """
        self._groups, self._rule = groups, rule

    def cells(self, cells: Iterable[ListedCell]) -> None:
        """Follow cells, besides those that are followed already."""
        there = {(cell.model, cell.key) for group in self._there.values() for cell in group}
        listed = {(cell.model, cell.key): cell for cell in cells}
        self._awaited |= {place: cell for place, cell in listed.items() if place not in there}

    def end(self) -> None:
        """Look a last time: what is in the store now is all that there will be."""
        self.ended, self._look_at = True, 0.0
        self._failures_in_a_row = self._hopeless_in_a_row = 0

    def stop(self, status: Status, seconds: float = math.inf) -> None:
        """Mark the runs that are not whole with `status`; then look a last time, and write what there is for some seconds."""
        self._stopped, self._until = status, min(self._until, time.monotonic() + seconds)
        self.end()

    @property
    def backlog(self) -> Backlog:
        """The records that MLflow lacks, as far as the last look found."""
        left = len(self._queue) + len(self._due) + len(self._ready) + len(self._refused)
        return Backlog(left, self._error)

    @property
    def over(self) -> bool:
        """Whether there is nothing more to do after the end, or nothing that is of use."""
        given_up = self._hopeless_in_a_row >= GIVE_UP_AFTER or time.monotonic() > self._until
        return self.ended and (given_up or (self._look_at > 0 and self._idle))

    @property
    def _idle(self) -> bool:
        left_running = self._stopped is not None and self._running
        return not (self._queue or self._due or self._whole or self._ready or left_running)

    def step(self) -> float:
        """Write a few records, or look for more; return the seconds until the next step."""
        try:
            self._end_running()
            if not self._look_at or (not self._queue and not self.ended and time.monotonic() >= self._look_at):
                self._look()
            if not self._queue:
                self.put(self._more())
            if self._queue:
                writer = self._opened()
                batch = list(islice(self._queue.values(), writer.at_once))
                self._write(batch, writer)
                for record in batch:
                    del self._queue[record.key]
                self._end_running()
        except Exception as error:  # whatever MLflow, its database, the network or the store raises stays here
            self._note(error)
            self._failures_in_a_row += 1
            self._hopeless_in_a_row = 0 if passing(error) else self._hopeless_in_a_row + 1
            return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (self._failures_in_a_row - 1))
        self._failures_in_a_row = self._hopeless_in_a_row = 0
        self._error = self._error if self._refused else None
        return max(0.0, self._look_at - time.monotonic()) if self._idle else 0.0

    def close(self) -> None:
        """Leave the database as MLflow searches it fastest."""
        with suppress(Exception):  # everything is written
            self._open.close()

    def _end_running(self) -> None:
        """Mark the runs of a study that has been stopped."""
        if self._stopped is not None and self._running:
            self._opened().end_running(self._running, self._stopped)
            self._running.clear()

    def _opened(self) -> Writer:
        if self._writer is None:
            self._writer = self._open.enter_context(writer_of(self._address, self._experiment, self._store))
        return self._writer

    def _write(self, batch: list[RunRecord], writer: Writer) -> None:
        """Write records; each of them alone if MLflow refuses one, so that a bad record doesn't hold up good ones."""
        self._running -= {record.key for record in batch if not record.running}
        self._running |= {record.key for record in batch if record.running}  # first, since a write may fail half-way
        try:
            writer.write(batch)
        except Exception as error:
            if not refused(error):
                raise
            if len(batch) == 1:
                self._refused[batch[0].key] = batch[0]
                self._note(error)
                self._write_bare(batch[0], writer)
            for record in batch if len(batch) > 1 else ():
                self._write([record], writer)

    def _write_bare(self, record: RunRecord, writer: Writer) -> None:
        """Write the run of a refused record without its content, so that its children's runs have a parent."""
        with suppress(Exception):  # then they have none, which only the view of them misses
            writer.write([RunRecord(record.key, record.name, record.parent_key, tags=record.tags, status="RUNNING")])
            self._running.add(record.key)

    def _note(self, error: Exception) -> None:
        self._error = " ".join(f"{type(error).__name__}: {error}".split())[:300]

    def _look(self) -> None:
        """Find the cells that have a result now."""
        began = time.monotonic()
        keys = self._results_store.keys() if self._awaited else set()
        for place, cell in [(place, cell) for place, cell in self._awaited.items() if cell.key in keys]:
            del self._awaited[place]
            self._ready.append(cell)
            group = cell.model, cell.task
            self._there[group].append(cell)
            if group in self._groups and len(self._there[group]) == self._groups[group].cells:
                self._whole.append(group)
        self._due = list(self._stages.values())
        now = time.monotonic()
        self._look_at = now + max(SECONDS_BETWEEN_LOOKS, (now - began) / SHARE_OF_LOOKS)

    def _more(self) -> list[RunRecord]:
        """Return the next records of what the last look found; none if that was all."""
        while self._due:
            began = time.monotonic()
            record = self._stage(self._due[0])
            self._look_at += (time.monotonic() - began) / SHARE_OF_LOOKS  # a long run's metrics take long to read
            del self._due[0]
            if record is not None:
                return [record]
        while self._whole:
            record, place = None, self._whole[0]
            if not self.ended:  # else the analysis of the whole study is there
                results = self._results(self._there[place])
                record = summary_of(self._experiment, place, self._groups[place], results, self._rule)
            del self._whole[0]
            if record is not None and record.key not in self._final:  # else the analysis of the whole study was faster
                return [record]
        a_call = 1 if self._writer is None else self._writer.at_once
        if not (cells := self._ready[: min(RESULTS_AT_ONCE, BATCHES_AT_ONCE * a_call)]):
            return []
        records = [cell_record(self._experiment, result, about=self._about(result)) for result in self._results(cells)]
        del self._ready[: len(cells)]
        return records

    def _stage(self, stage: FollowedStage) -> RunRecord | None:
        """Return a stage's run, with all its metrics if it has ended, else with those since the last time."""
        if states.exists(self._store, stage.state):
            with suppress(UserError):  # it is damaged, and trained again
                rows = [row for row in states.curve(self._store, stage.state) if row["step"] > stage.start]
                facts = states.describe(states.StoredState(self._store, stage.state).brought().folder).get("system", {})
                self._stages.pop(stage.state)
                return trained(stage.record, rows, facts)
        rows = []
        with suppress(UserError):  # a damaged line, which ends the stage
            rows = states.read_metrics(self._store / "runs" / stage.state / "metrics.jsonl")
        seen = self._lines[stage.state] if len(rows) >= self._lines[stage.state] else 0  # a restart drops lines
        self._lines[stage.state] = len(rows)
        return trained(stage.record, rows[seen:]) if rows[seen:] else None

    def _results(self, cells: list[ListedCell]) -> list[dict[str, Any]]:
        """Return the results of cells under the cells' names, without damaged ones, which end the study itself."""
        found: dict[str, dict[str, Any]] = {}
        try:
            found = self._results_store.find_all((cell.key for cell in cells), listed=True)
        except UserError:
            for cell in cells:
                with suppress(UserError):
                    found |= self._results_store.find_all([cell.key], listed=True)
        results = []
        for cell in cells:
            with suppress(UserError):  # it lacks the metric
                results += [named(found[cell.key], cell)] if cell.key in found else []
        return results

    def _about(self, result: Mapping[str, Any]) -> Mapping[str, str]:
        group = self._groups.get((result["model"], result["task"]))
        return {} if group is None else group.about


def summary_of(
    study: str, place: tuple[str, str], group: CellGroup, results: list[dict[str, Any]], rule: str
) -> RunRecord | None:
    """Return the run of a (model, task) whose cells are there; None if they cannot be analysed.

    It is marked as running until the analysis of the whole study adds what needs other models.
    """
    # Imported here: pandas takes half a second, which a study without new results need not wait for.
    from mlmclm.analysis.analyse import analyse
    from mlmclm.analysis.results import records
    from mlmclm.analysis.selection import best_rates
    from mlmclm.analysis.summary import task_metrics

    try:
        analysis = analyse(results, rule=rule, ranges={place[1]: group.limits})
    except MlmclmError:
        return None  # the analysis of the whole study meets the same error, and the user is told
    (best,) = records(analysis.best)
    return group_record(
        study,
        *place,
        about=group.about,
        metric=results[0]["metric"],
        rates=best_rates(best),
        note=best["note"],
        metrics=task_metrics(analysis)[place],
        results=results,
        status="RUNNING",
    )


def main() -> None:
    """Take messages from standard input until it ends; after the last one, write `Backlog` to standard output."""
    source, report = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever MLflow prints must not get between the driver and the reports
    messages: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()

    def receive() -> None:
        try:
            while True:
                messages.put(pickle.load(source))
        except (EOFError, pickle.UnpicklingError):  # the driver has ended, perhaps in the middle of a message
            messages.put(("stop", ("KILLED", SECONDS_ALONE)))

    threading.Thread(target=receive, daemon=True).start()
    first, (niceness, *given) = messages.get()
    if first != "begin":
        return
    # `ray job stop` sends it to all of a job's processes, and kills them three seconds later.
    signal.signal(signal.SIGTERM, lambda *_: messages.put(("stop", ("KILLED",))))
    os.nice(niceness)
    follower, pause, parent = Follower(*given), 0.0, os.getppid()
    while not follower.over:
        if os.getppid() != parent:  # the driver has ended, but a process that it forked holds the pipe open
            follower.stop("KILLED", SECONDS_ALONE)
        with suppress(queue.Empty):
            kind, value = messages.get(timeout=pause) if pause else messages.get_nowait()
            getattr(follower, kind)(*value)
        pause = follower.step()
        if follower.ended:
            with suppress(OSError):  # nobody listens
                pickle.dump(follower.backlog, report)
                report.flush()
    follower.close()

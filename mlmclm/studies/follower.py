"""The process that writes a study's runs to MLflow: every few seconds it searches the study's folder, states and results for what MLflow lacks.

It takes neither the driver's time nor its memory, and can be killed at any moment; the next one continues where it stopped. It reads from
the study's folder what to follow, and how the study has ended. A study that has not ended, and whose lock nobody holds, was killed. However
a study ends, none of its runs stays marked as running.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from mlmclm.errors import MlmclmError, UserError
from mlmclm.numbers import plural
from mlmclm.pretraining import states
from mlmclm.progress import SECONDS_OF_SILENCE, Bar, say
from mlmclm.storage.files import is_locked, write_atomic
from mlmclm.storage.place import LOCK, STUDIES
from mlmclm.storage.retrying import RetryPolicy
from mlmclm.storage.unchanged import Mark, mark_of
from mlmclm.sweeps.cells import ListedCell, named_result
from mlmclm.sweeps.manifest import FILE as CELLS
from mlmclm.sweeps.manifest import read_manifest
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.tasks.declaration import FAMILIES
from mlmclm.tracking.address import VARIABLE, default_address
from mlmclm.tracking.experiment import writer_of
from mlmclm.tracking.failures import passing, refused
from mlmclm.tracking.records import RunRecord, Status
from mlmclm.tracking.saved_views import experiment_links
from mlmclm.tracking.views import cell_record, group_key, group_record, trained
from mlmclm.tracking.writer import Writer, chunks

if TYPE_CHECKING:
    from mlmclm.analysis.analyse import Analysis

SECONDS_BETWEEN_LOOKS, SHARE_OF_LOOKS = 2.0, 0.05
"""Minimum seconds between two searches of the store, and the maximum share of the time that searches take."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds between attempts while nothing can be written; the pause doubles each time."""
GIVE_UP_AFTER = 3
"""Number of consecutive failures, none apparently temporary, after which the rest of a study that has ended is not written."""
Pair = tuple[str, str]
"""Model and task."""
FILE = "runs.json"
PROGRAM = (
    "import signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); "  # until `main` handles it
    "sys.path.insert(0, sys.argv.pop(1)); import mlmclm; del sys.path[0]; "
    "from mlmclm.studies.follower import main; main()"
)
PACKAGE = str(Path(__file__).parents[2])
"""First argument of `PROGRAM`, which the process runs: the folder of this package, which a notebook may have only in its own `sys.path`."""
NICE = 19
"""Added to the process's niceness while the study runs, so that the sweep has priority if all cores are busy. Ray's workers have a niceness
of 15."""
SECONDS_BETWEEN_READS = 0.25
OWN_TIMEOUT, TIMEOUT = RetryPolicy().seconds, 120.0
"""Seconds in which no run is written and after which the process gives up, once the study has ended: for the store's own database, and for
another address. The next run or `mlmclm tracking sync` writes the rest."""
LIMIT_AFTER_ERROR = 5.0
"""Seconds that the process continues after the study fails, is interrupted or is killed; few, as the user waits for the error's message."""
LIMIT_IF_TERMINATED = 1.0
SECONDS_TO_END = 2.0
"""Seconds after these limits in which the process can mark runs as killed and report what is missing, before it is killed itself."""


@dataclass(frozen=True)
class FollowedStage:
    """A stage of pretraining: its run without metrics, the key of the state in which it ends, and its first step."""

    record: RunRecord
    state: str
    start: int


@dataclass(frozen=True)
class TrackedStudy:
    """The runs of a study for trackers, without the data that its states and results contain: its file `runs.json`, and its cells.

    Attributes:
        status: how it ended, or `RUNNING`.
        stages: stages of pretraining; the metrics that they write and the states in which they end show how far they are.
        records: other runs as they are now, parents before their children.
        sources: where the data of each task are (`records.DataSet`).
        rule: how the best learning rate is chosen (`analysis.selection`).
        cells: the cells of models that have a run, from the study's manifest rather than `runs.json`. A (model, task) is summarised as soon
            as it has all results.
    """

    status: Status = "RUNNING"
    stages: tuple[FollowedStage, ...] = ()
    records: tuple[RunRecord, ...] = ()
    sources: Mapping[str, str | Mapping[str, str]] = field(default_factory=dict)
    rule: str = "mean"
    cells: tuple[ListedCell, ...] = ()

    @property
    def abouts(self) -> dict[str, Mapping[str, str]]:
        """The parameters of each model, which the runs of its cells have too."""
        return {run.params["model"]: run.params for run in self.records if run.tags.get("mlmclm.kind") == "model"}

    @property
    def stopped(self) -> bool:
        """Whether it ended before it was complete."""
        return self.status in ("FAILED", "KILLED")


_FILE: TypeAdapter[TrackedStudy] = TypeAdapter(TrackedStudy)


def write_runs(folder: Path, study: TrackedStudy) -> None:
    """Write what `read_runs` reads to the study's folder; an `EnvironmentFault` if the disk is full or not writable."""
    write_atomic(folder / FILE, _FILE.dump_json(study))


def read_runs(store: Path, name: str) -> TrackedStudy:
    """Return a study as the files in its folder describe it.

    Raises:
        OSError, ValueError: `runs.json` is missing, or somebody has edited it.
    """
    study = _FILE.validate_json((store / STUDIES / name / FILE).read_bytes())
    with suppress(UserError):  # no list yet, or a damaged one, which the study itself reports
        cells, abouts = read_manifest(name, store).cells, study.abouts
        study = replace(study, cells=tuple(cell for cell in cells if cell.model in abouts))
    return study


class Follower:
    """Writer of a study's runs, summaries before cells; what cannot be written is tried again.

    Args:
        name: the study's, and that of its experiment.
        address: an MLflow tracking address.
        shown: the address at which its runs are seen.
    """

    def __init__(self, store: Path, name: str, study: TrackedStudy, address: str, shown: str = "") -> None:
        self._study = self._latest = study
        self._store, self._name, self._address, self._shown = store, name, address, shown
        self._news = threading.Event()
        self._results_store = ResultsStore(store)
        # No retries: the study itself waits for an object store, and reports that.
        self._results_store.availability.retry = RetryPolicy(0.0, silent=math.inf)
        self._open = ExitStack()
        self._writer: Writer | None = None
        # Written so far: the study's own records; the number of lines of metrics by stage (-1: all, and the stage's end);
        # models and keys of cells; the number of cells by summary.
        self._records: dict[str, RunRecord] = {}
        self._lines: dict[str, int] = defaultdict(int)
        self._cells: set[tuple[str, str]] = set()
        self._summaries: dict[Pair, int] = {}
        self._refused: set[str] = set()  # keys of records that MLflow refuses
        self._running: set[str] = set()  # keys of records whose runs this has marked as running
        self._batches: Iterator[Sequence[RunRecord]] | None = None
        self._idle = False  # whether the last look's records are written
        self._left = 0  # number of records to write; each stage that has not ended counts as one
        self._look_at = 0.0
        self._error: str | None = None
        self._failures_in_a_row = self._hopeless_in_a_row = 0

    def take(self, study: TrackedStudy) -> None:
        """Follow the study as it is now; any thread may call this."""
        self._latest = study
        self._news.set()

    def run(self) -> None:
        """Follow the study until it is `over`."""
        pause = 0.0
        while not self.over:
            self._news.wait(pause)
            self._news.clear()
            pause = self.step()
        with suppress(Exception):  # all is written; closing optimises the database for MLflow's searches
            self._open.close()

    @property
    def backlog(self) -> tuple[int, str | None]:
        """The number of runs that MLflow lacks according to the last search, and the last error unless it has passed."""
        return self._left + len(self._refused), self._error

    @property
    def over(self) -> bool:
        """Whether the study has ended and all of it is written, or further attempts are of no use."""
        done = self._idle and not (self._study.stopped and self._running)
        given_up = self._hopeless_in_a_row >= GIVE_UP_AFTER
        return self._latest is self._study and self._study.status != "RUNNING" and (done or given_up)

    def step(self) -> float:
        """Write some records, or look for more; return the seconds until the next step."""
        try:
            if self._latest is not self._study:
                self._study, self._batches = self._latest, None
                self._failures_in_a_row = self._hopeless_in_a_row = 0
            if self._study.stopped and self._running:
                self._opened().end_running(self._running, self._study.status)
                self._running.clear()
            if self._batches is None:
                self._batches = self._look()
            batch = next(self._batches, None)
            if batch is None:
                self._batches = None
            elif batch:
                self._write(batch, self._opened())
            self._idle = batch is None and not self._left
        except Exception as error:  # no error of MLflow, its database, the network or the store ends this
            self._note(error)
            self._batches, self._idle = None, False
            self._failures_in_a_row += 1
            self._hopeless_in_a_row = 0 if passing(error) else self._hopeless_in_a_row + 1
            return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (self._failures_in_a_row - 1))
        self._failures_in_a_row = self._hopeless_in_a_row = 0
        self._error = self._error if self._refused else None
        return max(0.0, self._look_at - time.monotonic()) if self._idle and self._study.status == "RUNNING" else 0.0

    def _opened(self) -> Writer:
        if self._writer is None:
            self._writer = self._open.enter_context(writer_of(self._address, self._name, self._store))
            if self._shown.startswith("http"):
                say(f"MLflow: {experiment_links(self._shown, {self._name: self._writer.experiment})[self._name]}")
        return self._writer

    def _write(self, batch: Sequence[RunRecord], writer: Writer) -> None:
        """Write records; each of them alone if MLflow refuses one, so that a bad record doesn't hold up good ones."""
        keys = {record.key for record in batch}
        self._refused -= keys
        self._running -= keys
        self._running |= {record.key for record in batch if record.running}  # first, since a write may fail half-way
        try:
            writer.write(batch)
        except Exception as error:
            if not refused(error):
                raise
            if len(batch) > 1:
                for record in batch:
                    self._write([record], writer)
                return
            self._refused |= keys
            self._note(error)
            (record,) = batch
            bare = RunRecord(record.key, record.name, record.parent_key, tags=record.tags, status="RUNNING")
            with suppress(Exception):  # without it, children have no parent run, which only changes their display
                writer.write([bare])
                self._running |= keys

    def _note(self, error: Exception) -> None:
        self._error = " ".join(f"{type(error).__name__}: {error}".split())[:300]

    def _look(self) -> Iterator[Sequence[RunRecord]]:
        """Find what MLflow lacks, and yield it in batches; the caller writes each one before it asks for the next."""
        began, study = time.monotonic(), self._study
        changed = [record for record in study.records if self._records.get(record.key) != record]
        stages = [stage for stage in study.stages if self._lines[stage.state] >= 0]
        unwritten = [cell for cell in study.cells if (cell.model, cell.key) not in self._cells]
        keys = self._results_store.keys() if unwritten else set()
        ready = [cell for cell in unwritten if cell.key in keys]
        self._left = len(changed) + len(stages) + len(ready)
        now = time.monotonic()
        self._look_at = now + max(SECONDS_BETWEEN_LOOKS, (now - began) / SHARE_OF_LOOKS)
        size = self._opened().at_once if self._left else 1
        for batch in chunks(changed, size):
            yield batch
            self._records |= {record.key: record for record in batch}
            self._left -= len(batch)
        for stage in stages:
            began = time.monotonic()
            record, lines = self._stage(stage)
            self._look_at += (time.monotonic() - began) / SHARE_OF_LOOKS  # a long run's metrics take long to read
            yield [record] if record is not None else []
            self._lines[stage.state] = lines
            self._left -= 1
        cells: dict[Pair, list[ListedCell]] = defaultdict(list)
        for cell in study.cells:
            cells[cell.model, cell.task].append(cell)
        incomplete = {(cell.model, cell.task) for cell in unwritten if cell.key not in keys}
        for pair in list(cells) if study.status == "RUNNING" else ():
            summary = self._records.get(group_key(self._name, *pair))
            due = pair not in incomplete and len(cells[pair]) != self._summaries.get(pair, 0)
            if due and (summary is None or summary.running):  # else the analysis of the whole study has written it
                yield summary_of(self._name, study, self._results(cells[pair]))
                self._summaries[pair] = len(cells[pair])
        for batch in chunks(ready, size):
            yield self._cell_runs(batch)
            self._cells |= {(cell.model, cell.key) for cell in batch}
            self._left -= len(batch)
            if time.monotonic() >= self._look_at:  # a stage may have more metrics
                return

    def _stage(self, stage: FollowedStage) -> tuple[RunRecord | None, int]:
        """Return a stage's run with all metrics, and -1, if it has ended; else its run with new metrics, if any, and the number of all so far."""
        store = self._store
        if states.exists(store, stage.state):
            with suppress(UserError):  # a damaged state, which is trained again
                rows = [row for row in states.curve(store, stage.state) if row["step"] > stage.start]
                facts = states.read_description(states.StoredState(store, stage.state).brought().folder).get(
                    "system", {}
                )
                return trained(stage.record, rows, facts), -1
        rows = []
        with suppress(UserError):  # a damaged line, which ends the stage
            rows = states.read_metrics(store / "runs" / stage.state / "metrics.jsonl")
        seen = self._lines[stage.state] if len(rows) >= self._lines[stage.state] else 0  # a restart drops lines
        return trained(stage.record, rows[seen:]) if rows[seen:] else None, len(rows)

    def _cell_runs(self, cells: Sequence[ListedCell]) -> list[RunRecord]:
        abouts = self._study.abouts
        return [
            cell_record(self._name, row, about={**abouts.get(row["model"], {}), "family": row["family"]})
            for row in self._results(cells)
        ]

    def _results(self, cells: Sequence[ListedCell]) -> list[dict[str, Any]]:
        """Return the results of cells under the cells' names, without damaged results, which the study itself reports."""
        try:
            by_key = self._results_store.find_all((cell.key for cell in cells), listed=True)
            return [named_result(by_key[cell.key], cell) for cell in cells if cell.key in by_key]
        except UserError:  # one is damaged, or lacks the metric
            return [result for cell in cells for result in self._results([cell])] if len(cells) > 1 else []


def all_runs(store: Path, name: str) -> list[RunRecord]:
    """Return the runs of a study that has ended as MLflow gets them, parents before their children."""
    follower = Follower(store, name, study := read_runs(store, name), "")
    stages = [record for stage in study.stages for record, _ in [follower._stage(stage)] if record is not None]
    return [*study.records, *stages, *follower._cell_runs(study.cells)]


def summary_of(name: str, study: TrackedStudy, results: list[dict[str, Any]]) -> list[RunRecord]:
    """Return the run of a (model, task) whose cells have results; none if these cannot be analysed.

    It is marked as running until the analysis of the whole study adds what needs other models.
    """
    # Imported here: pandas takes half a second, which a study without new results need not wait for.
    from mlmclm.analysis.analyse import analyse

    # A family of tasks from a notebook is unknown in this process, so its scores have the range `ANY_SCORE` until the whole study is analysed.
    typed = [(row, family) for row in results[:1] if (family := FAMILIES.find(row["family"])) is not None]
    ranges = {row["task"]: family.score_range(row["metric"]) for row, family in typed}
    try:
        return summaries(name, study, analyse(results, rule=study.rule, ranges=ranges), results, status="RUNNING")
    except MlmclmError:
        return []  # the analysis of the whole study meets the same error, and the user is told


def summaries(
    name: str,
    study: TrackedStudy,
    analysis: Analysis,
    results: Sequence[Mapping[str, Any]],
    *,
    verdicts: Mapping[Pair, str] | None = None,
    status: Status = "FINISHED",
) -> list[RunRecord]:
    """Return the run of each analysed (model, task); arguments as of `group_record`.

    Args:
        results: the results that were analysed.
    """
    from mlmclm.analysis.results import records
    from mlmclm.analysis.selection import best_rates
    from mlmclm.analysis.summary import task_metrics

    rows = defaultdict[Pair, list[Mapping[str, Any]]](list)
    for row in results:
        rows[row["model"], row["task"]].append(row)
    best = {(row["model"], row["task"]): row for row in records(analysis.best)}
    abouts, families = study.abouts, analysis.families  # "" for a task without any result
    return [
        group_record(
            name,
            *pair,
            about={**abouts.get(pair[0], {}), **({"family": families[pair[1]]} if families[pair[1]] else {})},
            source=study.sources.get(pair[1], ""),
            metric=rows[pair][0]["metric"] if rows[pair] else "",
            rates=best_rates(best[pair]),
            note=best[pair]["note"],
            verdict=(verdicts or {}).get(pair, ""),
            metrics=metrics,
            results=rows[pair],
            status=status,
        )
        for pair, metrics in task_metrics(analysis).items()
    ]


@contextmanager
def following(
    store: Path,
    name: str,
    address: str,
    shown: str,
    *,
    on_end: Callable[[Status], None] = lambda status: None,
    niceness: int = NICE,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `mlmclm tracking sync STUDY --follow` as a process; nothing is lost if it is killed.

    The end of the block waits until MLflow has everything or the time is up. It then ends the process, which has reported what is missing.

    Args:
        name: the study's.
        address: an MLflow tracking address.
        shown: the address at which its runs are seen.
        on_end: a function that writes how the study has ended; by default another process writes it.
        niceness: added to the process's own until the driver waits for it.
    """
    process = subprocess.Popen(
        # -P: a file in the working directory must not shadow a module of the standard library.
        [sys.executable, "-P", "-c", PROGRAM, PACKAGE, str(store), name, shown, str(niceness)],
        # The address is not on the command line, where other users could read its password.
        env={**os.environ, VARIABLE: address},
        stdin=subprocess.DEVNULL,
        stdout=2,  # whatever MLflow prints must not get between the command's results
        start_new_session=True,  # Ctrl-C reaches the driver alone, which then ends this process
    )
    limit: float | None = None
    status: Status = "FINISHED"
    try:
        yield process
    except BaseException as error:
        limit, status = LIMIT_AFTER_ERROR + SECONDS_TO_END, "FAILED" if isinstance(error, Exception) else "KILLED"
        raise
    finally:
        with suppress(OSError):  # only root may do so, and the process may have ended
            os.setpriority(os.PRIO_PROCESS, process.pid, os.getpriority(os.PRIO_PROCESS, 0))
        reason = "interrupted"
        try:
            on_end(status)
            code = process.wait(limit)
            reason = f"the process that writes to MLflow ended by itself, with exit code {code}"
        except subprocess.TimeoutExpired:
            reason = f"not finished within {limit:g} s"
        except BaseException:
            process.terminate()  # so that it marks its unfinished runs
            with suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS_TO_END)
            raise
        finally:
            process.kill()  # safe at any moment, since it writes whole runs or none
            if process.wait():
                say_missing(shown, "some runs", reason)


def say_missing(shown: str, what: str, reason: str) -> None:
    """Say that MLflow lacks runs, and the remedy."""
    say(
        f"MLflow at {shown} lacks {what} ({reason}). Nothing is lost: the results are in the store, and the same "
        "command run again, or `mlmclm tracking sync STUDY.yaml`, writes what is missing."
    )


def main() -> None:
    """Write what MLflow lacks of a study, with a progress bar once the study has ended, and report what is missing: the process's main function."""
    store, name, shown, niceness = Path(sys.argv[1]), *sys.argv[2:4], int(sys.argv[4])
    address, folder = os.environ[VARIABLE], store / STUDIES / name
    timeout = OWN_TIMEOUT if address == default_address(store) else TIMEOUT
    terminated: list[int] = []
    # `ray job stop` sends SIGTERM to all of a job's processes, and kills them three seconds later.
    signal.signal(signal.SIGTERM, lambda number, _: terminated.append(number))
    os.nice(niceness)
    study, seen = TrackedStudy(), list[Mark]()
    follower = Follower(store, name, study, address, shown)
    thread = threading.Thread(target=follower.run, daemon=True)
    thread.start()
    changed_at = progress_at = time.monotonic()
    left, total, reason = -1, 0, ""
    with ExitStack() as stack:
        bar: Bar | None = None
        while thread.is_alive() and not reason:
            # The lock is checked first: the driver releases it after it has written how the study ended.
            now, previous, working = time.monotonic(), study, is_locked(folder / LOCK)
            if study.status == "RUNNING":
                progress_at, total = now, 0
                with suppress(OSError, ValueError):  # somebody deletes or edits the files
                    # The marks are taken before the files are read, because the driver may write these in between.
                    marks = [mark_of(path.stat()) for path in (folder / FILE, folder / CELLS) if path.exists()]
                    if marks != seen:
                        study, seen = read_runs(store, name), marks
            if (terminated or (study.status == "RUNNING" and not working)) and study.status != "KILLED":
                study = replace(study, status="KILLED")
            if study is not previous:
                changed_at = now
                follower.take(study)
            limit = LIMIT_IF_TERMINATED if terminated else LIMIT_AFTER_ERROR if study.stopped else math.inf
            backlog, error = follower.backlog
            total = max(total, backlog)
            if backlog != left:
                progress_at, left = now, backlog
            if now - changed_at > limit:
                reason = "interrupted" if terminated else f"not finished within {limit:g} s"
            elif now - progress_at > timeout:
                reason = f"nothing was written for {timeout:g} s"
            elif bar is None and left and study.status != "RUNNING" and now - changed_at > SECONDS_OF_SILENCE:
                title = "MLflow, one run a cell (Ctrl-C leaves them for later)"
                bar = stack.enter_context(Bar(title, total, unit="runs"))
            if bar is not None:
                bar.update(total - left, total, note=f"trying again ({error})" if error else "")
            thread.join(SECONDS_BETWEEN_READS)
        left, error = follower.backlog
        if bar is not None:
            bar.complete = not left
    if left:
        say_missing(shown, plural(left, "run"), error or reason)
    os._exit(0)  # the follower may still wait for an answer

"""How far a sweep is, from its manifest, the results store, leases and notes of failures; without Ray, models or data."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from mlmclm.errors import UserError, unknown
from mlmclm.results.metrics import metric_parts, value_of
from mlmclm.seeds import Seeds
from mlmclm.storage.leases import Holder
from mlmclm.sweeps.cell_failures import FailureNote, failure_notes
from mlmclm.sweeps.cells import ListedCell
from mlmclm.sweeps.manifest import Manifest
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.sweeps.table import SweepTable

STATUSES = ("ok", "diverged", "damaged", "running", "failed", "missing")
"""Status of a cell: with a result (three kinds), leased by a process, failed without a result, or none of these."""
AGAIN = ("damaged", "diverged")
"""Statuses whose results can be chosen to be computed again; any other result is chosen by its key."""
RATE_SECONDS = 3600.0
"""Length in seconds of the window, up to the last result, over which the rate is computed."""
READ_AT_ONCE = 500
"""Number of results that are read together, from an object store in parallel, before their unneeded parts are dropped."""
KEPT = ("status", "scores", "cost", "steps", "tokens", "diverged_step")
"""Entries of a result that are kept in memory, of up to 20,000 results."""


@dataclass(frozen=True)
class CellState:
    """A cell and its state, one of `STATUSES`: at most one of `result`, `damage`, `holder` and `failure` is set."""

    cell: ListedCell
    status: str
    result: Mapping[str, Any] | None = None
    """The entries `KEPT` of the result."""
    damage: str | None = None
    """The message about a damaged result."""
    holder: Holder | None = None
    failure: FailureNote | None = None

    def score(self, split: str) -> float | None:
        """Return the sweep's main metric on a split; None if the result lacks it."""
        scores = ((self.result or {}).get("scores") or {}).get(split) or {}
        complete = all(name in scores for name in metric_parts(self.cell.metric))
        return value_of(scores, self.cell.metric) if complete else None

    def row(self) -> dict[str, Any]:
        """Return the cell and its state as a flat row; a score is a fraction, a duration is in seconds."""
        cell, cost = self.cell, (self.result or {}).get("cost") or {}
        seed = Seeds.of(cell.seed).simplest()
        node = str(cost.get("worker", "")).partition("/")[0]
        if self.holder is not None:
            node = self.holder.host
        elif self.failure is not None:
            node = self.failure.node
        return {
            "name": cell.name,
            "key": cell.key,
            "model": cell.model,
            "task": cell.task,
            "setting": cell.setting,
            "learning_rate": cell.learning_rate,
            "seed": seed if isinstance(seed, int) else str(seed),
            "status": self.status,
            "metric": cell.metric,
            "validation_score": self.score("validation"),
            "score": self.score("test"),
            "seconds": cost.get("seconds"),
            "finished": cost.get("finished"),
            "node": node or None,
            "started_from": cell.start,
            "error": self.damage or (self.failure.reason if self.failure else None),
        }


@dataclass(frozen=True)
class SweepStatus:
    """The states of all cells at one time. A cell under two names of a model counts for each name."""

    manifest: Manifest
    states: tuple[CellState, ...]

    @cached_property
    def counts(self) -> Counter[str]:
        """Number of cells by status."""
        return Counter(state.status for state in self.states)

    @property
    def done(self) -> int:
        """Number of cells with a usable result."""
        return self.counts["ok"] + self.counts["diverged"]

    @property
    def total(self) -> int:
        """Number of all cells, including those that have no key yet."""
        return len(self.states) + sum(self.manifest.waiting.values())

    @property
    def complete(self) -> bool:
        """Whether every cell has a result."""
        return self.done == self.total

    def by_pair(self) -> dict[tuple[str, str], Counter[str]]:
        """Return the number of cells by status for each model and task, in the sweep's order."""
        pairs: dict[tuple[str, str], Counter[str]] = {}
        for state in self.states:
            pairs.setdefault((state.cell.model, state.cell.task), Counter())[state.status] += 1
        return pairs

    @cached_property
    def rate(self) -> float | None:
        """Results per second since the sweep was last started, over at most the last hour of results; None while unknown."""
        costs = {state.cell.key: state.result["cost"] or {} for state in self.states if state.result is not None}
        finished = (_instant(cost.get("finished")) for cost in costs.values())
        return rate(finished, since=_instant(self.manifest.planned))

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds until the last cell is done; None if none is running, or while the rate is unknown."""
        return (self.total - self.done) / self.rate if self.rate and self.counts["running"] else None

    def errors(self) -> list[CellState]:
        """Return the damaged and failed cells, the latest failure first."""
        wrong = [state for state in self.states if state.status in ("damaged", "failed")]
        return sorted(wrong, key=lambda state: state.failure.time if state.failure else "", reverse=True)

    def chosen(
        self, models: Collection[str] = (), tasks: Collection[str] = (), statuses: Collection[str] = ()
    ) -> list[CellState]:
        """Return the states of these models, tasks and statuses (empty for all); raise a `UserError` for an unknown value."""
        filters = {
            "model": (models, dict.fromkeys(state.cell.model for state in self.states)),
            "task": (tasks, dict.fromkeys(state.cell.task for state in self.states)),
            "status": (statuses, STATUSES),
        }
        for kind, (asked, allowed) in filters.items():
            for value in asked:
                if value not in allowed:
                    raise unknown(kind, value, allowed, where=f"--{kind}")
        return [
            state
            for state in self.states
            if (not models or state.cell.model in models)
            and (not tasks or state.cell.task in tasks)
            and (not statuses or state.status in statuses)
        ]

    def again(
        self, cells: Iterable[str], statuses: Iterable[str], *, models: Collection[str], tasks: Collection[str]
    ) -> dict[str, str]:
        """Return key and name of results to compute again, of these models and tasks.

        Args:
            cells: keys, first digits of keys, or names; each must match one result.
            statuses: of `AGAIN`.
        """
        statuses = list(statuses)
        for value in statuses:
            if value not in AGAIN:
                raise unknown("status", value, AGAIN, where="--status")
        finished = [state for state in self.chosen(models, tasks) if state.status in ("ok", *AGAIN)]
        names = {state.cell.key: state.cell.name for state in finished if state.status in statuses}
        for text in cells:
            hits = {
                state.cell.key: state.cell.name
                for state in finished
                if text == state.cell.name or state.cell.key.startswith(text)
            }
            if len(hits) != 1:
                count = f"{len(hits)} results match" if hits else "no result matches"
                raise UserError(f"--cell {text}: {count}; `mlmclm sweep cells` lists names and keys.")
            names |= hits
        return names

    def table(self) -> SweepTable:
        """Return the table that a running sweep shows."""
        table = SweepTable(state.cell for state in self.states)
        for state in self.states:
            cell = state.cell
            if state.holder is not None:
                since = 0.0 if state.holder.since is None else time.time() - state.holder.since
                table.started(cell, f"process {state.holder.process} on {state.holder.host}", seconds=since)
            elif state.status in ("failed", "damaged"):
                table.started(cell, "")
                table.stopped(cell, failed=True)
            elif state.result is not None:
                names = {"model": cell.model, "task": cell.task, "setting": cell.setting, "metric": cell.metric}
                ok = state.score("validation") is not None
                table.add({**state.result, **names, "learning_rate": cell.learning_rate,
                           "status": state.status if ok else "diverged"})  # fmt: skip
        return table


class Watch:
    """Looks at a sweep again and again; each result is read once."""

    def __init__(self, manifest: Manifest, results_store: ResultsStore) -> None:
        self._manifest, self._results_store = manifest, results_store
        self._results: dict[str, dict[str, Any]] = {}

    def look(self) -> SweepStatus:
        """Return the present states.

        Raises:
            EnvironmentFault: the store cannot be read.
        """
        # Leases first: a cell whose lease ends in between has its result by then.
        holders = self._results_store.holders()
        damages = self._read(self._results_store.keys())
        failed = failure_notes(self._results_store.folder)
        states = []
        for cell in self._manifest.cells:
            result, holder = self._results.get(cell.key), holders.get(cell.key)
            if result is not None:
                states.append(CellState(cell, result["status"], result))
            elif cell.key in damages:
                states.append(CellState(cell, "damaged", damage=damages[cell.key]))
            elif holder is not None and holder.alive:
                states.append(CellState(cell, "running", holder=holder))
            elif cell.key in failed:
                states.append(CellState(cell, "failed", failure=failed[cell.key]))
            else:
                states.append(CellState(cell, "missing"))
        return SweepStatus(self._manifest, tuple(states))

    def _read(self, filed: set[str]) -> dict[str, str]:
        """Read new results, forget deleted ones, and return the messages about damaged ones."""
        for gone in self._results.keys() - filed:
            del self._results[gone]
        damages: dict[str, str] = {}
        keys = dict.fromkeys(cell.key for cell in self._manifest.cells)
        new = [key for key in keys if key in filed and key not in self._results]
        for start in range(0, len(new), READ_AT_ONCE):
            part = new[start : start + READ_AT_ONCE]
            try:
                results = self._results_store.find_all(part)
            except UserError:  # some are damaged
                results = {key: result for key in part if (result := self._find(key, damages)) is not None}
            for key, result in results.items():
                self._results[key] = {name: result.get(name) for name in KEPT}
        return damages

    def _find(self, key: str, damages: dict[str, str]) -> dict[str, Any] | None:
        try:
            return self._results_store.find(key)
        except UserError as error:
            damages[key] = str(error)
            return None


def rate(finished: Iterable[float], *, since: float = 0.0) -> float | None:
    """Return the number of results per second, from their times in seconds; None if fewer than two count.

    Results from before `since`, or from more than `RATE_SECONDS` before the last one, don't count.
    """
    times = sorted(at for at in finished if at >= since)
    times = [at for at in times if at > times[-1] - RATE_SECONDS]
    if len(times) < 2 or times[-1] == times[0]:
        return None
    return (len(times) - 1) / (times[-1] - times[0])


def _instant(text: Any) -> float:
    """Return an ISO time in seconds since the epoch, or 0 if the text is no time."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError):
        return 0.0

"""Summaries of a running sweep: a (model, task) is summarised as soon as all of its cells are done."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlmclm.errors import MlmclmError
from mlmclm.tracking.records import RunRecord
from mlmclm.tracking.views import group_record


@dataclass(frozen=True)
class CellGroup:
    """The summary that a (model, task) gets: its parameters (`group_record`'s `about`), and its number of cells."""

    about: Mapping[str, str]
    cells: int
    limits: tuple[float, float]
    """The lowest and the highest possible main score."""


class Summaries:
    """The summaries of a sweep that is running.

    Args:
        study: the study's name.
        groups: its (model, task) pairs.
        rule: how the best learning rate is chosen (`analysis.selection`).
    """

    def __init__(self, study: str, groups: Mapping[tuple[str, str], CellGroup], rule: str) -> None:
        self._study, self._groups, self._rule = study, groups, rule
        self._results: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)

    def about(self, result: Mapping[str, Any]) -> Mapping[str, str]:
        """Return the parameters that a result's summary has from the study; none if it belongs to no announced sweep."""
        group = self._groups.get((result["model"], result["task"]))
        return {} if group is None else group.about

    def add(self, result: Mapping[str, Any]) -> RunRecord | None:
        """Add a cell's result; return the summary of its (model, task) if this was the last cell.

        The summary is still marked as running, because the analysis of the whole study adds what needs other models.
        """
        pair = result["model"], result["task"]
        group = self._groups.get(pair)
        if group is None:
            return None
        self._results[pair].append(result)
        if len(self._results[pair]) < group.cells:
            return None
        # Imported here: pandas takes half a second, which a command that only announces a sweep need not wait for.
        from mlmclm.analysis.analyse import analyse
        from mlmclm.analysis.results import records
        from mlmclm.analysis.selection import best_rates
        from mlmclm.analysis.summary import task_metrics

        results = self._results.pop(pair)
        try:
            analysis = analyse([dict(one) for one in results], rule=self._rule, ranges={pair[1]: group.limits})
        except MlmclmError:
            return None  # the analysis of the whole study meets the same error, and the user is told
        (best,) = records(analysis.best)
        return group_record(
            self._study,
            *pair,
            about=group.about,
            metric=results[0]["metric"],
            rates=best_rates(best),
            note=best["note"],
            metrics=task_metrics(analysis)[pair],
            results=results,
            status="RUNNING",
        )

"""The comparison of two models, or of two cells, example by example of the test splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mlmclm.errors import UserError
from mlmclm.progress import Bar
from mlmclm.results.examples import KeptExamples
from mlmclm.studies.place import Place
from mlmclm.sweeps.ledger import Ledger
from mlmclm.tasks.family import family_of

if TYPE_CHECKING:
    from mlmclm.analysis.analyse import Analysis

Sides = dict[str, tuple[str, Sequence[KeptExamples], Sequence[KeptExamples]]]
"""Task -> main score, and the examples of both sides' cells, seed by seed."""


@dataclass(frozen=True)
class ComparisonOfModels:
    """Two models, or two cells, on the same test examples.

    Attributes:
        rows: for each task, the difference of the scores (first minus second) with a paired bootstrap interval and a paired
            test (`analysis.pairs.compare`), and the learning rates.
        left_out: task -> why it is left out.
    """

    rows: list[dict[str, Any]]
    left_out: dict[str, str]


def compare_cells(first: str, second: str, place: Place, *, metric: str | None = None) -> ComparisonOfModels:
    """Compare two cells, given by their keys.

    Args:
        metric: a score in place of the main one.

    Raises:
        UserError: there is no such result, or the cells have no score in common.
    """
    ledger, results = Ledger(place.store), []
    for key in (first, second):
        result = ledger.find(key)
        if result is None:
            raise UserError(
                f"{key}: {ledger.folder} has no result of that key; to compare models by name, give --study NAME."
            )
        results.append(result)
    metrics = [result["metric"] for result in results]
    if metric is None and metrics[0] != metrics[1]:
        raise UserError(f"the cells have different main scores ({metrics[0]}, {metrics[1]}): choose one with --metric.")
    one, other = (ledger.examples(result) for result in results)
    return ComparisonOfModels(compare_sides({results[0]["task"]: (metrics[0], [one], [other])}, metric), {})


def compare_sides(sides: Sides, metric: str | None, analysis: Analysis | None = None) -> list[dict[str, Any]]:
    """Return the rows of a `ComparisonOfModels`; `analysis` is that of the models' study."""
    from mlmclm.analysis.pairs import compare
    from mlmclm.results.resampling import RESAMPLES

    rows: list[dict[str, Any]] = []
    with Bar("comparing", 2 * RESAMPLES * len(sides), unit="resamples") as bar:
        for number, (name, (main, ones, others)) in enumerate(sides.items(), 1):
            rates = _rates("first", ones) | _rates("second", others)
            family = family_of(ones[0].result)
            pair = compare(
                ones,
                others,
                metric=metric or main,
                measures=family.measured,
                gold=family.gold_columns,
                observer=lambda count: bar.update(bar.done + count),
            )
            # McNemar's test draws no permutations, so the observer stops short of this task's share.
            bar.update(2 * RESAMPLES * number)
            rows.append(
                {"task": name, **asdict(pair), **rates, **_standing(analysis, ones[0].result, others[0].result)}
            )
    return rows


def _rates(side: str, cells: Sequence[KeptExamples]) -> dict[str, Any]:
    """Return a side's learning rate (None where its seeds use different ones), and the rate of each seed in order."""
    rates = [cell.result["learning_rate"] for cell in cells]
    return {f"{side}_rate": rates[0] if len(set(rates)) == 1 else None, f"{side}_rates": rates}


def _standing(analysis: Analysis | None, *cells: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the study's analysis says of two models' scores on a task; nothing for two cells.

    `chance` is the chance level of the main score `chance_of` (NaN if it is not known), `at_chance` lists the models that
    are not above it, `constant` those that predict the same for every example with every seed, and `final` is False if
    cells are still to be run, which may change the best learning rates.
    """
    from mlmclm.analysis.results import records
    from mlmclm.results.chance import above_chance

    if analysis is None:
        return {}
    pairs = [(cell["model"], cell["task"]) for cell in cells]
    rows = [row for row in records(analysis.best) if (row["model"], row["task"]) in pairs]
    low = [row["model"] for row in rows if above_chance(row["score"], row["score_low"], row["chance"]) == "no"]
    alike = [row["model"] for row in rows if row["constant"] and row["constant"] == row["n"]]
    told = {"chance": rows[0]["chance"], "chance_of": rows[0]["metric"], "at_chance": low, "constant": alike}
    return {**told, "final": all(row["final"] for row in rows)}

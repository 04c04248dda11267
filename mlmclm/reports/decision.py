"""Sequential decision whether one model is better than another, with a look each time that seeds are added (`analysis.looks`)."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlmclm.analysis.analyse import Analysis
from mlmclm.analysis.comparison import against
from mlmclm.analysis.contrasts import mean_difference
from mlmclm.analysis.looks import Decision, Look, decided
from mlmclm.analysis.power import seeds_or_obstacle
from mlmclm.errors import UserError
from mlmclm.numbers import without_nan
from mlmclm.reports import text
from mlmclm.reports.advice import More, instructions
from mlmclm.reports.provenance import Basis
from mlmclm.reports.wording import unfinished
from mlmclm.storage.addresses import send_file
from mlmclm.storage.files import read_json, write_json

MOST, STEP = 9, 2
"""Default number of seeds at which a comparison ends, and how many more each look asks for."""
FILE = "looks.json"
"""The file in a study's folder that stores its looks, by pair of models."""


@dataclass(frozen=True)
class Decided:
    """The decision on two models by the results so far.

    Attributes:
        decision, bound: see `looks.decided`.
        looks: all looks so far; the last one is at these results, unless cells are still to be run.
        most: the number of seeds, or of pretraining runs, at which the comparison ends.
        runs: whether looks count pretraining runs.
        low, high: the interval of the difference in these results, at the analysis's confidence, without regard to earlier looks.
        next: the number of seeds or pretraining runs at the next look; None without a next look, for example if test sets are too small.
        cells, seconds: what the next look takes for both models; the time is without pretraining, and None if it is not known.
        sentences: the decision and the next look in words.
    """

    new: str
    base: str
    decision: Decision
    bound: float
    looks: tuple[Look, ...]
    most: int
    runs: bool
    low: float
    high: float
    next: int | None
    cells: int
    seconds: float | None
    sentences: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the decision as JSON-serialisable values, with None for unknown numbers."""
        return without_nan(asdict(self) | {"looks": [look._asdict() for look in self.looks]})


def decide(
    analysis: Analysis, basis: Basis, new: str, base: str, *, most: int | None = None, folder: Path | None = None
) -> Decided:
    """Decide whether a model is better than another on the mean over tasks, or say what the next look takes.

    Args:
        most: the number of seeds, or of pretraining runs, at which the comparison ends; by default as at the first look, else `MOST`.
        folder: the study's folder, which stores the looks; None for results that do not grow.

    Raises:
        UserError: a model is unknown or compared with itself, or `most` is not the number that was set at the first look.
    """
    row = next(
        (row for row in against(analysis.comparisons, new) if (row["model_b"], row["kind"]) == (base, "all")), None
    )
    if row is None:
        raise UserError(f"decide {new} {base}: expected two different ones of {', '.join(analysis.groups)}.")
    members = [run for model in (new, base) for run in analysis.groups[model]]
    runs = len(members) > 2
    number = min(len(analysis.groups[model]) for model in (new, base)) if runs else len(analysis.grid.seeds)
    stored = read_json(folder / FILE) if folder is not None and (folder / FILE).is_file() else {}
    record = stored.get(f"{new} {base}", {})
    looks = [Look(**look) for look in record.get("looks", ())]
    if most is not None and most != record.get("most", most):
        raise UserError(
            f"--most {most}: {new} and {base} were first looked at with {record['most']}, on which the bounds depend."
        )
    most = most or record.get("most") or max(MOST, number)
    missing = unfinished(analysis, members)
    if not missing and number not in {look.number for look in looks}:
        sound = row["above_chance"] and not math.isnan(row["p"])
        looks.append(Look(number, row["difference"], row["p"] if sound else 1.0))
        looks.sort()
        if folder is not None:
            stored[f"{new} {base}"] = {"most": most, "looks": [look._asdict() for look in looks]}
            write_json(folder / FILE, stored)
            send_file(folder / FILE)
    decision, bound = decided(looks, most, 1 - analysis.confidence) if looks else ("undecided", math.nan)
    contrast = mean_difference(analysis.effects, (new, base), sorted(analysis.families))
    too_small = seeds_or_obstacle(row["difference"], [contrast], number, 1 - analysis.confidence) == "test sets"
    undecided = decision == "undecided" and not missing
    following = min(most, number + STEP) if undecided and not too_small else None
    wanted = {} if following is None else More(following, runs).cells(analysis)
    cells = {pair: count for pair, count in wanted.items() if pair[0] in members}
    unit = "pretraining runs of each model" if runs else "seeds a rate"
    verdicts = {
        "better": "is better than",
        "not better": "is not shown to be better than",
        "undecided": "may be better than",
    }
    sentences = [f"{new} {verdicts[decision]} {base}{': undecided' if decision == 'undecided' else ''}."]
    if looks:
        last = looks[-1]
        sentences.append(
            f"{text.difference(last.difference)} points on the mean over tasks, p {text.probability(last.p)}; with {last.number} of {most} "
            f"{unit}, a look decides below {bound:.2g} ({text.plural(len(looks), 'look')} so far)."
        )
    if missing:
        sentences.append(f"{missing} There is no look before they are run.")
    if undecided and too_small:
        sentences.append(
            f"More {'runs' if runs else 'seeds'} would hardly decide: the test sets are too small for this difference."
        )
    if following is not None:
        sentences.append(
            f"Next look: {following} {unit}, {sum(cells.values()):,} more cells of both{basis.cost(cells)}."
        )
        sentences += instructions(analysis, [More(following, runs)], basis)
    return Decided(
        *(new, base, decision, bound, tuple(looks), most, runs, row["low"], row["high"], following),
        *(sum(cells.values()), basis.time(cells), tuple(sentences)),
    )

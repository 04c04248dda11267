"""Formatting of numbers for people: scores in points, intervals in brackets, learning rates as in configurations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from mlmclm.numbers import NONE as NONE  # exported with `count`, because the templates can use only this module
from mlmclm.numbers import count as count
from mlmclm.numbers import plural as plural
from mlmclm.numbers import rate_text as rate_text
from mlmclm.registry import KINDS
from mlmclm.results.metrics import metric_parts

MINUS = "−"
DELIVERED = "the mean test score of the chosen runs that learn, which is what this procedure delivers"
FRESH = "what another run at the chosen rate is expected to score, without the luck of being chosen"
"""`DELIVERED` and `FRESH`: the report's two kinds of score in words."""
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

FAMILIES = KINDS["family"]
"""Registry of the task families; reports use only the names of families and their metrics."""


def points(score: float, plus: str = "") -> str:
    """Format a score in points out of 100: 0.61234 is 61.23; unknown (NaN) is a dash."""
    if math.isnan(score):
        return NONE
    value = f"{abs(score * 100):.2f}"
    # A value that rounds to zero has no sign.
    return value if float(value) == 0 else f"{MINUS if score < 0 else plus}{value}"


def difference(score: float) -> str:
    """Format a difference of scores in points with its sign: +1.32, −0.40."""
    return points(score, "+")


def interval(low: float, high: float, *, sign: bool = False) -> str:
    """Format an interval of scores in points, in brackets; empty if there is none."""
    if math.isnan(low) or math.isnan(high):
        return ""
    write = difference if sign else points
    return f"[{write(low)}, {write(high)}]"


def estimate(value: float, low: float, high: float, *, sign: bool = False) -> str:
    """Format a score, or with `sign` a difference of scores, and its interval; without an interval, the text ends in a space."""
    return f"{(difference if sign else points)(value)} {interval(low, high, sign=sign)}"


def every(number: int, noun: str) -> str:
    """Format "all" of a number of things, at least two: both models, all 3 models."""
    return f"both {noun}s" if number == 2 else f"all {number:,} {noun}s"


def percent(share: float) -> str:
    """Format a share as a whole percentage; only 0 and 1 are shown as 0 % and 100 %."""
    if math.isnan(share):
        return NONE
    if 0 < share < 0.01:
        return "<1 %"
    if 0.99 < share < 1:
        return ">99 %"
    return f"{share * 100:.0f} %"


def probability(p: float) -> str:
    """Format a p value: two digits, and "<0.001" below that."""
    if math.isnan(p):
        return NONE
    return "<0.001" if p < 0.001 else f"{p:#.2g}" if p < 0.1 else f"{p:.2f}"


def scientific(value: float | None) -> str:
    """Format a very large number as 1.23 × 10¹⁵, or a dash."""
    if value is None or math.isnan(value) or value <= 0:
        return NONE
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa} × 10{str(int(exponent)).translate(_SUPERSCRIPTS)}"


def loss(value: float | None) -> str:
    """Format a loss in nats with three decimals, or a dash."""
    return NONE if value is None or math.isnan(value) else f"{value:.3f}"


def plain(value: object) -> str:
    """Format a setting: integers with thousands separators, booleans as yes or no, lists and mappings with commas."""
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return rate_text(value) if value != 0 and abs(value) < 1e-3 else f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(plain(item) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {plain(item)}" for key, item in value.items())
    return str(value)


def family(name: str) -> str:
    """Return a family's name for people."""
    return FAMILIES[name].title if name in FAMILIES else name


def metric(name: str) -> str:
    """Return a metric's name for people; for several names joined by `+`, that of their mean."""
    words = {score: title for kind in FAMILIES.values() for score, title in kind.labels_of_metrics().items()}
    parts = [words.get(part, part.replace("_", " ")) for part in metric_parts(name)]
    return parts[0] if len(parts) == 1 else f"mean of {listing(parts)}"


def in_notebook(verdict: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Return a verdict and some columns of a table as HTML, with scores as fractions of 1."""
    import pandas as pd

    table = pd.DataFrame(list(rows), columns=list(columns)).to_html(
        index=False, float_format="{:.4g}".format, na_rep=NONE
    )
    return f"<pre>{escape(verdict)}</pre>{table}<p>Scores are fractions of 1.</p>"


def scope(tasks: Sequence[str]) -> str:
    """Name the scope of a comparison over all tasks: the mean over tasks, or the only task."""
    return "the mean over tasks" if len(tasks) != 1 else tasks[0]


def listing(items: Sequence[str], *, most: int = 6) -> str:
    """Join items as "a, b and c", with the number of those beyond `most`."""
    shown = list(items[:most])
    if len(items) > most:
        shown.append(f"{len(items) - most} more")
    if len(shown) < 2:
        return "".join(shown)
    return f"{', '.join(shown[:-1])} and {shown[-1]}"

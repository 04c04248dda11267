"""Sentences on what differs in how compared results were computed (`analysis.setups`)."""

from __future__ import annotations

from collections.abc import Sequence

from mlmclm.analysis.setups import COMPUTED, SetupDifference
from mlmclm.reports import text

MOST = 3
"""Most settings, and most names on a side, that a sentence lists."""


def setup_sentences(setups: Sequence[SetupDifference]) -> list[str]:
    """Say what differs: first what the results were computed with, then the protocol; empty if nothing does."""
    differing = [each for each in setups if each.several]
    found = [_computed(each) for each in differing if each.what in COMPUTED]
    settings = [each for each in differing if each.what not in COMPUTED]
    if settings:
        named = [f"{each.what} is {_values(each)}{_where(each)}" for each in settings[:MOST]]
        if len(settings) > MOST:
            named.append(f"and {text.plural(len(settings) - MOST, 'more setting')}")
        found.append(
            f"Fine-tuning differs: {'; '.join(named)}. A difference of these scores is partly one of the settings."
        )
    return [*found, *_recorded_for_some(setups)]


def _recorded_for_some(setups: Sequence[SetupDifference]) -> list[str]:
    """Say what some sides' results record and others' don't."""
    sides: dict[tuple[str, ...], dict[str, None]] = {}
    for each in setups:
        if not each.several:
            sides.setdefault(tuple(side for side, own in each.values.items() if own), {})[each.what] = None
    return [
        f"Recorded for {text.listing(own, most=MOST)} only: {text.listing(list(names))}. The others may differ in "
        f"{'it' if len(names) == 1 else 'these'}."
        for own, names in sides.items()
    ]


def _computed(each: SetupDifference) -> str:
    if each.apart:
        note = "A difference of these scores is partly one of these."
        return f"Not computed alike: the {each.what} is {_values(each)}{_where(each)}. {note}"
    values = text.listing(next(iter(each.values.values())))
    return f"Cells were computed with several {each.what}s ({values}){_where(each)}; scores can differ a little between them."


def _values(each: SetupDifference) -> str:
    """Return each value with the sides that have it."""
    sides: dict[tuple[str, ...], list[str]] = {}
    for side, values in each.values.items():
        sides.setdefault(values, []).append(side)
    return ", ".join(
        f"{' or '.join(values) or 'not recorded'} for {text.listing(own, most=MOST)}" for values, own in sides.items()
    )


def _where(each: SetupDifference) -> str:
    return f" on {text.listing(each.tasks, most=MOST)}"

"""Sentences on differences in how compared results were computed (`analysis.setups`)."""

from __future__ import annotations

from collections.abc import Sequence

from mlmclm.analysis.setups import COMPUTED, SetupDifference
from mlmclm.reports import text

MOST = 3
"""Maximum number of settings, and of names on a side, that a sentence lists."""


def setup_sentences(setups: Sequence[SetupDifference]) -> list[str]:
    """Say what differs: first what the results were computed with, then the protocol; empty if nothing does."""
    differing = [setup for setup in setups if setup.several]
    sentences = [_computed(setup) for setup in differing if setup.what in COMPUTED]
    settings = [setup for setup in differing if setup.what not in COMPUTED]
    if settings:
        named = [f"{setup.what} is {_values(setup)}{_where(setup)}" for setup in settings[:MOST]]
        if len(settings) > MOST:
            named.append(f"and {text.plural(len(settings) - MOST, 'more setting')}")
        sentences.append(
            f"Fine-tuning differs: {'; '.join(named)}. A difference of these scores is partly one of the settings."
        )
    return [*sentences, *_recorded_for_some(setups)]


def _recorded_for_some(setups: Sequence[SetupDifference]) -> list[str]:
    """Say which settings are recorded in the results of some sides only."""
    sides: dict[tuple[str, ...], dict[str, None]] = {}
    for setup in setups:
        if not setup.several:
            sides.setdefault(tuple(side for side, texts in setup.values.items() if texts), {})[setup.what] = None
    return [
        f"Recorded for {text.listing(recorded, most=MOST)} only: {text.listing(list(names))}. The others may differ in "
        f"{'it' if len(names) == 1 else 'these'}."
        for recorded, names in sides.items()
    ]


def _computed(setup: SetupDifference) -> str:
    if setup.apart:
        note = "A difference of these scores is partly one of these."
        return f"Not computed alike: the {setup.what} is {_values(setup)}{_where(setup)}. {note}"
    values = text.listing(next(iter(setup.values.values())))
    return f"Cells were computed with several {setup.what}s ({values}){_where(setup)}; scores can differ a little between them."


def _values(setup: SetupDifference) -> str:
    """Return each value with the sides that have it."""
    sides: dict[tuple[str, ...], list[str]] = {}
    for side, values in setup.values.items():
        sides.setdefault(values, []).append(side)
    return ", ".join(
        f"{' or '.join(values) or 'not recorded'} for {text.listing(names, most=MOST)}"
        for values, names in sides.items()
    )


def _where(setup: SetupDifference) -> str:
    return f" on {text.listing(setup.tasks, most=MOST)}"

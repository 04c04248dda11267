"""The study's noise in words: the smallest difference that it detects, and where its intervals cover less than they state."""

from __future__ import annotations

import math

from mlmclm.analysis.analyse import Analysis
from mlmclm.analysis.comparison import ALL_TASKS
from mlmclm.analysis.power import POWER
from mlmclm.reports import text


def warnings(analysis: Analysis) -> list[str]:
    """Say where intervals and claims are less certain than they state; empty if there is no such sign."""
    return list(filter(None, (tasks_together(analysis), heavy_tails(analysis))))


def tasks_together(analysis: Analysis) -> str:
    """Say by how much means over tasks are less certain than their intervals, if a seed that does well on one task does well on others."""
    check, tasks = analysis.noise.together, len(analysis.families)
    if not check.fails:
        return ""
    wider = math.sqrt(1 + (tasks - 1) * check.value)
    return (
        f"A seed that does well on one task does well on others (correlation {check.value:.2f}, p {check.p:.2g}), though they are not known "
        f"to share a training: intervals of means over {tasks} tasks should be about {wider:.1f} times as wide, so take their claims with care."
    )


def heavy_tails(analysis: Analysis) -> str:
    """Say that intervals may cover less than they state, if single runs are outliers more often than with normal noise."""
    check = analysis.noise.tails
    if not check.fails:
        return ""
    return (
        f"Single runs are far from the others more often than with normal noise (excess kurtosis {check.value:.1f}): intervals may cover a "
        "little less than they are called."
    )


def noise_lines(analysis: Analysis) -> list[str]:
    """Say which true difference the study detects, and whether noise differs between models; empty if the noise is not known."""
    sentences, smallest = [], analysis.smallest.get(ALL_TASKS, math.nan)
    if not math.isnan(smallest):
        sentences.append(detectable_difference(smallest, f" on {text.scope(list(analysis.families))}"))
    if analysis.noise.uneven:
        sentences.append(
            "Some models' noise is larger than that of others, so each model's intervals are based on its own runs."
        )
    return sentences


def detectable_difference(least: float, where: str = "") -> str:
    """Say which true difference is found with the intended power; if it is over 100 points, which is impossible, say that none is."""
    if least > 1:
        return f"No difference{where}, however large, is found with {POWER * 100:g} % power."
    return f"A true difference of {text.points(least)} points{where} is found with {POWER * 100:g} % power."

"""The study's certificate of calibration (`analysis.certificate`) in words."""

from __future__ import annotations

import math

import numpy as np

from mlmclm.analysis.analyse import Analysis
from mlmclm.analysis.certificate import Certificate
from mlmclm.analysis.comparison import ALL_TASKS
from mlmclm.analysis.power import POWER
from mlmclm.reports import text

CAUTIOUS = " They may cover more than that: 97 to 99 % in simulated studies with two or three seeds, or where the learning rate hardly matters."
"""Known from simulated studies only (`benchmarks.calibration`): the certificate repeats the fitted curve, which is never flat."""


def coverage(analysis: Analysis) -> str:
    """Say what intervals cover in repetitions of the study, if that is not what they are called."""
    found = analysis.certificate
    if not found.off():
        return ""
    shares = {"scores": found.covered, "differences on a task": found.covered_differences}
    parts = [f"{text.percent(share)} ({name})" for name, share in shares.items() if not math.isnan(share)]
    return f"What is called a {100 * found.confidence:g} % interval covers {' and '.join(parts)} in repetitions of this study."


def claims_too_much(analysis: Analysis) -> str:
    """Say how often the study claims a difference between equal models, if that is shown to be more than its tests allow."""
    found = analysis.certificate
    if not found.claims_too_much():
        return ""
    return (
        f"With equal models, {text.percent(found.false_claims)} of repetitions of this study claim a difference, and its tests allow "
        f"{100 * (1 - found.confidence):g} %: take a claim that is only just significant with care."
    )


def unknown_rates(analysis: Analysis) -> str:
    """Say which learning rates a race gave up when their first runs diverged, though other models have scores there.

    The simulated studies can't go on with such a rate, because nobody knows what it scores.
    """
    found = []
    for (model, task), runs in analysis.runs.items():
        if runs.withheld is None or runs.diverged is None:
            continue
        others = [own for (name, where), own in analysis.runs.items() if where == task and name != model]
        scored = {own.rates[row] for own in others for row in np.flatnonzero(own.present.any(axis=1)).tolist()}
        gone = runs.diverged.any(axis=1) & runs.withheld.any(axis=1) & np.asarray(~runs.present.any(axis=1))
        rates = [runs.rates[row] for row in np.flatnonzero(gone).tolist()]
        rates = [rate for rate in rates if rate in scored]
        if rates:
            found.append(f"{model} at {text.listing([text.scientific(rate) for rate in rates])} on {task}")
    if not found:
        return ""
    return (
        f"The race gave up learning rates whose first two runs diverged, so nobody knows what they score: {text.listing(found, most=3)}. If one of them "
        "is the best, a difference between equal models can be claimed: where the choice matters, run these models without a race."
    )


def warnings(analysis: Analysis) -> list[str]:
    """Say where intervals and claims are not worth what they are called; empty if they are."""
    return list(filter(None, (coverage(analysis), claims_too_much(analysis), unknown_rates(analysis))))


def certificate_lines(analysis: Analysis) -> list[str]:
    """Say what the study's intervals and claims are worth; empty if its noise is not known."""
    found, certificate = [], analysis.certificate
    if not math.isnan(certificate.covered):
        found.append(
            f"In {certificate.repetitions:,} repetitions of this study with its own noise, {text.percent(certificate.covered)} of "
            f"the {analysis.confidence * 100:g} % intervals cover the true score.{CAUTIOUS if _is_cautious(analysis) else ''}"
        )
    if not math.isnan(certificate.false_claims):
        found.append(
            f"If all models were equal, {text.percent(certificate.false_claims)} of such studies would claim a "
            f"difference{_beside_allowed(certificate)}."
        )
    least = certificate.smallest.get(ALL_TASKS, math.nan)
    if not math.isnan(least):
        found.append(found_with_power(least, f" on {text.scope(list(analysis.families))}"))
    return found


def found_with_power(least: float, where: str = "") -> str:
    """Say which true difference is found with the intended power; no two scores differ by more than 100 points."""
    if least > 1:
        return f"No difference{where}, however large, is found with {POWER * 100:g} % power."
    return f"A true difference of {text.points(least)} points{where} is found with {POWER * 100:g} % power."


def _beside_allowed(certificate: Certificate) -> str:
    """Return what a share of false claims above the allowed one means; empty for others."""
    allowed = 1 - certificate.confidence
    if certificate.false_claims <= allowed:
        return ""
    if certificate.claims_too_much():
        return f", more than the {100 * allowed:g} % that its tests allow"
    return (
        f", which {certificate.repetitions:,} repetitions do not tell from the {100 * allowed:g} % that its tests allow"
    )


def _is_cautious(analysis: Analysis) -> bool:
    """Whether the study is of the kinds whose intervals cover more than its certificate says."""
    if analysis.certificate.off():
        return False
    few_seeds = float(analysis.best["n"].median()) <= 3
    return analysis.confidence == 0.95 and (few_seeds or float(analysis.stability["p_flat"].median()) > 0.05)

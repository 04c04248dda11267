"""Facts about a model's pretraining that its name states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mlmclm.plans.names import ModelName, Phase
from mlmclm.reports.study_facts import Continuation, PhaseFacts


def named_facts(name: ModelName) -> dict[str, Any]:
    """Return the size and the phases that a model's name states, as fields of `ModelFacts`."""
    return {"size": name.size, "phases": phase_facts(name)}


def phase_facts(name: ModelName) -> tuple[PhaseFacts, ...]:
    """Return the phases of a model as far as it was trained."""
    trained = _trained(name)
    starts = (0, *(phase.until for phase in trained))
    return tuple(
        PhaseFacts(
            objective=str(phase.objective),
            kind=phase.objective.name,
            causal=phase.objective.causal,
            steps=min(phase.until, name.steps) - start,
            hidden_share=phase.objective.hidden_share,
            decayed=phase.decayed,
        )
        for start, phase in zip(starts, trained, strict=False)
    )


def _trained(name: ModelName) -> tuple[Phase, ...]:
    """Return the phases in which a model has taken steps; an intermediate checkpoint has not reached the last ones."""
    starts = (0, *(phase.until for phase in name.phases))
    return tuple(phase for start, phase in zip(starts, name.phases, strict=False) if start < name.steps)


def continuation(name: ModelName, *, given: bool = False) -> Continuation | None:
    """Return what a model's pretraining continues; None if it was trained in one go, or not at all.

    Args:
        given: whether the size in the name means given weights, from which the phases continue.
    """
    trained = _trained(name)
    ends = [place for place, phase in enumerate(trained[:-1], 1) if phase.decayed]
    if not trained or not (ends or given):
        return None
    before, since = (trained[: ends[-1]], trained[ends[-1] :]) if ends else ((), trained)
    # Given weights have no replicates.
    base = ModelName(
        name.size,
        (*before[:-1], *(replace(phase, decayed=False) for phase in before[-1:])),
        replicate=name.replicate if before else 1,
    )
    return Continuation(
        base=str(base),
        start=_objectives(before) if before else name.size,
        objective=_objectives(since),
        steps=name.steps - base.steps,
    )


def _objectives(phases: Sequence[Phase]) -> str:
    return " then ".join(str(phase.objective).upper() for phase in phases)

"""The models and tasks of a study that a claim is about, in pairs that are alike in all but what the claim varies.

Everything follows from the facts of the models (`study_facts.PhaseFacts`), not from their names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

from mlmclm.analysis.claim import THEN, Claim, ModelQuery, TaskQuery, Than, within_span
from mlmclm.analysis.contrasts import PairOnTask
from mlmclm.reports import text
from mlmclm.reports.study_facts import ModelFacts

NO_SCORES = "no pair of the study has scores on such a task"


@dataclass(frozen=True)
class Traits:
    """Features of a model that claims name; shares are in per cent."""

    name: str
    size: str
    objective: str
    made: str
    steps: int
    tokens: int | None
    clm_share: float
    mask: float | None
    steps_before: int
    decayed: bool
    given: bool = False


def traits_of(model: ModelFacts) -> Traits | None:
    """Return the features of a model; None if it was not pretrained, or its pretraining is not known.

    For a model that goes on from given weights, the features describe the steps from these weights on.
    """
    phases = model.phases or model.since
    steps = sum(phase.steps for phase in phases)
    if not steps:
        return None
    before = done = 0
    for earlier, later in pairwise(phases):
        done += earlier.steps
        if earlier.decayed or earlier.causal != later.causal:
            before = done
    hidden = phases[-1].hidden_share
    return Traits(
        name=model.name,
        size=model.size,
        objective=THEN.join(kind for kind, _ in groupby(phase.kind for phase in phases)),
        made=model.made,
        steps=steps,
        tokens=model.tokens,
        clm_share=100 * sum(phase.steps for phase in phases if phase.causal) / steps,
        mask=None if hidden is None else round(100 * hidden, 6),
        steps_before=before,
        decayed=any(phase.decayed for phase in phases[:-1]),
        given=not model.phases,
    )


class Pair(NamedTuple):
    """Two models that are alike in all but what a claim varies."""

    first: Traits
    second: Traits


class Lacking(Exception):
    """Says what a study lacks for a claim."""


def find_pairs(claim: Claim, models: Sequence[Traits], than: Than | None = None) -> list[Pair]:
    """Return all pairs of models that a claim compares, whatever their budgets; raise `Lacking` if there are none.

    Args:
        models: the models with scores.
        than: what the claim compares with; its queries replace those of the claim.
    """
    queries = (than and than.first) or claim.first, (than and than.second) or claim.second
    sides = [[model for model in models if matches(query, model)] for query in queries]
    for query, side in zip(queries, sides, strict=True):
        if not side:
            lacking = f"the study has no {described(query)}"
            either = query.model_copy(update={"given": None})
            if query.given is False and any(matches(either, model) for model in models):
                lacking += " trained from scratch, only such that go on from given weights (`given: true` in a claim)"
            raise Lacking(lacking)
    pairs = [
        Pair(one, other)
        for one in sides[0]
        for other in sides[1]
        if one.name != other.name and all(_alike(feature, one, other) for feature in claim.alike)
    ]
    if not pairs:
        shared = text.listing([feature.replace("_", " ").replace(" = ", " as ") for feature in claim.alike])
        raise Lacking(f"the study has no pair of {' and '.join(map(described, queries))} of the same {shared}")
    return pairs


def at_budgets(pairs: Sequence[Pair], budgets: tuple[float, float]) -> list[Pair]:
    """Return the pairs within a range of budgets, in per cent of the steps of the longest pair of the same size; raise `Lacking` if there are none."""
    longest: dict[str, int] = {}
    for pair in pairs:
        longest[pair.first.size] = max(longest.get(pair.first.size, 0), _steps(pair))
    kept = [pair for pair in pairs if within_span(100 * _steps(pair) / longest[pair.first.size], budgets)]
    if not kept:
        low, high = budgets
        span = f"{low:g} %" if low == high else f"{low:g} to {high:g} %"
        raise Lacking(f"the study has no such pair at {span} of its longest budget")
    return kept


@dataclass(frozen=True)
class PairFinder:
    """The models and tasks of a study, among which the pairs of claims are found; `Lacking` says why there are none.

    Attributes:
        models: the models whose pretraining is known; a model with several pretraining runs is in it once.
        families: the family of each task.
    """

    models: Sequence[Traits]
    families: Mapping[str, str]

    def pairs(self, claim: Claim, than: Than | None = None) -> list[Pair]:
        """Return the pairs of a claim, or those that it compares with."""
        if not self.models:
            raise Lacking("how the models were pretrained is not known")
        return at_budgets(find_pairs(claim, self.models, than), (than and than.budgets) or claim.budgets)

    def parts(self, claim: Claim, usable: Callable[[Pair, str], bool], unusable: str = NO_SCORES) -> list[PairOnTask]:
        """Return the pairs of a claim on its tasks with their weights.

        Args:
            usable: whether the results of a pair on a task suffice for the claim's statistic.
            unusable: what is lacking where they don't for any.
        """

        def side(than: Than | None, sign: int) -> list[PairOnTask]:
            query = (than and than.tasks) or claim.tasks
            tasks = matching_tasks(query, self.families)
            if not tasks:
                raise Lacking(f"the study has no {described_tasks(query)}")
            return weighed(self.pairs(claim, than), tasks, usable, sign, unusable)

        parts = side(None, 1)
        if claim.than is None:
            return parts
        try:
            return [*parts, *side(claim.than, -1)]
        except Lacking as reason:
            raise Lacking(f"to compare with: {reason}") from None


def weighed(
    pairs: Sequence[Pair],
    tasks: Sequence[str],
    usable: Callable[[Pair, str], bool],
    sign: int = 1,
    unusable: str = NO_SCORES,
) -> list[PairOnTask]:
    """Return pairs on tasks with their weights. All tasks have equal weight, and so have the pairs on a task."""
    by_task = {task: [pair for pair in pairs if usable(pair, task)] for task in tasks}
    by_task = {task: usable_pairs for task, usable_pairs in by_task.items() if usable_pairs}
    if not by_task:
        raise Lacking(unusable)
    return [
        PairOnTask(one.name, other.name, task, sign / len(by_task) / len(task_pairs))
        for task, task_pairs in by_task.items()
        for one, other in task_pairs
    ]


def matches(query: ModelQuery, model: Traits) -> bool:
    """Return whether a model matches a query."""
    return (
        (query.objective is None or model.objective in query.objective)
        and (query.made is None or model.made in query.made)
        and (query.size is None or model.size in query.size)
        and within_span(model.clm_share, query.clm_share)
        and within_span(model.mask, query.mask)
        and within_span(model.steps, query.steps)
        and within_span(model.tokens, query.tokens)
        and (query.decayed is None or model.decayed == query.decayed)
        and (query.given is None or model.given == query.given)
    )


def matching_tasks(query: TaskQuery, families: Mapping[str, str]) -> list[str]:
    """Return the names of the tasks that match a query, given the family of each task."""
    return [
        task
        for task, family in families.items()
        if (query.families is None or family in query.families) and (query.names is None or task in query.names)
    ]


def described(query: ModelQuery) -> str:
    """Return a query of models in words."""
    parts = [" or ".join(query.size)] if query.size else []
    if query.objective:
        parts.append(" or ".join(THEN.join(map(str.upper, words.split(THEN))) for words in query.objective))
    parts.append("model")
    if query.made:
        parts.append(f"pretrained as {' or as '.join(query.made)}")
    spans = {"with {} % causal steps": query.clm_share, "with {} % masked": query.mask}
    spans |= {"of {} steps": query.steps, "of {} tokens": query.tokens}
    for words, span in spans.items():
        if span is not None:
            low, high = (text.plain(int(end)) if end == int(end) else f"{end:g}" for end in span)
            parts.append(words.format(low if low == high else f"{low} to {high}"))
    if query.decayed:
        parts.append("that goes on from a decayed one")
    if query.given:
        parts.append("that goes on from given weights")
    return " ".join(parts)


def described_tasks(query: TaskQuery) -> str:
    """Return a query of tasks in words."""
    if query.names:
        return f"task {text.listing(query.names)}"
    families: Mapping[str, str] = {name: text.family(name).lower() for name in query.families or ()}
    return f"task of {text.listing(list(families.values()))}" if families else "task"


def _steps(pair: Pair) -> int:
    return max(pair.first.steps, pair.second.steps)


def _alike(feature: str, one: Traits, other: Traits) -> bool:
    name, _, other_name = (part.strip() for part in feature.partition("="))
    return bool(getattr(one, name) == getattr(other, other_name or name))

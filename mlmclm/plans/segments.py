"""Histories as segments: consecutive steps under one objective and one part of the learning-rate schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlmclm.corpora.mixes import Mix, MixedSamples, counts
from mlmclm.errors import UserError
from mlmclm.objectives.objective import Objective
from mlmclm.plans.names import ModelName
from mlmclm.plans.phases import ResolvedPhase
from mlmclm.plans.recipe import Recipe
from mlmclm.schedules.decay import learning_rate


@dataclass(frozen=True)
class Segment:
    """Consecutive steps under one objective and one part of the learning-rate schedule."""

    objective: Objective
    start: int
    stop: int
    origin: int
    """Step from which the warm-up is counted: 0, or the end of a decayed phase."""
    decay_end: int | None = None
    """Step at which the decay ends, even if the segment is cut before it; None while the rate is stable."""
    warmup: int | None = None
    """Steps of warm-up from `origin` on; None takes the recipe's `warmup_steps`."""
    phase: ResolvedPhase | None = None
    """The recipe's phase that contains the segment, if any; `origin` is then the start of that phase."""

    def rate(self, step: int, recipe: Recipe) -> float:
        """Return the learning rate of one of this segment's steps, counted from 0."""
        settings = self.phase or recipe
        return learning_rate(
            step,
            peak=settings.peak_learning_rate,
            warmup=settings.warmup_steps if self.warmup is None else self.warmup,
            origin=self.origin,
            decay=settings.decay_steps,
            decay_end=self.decay_end,
            law=settings.decay,
            final_share=0.0 if self.phase is None else self.phase.final_share,
        )

    def identity(self) -> list[Any]:
        """Return this segment as plain values for a state's key."""
        # The recipe's own warm-up is part of the fingerprint already.
        schedule = self.warmup if self.phase is None else self.phase.identity()
        place = [self.objective.identity, self.start, self.stop, self.origin, self.decay_end]
        return place if schedule is None else [*place, schedule]

    def batch_at(self, step: int, recipe: Recipe) -> int:
        """Return the sequences of one of this segment's steps, counted from 0."""
        return recipe.batch if self.phase is None else self.phase.batch_at(step)

    def samples(self, stop: int, recipe: Recipe) -> int:
        """Return the sequences that its steps before `stop` see."""
        stop = min(stop, self.stop)
        if stop <= self.start:
            return 0
        if self.phase is None:
            return (stop - self.start) * recipe.batch
        return self.phase.samples(stop) - self.phase.samples(self.start)

    def tokens(self, stop: int, recipe: Recipe) -> int:
        """Return how many tokens its steps before `stop` see."""
        return self.samples(stop, recipe) * recipe.during(self.phase).block_length


def segment_at(segments: Sequence[Segment], step: int) -> Segment:
    """Return the segment that contains a step, counted from 0."""
    return next(segment for segment in segments if segment.start <= step < segment.stop)


def samples_of(segments: Sequence[Segment], step: int, recipe: Recipe) -> range | MixedSamples:
    """Return the samples of a step's global batch, as indices into the endless sequence of blocks of its length.

    Each length has an order of its own. Phases of the same length go on where the previous one stopped, so that none of
    the text is seen again before all of it has been seen. In a mix, this is true of each of its sources.

    Args:
        segments: the history that contains the step.
        step: the step, counted from 0.
    """
    segment = segment_at(segments, step)
    current = recipe.during(segment.phase)
    seen = {mix: n for (length, mix), n in _seen(segments, step, recipe).items() if length == current.block_length}
    first = seen.pop(current.mix)
    numbers = range(first, first + segment.batch_at(step, recipe))
    if current.mix is None:
        return numbers
    before = Counter[str]()
    for mix, count in seen.items():
        before.update(counts(mix or (), count))
    return MixedSamples(numbers, current.mix, tuple(sorted(before.items())))


def revision_steps(segments: Sequence[Segment], recipe: Recipe) -> list[int]:
    """Return the steps whose weights are kept as revisions, 0 included; none if the recipe asks for none."""
    last = segments[-1].stop if segments else 0
    if recipe.revisions_every is not None:
        return list(range(0, last + 1, recipe.revisions_every))
    if recipe.revisions_every_tokens is None:
        return []
    steps, seen = [0], 0
    for segment in segments:
        length = recipe.during(segment.phase).block_length
        for step in range(segment.start, segment.stop):
            before, seen = seen, seen + segment.batch_at(step, recipe) * length
            # A step may pass several multiples.
            if seen // recipe.revisions_every_tokens > before // recipe.revisions_every_tokens:
                steps.append(step + 1)
    return steps


def samples_by_source(segments: Sequence[Segment], recipe: Recipe) -> dict[tuple[str, int], int]:
    """Return the number of samples that training sees by (source name, block length); without mixes the name is ""."""
    totals = Counter[tuple[str, int]]()
    for (length, mix), samples in _seen(segments, segments[-1].stop if segments else 0, recipe).items():
        parts = {"": samples} if mix is None else counts(mix, samples)
        totals.update({(name, length): count for name, count in parts.items()})
    return dict(totals)


def _seen(segments: Sequence[Segment], step: int, recipe: Recipe) -> Counter[tuple[int, Mix | None]]:
    """Return the number of samples before a step, by their length and mix."""
    totals = Counter[tuple[int, Mix | None]]()
    for segment in segments:
        resolved = recipe.during(segment.phase)
        totals[resolved.block_length, resolved.mix] += segment.samples(step, recipe)
    return totals


def segments_of(name: ModelName, recipe: Recipe) -> list[Segment]:
    """Return the segments of a whole run under a recipe without phases."""
    segments: list[Segment] = []
    start = origin = 0
    warmup: int | None = None
    for index, phase in enumerate(name.phases):
        # Only the last phase and `dec` phases decay. All others hand over at the stable rate.
        decays = phase.decayed or index == len(name.phases) - 1
        stable_until = phase.until - recipe.decay_steps if decays else phase.until
        if stable_until < start:
            raise UserError(
                f"model {str(name)!r}: its phase of {phase.objective} takes {phase.until - start} steps, fewer than the recipe's "
                f"decay_steps {recipe.decay_steps}; use more steps or a shorter decay."
            )
        if decays:
            _check_peak(name, phase.until, origin, recipe.warmup_steps if warmup is None else warmup, recipe)
        if stable_until > start:
            segments.append(Segment(phase.objective, start, stable_until, origin, warmup=warmup))
        if phase.until > stable_until:
            segments.append(Segment(phase.objective, stable_until, phase.until, origin, phase.until, warmup))
        start = phase.until
        if phase.decayed:
            # A decayed phase ends a schedule. The next phase starts a new one, with its warm-up counted from here.
            origin = phase.until
            warmup = None if recipe.rewarmup_steps == recipe.warmup_steps else recipe.rewarmup_steps
    return segments


def segments_in_phases(name: ModelName, phases: Sequence[ResolvedPhase]) -> list[Segment]:
    """Return the segments of a whole run under a recipe with phases."""
    total = name.phases[-1].until
    if any(part.decayed for part in name.phases):
        raise UserError(f"model {str(name)!r}: with phases, they say where the learning rate decays; leave out 'dec'.")
    if total not in [phase.stop for phase in phases]:
        raise UserError(
            f"model {str(name)!r}: it ends at step {total:,}, but the recipe's phases end at "
            f"{', '.join(f'{phase.stop:,} ({phase.name})' for phase in phases)}. End it at one of these steps."
        )
    segments, start = list[Segment](), 0
    for part in name.phases:
        for phase in phases:
            stop = min(part.until, phase.stop)
            if phase.start <= start < stop:
                end = phase.stop if phase.decay_steps else None
                segments.append(Segment(part.objective, start, stop, phase.start, end, phase=phase))
                start = stop
    return segments


def _check_peak(name: ModelName, until: int, origin: int, warmup: int, recipe: Recipe) -> None:
    """Raise a `UserError` if the learning rate never reaches its peak between steps `origin` and `until`."""
    # The first step of the decay still has the peak rate, hence the - 1.
    if warmup <= until - max(recipe.decay_steps - 1, 0) - origin:
        return
    field, remedy = "warmup_steps", "shorten warmup_steps or decay_steps"
    if origin > 0 and recipe.rewarmup_steps is not None:
        field, remedy = "rewarmup_steps", "shorten rewarmup_steps or decay_steps"
    elif origin > 0:
        remedy += ", or set rewarmup_steps, the warm-up of phases that start from a decayed state"
    raise UserError(
        f"model {str(name)!r}: the {until - origin:,} steps from {origin:,} to {until:,} are fewer than the recipe's {field} {warmup:,} and "
        f"decay_steps {recipe.decay_steps:,} together, so the learning rate would never reach its peak. End at step "
        f"{origin + warmup + recipe.decay_steps:,} or later, or {remedy} in the recipe."
    )

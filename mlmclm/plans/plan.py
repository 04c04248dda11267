"""From names to stages: which steps are trained, from which state, and which of them several models share.

A *state* is a set of weights with its optimiser: what came out of a history of objectives and learning rates. Its key is a hash
of that history, so two models that agree on their first n steps need the same state at n, and it is trained once. Warm-up /
stable / decay makes that frequent: a run of 600 steps passes through the undecayed state at 150 from which another model
branches off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from mlmclm.errors import UserError
from mlmclm.objectives.objective import Objective
from mlmclm.plans.names import ModelName
from mlmclm.plans.recipe import Recipe
from mlmclm.plans.schedules import learning_rate
from mlmclm.storage.files import stable_hash

ENGINE_VERSION = 5
"""Raised when the pretraining engine's arithmetic changes, so that older states are not taken for new ones."""


@dataclass(frozen=True)
class Leg:
    """Consecutive steps under one objective and one learning-rate law."""

    objective: Objective
    start: int
    stop: int
    origin: int
    """Where the warm-up counts from: 0, or the end of a decayed phase."""
    decay_end: int | None = None
    """Where this leg's decay would reach a rate of 0; None while the rate is stable."""
    warmup: int | None = None
    """Steps of warm-up from `origin` on, where they aren't the recipe's `warmup_steps`."""

    def rate(self, step: int, recipe: Recipe) -> float:
        """Learning rate of one of this leg's steps."""
        return learning_rate(
            step,
            peak=recipe.peak_learning_rate,
            warmup=recipe.warmup_steps if self.warmup is None else self.warmup,
            origin=self.origin,
            decay=recipe.decay_steps,
            decay_end=self.decay_end,
            law=recipe.decay,
        )

    def identity(self) -> list[Any]:
        """Plain values for a state's key; a warm-up that is the recipe's is in the fingerprint."""
        own = [] if self.warmup is None else [self.warmup]
        return [str(self.objective), self.start, self.stop, self.origin, self.decay_end, *own]


def leg_at(legs: Sequence[Leg], step: int) -> Leg:
    """Return the leg that a step, counted from 0, belongs to."""
    return next(leg for leg in legs if leg.start <= step < leg.stop)


@dataclass(frozen=True)
class State:
    """Weights and optimiser after a history of legs; no legs is the initialisation."""

    size: str
    legs: tuple[Leg, ...]
    initial: str | None = None
    """Key of the weights that it begins with, where they are a given model's; None where they are random."""

    @property
    def step(self) -> int:
        """Optimiser steps taken."""
        return self.legs[-1].stop if self.legs else 0

    def key(self, fingerprint: str) -> str:
        """Hash of the history; `fingerprint` stands for what a study's models share (see `fingerprint`)."""
        return stable_hash(
            {
                "size": self.size,
                "legs": [leg.identity() for leg in self.legs],
                "shared": fingerprint,
                "engine": ENGINE_VERSION,
                **({} if self.initial is None else {"initial": self.initial}),
            }
        )

    def __str__(self) -> str:
        if not self.legs:
            return f"{self.size} at initialisation"
        parts = [f"{leg.objective} to {leg.stop}{' (decay)' if leg.decay_end is not None else ''}" for leg in self.legs]
        return f"{self.size}: {', '.join(parts)}"


@dataclass(frozen=True)
class Stage:
    """One Ray Train run: one objective, from a state through others to a last one."""

    start: State
    states: tuple[State, ...]
    """What the run leaves behind, in the order of their steps; the last one is its end."""
    models: tuple[str, ...] = ()
    """Names of the models that need it."""

    @property
    def objective(self) -> Objective:
        """The one objective of all its steps."""
        return self.states[-1].legs[-1].objective

    @property
    def end(self) -> State:
        """The state at its last step."""
        return self.states[-1]

    @property
    def steps(self) -> int:
        """Number of optimiser steps that it takes."""
        return self.end.step - self.start.step

    @property
    def legs(self) -> tuple[Leg, ...]:
        """Its own legs, without those of the state it starts from."""
        return tuple(leg for leg in _split_at(self.end.legs, self.start.step) if leg.start >= self.start.step)

    @property
    def title(self) -> str:
        """Short, for a dashboard: `2m clm 0-600`."""
        return f"{self.end.size} {self.objective} {self.start.step}-{self.end.step}"


@dataclass(frozen=True)
class Stretch:
    """Consecutive steps of a stage that the same models need."""

    start: int
    stop: int
    models: tuple[str, ...]

    @property
    def steps(self) -> int:
        """Number of optimiser steps."""
        return self.stop - self.start


@dataclass(frozen=True)
class Plan:
    """The stages that a set of models needs, each after the one that it starts from."""

    models: tuple[ModelName, ...]
    targets: tuple[State, ...]
    """The state of each model, in the order of `models`."""
    stages: tuple[Stage, ...]

    @property
    def steps(self) -> int:
        """Optimiser steps in all."""
        return sum(stage.steps for stage in self.stages)

    @property
    def alone(self) -> tuple[State, ...]:
        """The last states of the runs that there would be without sharing: one a model, in which its intermediate checkpoints lie."""
        furthest: dict[ModelName, State] = {}
        for name, target in zip(self.models, self.targets, strict=True):
            run = replace(name, checkpoint=None)
            if run not in furthest or target.step > furthest[run].step:
                furthest[run] = target
        return tuple(furthest.values())

    @property
    def steps_alone(self) -> int:
        """Optimiser steps if every model were trained by itself."""
        return sum(state.step for state in self.alone)

    @property
    def steps_shared(self) -> int:
        """Optimiser steps that are taken once for several models."""
        return sum(part.steps for stage in self.stages for part in self.stretches(stage) if len(part.models) > 1)

    def parent(self, stage: Stage) -> Stage | None:
        """The stage that leaves behind the state that `stage` starts from; None where that is the initialisation."""
        return next((other for other in self.stages if stage.start in other.states), None)

    def depth(self, stage: Stage) -> int:
        """Number of stages before it on the way from the initialisation."""
        parent = self.parent(stage)
        return 0 if parent is None else 1 + self.depth(parent)

    def stretches(self, stage: Stage) -> tuple[Stretch, ...]:
        """A stage's steps from each state to the next; it has a state wherever two models part."""
        starts = (stage.start, *stage.states)
        return tuple(
            Stretch(
                before.step,
                state.step,
                tuple(
                    str(name)
                    for name, target in zip(self.models, self.targets, strict=True)
                    if _is_prefix(state, target)
                ),
            )
            for before, state in pairwise(starts)
        )

    def tree(self) -> tuple[Stage, ...]:
        """The stages with each one's offspring behind it, in the order of the steps at which they branch off."""
        parents = {stage: self.parent(stage) for stage in self.stages}

        def below(parent: Stage | None) -> Iterator[Stage]:
            for stage in sorted((s for s in self.stages if parents[s] == parent), key=lambda s: s.start.step):
                yield stage
                yield from below(stage)

        return tuple(below(None))


def fingerprint(recipe: Recipe, corpus_key: str, vocabulary: int, *, padded_with_eos: bool = False) -> str:
    """Hash of what all models of a study share and what can change their weights.

    Args:
        padded_with_eos: a model's pad token is EOS. Earlier versions held EOS's embedding at 0 then, so these states have other keys.
    """
    learned = {"eos": "learned"} if padded_with_eos else {}
    return stable_hash({"recipe": recipe.identity(), "corpus": corpus_key, "vocabulary": vocabulary, **learned})


def history(name: ModelName, recipe: Recipe, initial: str | None = None) -> State:
    """The state that a name stands for; `initial` as in `State`.

    Raises:
        UserError: a phase is shorter than the decay that it must hold, or the decay begins before the warm-up has ended, so that
            the rate would never reach its peak.
    """
    legs: list[Leg] = []
    start = origin = 0
    warmup: int | None = None
    for index, phase in enumerate(name.phases):
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
            legs.append(Leg(phase.objective, start, stable_until, origin, warmup=warmup))
        if phase.until > stable_until:
            legs.append(Leg(phase.objective, stable_until, phase.until, origin, phase.until, warmup))
        start = phase.until
        if phase.decayed:
            origin = phase.until
            warmup = None if recipe.rewarmup_steps == recipe.warmup_steps else recipe.rewarmup_steps
    cut = _split_at(tuple(legs), name.steps)
    return State(name.size, tuple(leg for leg in cut if leg.stop <= name.steps), initial)


def _check_peak(name: ModelName, until: int, origin: int, warmup: int, recipe: Recipe) -> None:
    """Raises a `UserError` where the learning rate of the steps from `origin` to `until` would never reach its peak."""
    if warmup <= until - max(recipe.decay_steps - 1, 0) - origin:  # the first step of the decay has the peak still
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


def make_plan(names: Sequence[ModelName], recipe: Recipe, initial: Mapping[str, str] | None = None) -> Plan:
    """Stages for all models, with every shared step trained once.

    The model that stays longest on an objective is planned first; models that leave it earlier, to decay or to change the
    objective, start from states that its stage deposits on its way.

    Args:
        initial: keys of the weights that sizes begin with, of those that don't begin with random ones.
    """
    targets = [history(name, recipe, (initial or {}).get(name.size)) for name in names]
    stages: list[Stage] = []
    for target in sorted(targets, key=lambda state: [-leg.stop for leg in state.legs]):
        position = replace(target, legs=())
        while position.step < target.step:
            position = _extend(stages, position, target, targets)
    named = [
        replace(
            stage,
            models=tuple(
                str(name)
                for name, target in zip(names, targets, strict=True)
                if any(_is_prefix(state, target) for state in stage.states)
            ),
        )
        for stage in stages
    ]
    return Plan(tuple(names), tuple(targets), tuple(named))


def _extend(stages: list[Stage], position: State, target: State, targets: Sequence[State]) -> State:
    """Makes sure that a stage reaches the end of `target`'s next phase after `position`; returns that end."""
    ahead = [leg for leg in _split_at(target.legs, position.step) if leg.start >= position.step]
    phase = [leg for leg in ahead if (leg.objective, leg.origin) == (ahead[0].objective, ahead[0].origin)]
    end = _prefix(target, phase[-1].stop)
    if not any(end in stage.states for stage in stages):
        known = [
            state for stage in stages for state in stage.states if state.step < end.step and _is_prefix(state, end)
        ]
        start = max([position, *known], key=lambda state: state.step)
        branches = {_prefix(end, _common_step(end, other)) for other in targets}
        deposits = sorted(
            (state for state in branches | {end} if state.step > start.step), key=lambda state: state.step
        )
        stages.append(Stage(start, tuple(deposits)))
    return end


def _prefix(state: State, step: int) -> State:
    """The state at an earlier step of the same history."""
    return replace(state, legs=tuple(leg for leg in _split_at(state.legs, step) if leg.stop <= step))


def _is_prefix(state: State, of: State) -> bool:
    return state.size == of.size and state.step <= of.step and _prefix(of, state.step) == state


def _common_step(a: State, b: State) -> int:
    """The last step up to which two histories agree."""
    if (a.size, a.initial) != (b.size, b.initial):
        return 0
    step = 0
    for mine, theirs in zip(a.legs, b.legs, strict=False):
        if (mine.objective, mine.start, mine.origin, mine.decay_end) != (
            theirs.objective,
            theirs.start,
            theirs.origin,
            theirs.decay_end,
        ):
            break
        step = min(mine.stop, theirs.stop)
        if mine.stop != theirs.stop:
            break
    return step


def _split_at(legs: tuple[Leg, ...], step: int) -> tuple[Leg, ...]:
    """The same history with a boundary between legs at `step`, where it runs through one."""
    result: list[Leg] = []
    for leg in legs:
        if leg.start < step < leg.stop:
            result += [replace(leg, stop=step), replace(leg, start=step)]
        else:
            result.append(leg)
    return tuple(result)

"""From model names to stages: which steps to train, from which state, and which steps several models share.

A *state* is a set of weights and optimiser moments, the result of a history of objectives and learning rates. Its key
is a hash of that history. Two models that agree on their first n steps therefore need the same state at step n, and it
is trained once. The warm-up / stable / decay schedule makes this frequent: a run of 600 steps passes through the
undecayed state at step 150, from which another model can branch off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any

from mlmclm import versions
from mlmclm.configuration import Role
from mlmclm.objectives.objective import Objective
from mlmclm.plans.names import ModelName
from mlmclm.plans.phases import ResolvedPhase
from mlmclm.plans.pretraining_seeds import PretrainingSeeds, StreamSeeds
from mlmclm.plans.recipe import Recipe
from mlmclm.plans.segments import Segment, segments_in_phases, segments_of
from mlmclm.storage.files import stable_hash

SHAPE = ResolvedPhase.fields_with(Role.SHAPE)
"""Settings of the first phase that an untrained model is exported with."""

Sources = tuple[tuple[str, str], ...]
"""Corpora by name, each with its key."""


@dataclass(frozen=True)
class State:
    """Weights and optimiser state after a history of segments. Without segments it is the initialisation."""

    size: str
    segments: tuple[Segment, ...]
    initial: str | None = None
    """Key of the model whose weights it starts from; None for random weights."""
    shape: tuple[tuple[str, Any], ...] = ()
    """Settings that an untrained model takes from the first of the recipe's phases, if there are any."""
    sources: Sources = ()
    """Names and keys of the corpora that the recipe's mixes are drawn from, if it has mixes."""
    seeds: StreamSeeds | None = None
    """Seeds of its random streams; None if each is the recipe's `seed`."""

    @property
    def step(self) -> int:
        """Optimiser steps taken."""
        return self.segments[-1].stop if self.segments else 0

    def tokens(self, recipe: Recipe) -> int:
        """Return the number of tokens that training has seen up to this state."""
        return sum(segment.tokens(segment.stop, recipe) for segment in self.segments)

    def lengths(self, recipe: Recipe) -> list[int]:
        """Return the block length of each segment; of an untrained model, that of the first phase."""
        lengths = [recipe.during(segment.phase).block_length for segment in self.segments]
        return lengths or [self.resolved(recipe).block_length]

    def resolved(self, recipe: Recipe) -> Recipe:
        """Return the recipe as it was in the last step's phase; in the first phase for an untrained state."""
        phases = recipe.phases_of(self.size)
        resolved = recipe.during(self.segments[-1].phase if self.segments else phases[0] if phases else None)
        seeds = PretrainingSeeds() if self.seeds is None else PretrainingSeeds(**self.seeds._asdict())
        if seeds == resolved.pretraining_seeds:
            return resolved
        return resolved.model_copy(update={"pretraining_seeds": seeds})

    def at(self, step: int) -> State:
        """Return the state at an earlier step of this history."""
        return replace(
            self,
            segments=tuple(
                replace(segment, stop=min(segment.stop, step)) for segment in self.segments if segment.start < step
            ),
        )

    def segments_after(self, step: int) -> tuple[Segment, ...]:
        """Return the history from a step on."""
        return tuple(
            replace(segment, start=max(segment.start, step)) for segment in self.segments if segment.stop > step
        )

    def passes(self, state: State) -> bool:
        """Return whether training to this state passes through another one."""
        return self.at(state.step) == state

    def key(self, fingerprint: str) -> str:
        """Return the hash of the history. `fingerprint` covers what all models of a study share (see `study_fingerprint`).

        Only the sources that the history reads count, so that a later phase may add one.
        """
        read = {
            name
            for segment in self.segments
            for name, _ in (segment.phase.mix if segment.phase is not None else self.sources) or ()
        }
        sources = {name: key for name, key in self.sources if name in read}
        return stable_hash(
            {
                "size": self.size,
                "legs": [segment.identity() for segment in self.segments],
                "shared": fingerprint,
                "engine": versions.STATES,
                # Added only if set, so that the keys of older states stay valid.
                **({} if self.initial is None else {"initial": self.initial}),
                **({"shape": dict(self.shape)} if self.shape else {}),
                **({"sources": sources} if sources else {}),
                **({} if self.seeds is None else {"seeds": self.seeds._asdict()}),
            }
        )

    def __str__(self) -> str:
        seeds = "" if self.seeds is None else f", seeds {'/'.join(map(str, self.seeds))}"
        if not self.segments:
            return f"{self.size} at initialisation{seeds}"
        parts = [
            f"{segment.objective} to {segment.stop}{' (decay)' if segment.decay_end is not None else ''}"
            for segment in self.segments
        ]
        return f"{self.size}: {', '.join(parts)}{seeds}"


@dataclass(frozen=True)
class Stage:
    """One Ray Train run: training with one objective from a starting state to an end state, with states in between."""

    start: State
    states: tuple[State, ...]
    """The states that the run deposits, in the order of their steps. The last one is its end."""
    models: tuple[str, ...] = ()
    """Names of the models that need this stage."""

    @property
    def objective(self) -> Objective:
        """The objective of all its steps."""
        return self.states[-1].segments[-1].objective

    @property
    def end(self) -> State:
        """The state at its last step."""
        return self.states[-1]

    @property
    def steps(self) -> int:
        """Number of optimiser steps in the stage."""
        return self.end.step - self.start.step

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The stage's own segments, without those of the state it starts from."""
        return self.end.segments_after(self.start.step)

    def left(self, exists: Callable[[State], bool]) -> tuple[Stage, ...]:
        """Return what is still to be trained: a stage for each group of consecutive states that don't exist.

        Each starts from the existing state before them, so that no step between two existing states is trained again.
        """
        parts: list[Stage] = []
        start = self.start
        for existing, group in groupby(self.states, exists):
            states = tuple(group)
            if not existing:
                parts.append(replace(self, start=start, states=states))
            start = states[-1]
        return tuple(parts)

    @property
    def title(self) -> str:
        """Short title for dashboards, such as `2m clm 0-600`, with the seeds if they are not the recipe's own."""
        seeds = "" if self.end.seeds is None else f" seeds {'/'.join(map(str, dict.fromkeys(self.end.seeds)))}"
        return f"{self.end.size} {self.objective} {self.start.step}-{self.end.step}{seeds}"


@dataclass(frozen=True)
class Stretch:
    """Consecutive steps of a stage that are needed by the same models."""

    start: int
    stop: int
    models: tuple[str, ...]

    @property
    def steps(self) -> int:
        """Number of optimiser steps."""
        return self.stop - self.start


@dataclass(frozen=True)
class Plan:
    """The stages that a set of models needs. Each stage comes after the one it starts from."""

    models: tuple[ModelName, ...]
    targets: tuple[State, ...]
    """The state of each model, in the order of `models`."""
    stages: tuple[Stage, ...]

    @property
    def steps(self) -> int:
        """Total number of optimiser steps."""
        return sum(stage.steps for stage in self.stages)

    @property
    def alone(self) -> tuple[State, ...]:
        """End states of the runs needed without sharing: one per model, including its intermediate checkpoints."""
        furthest: dict[ModelName, State] = {}
        for name, target in zip(self.models, self.targets, strict=True):
            run = replace(name, checkpoint=None)
            furthest[run] = max(furthest.get(run, target), target, key=lambda state: state.step)
        return tuple(furthest.values())

    @property
    def steps_alone(self) -> int:
        """Optimiser steps needed if every model were trained separately."""
        return sum(state.step for state in self.alone)

    @property
    def steps_shared(self) -> int:
        """Optimiser steps that are trained once for several models."""
        return sum(part.steps for stage in self.stages for part in self.stretches(stage) if len(part.models) > 1)

    def parent(self, stage: Stage) -> Stage | None:
        """Return the stage that deposits the state `stage` starts from; None if it starts from the initialisation."""
        return next((other for other in self.stages if stage.start in other.states), None)

    def depth(self, stage: Stage) -> int:
        """Return the number of stages between the initialisation and this stage."""
        parent = self.parent(stage)
        return 0 if parent is None else 1 + self.depth(parent)

    def stretches(self, stage: Stage) -> tuple[Stretch, ...]:
        """Split a stage's steps at its states. A stage has a state wherever two models diverge."""
        return tuple(
            Stretch(before.step, state.step, _needing(self.models, self.targets, [state]))
            for before, state in pairwise((stage.start, *stage.states))
        )

    def tree(self) -> tuple[Stage, ...]:
        """Return the stages depth-first: each is followed by its descendants, sorted by the step they start at."""
        parents = {stage: self.parent(stage) for stage in self.stages}

        def below(parent: Stage | None) -> Iterator[Stage]:
            for stage in sorted((s for s in self.stages if parents[s] == parent), key=lambda s: s.start.step):
                yield stage
                yield from below(stage)

        return tuple(below(None))


def study_fingerprint(recipe: Recipe, corpus_key: str, vocabulary: int, *, padded_with_eos: bool = False) -> str:
    """Return the hash of everything that all models of a study share and that can change their weights.

    Args:
        corpus_key: key of the corpus; with several sources, that of their tokenizer, since the keys of states have the sources' keys.
        padded_with_eos: whether the pad token is EOS, whose embedding is then learned like all others; this enters the hash.
    """
    learned = {"eos": "learned"} if padded_with_eos else {}
    return stable_hash({"recipe": recipe.identity(), "corpus": corpus_key, "vocabulary": vocabulary, **learned})


def history(name: ModelName, recipe: Recipe, initial: str | None = None, sources: Sources = ()) -> State:
    """Return the state that a model name describes.

    For `initial` and `sources` see `State`.

    Raises:
        UserError: if a phase is shorter than its decay, or the decay begins before the end of the warm-up, so that the
            learning rate would never reach its peak; or if the name doesn't fit the recipe's phases.
    """
    phases, stream_seeds = recipe.phases_of(name.size), recipe.seeds_of(name.replicate)
    seeds = None if set(stream_seeds) == {recipe.seed} else stream_seeds
    if phases and not name.phases:
        return State(name.size, (), initial, tuple((f, getattr(phases[0], f)) for f in SHAPE), sources, seeds)
    segments = segments_in_phases(name, phases) if phases else segments_of(name, recipe)
    # An intermediate checkpoint lies on the full run's schedule: plan that run, then cut it at the step.
    return State(name.size, tuple(segments), initial, sources=sources, seeds=seeds).at(name.steps)


def make_plan(
    names: Sequence[ModelName],
    recipe: Recipe,
    initial: Mapping[str, str] | None = None,
    sources: Sources = (),
    *,
    beside: Sequence[ModelName] = (),
) -> Plan:
    """Plan the stages for all models, with every shared step trained once.

    The model that stays longest with an objective is planned first. Models that leave earlier, to decay or to change
    the objective, start from states that its stage deposits along the way.

    Args:
        initial: key of the starting weights, by size, for sizes that do not start from random weights.
        beside: models that are trained at another time. The stages also deposit the states at which these branch off.
    """

    def target_of(name: ModelName) -> State:
        return history(name, recipe, (initial or {}).get(name.size), sources)

    targets, others = list(map(target_of, names)), list(map(target_of, beside))
    stages: list[Stage] = []
    for target in sorted(targets, key=lambda state: [-segment.stop for segment in state.segments]):
        position = replace(target, segments=())
        while position.step < target.step:
            position = _extend(stages, position, target, [*targets, *others])
    # Which models need a stage is known only once all of them are planned.
    named = tuple(replace(stage, models=_needing(names, targets, stage.states)) for stage in stages)
    return Plan(tuple(names), tuple(targets), named)


def _needing(names: Sequence[ModelName], targets: Sequence[State], states: Sequence[State]) -> tuple[str, ...]:
    """Return the names of the models whose training passes through any of these states."""
    return tuple(str(name) for name, target in zip(names, targets, strict=True) if any(map(target.passes, states)))


def _extend(stages: list[Stage], position: State, target: State, targets: Sequence[State]) -> State:
    """Add a stage to the end of `target`'s next phase after `position`, unless a stage already reaches it; return that end."""
    ahead = target.segments_after(position.step)
    # A phase is the segments that share an objective and a warm-up: its stable part and its decay, in one Ray Train run.
    phase = [
        segment for segment in ahead if (segment.objective, segment.origin) == (ahead[0].objective, ahead[0].origin)
    ]
    end = target.at(phase[-1].stop)
    deposited = [state for stage in stages for state in stage.states]
    if end not in deposited:
        reached = [state for state in deposited if state.step < end.step and end.passes(state)]
        # Start from the furthest state that some stage deposits, so that none of the steps before it is trained twice.
        start = max([position, *reached], key=lambda state: state.step)
        # Deposit a state wherever another model branches off from this one.
        branches = {end.at(_common_step(end, other)) for other in targets}
        deposits = (state for state in branches | {end} if state.step > start.step)
        stages.append(Stage(start, tuple(sorted(deposits, key=lambda state: state.step))))
    return end


def _common_step(a: State, b: State) -> int:
    """Return the last step up to which two histories agree."""
    if (a.size, a.initial, a.seeds) != (b.size, b.initial, b.seeds):
        return 0
    step = 0
    for mine, theirs in zip(a.segments, b.segments, strict=False):
        if replace(mine, stop=theirs.stop) != theirs:
            break
        step = min(mine.stop, theirs.stop)
        if mine.stop != theirs.stop:
            break
    return step

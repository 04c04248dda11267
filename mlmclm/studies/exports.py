"""Export of any state in a store as a Hugging Face folder: saved states, and checkpoints of unfinished stages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from mlmclm.corpora.corpus_config import CorpusConfig
from mlmclm.corpora.mixed_corpus import AnyCorpus, open_stored
from mlmclm.corpora.notes import UNTRAINED
from mlmclm.errors import UserError, meant
from mlmclm.models.sizes import SIZES
from mlmclm.plans.names import ModelName
from mlmclm.plans.recipe import Recipe
from mlmclm.plans.stages import State, history
from mlmclm.pretraining import states
from mlmclm.pretraining.initial import StoredInitial, first_config
from mlmclm.progress import say
from mlmclm.storage.files import read_json

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class FoundState:
    """A state that a model passes through in its training, as found in a store."""

    store: Path
    name: ModelName
    """Name of these weights: the model's, with the step appended unless it is the last."""
    state: State
    folder: Path
    recipe: Recipe
    corpus: str
    """Key of the prepared corpus."""
    fingerprint: str

    @property
    def key(self) -> str:
        """The state's key."""
        return self.state.key(self.fingerprint)

    @property
    def causal(self) -> bool:
        """Whether the last step was causal, so that there is a decoder, too."""
        last = self.name.last_objective
        return last is not None and last.causal

    @cached_property
    def _corpus(self) -> tuple[AnyCorpus, Mapping[str, CorpusConfig]]:
        return open_stored(self.store, self.corpus)

    @cached_property
    def _initial(self) -> StoredInitial | None:
        return StoredInitial(self.store, self.state.initial).opened() if self.state.initial is not None else None

    @cached_property
    def _curve(self) -> list[dict[str, Any]]:
        return states.folder_curve(self.store, self.folder)

    def facts(self, state: State) -> dict[str, Any]:
        """Return the facts for the card of the state, or of an earlier one on the way to it."""
        from mlmclm.studies.facts import state_facts

        name, step = self.name, state.step
        if step < self.state.step:
            name = replace(name, checkpoint=step) if step else replace(name, phases=(), checkpoint=None)
        trained = [row for row in self._curve if row["step"] <= step]
        return state_facts(name, state, self.recipe, *self._corpus, trained, self._initial)

    def write(self, target: Path, state: State, weights: dict[str, Tensor], **more: Any) -> None:
        """Write the weights of such a state as a Hugging Face folder; `more` is as in `write_state`."""
        write_state(target, state, self.recipe, weights, self._initial, self._corpus[0].tokenizer, **more)


def sizes_in(store: Path) -> list[str]:
    """Return the sizes of a store's models: the built-in ones, and the names that studies gave to models to continue from."""
    own = {description["size"] for _, description in _described(store) if description.get("initial") is not None}
    return [*SIZES, *sorted(own - SIZES.keys())]


def find_state(
    store: Path, name: ModelName, *, step: int | None = None, of: tuple[State, str] | None = None
) -> FoundState:
    """Return a model's state at a step; a damaged state is reported and skipped.

    Args:
        step: optimiser steps; None for the model's last.
        of: the model's last state in its study, and its fingerprint (`plans.stages.fingerprint`); None for the only
            study in the store that has the model.

    Raises:
        UserError: there is no intact state, or several studies have one.
    """
    every = [
        found for found in _on_the_way(store, name) if of is None or found.key == of[0].at(found.state.step).key(of[1])
    ]
    wanted = [found for found in every if found.state.step == (step or name.steps)]
    wanted.sort(key=lambda found: found.state.step)
    if any(low.key != high.state.at(low.state.step).key(high.fingerprint) for low, high in pairwise(wanted)):
        corpora = ", ".join(sorted({found.corpus for found in wanted}))
        raise UserError(
            f"{store}: several studies have a model {str(name)!r} (corpora {corpora}); name the study file instead of the store."
        )
    for found in reversed(wanted):
        damage = states.damage(found.folder)
        if damage is None:
            return found
        say(f"{found.folder} is not used: {damage}.")
    steps = ", ".join(str(step) for step in sorted({found.state.step for found in every}))
    if steps:
        there = f"there are steps {steps}; --step exports one of them"
    else:
        models = {path.name for path in (store / "studies").glob("*/models/[!.]*")}
        there = f"train it with `mlmclm pretrain`.{meant(str(name), models)}".rstrip(".")
    raise UserError(f"{store}: no intact state of model {str(name)!r} at step {step or name.steps}; {there}.")


def _described(store: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield all states and checkpoints, each with its `state.json`; saved states come first."""
    folders = [path for path in sorted((store / "states").glob("*")) if re.fullmatch("[0-9a-f]{64}", path.name)]
    for run in sorted((store / "runs").glob("*")):
        folders += [folder for _, folder in states.checkpoints(run)]
    for folder in folders:
        try:
            description: dict[str, Any] = read_json(folder / "state.json")
        except UserError:
            continue  # damaged, or the folder of an untrained model, which has no state.json
        if "size" in description:
            yield folder, description


def _on_the_way(store: Path, name: ModelName) -> Iterator[FoundState]:
    """Yield the states whose history is a prefix of the model's; saved states come first."""
    for folder, description in _described(store):
        try:
            recipe, step = Recipe.model_validate(description["recipe"]), int(description["step"])
        except (ValidationError, KeyError):
            continue  # written by another version
        if description["size"] != name.size or not 0 < step <= name.steps:
            continue
        # The right size and step are not enough: the steps up to there must be the model's own.
        at = replace(name, checkpoint=step) if step < name.phases[-1].until else name
        try:
            sources = tuple(sorted(description.get("sources", {}).items()))
            state = history(at, recipe, description.get("initial"), sources)
        except UserError:
            continue  # its recipe has no such model
        seeds = None if state.seeds is None else state.seeds._asdict()
        if (
            description["legs"] == [segment.identity() for segment in state.segments]
            and description.get("seeds") == seeds
        ):
            yield FoundState(store, at, state, folder, recipe, description["corpus"], description["fingerprint"])


def write_state(
    target: Path,
    state: State,
    recipe: Recipe,
    weights: dict[str, Tensor] | None,
    initial: StoredInitial | None,
    tokenizer: Path,
    *,
    card: str,
    decoder_card: str | None,
    key: str | None = None,
) -> None:
    """Write a state as a Hugging Face folder (`models.exported_folder.export_folder`).

    Args:
        recipe: the study's.
        weights: None for a fresh initialisation.
        key: the state's, to be noted in the folder.
    """
    from mlmclm.models.architectures import weights_of
    from mlmclm.models.build import build
    from mlmclm.models.exported_folder import export_folder

    resolved = state.resolved(recipe)
    config = first_config(state.size, initial, tokenizer, resolved)
    export_folder(
        target,
        weights_of(build(config, resolved.seeds.weights)) if weights is None else weights,
        config,
        tokenizer,
        card=card,
        decoder_card=decoder_card,
        context=resolved.block_length,
        state=key,
        objective=str(state.segments[-1].objective) if state.segments else UNTRAINED,
        begins=resolved.rows == "chunks",
    )

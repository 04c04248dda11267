"""Export of any state in a store as a Hugging Face folder: saved states, and checkpoints of unfinished stages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mlmclm.errors import UserError
from mlmclm.models.sizes import SIZES
from mlmclm.plans.names import ModelName
from mlmclm.plans.plan import State, history
from mlmclm.plans.recipe import Recipe
from mlmclm.pretraining import states
from mlmclm.pretraining.initial import first_config, open_initial
from mlmclm.progress import say
from mlmclm.storage.files import read_json


@dataclass(frozen=True)
class Found:
    """A state that a model passes through in its training, as found in a store."""

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


def sizes_in(store: Path) -> list[str]:
    """Return the sizes that a store's models can have.

    These are the built-in ones, and the names that the store's studies gave to models to continue from.
    """
    own = {description["size"] for _, description in _described(store) if description.get("initial") is not None}
    return [*SIZES, *sorted(own - SIZES.keys())]


def find_state(
    store: Path,
    name: ModelName,
    *,
    step: int | None = None,
    of: tuple[State, str] | None = None,
) -> Found:
    """Return a model's state at a step, or the furthest one; a damaged state is reported and skipped.

    Args:
        step: optimiser steps; None for the furthest state up to the model's last step.
        of: the study's state that the model is, and its fingerprint (`plans.plan.fingerprint`); None for the only study
            in the store that has the model.

    Raises:
        UserError: there is no intact state, or several studies have one.
    """
    every = [
        found for found in _on_the_way(store, name) if of is None or found.key == of[0].at(found.state.step).key(of[1])
    ]
    wanted = [found for found in every if step in (None, found.state.step)]
    ordered = sorted(wanted, key=lambda found: found.state.step)
    if any(low.key != replace(high, state=high.state.at(low.state.step)).key for low, high in pairwise(ordered)):
        corpora = ", ".join(sorted({found.corpus for found in wanted}))
        raise UserError(
            f"{store}: several studies have a model {str(name)!r} (corpora {corpora}); name the study file instead of the store."
        )
    for found in reversed(ordered):
        damage = states.damage(found.folder)
        if damage is None:
            return found
        say(f"{found.folder} is not used: {damage}.")
    steps = ", ".join(str(step) for step in sorted({found.state.step for found in every}))
    at = "" if step is None else f" at step {step}"
    there = f"there are steps {steps}" if steps else "train it with `mlmclm pretrain`"
    raise UserError(f"{store}: no whole state of model {str(name)!r}{at}; {there}.")


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


def _on_the_way(store: Path, name: ModelName) -> Iterator[Found]:
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
        if description["legs"] == [leg.identity() for leg in state.legs]:
            yield Found(at, state, folder, recipe, description["corpus"], description["fingerprint"])


def export_state(found: Found, store: Path, target: Path, about: Mapping[str, Any] | None = None) -> None:
    """Write a state as a Hugging Face folder with a model card; add the decoder if the last step was causal.

    Args:
        about: facts for the card beside those that the store has (`facts.study_card`).

    Raises:
        UserError: the target folder is not empty, or the state's corpus is not in the store.
    """
    from mlmclm.corpora.mixed_corpus import open_stored
    from mlmclm.models.export import export_folder
    from mlmclm.pretraining.checkpoints import read_weights
    from mlmclm.reports.model_card import model_card
    from mlmclm.study.facts import state_facts

    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"--to {target}: there is something already; name a folder that isn't there, or is empty.")
    corpus, made_from = open_stored(store, found.corpus)
    curve = states.folder_curve(store, found.folder)
    initial = open_initial(store, found.state.initial) if found.state.initial is not None else None
    settled = found.state.settled(found.recipe)
    facts = state_facts(found.name, found.state, found.recipe, corpus, made_from, curve, initial)
    export_folder(
        target,
        read_weights(found.folder),
        first_config(found.name.size, initial, corpus.tokenizer, settled),
        corpus.tokenizer,
        card=model_card({**facts, **(about or {})}),
        decoder=facts["causal"],
        context=settled.block_length,
        objective=str(found.state.legs[-1].objective),
        begins=settled.rows == "chunks",
    )

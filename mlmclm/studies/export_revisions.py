"""Revisions of a model: its weights at the steps of `recipe.revisions_every`, as the tags of one repository."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from mlmclm.corpora.notes import STATE, read_notes
from mlmclm.errors import UserError
from mlmclm.models.hub_cache import CachedRepository, repositories_of
from mlmclm.plans.stages import State
from mlmclm.pretraining import states
from mlmclm.reports.model_card import model_cards
from mlmclm.storage.temporary import swept_folder
from mlmclm.studies.exports import FoundState

MAIN = "main"


@dataclass(frozen=True)
class Revision:
    """A model's weights at a step of its training."""

    state: State
    folder: Path | None
    """Folder of the weights in the store; None if they were not kept."""

    @property
    def tag(self) -> str:
        """The name by which `from_pretrained(..., revision=TAG)` finds it: `step1000`, or `ext200` in a later phase."""
        phase = self.state.legs[-1].phase if self.state.legs else None
        if phase is None or phase.start == 0:
            return f"step{self.state.step}"
        return f"{phase.name}{self.state.step - phase.start}"


@dataclass(frozen=True)
class Exported:
    """The outcome of `export_revisions`."""

    repositories: tuple[str, ...]
    tags: tuple[str, ...]
    written: tuple[str, ...]
    """Tags for which something was written; the others existed already."""
    missing: tuple[str, ...]
    """Tags whose weights the store does not have."""


def export_revisions(
    found: FoundState, cache: Path, repository: str, steps: Sequence[int], about: Mapping[str, Any]
) -> Exported:
    """Write a trained model's revisions as a repository in the layout of the Hub's cache; existing ones stay.

    `main` is the model itself. A model whose last objective is causal becomes two repositories: `repository` has it as a
    decoder, and `repository`-encoder as an encoder.

    Args:
        found: the model's last state.
        cache: the folder that `from_pretrained` takes as `cache_dir`.
        steps: those of its revisions (`plans.legs.revision_steps`); empty if the recipe asks for none.
        about: facts for the cards in addition to those that the store has (`facts.study_card`).

    Raises:
        UserError: no revisions were asked for, the repository's name is refused, or the folder has a repository of this
            name with other weights.
    """
    names = repositories_of(repository, decoder=found.causal)
    repositories = [CachedRepository(cache, name) for name in names]
    if not steps:
        raise UserError(
            f"model {str(found.name)!r}: neither recipe.revisions_every nor revisions_every_tokens is set, so no revisions were kept. Set one in "
            "the study file before the model is trained."
        )
    before = [found.state.at(step) for step in steps if step < found.state.step]
    kept = [Revision(each, states.weights_folder(found.store, each.key(found.fingerprint))) for each in before]
    revisions = [*kept, Revision(found.state, found.folder)]
    there = [each for each in revisions if each.folder is not None]
    missing = tuple(each.tag for each in revisions if each.folder is None)
    tags = tuple(each.tag for each in there)
    writer = _Writer(found, repositories, {**about, "revisions": tags, "missing": missing})
    # All are compared before any is written, so that a folder with another model's revisions stays as it is.
    lacking = [each for each in there if not writer.is_there(each)]
    for each in lacking:
        writer.write(each, cache)
    return Exported(names, tags, tuple(each.tag for each in lacking), missing)


class _Writer:
    """Writes a model's revisions into its repositories; if there are two, the decoder's is the first."""

    def __init__(self, found: FoundState, repositories: Sequence[CachedRepository], about: Mapping[str, Any]) -> None:
        self.found, self.repositories, self.about = found, repositories, about

    def is_there(self, revision: Revision) -> bool:
        """Return whether all repositories have a revision with this card; a `UserError` if one has other weights."""
        whole = True
        for repository, card in zip(self.repositories, self._cards(revision), strict=True):
            for tag in self._tags(revision):
                folder = repository.snapshot(tag)
                if folder is not None and read_notes(folder).get(STATE) != self._key(revision):
                    raise UserError(
                        f"{repository.folder}: its revision {tag!r} has the weights of another model or training. Give another --repository or "
                        "--to, or delete this folder."
                    )
                whole &= folder is not None and (folder / "README.md").read_text(encoding="utf-8") == card
        return whole

    def write(self, revision: Revision, cache: Path) -> None:
        """Write a revision, completely or not at all; a `UserError` if its weights in the store are damaged."""
        from mlmclm.pretraining.checkpoints import read_tensors

        stored = cast(Path, revision.folder)
        damage = states.damage(stored)
        if damage is not None:
            raise UserError(f"{stored}: {damage}. Put back a copy, or delete this folder to leave {revision.tag} out.")
        weights, cards, key = dict(read_tensors(stored).weights), self._cards(revision), self._key(revision)
        with swept_folder(cache, ".revision-") as temporary:
            folder = temporary / "model"
            *decoder_card, card = cards
            self.found.write(
                folder, revision.state, weights, card=card, decoder_card=next(iter(decoder_card), None), key=key
            )
            parts = [folder / "decoder", folder] if self.found.causal else [folder]
            for repository, part in zip(self.repositories, parts, strict=True):
                commit = repository.commit(part, sorted(path for path in part.iterdir() if path.is_file()))
                for tag in self._tags(revision):
                    repository.tag(tag, commit)

    def _key(self, revision: Revision) -> str:
        return revision.state.key(self.found.fingerprint)

    def _tags(self, revision: Revision) -> list[str]:
        return [revision.tag, *([MAIN] if revision.state == self.found.state else [])]

    def _cards(self, revision: Revision) -> list[str]:
        """Return the cards of a revision in each of the repositories."""
        tag = None if MAIN in self._tags(revision) else revision.tag
        facts = {**self.found.facts(revision.state), **self.about, "revision": tag}
        card, decoder_card = model_cards(
            facts, decoder=self.found.causal, repositories=[each.name for each in self.repositories]
        )
        return [card] if decoder_card is None else [decoder_card, card]

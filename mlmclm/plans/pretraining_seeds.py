"""Seeds of pretraining: one for each random stream, so that replicates can vary one and keep the others."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from pydantic import Field

from mlmclm.configuration import Enters, Frozen, Role
from mlmclm.errors import UserError


class StreamSeeds(NamedTuple):
    """The seeds of one pretraining run."""

    weights: int
    """Initial weights."""
    order: int
    """Order of the blocks of text."""
    masks: int
    """Which tokens are masked, and by what."""


OfReplicates = Annotated[int, Field(ge=0)] | Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]


class PretrainingSeeds(Frozen):
    """Seeds by random stream: one number for all replicates of a model, or a list with one for each."""

    weights: Annotated[OfReplicates | None, Role.WEIGHTS, Enters.INDIRECTLY] = None
    """Initial weights. None, here and below, takes the recipe's seed for the first replicate, and the next number for each
    further one."""
    order: Annotated[OfReplicates | None, Role.WEIGHTS, Enters.INDIRECTLY] = None
    """Order of the blocks of text."""
    masks: Annotated[OfReplicates | None, Role.WEIGHTS, Enters.INDIRECTLY] = None
    """Which tokens are masked, and by what."""

    def of(self, replicate: int, seed: int) -> StreamSeeds:
        """Return the seeds of a replicate, counted from 1, of a recipe with a seed.

        Raises:
            UserError: a list has no seed for the replicate.
        """
        seeds = {}
        for stream in StreamSeeds._fields:
            value = getattr(self, stream)
            if value is None:
                value = seed + replicate - 1
            elif not isinstance(value, int):
                if replicate > len(value):
                    raise UserError(
                        f"recipe.pretraining_seeds.{stream}: {list(value)} has no seed for replicate {replicate}; add one."
                    )
                value = value[replicate - 1]
            seeds[stream] = value
        return StreamSeeds(**seeds)

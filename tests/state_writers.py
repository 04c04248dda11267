"""A state written by threads of this process, as a stage's workers write it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as distributed
from torch import Tensor

from mlmclm.pretraining.checkpoints import FIRST, SECOND, WEIGHTS, TrainingState, write_folder, write_share, writers
from mlmclm.pretraining.parts import own_names
from mlmclm.pretraining.peers import Peers


def share_of(state: TrainingState, rank: int, world: int) -> TrainingState:
    """Return a state with the tensors of a worker's parts only."""
    names = own_names(state.parts, rank, world)

    def own(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in tensors.items() if kind + name in names}

    first, second = own(FIRST, state.first), own(SECOND, state.second)
    return replace(state, weights=own(WEIGHTS, state.weights), first=first, second=second)


class Elsewhere(Peers):
    """A worker on a machine that doesn't see rank 0's folders."""

    def told(self, name: str) -> dict[str, object]:
        """Return rank 0's folder under a path that isn't here."""
        message = super().told(name)
        return {"path": "/elsewhere"} if name == "folder" else message


def write_by_threads(
    state: TrainingState, targets: Sequence[Path], *, elsewhere: bool = False, broken: int | None = None
) -> list[str | None]:
    """Write a state by one worker for each target, each worker its parts; return the error of each.

    Args:
        elsewhere: whether the other workers do not see the folders of rank 0.
        broken: rank of a worker that cannot write.
    """
    world, title, store = len(targets), uuid.uuid4().hex, distributed.HashStore()  # type: ignore[attr-defined]

    def work(rank: int) -> str | None:
        share = share_of(state, rank, world)
        if rank == broken:
            share = replace(share, weights=dict.fromkeys(share.weights))  # type: ignore[arg-type]
        peers = Elsewhere(title, rank, world) if elsewhere and rank > 0 else writers(share, title, rank, world)
        try:
            with peers.together():
                if rank == 0:
                    write_folder(targets[0], share, {"key": "0"}, [], peers=peers)
                else:
                    write_share(targets[rank], share, peers)
        except Exception as error:
            return str(error)
        return None

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(world) as pool:
        patch.setattr("mlmclm.pretraining.peers._get_default_store", lambda: store)
        return list(pool.map(work, range(world)))

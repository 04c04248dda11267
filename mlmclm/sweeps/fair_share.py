"""Fair division of a cluster between sweeps: how many workers each of them may have, as pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from mlmclm.cluster.placement import Resources, places


@dataclass(frozen=True)
class Claimant:
    """A sweep on a cluster, with the workers that it has and wants.

    Attributes:
        name: a name that no other sweep on the cluster has.
        bundle: the resources of a worker.
        wanted: the most workers that it can use now.
        held: the workers that it has on each node, including those that are starting, by the node's id.
        priority: it gets as many workers for each of another sweep as its priority is higher.
    """

    name: str
    bundle: Resources
    wanted: int
    held: Mapping[str, int] = field(default_factory=dict)
    priority: float = 1.0

    @property
    def workers(self) -> int:
        """The number of workers that it has."""
        return sum(self.held.values())


def fair_shares(
    capacity: Mapping[str, Resources], sweeps: Sequence[Claimant], turn: int = 0
) -> dict[str, dict[str, int]]:
    """Divide a cluster between sweeps; return the workers of each on each node, by its name and the node's id.

    Workers are given out one by one, each to the sweep whose share is the smallest for its priority: the share of the
    resource of which it has most (dominant resource fairness: Ghodsi et al., NSDI 2011). What one sweep cannot use, the
    others get. Where the workers don't divide evenly, the next `turn` gives the rest to another sweep.

    A worker needs its resources on one node. It is counted on a node where the sweep has one already if there is any, and
    of these on the one that has the least left beside it, so that large workers find room.

    Args:
        capacity: the resources of each node for all of them together, by the node's id.
    """
    left = {node: dict(resources) for node, resources in sorted(capacity.items())}
    kinds = {kind for sweep in sweeps for kind, amount in sweep.bundle.items() if amount}
    total = {kind: math.fsum(resources.get(kind, 0.0) for resources in left.values()) for kind in kinds}
    shares: dict[str, dict[str, int]] = {sweep.name: {} for sweep in sweeps}
    # The same order in all drivers, which compute this each for themselves.
    order = sorted(sweeps, key=lambda sweep: sweep.name)
    order = order[turn % len(order) :] + order[: turn % len(order)] if order else []

    def standing(sweep: Claimant) -> float:
        of_each = (amount / total[kind] for kind, amount in sweep.bundle.items() if amount)
        return max(of_each, default=0.0) * (sum(shares[sweep.name].values()) + 1) / sweep.priority

    def rooms(sweep: Claimant) -> Iterator[str]:
        return (node for node, resources in left.items() if places(resources, sweep.bundle) > 0)

    def price(sweep: Claimant, node: str) -> tuple[bool, float]:
        has = sweep.held.get(node, 0) > shares[sweep.name].get(node, 0)
        return not has, math.fsum(left[node].get(kind, 0.0) / total[kind] for kind in kinds if total[kind])

    while True:
        able = [sweep for sweep in order if sum(shares[sweep.name].values()) < sweep.wanted and any(rooms(sweep))]
        if not able:
            return shares
        # On ties, `min` returns the first.
        chosen = min(able, key=standing)
        node = min(rooms(chosen), key=partial(price, chosen))
        shares[chosen.name][node] = shares[chosen.name].get(node, 0) + 1
        for kind, amount in chosen.bundle.items():
            left[node][kind] = left[node].get(kind, 0.0) - amount
        if not any(places(left[node], sweep.bundle) for sweep in sweeps):
            del left[node]  # a full node, so that none is looked at again and again


def capacity_for(free: Mapping[str, Resources], sweeps: Sequence[Claimant]) -> dict[str, dict[str, float]]:
    """Return the resources of each node that sweeps can divide: the free ones and those of their workers."""
    found = {node: dict(resources) for node, resources in free.items()}
    for sweep in sweeps:
        for node, workers in sweep.held.items():
            own = found.setdefault(node, {})
            for kind, amount in sweep.bundle.items():
                own[kind] = own.get(kind, 0.0) + workers * amount
    return found


def own_share(
    me: str, free: Mapping[str, Resources], sweeps: Sequence[Claimant], turn: int = 0
) -> Mapping[str, int] | None:
    """Return how many workers a sweep may have on each node now: its share while a sweep lacks some of its own, else None.

    A sweep that has its share may ask for more, as an autoscaler adds nodes only for what is asked for.
    """
    if len(sweeps) < 2:
        return None
    shares = fair_shares(capacity_for(free, sweeps), sweeps, turn)
    lacks = any(sweep.workers < sum(shares[sweep.name].values()) for sweep in sweeps)
    return shares[me] if lacks else None

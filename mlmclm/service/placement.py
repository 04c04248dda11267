"""The device that workers run on, and how many of them a cluster can ever hold: pure functions of plain values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mlmclm.errors import UserError

Device = Literal["cpu", "cuda"]
Choice = Literal["auto", "cpu", "cuda"]
Resources = Mapping[str, float]
"""Amounts by Ray's names: CPU, GPU, and others."""

HEAD = "node:__internal_head__"
"""The resource that Ray gives to the head node alone."""
_ROUNDING = 1e-9
_SHOWN = ("CPU", "GPU")


@dataclass(frozen=True)
class NodeType:
    """Nodes of one kind that an autoscaler starts, `most` of them at once (math.inf where nothing limits them)."""

    name: str
    resources: Resources
    most: float


@dataclass(frozen=True)
class Growth:
    """The nodes that an autoscaler can add: of these types, `most` of all types together."""

    types: tuple[NodeType, ...] = ()
    most: float = math.inf


@dataclass(frozen=True)
class Cluster:
    """The resources that a cluster has, and those that it can get."""

    nodes: tuple[Resources, ...]
    """The resources of each node that is there."""
    free: Resources
    """The part of all nodes' resources that nobody holds."""
    growth: Growth | None = Growth()
    """None where there is an autoscaler whose limits can't be read."""

    def total(self, kind: str) -> float:
        """The amount of a resource that is there."""
        return math.fsum(node.get(kind, 0.0) for node in self.nodes)

    def can_have(self, kind: str) -> bool | None:
        """Whether there is any of a resource, now or ever; None where that can't be known."""
        if self.total(kind) > 0:
            return True
        if self.growth is None:
            return None
        return any(each.most > 0 and each.resources.get(kind, 0) > 0 for each in self.growth.types)


def places(resources: Resources, bundle: Resources) -> int:
    """How often a bundle fits into some resources."""
    return min((int(resources.get(kind, 0.0) / amount + _ROUNDING) for kind, amount in bundle.items() if amount), default=0)  # fmt: skip


def places_now(cluster: Cluster, bundle: Resources) -> int:
    """How many bundles the nodes that are there hold when nothing else runs; a bundle lies on one node."""
    return sum(places(node, bundle) for node in cluster.nodes)


def most_places(cluster: Cluster, bundle: Resources) -> float:
    """How many bundles the cluster can ever hold; math.inf where that is not limited or not known."""
    if cluster.growth is None:
        return math.inf
    # Which of the other nodes the autoscaler has started is not known, so they are not counted beside its types.
    grown: float = sum(places(node, bundle) for node in cluster.nodes if HEAD in node)
    left = cluster.growth.most
    for each in sorted(cluster.growth.types, key=lambda each: -places(each.resources, bundle)):
        held, count = places(each.resources, bundle), min(each.most, left)
        if held and count > 0:
            grown += held * count
            left -= count
    return max(grown, places_now(cluster, bundle))


def choose_device(choice: Choice, cluster: Cluster) -> Device:
    """The device of all of a study's workers: `auto` is GPUs where the cluster has or can have any, else CPUs.

    Raises:
        UserError: `auto`, and nobody knows whether the cluster can have GPUs.
    """
    if choice != "auto":
        return choice
    found = cluster.can_have("GPU")
    if found is None:
        raise UserError(
            "recipe.device is auto, but the cluster has no GPU now, and its autoscaler doesn't say whether it can start nodes with GPUs: "
            "set recipe.device to cuda or cpu."
        )
    return "cuda" if found else "cpu"


def worker_bundle(device: Device) -> Resources:
    """Return the resources that a pretraining worker reserves."""
    return {"GPU": 1.0} if device == "cuda" else {"CPU": 1.0}


def cell_bundle(cpus: float, gpus: float | None, choice: Choice, cluster: Cluster) -> Resources:
    """Return the resources that a cell of a sweep reserves.

    Args:
        gpus: None for one where `choose_device` chooses GPUs, else none.
    """
    if gpus is None:
        gpus = 1.0 if choose_device(choice, cluster) == "cuda" else 0.0
    return {kind: amount for kind, amount in (("CPU", cpus), ("GPU", gpus)) if amount}


def check_workers(workers: int, choice: Choice, device: Device, cluster: Cluster) -> None:
    """Refuses a stage that would wait for ever.

    Raises:
        UserError: it says what the cluster can have and what to change.
    """
    most = most_places(cluster, worker_bundle(device))
    if most >= workers:
        return
    kind, other, device_of_other = ("GPU", "CPU", "cpu") if device == "cuda" else ("CPU", "GPU", "cuda")
    ways = [f"lower recipe.workers to {most:g}"] if most else []
    ways.append(
        "raise the autoscaler's limits" if cluster.growth and cluster.growth.types else f"add nodes with {kind}s"
    )
    if cluster.can_have(other):
        ways.append(f"set recipe.device: {device_of_other} to train on {other}s")
    raise UserError(
        f"recipe.workers asks for {workers} workers with a {kind} each (recipe.device: {choice}), but the cluster can have {most:g}: "
        f"{describe(cluster)}. Either {', or '.join(ways)}."
    )


def check_place(what: str, bundle: Resources, cluster: Cluster, *, remedy: str) -> None:
    """Refuses work that would wait for ever for one bundle.

    Raises:
        UserError: it says what the cluster can have and `remedy`.
    """
    if most_places(cluster, bundle) < 1:
        raise UserError(
            f"{what} needs {amounts(bundle)} on one node, and no node of this Ray cluster can ever have that: {describe(cluster)}. {remedy}"
        )


def amounts(bundle: Resources) -> str:
    """A bundle for people: `1 CPU and 0.25 GPU`."""
    return " and ".join(f"{amount:g} {kind}" for kind, amount in bundle.items())


def describe(cluster: Cluster) -> str:
    """Describe in one clause what a cluster has and can get."""
    has = " and ".join(f"{cluster.total(kind):g} {kind}s" for kind in _SHOWN)
    nodes = f"{len(cluster.nodes)} node{'s' if len(cluster.nodes) != 1 else ''}"
    if cluster.growth is None:
        return f"it has {has} on {nodes}, and an autoscaler whose limits can't be read"
    types = [each for each in cluster.growth.types if each.most > 0]
    if not types:
        return f"it has {has} on {nodes}, and no autoscaler that adds any"
    limit = "" if math.isinf(cluster.growth.most) else f", {cluster.growth.most:g} nodes together"
    added = ", ".join(
        f"{'any number' if math.isinf(each.most) else format(each.most, 'g')} of {each.name!r} "
        f"({', '.join(f'{each.resources.get(kind, 0):g} {kind}s' for kind in _SHOWN)})"
        for each in types
    )
    return f"it has {has} on {nodes}, and its autoscaler adds at most {added}{limit}"


def no_gpu(node: str) -> str:
    """The message where Ray has given a worker a GPU that torch doesn't see."""
    return (
        f"node {node} offers Ray a GPU, but torch sees none there: install torch with CUDA (or ROCm) and the driver on it, or start its Ray "
        "without GPUs (`ray start --num-gpus=0`)."
    )


@dataclass(frozen=True)
class Group:
    """A placement group: bundles that are reserved together or not at all."""

    waiting: bool
    bundles: tuple[Resources, ...]


def waiting_line(
    groups: Sequence[Group], cluster: Cluster, starting: Mapping[str, int], *, all_of_them: bool
) -> str | None:
    """Describe what a driver's work waits for and what is there; None if it doesn't wait.

    Args:
        groups: the driver's placement groups.
        starting: nodes that the autoscaler starts now, by type.
        all_of_them: it counts as waiting only if none of the groups has what it needs.
    """  # fmt: skip
    waiting = [group for group in groups if group.waiting]
    if not waiting or (all_of_them and len(waiting) < len(groups)):
        return None
    shapes = Counter((len(group.bundles), amounts(group.bundles[0])) for group in waiting if group.bundles)
    wanted = ", ".join(
        f"{count} x {amount}" + (f" ({times} times)" if times > 1 else "") for (count, amount), times in shapes.items()
    )
    kinds = [kind for kind in _SHOWN if any(kind in bundle for group in waiting for bundle in group.bundles)]
    there = " and ".join(f"{cluster.free.get(kind, 0):g} of {cluster.total(kind):g} {kind}s" for kind in kinds)
    coming = ", ".join(f"{count} x {name}" for name, count in starting.items())
    if coming:
        then = f"the autoscaler is starting {coming}"
    elif cluster.growth is None or cluster.growth.types:
        then = "the autoscaler has started no further node yet"
    else:
        then = "they are held by other work"
    return f"{wanted}; free are {there}; {then}"

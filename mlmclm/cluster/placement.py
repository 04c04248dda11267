"""Choice of the device, and the number of workers that a cluster can ever run, as pure functions of plain values."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlmclm.backends.device_kinds import Choice, Device
from mlmclm.errors import UserError

Resources = Mapping[str, float]
"""Amounts by Ray's resource names: CPU, GPU and others."""

HEAD = "node:__internal_head__"
"""The resource that Ray gives only to the head node."""
_ROUNDING = 1e-9
"""Tolerance for fractional amounts: in floating point, 0.1 fits only 2.9999999999999996 times into 0.3."""
_INTERNAL = re.compile(r"node:.*|.+_?group_?([0-9]+_)?[0-9a-f]{32,}", re.IGNORECASE)
"""Names of resources that Ray adds for itself: one for each node, and copies of what each placement group reserves (`CPU_group_0_…`, which
Ray's dashboard names `CPUGroup0…`)."""
SMALLER = "Change the space's cpus_per_cell or gpus_per_cell (0: on CPUs), or add nodes."
"""Remedy for a cell that fits on no node."""
_SHOWN = ("CPU", "GPU")
"""Resources that messages mention."""


@dataclass(frozen=True)
class NodeType:
    """A type of nodes that an autoscaler starts, at most `most` at a time (math.inf if unlimited)."""

    name: str
    resources: Resources
    most: float


@dataclass(frozen=True)
class Growth:
    """The nodes that an autoscaler can add: these types, at most `most` nodes over all types."""

    types: tuple[NodeType, ...] = ()
    most: float = math.inf


@dataclass(frozen=True)
class Cluster:
    """The resources that a cluster has, and those that it can get."""

    nodes: tuple[Resources, ...]
    """The resources of each existing node."""
    free: Resources
    """The unreserved resources, summed over nodes."""
    growth: Growth | None = Growth()
    """None if there is an autoscaler whose limits can't be read."""
    joinable: bool = False
    """Whether nodes that no autoscaler starts may join."""

    def total(self, kind: str) -> float:
        """Return the amount of a resource that exists now."""
        return math.fsum(node.get(kind, 0.0) for node in self.nodes)

    def can_have(self, kind: str) -> bool | None:
        """Return whether the cluster has or can get any of a resource; None if that can't be known."""
        if self.total(kind) > 0:
            return True
        if self.growth is None:
            return None
        return any(node_type.most > 0 and node_type.resources.get(kind, 0) > 0 for node_type in self.growth.types)


def is_offered(name: str) -> bool:
    """Return whether a node offers this resource; Ray adds others for its own use."""
    return _INTERNAL.fullmatch(name) is None


def places(resources: Resources, bundle: Resources) -> int:
    """Return how many times a bundle fits into some resources."""
    return min((int(resources.get(kind, 0.0) / amount + _ROUNDING) for kind, amount in bundle.items() if amount), default=0)  # fmt: skip


def places_now(cluster: Cluster, bundle: Resources) -> int:
    """Return how many bundles the existing nodes hold if nothing else runs; a bundle must fit on one node."""
    return sum(places(node, bundle) for node in cluster.nodes)


def most_places(cluster: Cluster, bundle: Resources) -> float:
    """Return how many bundles the cluster can ever hold; math.inf if that is unlimited or unknown."""
    if cluster.growth is None:
        return math.inf
    # Ray doesn't report which nodes the autoscaler has started. To count no node twice, count only the head and the
    # autoscaler's types.
    grown: float = sum(places(node, bundle) for node in cluster.nodes if HEAD in node)
    left = cluster.growth.most
    # Types that hold the most bundles come first, since the limit on nodes is shared by all types.
    for node_type in sorted(cluster.growth.types, key=lambda node_type: -places(node_type.resources, bundle)):
        held, count = places(node_type.resources, bundle), min(node_type.most, left)
        if held and count > 0:
            grown += held * count
            left -= count
    # Existing nodes that the autoscaler has not started may hold more than that.
    return max(grown, places_now(cluster, bundle))


def choose_device(choice: Choice, cluster: Cluster) -> Device:
    """Choose the device of all workers of a study: `auto` means GPUs if the cluster has or can get any, else CPUs.

    Raises:
        UserError: the choice is `auto`, and it is unknown whether the cluster can get GPUs.
    """
    if choice != "auto":
        return choice
    has_gpus = cluster.can_have("GPU")
    if has_gpus is None:
        raise UserError(
            "recipe.device is auto, but the cluster has no GPU now, and its autoscaler doesn't say whether it can start nodes with GPUs: "
            "set recipe.device to cuda or cpu."
        )
    return "cuda" if has_gpus else "cpu"


def worker_bundle(device: Device) -> Resources:
    """Return the resources that a pretraining worker reserves."""
    return {"GPU": 1.0} if device == "cuda" else {"CPU": 1.0}


def device_of(bundle: Resources) -> Device:
    """Return the device on which a worker with these resources computes."""
    return "cuda" if bundle.get("GPU") else "cpu"


def cell_bundle(cpus: float, gpus: float | None, choice: Choice, cluster: Cluster) -> Resources:
    """Return the resources that a cell of a sweep reserves.

    `gpus` is their number; None means one if `choose_device` chooses GPUs, else none.
    """
    if gpus is None:
        gpus = 1.0 if choose_device(choice, cluster) == "cuda" else 0.0
    return {kind: amount for kind, amount in (("CPU", cpus), ("GPU", gpus)) if amount}


def check_workers(workers: int, choice: Choice, device: Device, cluster: Cluster) -> None:
    """Refuse a stage that would wait forever.

    Raises:
        UserError: the cluster can never hold that many workers; the message says what it can have and what to change.
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
        f"{describe_cluster(cluster)}. Either {', or '.join(ways)}."
    )


def lacks_nodes(cluster: Cluster) -> bool:
    """Return whether no node has a CPU or GPU yet and no autoscaler is known to add one; other nodes may still join."""
    return most_places(cluster, {"CPU": 1.0}) < 1 and most_places(cluster, {"GPU": 1.0}) < 1


def may_get_places(cluster: Cluster, bundle: Resources, count: int) -> bool:
    """Return whether the cluster has no autoscaler and can't hold `count` bundles yet, but further nodes may still join."""
    grows = cluster.growth is None or any(node_type.most > 0 for node_type in cluster.growth.types)
    return cluster.joinable and not grows and most_places(cluster, bundle) < count


def check_place(what: str, bundle: Resources, cluster: Cluster, *, remedy: str) -> None:
    """Refuse work that would wait forever for a single bundle.

    Raises:
        UserError: no node can ever hold the bundle; the message says what the cluster can have, and `remedy`.
    """
    if most_places(cluster, bundle) < 1:
        raise UserError(
            f"{what} needs {amounts(bundle)} on one node, and no node of this Ray cluster can ever offer that: {describe_cluster(cluster)}. {remedy}"
        )


def amounts(bundle: Resources) -> str:
    """Format a bundle for display: `1 CPU and 0.25 GPU`."""
    return " and ".join(f"{amount:g} {kind}" for kind, amount in bundle.items())


def describe_cluster(cluster: Cluster) -> str:
    """Describe in one clause what a cluster has and can get."""
    has = " and ".join(f"{cluster.total(kind):g} {kind}s" for kind in _SHOWN)
    nodes = f"{len(cluster.nodes)} node{'s' if len(cluster.nodes) != 1 else ''}"
    if cluster.growth is None:
        return f"it has {has} on {nodes}, and an autoscaler whose limits can't be read"
    types = [node_type for node_type in cluster.growth.types if node_type.most > 0]
    if not types:
        return f"it has {has} on {nodes}, and no autoscaler that adds any"
    limit = "" if math.isinf(cluster.growth.most) else f", {cluster.growth.most:g} nodes together"
    added = ", ".join(
        f"{'any number' if math.isinf(node_type.most) else format(node_type.most, 'g')} of {node_type.name!r} "
        f"({', '.join(f'{node_type.resources.get(kind, 0):g} {kind}s' for kind in _SHOWN)})"
        for node_type in types
    )
    return f"it has {has} on {nodes}, and its autoscaler adds at most {added}{limit}"


def no_gpu(node: str) -> str:
    """Return the message for a worker that Ray has given a GPU which torch doesn't see."""
    return (
        f"node {node} offers Ray a GPU, but torch sees none there: install torch with CUDA (or ROCm) and the driver on it, or start its Ray "
        "without GPUs (`ray start --num-gpus=0`)."
    )


@dataclass(frozen=True)
class PlacementGroup:
    """A placement group: bundles that are reserved together or not at all."""

    waiting: bool
    bundles: tuple[Resources, ...]


def waiting_line(groups: Sequence[PlacementGroup], cluster: Cluster, *, all_of_them: bool) -> str | None:
    """Describe the resources that a driver's work waits for and those that are free; return None if it doesn't wait.

    Args:
        groups: the driver's placement groups.
        all_of_them: count the work as waiting only if all of the groups wait.
    """
    waiting = [group for group in groups if group.waiting]
    if not waiting or (all_of_them and len(waiting) < len(groups)):
        return None
    shapes = Counter((len(group.bundles), amounts(group.bundles[0])) for group in waiting if group.bundles)
    wanted = ", ".join(
        f"{count} x {amount}" + (f" ({times} times)" if times > 1 else "") for (count, amount), times in shapes.items()
    )
    kinds = [kind for kind in _SHOWN if any(kind in bundle for group in waiting for bundle in group.bundles)]
    free = " and ".join(f"{cluster.free.get(kind, 0):g} of {cluster.total(kind):g} {kind}s" for kind in kinds)
    if cluster.growth is None or cluster.growth.types:
        outlook = "the autoscaler may add nodes (`ray status` says which it starts)"
    elif not any(places_now(cluster, bundle) for group in waiting for bundle in group.bundles):
        outlook = "no node offers that much now"
    else:
        outlook = "they are held by other work"
    return f"{wanted}; free are {free}; {outlook}"

"""The current Ray session's cluster: its resources, what its autoscaler can add, and what the driver waits for."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

from mlmclm.cluster.placement import (
    HEAD,
    Cluster,
    Growth,
    NodeType,
    PlacementGroup,
    Resources,
    amounts,
    describe_cluster,
    lacks_nodes,
    may_get_places,
    places_now,
    waiting_line,
)
from mlmclm.errors import EnvironmentFault
from mlmclm.progress import repeated, say

SECONDS_BETWEEN_LOOKS = 5.0
SECONDS_BEFORE_THE_FIRST_LINE = 10.0
"""Seconds before the first message. On a busy machine, placing workers takes a few seconds, which needs no message."""
SECONDS_BETWEEN_LINES = 60.0


def cluster_view() -> Callable[[], Cluster]:
    """Return a function that reads the current session's cluster at each call; the autoscaler's limits are read once, now."""
    growth = _growth()

    def look() -> Cluster:
        import ray

        nodes = [node for node in ray.nodes() if node["Alive"]]
        # Other machines don't reach a private cluster, whose nodes listen on loopback.
        joinable = not all(node["NodeManagerAddress"].startswith("127.") for node in nodes)
        return Cluster(tuple(node["Resources"] for node in nodes), ray.available_resources(), growth, joinable)

    return look


@contextmanager
def report_waits(what: str, view: Callable[[], Cluster], *, all_of_them: bool = False) -> Iterator[None]:
    """Print from time to time, while the block runs, what the driver's placement groups wait for.

    `what` is the beginning of the line, such as `pretraining`; for `all_of_them` see `waiting_line`.
    """
    since, said_at, last_line = math.inf, -math.inf, ""

    def look() -> None:
        nonlocal since, said_at, last_line
        with suppress(Exception):  # if the cluster doesn't answer, the work itself reports it
            jobs, job_id = groups_of_jobs()
            groups, now, line = jobs.get(job_id, ()), time.monotonic(), None
            if (all if all_of_them else any)(group.waiting for group in groups):
                line = waiting_line(groups, view(), all_of_them=all_of_them)
            since = math.inf if line is None else min(since, now)
            # A changed line is printed soon; the same line is repeated only now and then.
            interval = SECONDS_BEFORE_THE_FIRST_LINE if line != last_line else SECONDS_BETWEEN_LINES
            if line is not None and now - since >= SECONDS_BEFORE_THE_FIRST_LINE and now - said_at >= interval:
                say(f"{what} waits for {line}")
                said_at, last_line = now, line

    with repeated(look, seconds=SECONDS_BETWEEN_LOOKS, name="mlmclm-waits"):
        yield


def await_nodes(
    view: Callable[[], Cluster],
    seconds: float,
    bundle: Callable[[Cluster], Resources] | None = None,
    *,
    places: int = 1,
) -> None:
    """Wait until the cluster has a node that computes, or an autoscaler that can add one.

    Args:
        seconds: the longest time to wait.
        bundle: also wait for nodes that can hold this bundle, unless no node can join. If none has joined in time, return:
            `check_place` or `check_workers` then raises the error.
        places: how many of these bundles the nodes must hold in total.

    Raises:
        EnvironmentFault: no node that computes has joined in that time.
    """
    began, said = time.monotonic(), ""
    while True:
        cluster = view()
        missing = "" if not lacks_nodes(cluster) else "the cluster has none that computes yet"
        if not missing and bundle is not None and may_get_places(cluster, needed := bundle(cluster), places):
            lacking = f"no node has {amounts(needed)}" if places == 1 else f"there are not {places} x {amounts(needed)}"
            missing = f"{lacking} yet: {describe_cluster(cluster)}"
        if not missing:
            return
        if time.monotonic() - began >= seconds:
            if not lacks_nodes(cluster):
                return
            raise EnvironmentFault(
                f"No node that computes has joined the Ray cluster in {seconds:g} s (--wait-for-nodes): {describe_cluster(cluster)}."
            )
        if missing != said:
            say(f"waiting for nodes, for up to {seconds:g} s (--wait-for-nodes; Ctrl-C ends it): {missing}")
            said = missing
        time.sleep(SECONDS_BETWEEN_LOOKS)


def wait_for_a_place(what: str, bundle: Resources, view: Callable[[], Cluster]) -> None:
    """Wait until the cluster has a node for a bundle of resources, for work that makes no placement group itself.

    Only a placement group makes an autoscaler add such a node.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    if places_now(view(), bundle):
        return
    group = placement_group([dict(bundle)])
    with report_waits(what, view):
        ray.get(group.ready())
    # The group was only a request for a node; while it exists, the work itself cannot use the resources.
    remove_placement_group(group)


def groups_of_jobs() -> tuple[Mapping[str, Sequence[PlacementGroup]], str]:
    """Return the placement groups of all the cluster's jobs, by the job's id, and the id of this process's job."""
    import ray
    from ray.util import placement_group_table

    job_id: str = ray.get_runtime_context().get_job_id()
    groups_by_job = defaultdict[str, list[PlacementGroup]](list)
    for key, group in placement_group_table().items():
        if group["state"] != "REMOVED":
            job = key[-len(job_id) :]  # a group's id ends with the id of its job
            groups_by_job[job].append(PlacementGroup(group["state"] != "CREATED", tuple(group["bundles"].values())))
    return groups_by_job, job_id


def _growth() -> Growth | None:
    """Return the nodes that the cluster's autoscaler can add, or None if it has one whose limits can't be read."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    context = ray.get_runtime_context()
    head = next(node["NodeID"] for node in ray.nodes() if HEAD in node["Resources"])
    if head == context.get_node_id():
        return growth_on_head(context.gcs_address)
    # The configuration file and the monitor process are on the head node, so a task pinned to that node reads them.
    task = ray.remote(growth_on_head).options(
        num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(head, soft=False)
    )
    growth: Growth | None = ray.get(task.remote(context.gcs_address))
    return growth


def growth_on_head(gcs_address: str) -> Growth | None:
    """Implement `_growth` on the head node, from the file given to its monitor process (`ray start --autoscaling-config`)."""
    monitor = _monitor(gcs_address)
    if monitor is None:  # a private cluster has no autoscaler; on Kubernetes it runs in its own container
        return Growth() if gcs_address.startswith("127.") else None
    path = next((word.partition("=")[2] for word in monitor if word.startswith("--autoscaling-config=")), "")
    if not path:
        return Growth()
    try:
        return configured_growth(yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8")))
    # An unreadable file means unknown limits, not the absence of an autoscaler.
    except (OSError, ValueError, yaml.YAMLError, AttributeError):
        return None


def configured_growth(config: Mapping[str, Any]) -> Growth:
    """Return the nodes, without the head, that a configuration of Ray's cluster launcher lets its autoscaler add."""
    # 2 is the default of Ray's cluster launcher.
    most = float(config.get("max_workers", 2))
    types = config.get("available_node_types") or {}
    return Growth(
        tuple(
            NodeType(name, kind.get("resources") or {}, float(kind.get("max_workers", most)))
            for name, kind in types.items()
            if name != config.get("head_node_type")
        ),
        most,
    )


def _monitor(gcs_address: str) -> list[str] | None:
    """Return the command line of this node's monitor process, or None if there is none.

    Clusters on the same machine differ in their GCS port.
    """
    port = gcs_address.rpartition(":")[2]
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = process.cmdline()
            address = next((word for word in words if word.startswith("--gcs-address=")), "")
            if address.endswith(f":{port}") and any(Path(word).name == "monitor.py" for word in words):
                return words
    return None

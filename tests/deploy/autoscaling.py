"""The nodes that Ray's autoscaler would start, by its code (version 2, the default of `ray up` and KubeRay)."""

from __future__ import annotations

from typing import Any

from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.utils import ResourceRequestUtil

BUNDLES: tuple[dict[str, float], ...] = ({"CPU": 1}, {"GPU": 1}, {"CPU": 4, "GPU": 0.25})
"""Resources that workers and cells reserve."""


def kinds_started(config: dict[str, Any], bundle: dict[str, float]) -> set[str]:
    """Return the kinds of nodes for two bundles, in a cluster that has none yet."""
    read = AutoscalingConfig(config, skip_content_hash=True)
    request = SchedulingRequest(
        disable_launch_config_check=True,
        node_type_configs=read.get_node_type_configs(),
        max_num_nodes=read.get_max_num_nodes(),
        resource_requests=ResourceRequestUtil.group_by_count([ResourceRequestUtil.make(bundle)] * 2),
    )
    return {launch.instance_type for launch in ResourceDemandScheduler().schedule(request).to_launch}

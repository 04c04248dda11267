#!/bin/bash
# Ray 2.60.0, the dashboard's `/api/cluster_status`.
# Guess: a node's resources have there the names by which they were given, and by which tasks ask for them.
# In fact: keys are in camel case, those of the resources too: `big_disk` is `bigDisk`, `object_store_memory` is `objectStoreMemory`.
# What placement groups reserve, `CPU_group_0_IDENTIFIER` in `ray.cluster_resources()`, is `CPUGroup0...`, with capitals in the
# identifier, so a filter of `_group_` finds none of it.
# Hurts: monitors and schedulers that look a custom resource up, or leave out what placement groups reserve. Source: ray-project/ray,
# python/ray/dashboard/utils.py, `to_google_style`.
# Seen: ray says ['big_disk', 'object_store_memory'], the dashboard ['bigDisk', 'objectStoreMemory']; 2 and 0 names with `_group_`.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet --disable-pip-version-check "ray[default]==2.60.0" || exit 2
cd "$work"
HOME="$work" RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=disabled "$work/venv/bin/python" - <<'PY'
import json, sys, time, urllib.request

import ray
from ray.util.placement_group import placement_group

print("ray", ray.__version__)
session = ray.init(num_cpus=1, resources={"big_disk": 2}, include_dashboard=True, object_store_memory=100_000_000, log_to_driver=False)
ray.get(placement_group([{"CPU": 1}]).ready())
deadline, usage = time.time() + 120, {}
while time.time() < deadline and not any("group" in name.lower() for name in usage):
    time.sleep(1)
    with urllib.request.urlopen(f"http://{session.dashboard_url}/api/cluster_status") as answer:
        status = json.load(answer)["data"]["clusterStatus"] or {}
    usage = (status.get("loadMetricsReport") or {}).get("usage") or {}
own = ray.cluster_resources()
ray.shutdown()
if not usage:
    sys.exit("the dashboard has said nothing yet")
plain, shown = (sorted(name for name in names if name.lower().replace("_", "") in ("bigdisk", "objectstorememory")) for names in (own, usage))
groups = [sum("_group_" in name and name.startswith("CPU") for name in names) for names in (own, usage)]
print(f"ray says {plain}, the dashboard {shown}; {groups[0]} and {groups[1]} names with `_group_`")
sys.exit(0 if plain == ["big_disk", "object_store_memory"] and shown == ["bigDisk", "objectStoreMemory"] and groups[0] and not groups[1] else 1)
PY

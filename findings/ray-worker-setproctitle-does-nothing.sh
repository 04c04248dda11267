#!/bin/bash
# Ray 2.60.0, setproctitle 1.3.8 (PyPI), in a task.
# Guess: `setproctitle.setproctitle` in a worker names its process for `ps`, `top` and the dashboard's Cluster page, as in any process.
# In fact: it does nothing and raises nothing. The package finds the place of the title by Python's own arguments, and Ray, which has a
# copy of the same C code, has written "ray::IDLE" over them before any code of the user's runs. Ray's copy (`ray._raylet.setproctitle`,
# not public) works, and Ray sets its own title again when the call returns.
# Hurts: whoever wants to see in the list of processes what a reused actor computes.
# Seen: package: ray::name; Ray's: mine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet --disable-pip-version-check "ray[default]==2.60.0" setproctitle==1.3.8 || exit 2
cd "$work"
export HOME="$work" RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=disabled
"$work/venv/bin/python" -W ignore - <<'PY'
import logging
import sys
from pathlib import Path

import ray


@ray.remote
def name(how):
    if how == "package":
        from setproctitle import setproctitle
    else:
        from ray._raylet import setproctitle
    setproctitle("mine")
    return Path("/proc/self/cmdline").read_bytes().partition(b"\0")[0].decode()


print("ray", ray.__version__)
ray.init(num_cpus=1, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
package, own = ray.get([name.remote("package"), name.remote("ray")])
ray.shutdown()
print(f"package: {package}; Ray's: {own}")
same = (package, own) == ("ray::name", "mine")
print("as described" if same else "CHANGED")
sys.exit(0 if same else 1)
PY

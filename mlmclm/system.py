"""Facts about the machine and the software, recorded with a run."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from math import inf
from pathlib import Path
from typing import Any

PACKAGES = (
    "mlmclm", "torch", "ray", "deepspeed", "transformers", "mlflow", "numpy",
    "tokenizers", "datasets",  # tokens and data
    "numba", "triton", "liger-kernel",  # kernels
    "scikit-learn", "scipy", "pytrec-eval-terrier", "lm-eval",  # metrics
)  # fmt: skip
GIT_SECONDS = 10.0
CONTROL_GROUP = Path("/sys/fs/cgroup")
"""The control group of a container, as it is seen from inside."""


def system_facts(gpus: Sequence[str]) -> dict[str, Any]:
    """Return the Python version, platform, processor, memory and `software()` as nested plain values, with names of GPUs."""
    import psutil

    return {
        "python": platform.python_version(),
        "host": platform.node(),
        "platform": platform.platform(),
        "processor": processor(),
        "cpus": usable_cpus(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": list(gpus),
        **software(),
    }


def usable_cpus() -> int:
    """Return how many processors this process may use: those that it may run on, or fewer if its container has a limit.

    A fraction of a processor is not counted, as in Ray.
    """
    return max(1, int(min(len(os.sched_getaffinity(0)), container_cpus(CONTROL_GROUP))))


def container_cpus(group: Path) -> float:
    """Return a control group's limit of processors (`docker run --cpus`, `limits.cpu` of Kubernetes); infinite without one."""
    with suppress(OSError, ValueError):  # there is no such file outside of containers and of Linux
        if (group / "cpu.max").exists():  # version 2 of control groups
            quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
        else:
            names = (f"cpu.cfs_{name}_us" for name in ("quota", "period"))
            quota, period = ((group / "cpu" / name).read_text(encoding="ascii").strip() for name in names)
        if quota not in ("max", "-1"):
            return int(quota) / int(period)
    return inf


@cache
def software() -> dict[str, Any]:
    """Return the versions of Python and of the packages that affect results, and mlmclm's commit if known."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {"versions": versions, **({"commit": head} if (head := commit()) else {})}


def provenance(device: str, backend: str) -> dict[str, Any]:
    """Return where, when and by which software something has just been computed."""
    worker, now = f"{platform.node()}/{os.getpid()}", datetime.now(UTC)
    return {
        "worker": worker,
        "finished": now.isoformat(timespec="seconds"),
        "device": device,
        "backend": backend,
        **software(),
    }


@cache
def processor() -> str:
    """Return the name of this machine's processor."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    # For ARM CPUs the file has numbers in place of a name, and LLVM has a table of these.
    from llvmlite import binding

    return f"{binding.get_host_cpu_name()} ({platform.machine()})"


@cache
def commit() -> str | None:
    """Return the commit of the running mlmclm, with a `+` suffix if files differ or may differ; None for a release."""
    try:
        url = json.loads(metadata.distribution("mlmclm").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        url = {}
    # Installed from a repository with pip: the installer has recorded the commit.
    if "vcs_info" in url:
        return str(url["vcs_info"]["commit_id"])
    root = Path(__file__).parents[1]
    return checkout_commit(root) if (root / ".git").exists() else None


def checkout_commit(root: Path) -> str | None:
    """Return a checkout's commit, with the suffix of `commit`; None if git is missing or cannot say."""
    # If `git status` fails, the files may differ, hence the `+`.
    head, changes = _git(root, "rev-parse", "HEAD"), _git(root, "status", "--porcelain", "--untracked-files=no")
    return None if head is None else head + ("" if changes == "" else "+")


def _git(root: Path, *words: str) -> str | None:
    try:
        # Without optional locks `git status` never gets in the way of a git command of the user. On clusters a checkout
        # often belongs to another user, which git refuses by default; its code is running already.
        options = ("--no-optional-locks", "-c", "safe.directory=*", "-C", str(root))
        done = subprocess.run(["git", *options, *words], capture_output=True, text=True, timeout=GIT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None

"""Facts about the machine and the software, for the record of a run."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("mlmclm", "torch", "ray", "deepspeed", "transformers", "mlflow", "numpy")
GIT_SECONDS = 10.0


def system_facts() -> dict[str, Any]:
    """Python, versions of what decides a result, processor, memory, GPUs; nested values of plain types."""
    import psutil
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "host": platform.node(),
        "platform": platform.platform(),
        "processor": processor(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": gpus,
        **software(),
    }


@cache
def software() -> dict[str, Any]:
    """The versions of what decides a result, and mlmclm's commit where it can be told."""
    found = {"versions": {name: version for name in PACKAGES if (version := _version(name)) is not None}}
    return found | ({"commit": own} if (own := commit()) else {})


@cache
def processor() -> str:
    """The name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


@cache
def commit() -> str | None:
    """The commit of the mlmclm that runs, with `+` behind it where files differ, or may; None for a release."""
    try:
        url = json.loads(metadata.distribution("mlmclm").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        url = {}
    if "vcs_info" in url:
        return str(url["vcs_info"]["commit_id"])
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    head, changes = _git(root, "rev-parse", "HEAD"), _git(root, "status", "--porcelain", "--untracked-files=no")
    return None if head is None else head + ("" if changes == "" else "+")


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(root), *words], capture_output=True, text=True, timeout=GIT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

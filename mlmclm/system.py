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
from pathlib import Path
from typing import Any

PACKAGES = (
    "mlmclm", "torch", "ray", "deepspeed", "transformers", "mlflow", "numpy",
    "tokenizers", "datasets",  # tokens and data
    "numba", "triton", "liger-kernel",  # kernels
    "scikit-learn", "scipy", "seqeval", "lm-eval",  # metrics
)  # fmt: skip
GIT_SECONDS = 10.0


def system_facts(gpus: Sequence[str]) -> dict[str, Any]:
    """Return the Python version, platform, processor, memory and `software()` as nested plain values, with names of GPUs."""
    import psutil

    return {
        "python": platform.python_version(),
        "host": platform.node(),
        "platform": platform.platform(),
        "processor": processor(),
        # The cores that this process may use, which can be fewer than the machine's.
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": list(gpus),
        **software(),
    }


@cache
def software() -> dict[str, Any]:
    """Return the versions of Python and of the packages that affect results, and mlmclm's commit if known."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {"versions": versions, **({"commit": own} if (own := commit()) else {})}


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
    # The file has numbers in place of a name for ARM CPUs, and LLVM knows them.
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

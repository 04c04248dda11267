"""Facts about the machine and the software, for the record of a run."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

PACKAGES = ("mlmclm", "torch", "ray", "deepspeed", "transformers", "mlflow", "numpy")


def system_facts() -> dict[str, Any]:
    """Python, versions of what decides a result, processor, memory, GPUs; nested values of plain types."""
    import psutil
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "host": platform.node(),
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": gpus,
        "versions": {name: version for name in PACKAGES if (version := _version(name)) is not None},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

"""The environment variables of Ray's worker processes, for pretraining and for sweeps."""

from __future__ import annotations

import logging
import os
from typing import Any

from mlmclm.backends.determinism import CUBLAS
from mlmclm.backends.device_kinds import BACKEND
from mlmclm.cluster.live_metrics import label_variables


def worker_environment() -> dict[str, str]:
    """Return the environment variables of single-threaded workers, for the `env_vars` of a Ray runtime environment.

    On small models two single-threaded workers are faster than one worker with two threads. The allocator's settings
    keep large buffers in the process instead of faulting them in again at every step (1.5 times the speed of a
    pretraining loop on the machine of reference/platform.md):

    - No block gets a memory mapping (mmap) of its own, whatever its size. A threshold would not suffice, as glibc accepts
      none above 32 MiB.
    - There is one arena. From any other arena glibc would still serve large blocks with fresh memory, and Ray Train
      runs the training function in a thread that is not the main one.
    - Memory comes in pages of 2 MiB where the system provides them on request (3 to 8 % of a pretraining step).

    cuBLAS reads its variable when CUDA starts, before it is known whether a worker's cells are to be deterministic.
    """
    tunables = [os.environ.get("GLIBC_TUNABLES", ""), "glibc.malloc.hugetlb=1"]
    return {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        **{name: os.environ.get(name, value) for name, value in CUBLAS.items()},
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
        "MALLOC_TOP_PAD_": str(64 << 20),
        "GLIBC_TUNABLES": ":".join(filter(None, tunables)),
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        **({BACKEND: os.environ[BACKEND]} if BACKEND in os.environ else {}),
        **label_variables(),
    }


def runtime_environment(job: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the `runtime_env` for `ray.init`, without the entries that the surrounding Ray job (`job`) has already set.

    Ray refuses a driver's runtime environment that sets a variable, or the setup hook, that its job's environment also sets.
    """
    job = job or {}
    job_variables = job.get("env_vars") or {}
    settings: dict[str, Any] = {
        "env_vars": {name: value for name, value in worker_environment().items() if name not in job_variables}
    }
    if "worker_process_setup_hook" not in job:
        settings["worker_process_setup_hook"] = "mlmclm.cluster.worker_environment.quiet_worker"
    return settings


def quiet_worker() -> None:
    """Silence, in each new worker process, what Ray logs about features that are off.

    Ray Train's placement group cleaner asks the dashboard for the state of the run. Without a dashboard it logs a
    failed query every few seconds.
    """
    logging.getLogger("ray.train.v2._internal.execution.controller.placement_group_cleaner").setLevel(logging.ERROR)

"""Zero-shot evaluation of several models on a Ray cluster, one Ray task for each missing result."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from mlmclm.backends.device_kinds import Choice
from mlmclm.cluster.placement import cell_bundle, check_place
from mlmclm.errors import MlmclmError, one_line
from mlmclm.evaluation.evaluations import Subject, ZeroShotTask, evaluation_key, find_or_compute
from mlmclm.evaluation.zero_shot_config import ZeroShot, load_model
from mlmclm.progress import Bar
from mlmclm.registry import Shipment, shipment
from mlmclm.sweeps.results_store import Evaluations

SECONDS_BETWEEN_LOOKS = 1.0
ATTEMPTS_AGAIN = 3
"""How often Ray reruns an evaluation whose worker has died."""


def evaluate_missing(
    missing: Sequence[tuple[Subject, ZeroShotTask]],
    zero_shot: ZeroShot,
    *,
    store: Path,
    data_root: Path | None,
    device: Choice,
    cpus: float,
) -> None:
    """Compute and file the results of models on tasks in the current Ray session.

    Args:
        zero_shot: the settings from which the tasks were read; the files that these name must be visible to all nodes.
        cpus: CPUs that an evaluation reserves. It has a GPU too if `device` chooses GPUs.

    Raises:
        MlmclmError: some evaluations failed; the results of all others are filed.
    """
    import ray
    from ray.exceptions import RayError

    from mlmclm.cluster.cluster import cluster_view, wait_for_a_place
    from mlmclm.cluster.ray_cluster import check_node

    view = cluster_view()
    bundle = cell_bundle(cpus, None, device, view())
    check_place("An evaluation", bundle, view(), remedy="Change the space's cpus_per_cell, or add nodes.")
    wait_for_a_place("zero-shot evaluation", bundle, view)
    reserved = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0)}
    remote = ray.remote(**reserved, max_retries=ATTEMPTS_AGAIN)(_evaluate)
    shared = store.resolve(), data_root.resolve() if data_root else None, ray.put(shipment())
    waiting = {
        remote.options(name=f"{subject.name}/{task.name}").remote(
            subject, task.name, evaluation_key(subject, task), zero_shot, *shared
        ): f"{subject.name} on {task.name}"
        for subject, task in missing
    }
    failures = []
    with Bar("zero-shot evaluation", len(missing), unit="evaluations") as bar:
        while waiting:
            check_node()
            for done in ray.wait(list(waiting), num_returns=1, timeout=SECONDS_BETWEEN_LOOKS)[0]:
                title = waiting.pop(done)
                try:
                    failure = ray.get(done)
                except RayError as error:
                    failure = f"{title}: {type(error).__name__}: {one_line(error, 300)}"
                if failure:
                    failures.append(failure)
                bar.update(bar.done + 1)
        bar.complete = not failures
    if failures:
        raise MlmclmError(
            "\n".join([f"{len(failures)} of {len(missing)} evaluations failed; all other results are kept.", *failures])
        )


def _evaluate(
    subject: Subject,
    task: str,
    key: str,
    zero_shot: ZeroShot,
    store: Path,
    data_root: Path | None,
    registered: Shipment,
) -> str | None:
    """Compute and file one result, as a Ray task; return the message of an error that would recur, else None.

    Args:
        registered: the registry members of the driver's process; unpickling this registers them in the worker too.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")  # the harness has bars of its own; tqdm reads this when it is imported
    try:
        chosen = _tasks(zero_shot, data_root)[task]
        if evaluation_key(subject, chosen) != key:
            return (
                f"{subject.name} on {task}: the task's data on {platform.node()} differ from those where the study was started. Use a "
                "folder that all nodes see, and do not change the data while the study runs."
            )
        find_or_compute(subject, chosen, Evaluations(store), lambda: _model(subject))
    except MlmclmError as error:
        return str(error)
    return None


@lru_cache(maxsize=1)
def _tasks(zero_shot: ZeroShot, data_root: Path | None) -> dict[str, ZeroShotTask]:
    """Return a worker process's tasks by name, read once."""
    return {task.name: task for task in zero_shot.read(data_root)}


_model = lru_cache(maxsize=1)(load_model)
"""Returns a worker process's model, loaded once for all its tasks."""

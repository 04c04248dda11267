"""Ray Train as the launcher of a stage's workers (`pretraining.launcher`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray.train
from ray.train import CheckpointUploadMode
from ray.train.collective import broadcast_from_rank_zero
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mlmclm.cluster import live_metrics


class RayWorker:
    """A worker of Ray Train."""

    def agreed(self, value: Any) -> Any:
        """Return rank 0's value; collective."""
        return broadcast_from_rank_zero(value)

    def apart(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run a function in a separate process on this node, and return when it has ended."""
        # No CPU is reserved, since the workers may hold them all. The process ends after the call, which frees its
        # memory.
        this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        ray.get(ray.remote(num_cpus=0, max_calls=1, scheduling_strategy=this_node)(function).remote(*arguments))

    def report(self, step: int) -> None:
        """Join the barrier that all workers must join when some save a checkpoint."""
        ray.train.report({"step": step}, checkpoint_upload_mode=CheckpointUploadMode.ASYNC)

    def keep(self, step: int, write: Callable[[Path], None]) -> None:
        """Write a checkpoint straight into Ray Train's storage, which saves copying a finished one."""
        folder = Path(ray.train.get_context().get_storage().experiment_fs_path)

        # Ray Train calls this in a separate thread, with the name that it has chosen for the checkpoint.
        def put(_: ray.train.Checkpoint, name: str) -> ray.train.Checkpoint:
            write(folder / name)
            return ray.train.Checkpoint.from_directory(folder / name)

        ray.train.report(
            {"step": step},
            checkpoint=ray.train.Checkpoint.from_directory(folder),  # a placeholder: `put` makes the real one in it
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
            checkpoint_upload_fn=put,
            # The "local checkpoint" is the whole run folder.
            delete_local_checkpoint_after_upload=False,
        )

    def show(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Export a live metric through Ray (`cluster.live_metrics`)."""
        live_metrics.show(name, value, **labels)

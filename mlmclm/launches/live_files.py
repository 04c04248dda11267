"""Small files that rank 0 writes and the driver reads during a stage's run, where the two share no folder.

Rank 0's machine sends new content to an actor on the driver's node (`Mailbox`), and the driver writes it into its own run
folder. So readers of these files find them there, wherever the workers are.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from mlmclm.cluster.ray_cluster import started_here
from mlmclm.pretraining.job import StageJob
from mlmclm.progress import repeated

SECONDS = 1.0
"""Seconds between rank 0's checks of the files, and between the driver's checks of the mailbox."""


class Part(NamedTuple):
    """The content of a file from an offset on."""

    name: str
    start: int
    """Bytes before this part. 0 replaces the whole file."""
    content: bytes


class Mailbox:
    """Actor that holds the parts that the driver has not fetched yet."""

    def __init__(self) -> None:
        self.parts: list[Part] = []

    def put(self, parts: list[Part]) -> None:
        """Add parts."""
        self.parts += parts

    def take(self) -> list[Part]:
        """Return what was added since the last call, in order."""
        parts, self.parts = self.parts, []
        return parts


class Link(NamedTuple):
    """Connection from rank 0 to the driver."""

    mailbox: Any
    """Handle of the `Mailbox`."""
    marker: Path
    """File in the driver's run folder. A worker that sees it shares the folder, and sends nothing."""


@contextmanager
def receive_live_files(job: StageJob) -> Iterator[Link | None]:
    """Write what rank 0 sends during the block into the driver's run folder; yield None on a cluster that the driver started."""
    if started_here():
        yield None
        return
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    marker = job.run_folder / f".driver-{uuid.uuid4().hex}"
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.touch()
    # Pinned to the driver's node, so that it lives as long as that node.
    place = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    mailbox = ray.remote(num_cpus=0, scheduling_strategy=place)(Mailbox).remote()

    def look() -> None:
        with suppress(ray.exceptions.RayError):  # the cluster has ended, which is reported elsewhere
            for part in ray.get(mailbox.take.remote()) if ray.is_initialized() else ():
                write(job.run_folder, part)

    try:
        with repeated(look, seconds=SECONDS, name="mlmclm-receive"):
            yield Link(mailbox, marker)
    finally:
        look()
        ray.kill(mailbox)
        marker.unlink(missing_ok=True)


def write(folder: Path, part: Part) -> None:
    """Write a part of a file, and cut off the old content after its start."""
    with (folder / part.name).open("r+b" if part.start else "wb") as file:
        file.truncate(part.start)
        file.seek(part.start)
        file.write(part.content)


@contextmanager
def sent(job: StageJob, link: Link | None) -> Iterator[None]:
    """Send the driver what this worker, if it is rank 0, writes during the block, unless the two share the run folder."""
    import ray.train

    if link is None or link.marker.is_file() or ray.train.get_context().get_world_rank() != 0:
        yield
        return
    for path in (job.notes_path, job.stop_path):
        path.unlink(missing_ok=True)  # left on this machine by an earlier run; they would be taken for this run's

    def put(parts: list[Part]) -> None:
        with suppress(ray.exceptions.RayError):  # the driver has ended, and the worker is about to
            ray.get(link.mailbox.put.remote(parts))

    look = sender((job.metrics_path, job.notes_path, job.stop_path), put)
    try:
        with repeated(look, seconds=SECONDS, name="mlmclm-send"):
            yield
    finally:
        look()


def sender(files: tuple[Path, ...], put: Callable[[list[Part]], None]) -> Callable[[], None]:
    """Return a function that passes to `put` the parts of files that have changed since its last call."""
    contents = dict.fromkeys(files, b"")

    def look() -> None:
        parts = []
        for path, before in contents.items():
            content = path.read_bytes() if path.is_file() else b""
            # Files only grow, except that a restart replaces the metrics with those of its checkpoint.
            start = len(before) if content.startswith(before) else 0
            if content != before:
                parts.append(Part(path.name, start, content[start:]))
            contents[path] = content
        if parts:
            put(parts)

    return look

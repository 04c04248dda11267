"""Files that rank 0 writes on a machine of its own reach the driver's folder, byte by byte."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlmclm.launches.live_files import Link, Part, sender, sent, write


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """The folders of rank 0 and of the driver."""
    found = tmp_path / "worker", tmp_path / "driver"
    for place in found:
        place.mkdir()
    return found


def job_in(folder: Path) -> Any:
    return SimpleNamespace(
        metrics_path=folder / "metrics.jsonl", notes_path=folder / "notes.txt", stop_path=folder / "stopped.json"
    )


def test_files_that_grow_begin_anew_and_appear_are_the_same_at_the_driver(places: tuple[Path, Path]) -> None:
    worker, driver = places
    metrics, stopped = worker / "metrics.jsonl", worker / "stopped.json"
    moved: list[Part] = []
    look = sender((metrics, stopped), moved.extend)

    def arrived() -> list[Part]:
        look()
        parts = moved.copy()
        moved.clear()
        for part in parts:
            write(driver, part)
        return parts

    assert arrived() == []
    (driver / "metrics.jsonl").write_text("left by an earlier run, and longer than what comes\n")
    lines = [f'{{"step": {step}}}\n' for step in range(5)]
    metrics.write_text("".join(lines[:3]))
    arrived()
    assert (driver / "metrics.jsonl").read_text() == "".join(lines[:3])
    with metrics.open("a") as file:
        file.write(lines[3])
    stopped.write_text("{}")
    first, second = arrived()
    assert (first.start, first.content.decode()) == (len("".join(lines[:3])), lines[3])
    assert second == Part("stopped.json", 0, b"{}")
    metrics.write_text("".join(lines[:1] + lines[4:]))  # a restart from the first step
    arrived()
    assert arrived() == []
    for path in (metrics, stopped):
        assert (driver / path.name).read_bytes() == path.read_bytes()


class Held:
    """A mailbox in this process: its method is called as an actor's is."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.put = SimpleNamespace(remote=self.parts.extend)


@pytest.mark.parametrize(
    ("rank", "shared", "sends"), [(0, False, True), (1, False, False), (0, True, False)], ids=["0", "1", "shared"]
)
def test_rank_0_alone_sends_and_only_to_another_folder(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, rank: int, shared: bool, sends: bool
) -> None:
    worker, driver = places
    monkeypatch.setattr("ray.get", lambda done: done)
    monkeypatch.setattr("ray.train.get_context", lambda: SimpleNamespace(get_world_rank=lambda: rank))
    marker = (worker if shared else driver) / ".driver-1"
    if shared:
        marker.touch()
    job, held = job_in(worker), Held()
    job.stop_path.write_text("an earlier run's")
    with pytest.raises(OSError, match="the end"), sent(job, Link(held, marker)):
        assert job.stop_path.is_file() != sends, "what an earlier run left on this machine is no news"
        job.metrics_path.write_text("{}\n")
        raise OSError("the end")
    assert held.parts == ([Part("metrics.jsonl", 0, b"{}\n")] if sends else [])

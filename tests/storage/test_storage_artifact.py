"""An artifact is made by one process, appears whole, and is set aside and made again if it is damaged."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mlmclm.errors import EnvironmentFault
from mlmclm.storage.artifact import FolderArtifact
from mlmclm.storage.files import stable_hash
from mlmclm.storage.leases import Leases

KEY = stable_hash("a part")


class Part(FolderArtifact):
    kind = "parts"
    part = "parts/inner"
    again = "nothing"


def write(folder: Path) -> None:
    (folder / "content").write_text("whole")


def test_of_eight_threads_that_want_an_artifact_one_makes_it_and_the_others_say_that_they_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    lines: list[str] = []
    # A line that is printed while `capfd` empties its file would be lost.
    monkeypatch.setattr("mlmclm.storage.artifact.say", lines.append)

    def make(folder: Path) -> None:
        while sum("the part: waiting for process" in line for line in lines) < 7:
            time.sleep(0.01)
        made.append(1)
        write(folder)

    with ThreadPoolExecutor(8) as pool:
        folders = [pool.submit(Part(tmp_path, KEY).ensure, make, title="the part") for _ in range(8)]
    assert {folder.result() for folder in folders} == {tmp_path / "parts" / "inner" / KEY}
    assert len(made) == 1


def test_an_artifact_whose_maker_fails_is_not_there_and_is_made_by_the_next(tmp_path: Path) -> None:
    part = Part(tmp_path, KEY)

    def fail(folder: Path) -> None:
        write(folder)
        raise EnvironmentFault("the disk is full")

    with pytest.raises(EnvironmentFault, match="the disk is full"):
        part.ensure(fail)
    assert list((tmp_path / "parts" / "inner").iterdir()) == []
    assert not part.find()
    assert part.damage() == "it is not there"
    part.ensure(write)
    assert part.find()
    assert part.damage() is None
    assert list(Part.all(tmp_path)) == [part]


@pytest.mark.parametrize("how", ["find", "ensure"])
@pytest.mark.parametrize("read", [True, False])
def test_a_damaged_artifact_is_kept_aside_and_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], how: str, read: bool
) -> None:
    part = Part(tmp_path, KEY)
    file = part.ensure(write) / "content"
    file.write_text("whale" if read else "cut")
    if read:
        assert part.damage(read=False) is None
    if how == "find":
        assert not part.find(read=read)
        assert not part.folder.exists()
    else:
        part.ensure(write, read=read)
        assert file.read_text() == "whole"
    error = " ".join(capfd.readouterr().err.split())
    assert f"{part.folder} is not used: content" in error
    assert f"It is kept as {KEY}.damaged and made again." in error
    assert (part.folder.with_name(f"{KEY}.damaged") / "content").is_file()
    assert list(Part.all(tmp_path)) == ([] if how == "find" else [part])


def test_an_intact_artifact_is_neither_made_nor_claimed(tmp_path: Path) -> None:
    part = Part(tmp_path, KEY)
    part.ensure(write)
    with Leases(tmp_path).attempt([part.lease]):
        assert part.ensure(lambda _: pytest.fail("made again")) == part.folder
        assert part.find()


def test_the_files_of_an_artifact_are_verified_each_by_its_checksum(tmp_path: Path) -> None:
    part = Part(tmp_path, KEY)
    part.ensure(write)
    assert [(Path(piece.path).name, piece.check()) for piece in part.files()] == [
        ("checksums.json", None),
        ("content", None),
    ]
    (part.folder / "content").write_text("whale")
    assert [piece.check() for piece in part.files()] == [
        None,
        "content is not what was written: its checksum differs",
    ]

"""The half-made files of killed processes are removed at the next start, and nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlmclm.storage.files import machine_tag
from mlmclm.storage.temporary import FOREIGN_SECONDS, GRACE_SECONDS, UNFINISHED, sweep_unfinished

WORK = """
import sys, time
from pathlib import Path
from mlmclm.storage.files import whole_file, whole_folder
store = Path(sys.argv[1])
with whole_file(store / "cells" / "ab" / "abc.json") as file, whole_folder(store / "states" / "key") as folder:
    file.write(b"half")
    (folder / "weights").write_bytes(b"half")
    print("working", flush=True)
    time.sleep(600)
"""


def age(store: Path) -> list[str]:
    """Makes everything old enough to be swept; the names of what is half made."""
    for path in store.rglob(".*"):
        os.utime(path, (0, time.time() - 2 * GRACE_SECONDS))
    return sorted(path.name for path in store.rglob(".*") if UNFINISHED.fullmatch(path.name))


def test_what_a_killed_process_left_is_removed_and_what_a_live_one_works_on_is_not(tmp_path: Path) -> None:
    words = [sys.executable, "-c", WORK, str(tmp_path)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"working\n"
        working = age(tmp_path)
        assert [name.split(".")[1] for name in working] == ["abc", "key"]
        sweep_unfinished(tmp_path)
        assert age(tmp_path) == working
    finally:
        process.kill()
        process.wait()
    for path in tmp_path.rglob(".*"):
        path.touch()
    sweep_unfinished(tmp_path)
    assert age(tmp_path) == working, "younger than the time between making and locking"
    sweep_unfinished(tmp_path)
    assert age(tmp_path) == []
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["ab", "cells", "states"]


@pytest.mark.parametrize("name", [".lock", ".mlflow.db.lock", ".a.json.abcdefgh", "a.{tag}.abcdefgh"])
def test_what_isn_t_known_as_half_made_by_this_machine_is_left_alone(tmp_path: Path, name: str) -> None:
    path = tmp_path / "cells" / name.format(tag=machine_tag())
    path.parent.mkdir()
    path.touch()
    os.utime(path, (0, 0))
    sweep_unfinished(tmp_path)
    assert path.exists()


def test_what_another_machine_left_is_removed_after_a_week(tmp_path: Path) -> None:
    path = tmp_path / ".a.json.00000000.abcdefgh"
    path.touch()
    os.utime(path, (0, time.time() - FOREIGN_SECONDS + 3600))
    sweep_unfinished(tmp_path)
    assert path.exists()
    os.utime(path, (0, time.time() - FOREIGN_SECONDS - 3600))
    sweep_unfinished(tmp_path)
    assert not path.exists()

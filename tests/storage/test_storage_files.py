"""Locks on files, where the file system has none."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from mlmclm.errors import EnvironmentFault
from mlmclm.storage.files import in_turn, only_one


@pytest.mark.parametrize("lock", [in_turn, lambda path: only_one(path, "study 'a'")])
def test_a_file_system_without_locks_is_named_and_no_other_process_is_blamed(
    lock: Callable[[Path], AbstractContextManager[None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (
        pytest.raises(EnvironmentFault, match=r"cannot be locked.*not implemented.*system with locks"),
        lock(tmp_path / "a"),
    ):
        pass

"""Locks on files where the file system has none, and folders whose place a file has."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.storage.files import check_folder, in_turn, only_one


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


def test_a_file_in_the_place_of_a_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    Path("link").symlink_to("nowhere")
    for path in (Path("file"), Path("file/below/it"), tmp_path / "file", Path("link")):
        with pytest.raises(UserError, match=rf"^{path}: .* is a file; name a folder"):
            check_folder(path)
    for path in (Path("new/folder"), Path(), tmp_path, Path("/")):
        assert check_folder(path) == path

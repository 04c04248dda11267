"""A result says which software made it."""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from mlmclm.system import checkout_commit, software


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    return subprocess.run(
        ["git", *who, "-C", folder, *words], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_of_a_checkout_is_marked_if_a_file_differs_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert checkout_commit(tmp_path) is None, "not a checkout"
    git(tmp_path, "init", "-q")
    (tmp_path / "code.py").write_text("one")
    git(tmp_path, "add", "code.py")
    git(tmp_path, "commit", "-qm", "first")
    head = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "results.txt").write_text("not tracked")
    assert checkout_commit(tmp_path) == head
    # Git's own tests pretend in this way that the checkout is another user's.
    with monkeypatch.context() as patch:
        patch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
        assert checkout_commit(tmp_path) == head
    (tmp_path / "code.py").write_text("two")
    assert checkout_commit(tmp_path) == f"{head}+"
    monkeypatch.setenv("PATH", "")
    assert checkout_commit(tmp_path) is None


def test_versions_are_those_that_are_installed() -> None:
    versions = software()["versions"]
    assert versions["python"] == platform.python_version()
    for name in ("torch", "tokenizers", "scikit-learn"):
        assert versions[name] == metadata.version(name)

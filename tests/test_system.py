"""A result says which software made it, and a container's limit of processors is respected."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from math import inf
from pathlib import Path

import pytest

from mlmclm import system
from mlmclm.corpora.process_map import worker_count
from mlmclm.system import checkout_commit, container_cpus, software


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


def write_limit(group: Path, quota: str, version: int) -> Path:
    """Writes a control group's limit as the kernel shows it in a container."""
    (group / "cpu").mkdir(parents=True)
    if version == 2:
        (group / "cpu.max").write_text(f"{quota} 100000\n")
    else:
        (group / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (group / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    return group


@pytest.mark.parametrize(("version", "unlimited"), [(1, "-1"), (2, "max")])
def test_processes_are_as_many_as_the_container_s_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, unlimited: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    for quota, cpus, workers in (("400000", 4.0, 4), ("150000", 1.5, 2), ("20000", 0.2, 1), (unlimited, inf, 64)):
        group = write_limit(tmp_path / quota, quota, version)
        monkeypatch.setattr(system, "CONTROL_GROUP", group)
        assert (container_cpus(group), worker_count(None)) == (cpus, workers)
    assert container_cpus(tmp_path) == inf

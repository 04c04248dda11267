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
from llvmlite import binding

from mlmclm import system
from mlmclm.system import checkout_commit, container_cpus, processor, software


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
    for quota, cpus, workers in (
        ("400000", 4.0, 4),
        ("150000", 1.5, 1),
        ("many", inf, 64),
        ("20000", 0.2, 1),
        (unlimited, inf, 64),
    ):
        group = write_limit(tmp_path / quota, quota, version)
        monkeypatch.setattr(system, "CONTROL_GROUP", group)
        assert (container_cpus(group), system.usable_cpus()) == (cpus, workers)
    assert container_cpus(tmp_path) == inf


NEOVERSE_N1 = """\
processor\t: 0
BogoMIPS\t: 243.75
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1
"""


def test_a_processor_of_which_linux_tells_numbers_only_has_llvm_s_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "get_host_cpu_name", lambda: "neoverse-n1")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: NEOVERSE_N1)
    assert processor.__wrapped__() == "neoverse-n1 (aarch64)"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n")
    assert processor.__wrapped__() == "Some CPU @ 2 GHz"

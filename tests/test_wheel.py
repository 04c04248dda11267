"""The built wheel has all that a checkout has, and asks for all that it imports."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = (
    "mlmclm",
    "tune_spaces",
    "claims",
    "examples",
    "replications",
    "dashboards",
    "pyproject.toml",
    "setup.py",
    "README.md",
    "LICENSE",
)


def packed(kind: str, source: Path, target: Path) -> Path:
    """Builds a `wheel` or `sdist` of a folder, and unpacks it."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(target)!r}))"
    made = subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True, text=True)
    file, unpacked = target / made.stdout.split()[-1], target / kind
    if kind == "wheel":
        with zipfile.ZipFile(file) as content:
            content.extractall(unpacked)
        return unpacked
    with tarfile.open(file) as archive:
        archive.extractall(unpacked, filter="data")
    return next(unpacked.iterdir())


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The unpacked wheel of the checkout, and that of its source distribution."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("checkout", "first", "second", "source"):
        (folder / name).mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, folder / "checkout" / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(ROOT / name, folder / "checkout" / name)
    stale = folder / "checkout" / "build" / "lib" / "mlmclm" / "deleted.py"  # as an earlier build leaves it
    stale.parent.mkdir(parents=True)
    stale.touch()
    source = packed("sdist", folder / "checkout", folder / "source")
    return [packed("wheel", folder / "checkout", folder / "first"), packed("wheel", source, folder / "second")]


def files_below(folder: Path) -> set[str]:
    """All files, those of linked folders too."""
    return {
        (Path(place) / name).relative_to(folder).as_posix()
        for place, _, names in os.walk(folder, followlinks=True)
        for name in names
        if "__pycache__" not in place
    }


def test_the_wheel_has_every_file_of_the_package_and_none_of_an_earlier_build(wheels: list[Path]) -> None:
    there = files_below(ROOT / "mlmclm")
    assert {
        "py.typed",
        "examples/quickstart.yaml",
        "tune_spaces/quickstart.yaml",
        "claims/ettin.yaml",
        "replications/tasks/last_word.py",
    } <= there
    for wheel in wheels:
        assert files_below(wheel / "mlmclm") == there


def test_a_packaged_study_is_found_where_there_is_no_checkout(wheels: list[Path], tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from mlmclm.cli.main import main\n"
        "main(['plan', '--study', 'quickstart', '--device', 'h100', '--json'])"
    )
    for wheel in wheels:
        found = subprocess.run(
            [sys.executable, "-c", code, str(wheel)], cwd=tmp_path, capture_output=True, text=True, timeout=1500
        )
        assert found.returncode == 0, found.stderr
        assert "1m-clm-1k" in found.stdout


def test_a_new_study_is_written_and_planned_where_there_is_no_checkout(wheels: list[Path], tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import mlmclm\n"
        "from mlmclm.studies.new_study import new_study\n"
        "study = mlmclm.study(new_study(__import__('pathlib').Path('mine'))[0])\n"
        "print(mlmclm.__file__, study.name, study.file.find_space().tasks)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(wheels[0])], cwd=tmp_path, capture_output=True, text=True, timeout=1500
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith(str(wheels[0])) and "mine" in found.stdout and "pydocs-kind" in found.stdout


def test_every_package_that_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [*project["dependencies"], *(each for extra in project["optional-dependencies"].values() for each in extra)]
    declared = {_plain(found[0]) for each in asked if (found := re.match(r"[\w.-]+", each))}
    owners = metadata.packages_distributions()
    undeclared: dict[str, str] = {}
    for file in sorted((ROOT / "mlmclm").rglob("*.py")):
        for name in _imported(file):
            own = {_plain(owner) for owner in owners.get(name, [name])}
            if name not in sys.stdlib_module_names | {"mlmclm"} and not own & declared:
                undeclared[name] = str(file.relative_to(ROOT))
    assert undeclared == {}


def test_every_declared_package_of_the_lock_is_locked() -> None:
    locked = {_plain(line.partition("==")[0]) for line in (ROOT / "constraints.txt").read_text().splitlines()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = {_plain(found[0]) for each in project["dependencies"] if (found := re.match(r"[\w.-]+", each))}
    assert asked - locked == set()


def test_every_version_has_its_hash_in_the_lock() -> None:
    versions = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    lines = [
        re.fullmatch(r"(\S+)==(\S+) --hash=sha256:[0-9a-f]{64}", line)
        for line in (ROOT / "lock.txt").read_text(encoding="utf-8").splitlines()
    ]
    locked = {f"{_plain(found[1])}=={found[2].removesuffix('+cpu')}" for found in lines if found}
    assert None not in lines and locked == {
        f"{_plain(name)}=={each}" for name, _, each in (line.partition("==") for line in versions)
    }


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _imported(file: Path) -> set[str]:
    """The top-level packages that a module imports, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return names

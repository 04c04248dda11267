"""What tests of the command line share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from mlmclm.cli.main import main
from mlmclm.storage.files import in_turn
from small_study import run as run_process
from small_study import write_study


class Finished(NamedTuple):
    """A study that has run to its end undisturbed, in a process of its own. Tests leave it as it is."""

    study: Path
    store: Path
    home: Path


@pytest.fixture(scope="session")
def finished_study(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Computed once for all of pytest's processes."""
    root = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        root = root.parent
    folder = root / "finished-study"
    made = Finished(folder / "study" / "study.yaml", folder / "store", folder / "home")
    with in_turn(root / "finished-study.lock"):
        if not folder.exists():
            made.home.mkdir(parents=True)
            write_study(made.study.parent)
            words = ("study", made.study, "--store", made.store, "--data", made.study.parent / "data")
            code, _, errors = run_process(*words, home=made.home)
            (folder / "ended").write_text(f"{code}\n{errors}")
        code, _, errors = (folder / "ended").read_text().partition("\n")
    assert code == "0", errors
    return made


@pytest.fixture(autouse=True)
def no_word_of_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine it would come between the lines that tests look at."""
    monkeypatch.setattr("mlmclm.progress.SECONDS_OF_SILENCE", 600.0)


@pytest.fixture
def study(finished_study: Finished) -> Path:
    """The study file of `finished_study`."""
    return finished_study.study


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs a command line in this process: its exit code and what it printed."""

    def call(*words: str | Path) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        captured = capfd.readouterr()
        code = ended.value.code
        return (code if isinstance(code, int) else 0), captured.out + captured.err

    return call

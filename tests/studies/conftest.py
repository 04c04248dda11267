"""Tests of comparisons use the made-up results of the analysis' tests; tests of stores share one, which takes a while to make."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "analysis"))


@pytest.fixture(scope="session")
def copied_store(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Copies a small study and its store (`small_store.make_store`), with hard links, to a folder that is not there yet."""
    from small_store import make_store

    made = make_store(tmp_path_factory.mktemp("small"))

    def copy(to: Path) -> Path:
        subprocess.run(["cp", "-a", made, to], check=True)
        return to

    return copy

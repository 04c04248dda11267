"""Shared fixtures: nothing here or below uses a fixed port or the user's home folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.1")  # many short runs, whose end is seen at such a look

# Tests have a home folder each, in which every one of their processes would compile the loops again.
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(__file__).resolve().parents[1] / ".pytest_cache" / "loops"))

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real tasks beside the checkout; the test is skipped where it is absent."""
    folder = SHARED / "data"
    if not folder.is_dir():
        pytest.skip("needs ../shared/data, which is not beside this checkout")
    return folder


@pytest.fixture(scope="session")
def shared_tokenizers() -> Path:
    """The folder of published tokenizers beside the checkout; the test is skipped where it is absent."""
    folder = SHARED / "tokenizers"
    if not folder.is_dir():
        pytest.skip("needs ../shared/tokenizers, which is not beside this checkout")
    return folder


@pytest.fixture(autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test has a home folder of its own, so that none reads or writes the user's."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    return home

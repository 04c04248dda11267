"""The store to which most tests of tracking write."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def store(mlflow_store: Path) -> Path:
    """A store with an empty MLflow database."""
    return mlflow_store

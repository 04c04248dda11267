"""The store that most of these tests write to."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def store(mlflow_store: Path) -> Path:
    """A store with an empty MLflow database."""
    return mlflow_store

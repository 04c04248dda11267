"""A store with an empty MLflow database, which several files copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlmclm.tracking.address import default_address
from mlmclm.tracking.connection import Connection


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose MLflow database has a schema and nothing else: creating one takes seconds."""
    store = tmp_path_factory.mktemp("empty")
    Connection(default_address(store), "unused", store / "mlflow")
    return store

"""A folder that the tests of a module share."""

from __future__ import annotations

from pathlib import Path

import pytest

from small_models import write_place


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data/ and model/."""
    folder = tmp_path_factory.mktemp("place")
    write_place(folder)
    return folder

"""A Ray cluster and a study that the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from small_study import write_study


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A session on a cluster of two processors."""
    from mlmclm.cluster.ray_cluster import prepare_environment, ray_session

    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_TRAIN_ENABLE_STATE_TRACKING", "0")  # saves a process that tests do not need
        prepare_environment()
        with ray_session(tmp_path_factory.mktemp("ray"), num_cpus=2):
            yield


@pytest.fixture(scope="module")
def study_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_study(tmp_path_factory.mktemp("study"))

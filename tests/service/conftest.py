"""A Ray head that the tests of jobs share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ray_head import RayHead, running_head


@pytest.fixture(scope="module")
def ray_head() -> Iterator[RayHead]:
    with running_head() as head:
        yield head

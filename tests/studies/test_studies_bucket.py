"""A whole study whose store is on a bucket that fails gives what it gives in a folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from object_stores import need_s3


@pytest.mark.slow
def test_a_study_on_a_failing_bucket_finds_what_it_finds_in_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    need_s3()
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parents[2])])
    from benchmarks import study_on_a_bucket

    study_on_a_bucket.measure(outage=10.0)

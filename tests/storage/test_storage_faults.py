"""Whatever a fault of the object store hits, the sweep goes on as if nothing had happened, only later."""

from __future__ import annotations

from pathlib import Path

import pytest

from fault_table import Scene
from object_stores import DisturbedStore

FAULTS = ("500", "503", "cut", "lost response", "truncated", "damaged")


@pytest.mark.parametrize("stage", ["reading a result", "listing", "lease", "filing a result"])
def test_a_fault_at_any_request_changes_nothing(stage: str, disturbed: DisturbedStore, tmp_path: Path) -> None:
    scene = Scene(disturbed.proxy, tmp_path, disturbed.url)
    wanted, requests = scene.undisturbed(stage)
    assert requests
    # Each fault has a request; `python -m benchmarks.faults` tries them all.
    cases = {(kind, number * requests // len(FAULTS)) for number, kind in enumerate(FAULTS)}
    wrong = {(kind, at): scene.outcome(kind, stage, at, wanted) for kind, at in cases}
    assert not any(wrong.values()), {case: outcome for case, outcome in wrong.items() if outcome}

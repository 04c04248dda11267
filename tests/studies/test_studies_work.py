"""The Ray session of a study's work, before it is there."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest
from rich.console import Console

from mlmclm import progress
from mlmclm.storage.place import open_place
from mlmclm.studies import work


def test_a_slow_start_of_ray_is_not_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(progress, "console", Console(file=written))
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.01)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def start(*_: object) -> None:
        for _ in range(6000):
            if "waiting for Ray: " in written.getvalue():
                return
            time.sleep(0.01)
        raise AssertionError(written.getvalue())

    monkeypatch.setattr(work, "_open_session", start)
    with work.one_session(open_place(store=tmp_path), None) as opened, opened.session():
        pass

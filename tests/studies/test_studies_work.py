"""The Ray session of a study's work, before it is there."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

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

    @contextmanager
    def start(*_: object, **__: object) -> Iterator[SimpleNamespace]:
        deadline = time.monotonic() + 60
        while "waiting for Ray: " not in written.getvalue():
            assert time.monotonic() < deadline, written.getvalue()
            time.sleep(0.01)
        yield SimpleNamespace(dashboard=None, local=True)

    monkeypatch.setattr(work, "ray_session", start)
    with closing(work.SharedSession(open_place(store=tmp_path), None, 0.0)) as session, session():
        pass

"""Bars that are open at once in several threads are drawn together, and the terminal is given back after the last."""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

from mlmclm import progress
from mlmclm.progress import Bar


def test_bars_of_two_threads_share_one_display(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(progress, "console", Console(file=written, force_terminal=True, width=160))
    both = threading.Barrier(2)

    def work(title: str) -> None:
        with Bar(title, 10, unit="tokens") as bar:
            both.wait()
            bar.update(10, note=f"{title} is done")
            both.wait()

    threads = [threading.Thread(target=work, args=(title,)) for title in ("first", "second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Bar._drawn is None
    assert all(f"{title} is done" in written.getvalue() for title in ("first", "second"))
    assert written.getvalue().rindex("\x1b[?25h") > written.getvalue().rindex("\x1b[?25l"), "the cursor is back"
    with Bar("later", 1):
        assert Bar._drawn is not None


def test_the_time_left_is_told_by_the_rate_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first steps come long after the bar: by their mean rate since then the time left would be hours."""
    written, now = io.StringIO(), [0.0]
    monkeypatch.setattr(progress, "console", Console(file=written))
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with Bar("pretraining", 1000, unit="tokens") as bar:
        now[0] = 100.0
        bar.update(10, rate=99.0)
    assert "100 s, 10 s left" in written.getvalue()

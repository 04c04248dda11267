"""Bars that are open at once in several threads are drawn together, and the terminal is given back after the last."""

from __future__ import annotations

import io
import itertools
import threading
import time
from contextlib import suppress

import pytest
from rich.console import Console

from mlmclm import progress
from mlmclm.cli.output import show, show_table
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


def test_what_comes_before_the_first_piece_is_not_in_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    written, now = io.StringIO(), [0.0]
    monkeypatch.setattr(progress, "console", Console(file=written))
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with Bar("fine-tuning", 104, unit="cells") as bar:
        bar.start_at(2)
        now[0] = 100.0
        bar.update(3)
        assert bar.seconds_left() is None
        now[0] = 110.0
        bar.update(4)
        assert bar.seconds_left() == 1000.0
        now[0] = 115.0
        assert bar.seconds_left() == 995.0
    assert written.getvalue().splitlines()[:2] == [
        "fine-tuning: 3/104 cells, 100 s",
        "fine-tuning: 4/104 cells, 110 s, 1000 s left",
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_work_that_ends_well_is_all_done_and_work_that_fails_is_not(
    monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    for fails in (False, True):
        written = io.StringIO()
        monkeypatch.setattr(progress, "console", Console(file=written, force_terminal=terminal, width=160))
        with suppress(ValueError), Bar("hashing", 40) as bar:
            bar.update(30)
            if fails:
                raise ValueError
        assert ("40/40" in written.getvalue()) != fails
        assert "-:--:--" not in written.getvalue().rpartition("hashing")[2]


def test_work_that_was_given_up_is_not_all_done(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(progress, "console", Console(file=written))
    monkeypatch.setattr(progress.time, "monotonic", lambda: 0.0)
    with Bar("fine-tuning", 24, unit="cells") as bar:
        bar.update(14)
        bar.complete = False
    assert written.getvalue() == "fine-tuning: 14/24 cells, 0 s\n"


def test_a_line_says_that_work_goes_on_where_nothing_has_happened_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(progress, "console", Console(file=written))
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.01)
    with Bar("pretraining", 10) as bar:
        while not written.getvalue():
            time.sleep(0.01)
        bar.update(10)
    assert written.getvalue().startswith("pretraining: 0/10, ")


def test_work_that_stops_counting_is_never_silent_for_longer_than_the_longest_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written, now = io.StringIO(), [0.0]
    monkeypatch.setattr(progress, "console", Console(file=written))
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress.threading.Thread, "start", lambda self: None)

    class Clock(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            """Let time pass; a part is finished at 16 s."""
            before, now[0] = now[0], now[0] + (timeout or 0.0)
            if before < 16.0 <= now[0]:
                now[0] = 16.0
                bar.update(19)
            return now[0] > 120.0

    with Bar("reading", 20, unit="parts") as bar:
        bar._over = Clock()
        bar._say_that_work_goes_on()
    times = [int(line.split(", ")[1].split()[0]) for line in written.getvalue().splitlines()]
    assert times[:4] == [5, 15, 20, 30], "after news the next line comes soon"
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) == 30


def test_work_without_a_count_shows_none(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress.time, "monotonic", lambda: 0.0)
    with Bar("choosing text"):
        pass
    assert capsys.readouterr().err == "choosing text: 0 s\n"


def test_brief_work_ends_without_a_line_and_longer_work_with_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seconds, said in ((0.5, ""), (1.5, "comparing: 2/2 tasks, 2 s\n")):
        now = iter((0.0, *[seconds] * 9))
        monkeypatch.setattr(progress.time, "monotonic", lambda now=now: next(now))
        with Bar("comparing", 2, unit="tasks", brief=1.0):
            pass
        assert capsys.readouterr().err == said


def test_brackets_in_paths_are_no_markup(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    written = io.StringIO()
    monkeypatch.setattr(progress, "console", Console(file=written, markup=False, emoji=False))
    progress.say(":bug:")
    show(":bug:")
    with Bar("/br[/x]a/[bold]b") as bar:
        bar.update(1, note="[/y]")
    progress.say("/br[/x]a/[bold]b")
    show("/br[/x]a/[bold]b")
    show_table(("a", "b"), [("/br[/x]a", "[bold]")])
    assert written.getvalue().count("/br[/x]a/[bold]b") == 2
    printed = capsys.readouterr().out
    assert ":bug:" in printed and ":bug:" in written.getvalue()
    assert "/br[/x]a/[bold]b" in printed and "[bold]" in printed.rpartition("/br[/x]a")[2]


@pytest.mark.parametrize("width", [20, 40, 200])
def test_a_table_leaves_columns_out_before_it_cuts_a_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    name = "2m-clm-150-mlm40-600"
    columns, rows = ("model", "metric", "spread"), [(name, "accuracy", "0.1234")]
    for forced in (None, "1"):
        monkeypatch.setenv("COLUMNS", str(width))
        if forced:
            monkeypatch.setenv("FORCE_COLOR", forced)
        show_table(columns, rows, drop=("spread", "metric"))
        printed = capsys.readouterr().out
        assert name in printed
        if not forced:
            assert "0.1234" in printed, "in a file or a pipe all columns are there"
        else:
            assert ("accuracy" in printed, "0.1234" in printed) == (width >= 40, width >= 200)
            assert ("omitted, the terminal is too narrow: spread" in printed) == (width < 200)


@pytest.mark.parametrize("spoken", [True, False])
def test_a_command_that_says_nothing_at_first_is_said_to_start(monkeypatch: pytest.MonkeyPatch, spoken: bool) -> None:
    written = io.StringIO()
    monkeypatch.setattr(progress, "console", Console(file=written))
    monkeypatch.setattr(progress, "SECONDS_OF_SILENCE", 300.0 if spoken else 0.05)
    before = threading.enumerate()
    with progress.starting("loading"):
        (waiting,) = {*threading.enumerate()} - {*before}
        if spoken:
            progress.say("something")
        waiting.join()
    assert written.getvalue() == ("something\n" if spoken else "loading\n")


def test_work_without_a_total_says_what_is_counted_and_how_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    written, now = io.StringIO(), [0.0]
    monkeypatch.setattr(progress, "console", Console(file=written))
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.bars() as report:
        report("tokenising", 0, None, "tokens")
        for now[0], done in ((10.0, 1000), (20.0, 121_000)):
            report("tokenising", done, None, "tokens")
        report("verifying", 1, 1, "MiB")
    assert written.getvalue().splitlines() == [
        "tokenising: 1,000 tokens, 10 s",
        "tokenising: 121,000 tokens, 12,000/s, 20 s",
        "verifying: 1/1 MiB, 0 s",
    ]

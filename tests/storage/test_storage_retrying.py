"""Storage that does not answer is asked again with growing pauses, for as long as allowed, and this is said once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace

import pytest

from mlmclm.errors import StorageFault
from mlmclm.storage import retrying
from mlmclm.storage.retrying import Availability, NoAnswer, RetryPolicy

SHORT = RetryPolicy(seconds=30.0, first=0.001, most=0.01, silent=0.0)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock of requests, which goes on while they wait and a hundredth of a second at each look."""
    clock = SimpleNamespace(now=0.0)

    def sleep(seconds: float) -> None:
        clock.now += seconds

    def monotonic() -> float:
        sleep(0.01)
        return clock.now

    clock.sleep, clock.monotonic = sleep, monotonic
    monkeypatch.setattr(retrying, "time", clock)
    return clock


def failing(times: int, error: Exception | None = None) -> Callable[[], str]:
    """Return a request that fails so often before it is answered."""
    left = [error or NoAnswer("out")] * times

    def request() -> str:
        if left:
            raise left.pop()
        return "answer"

    return request


def test_pauses_double_up_to_the_longest_and_are_spread() -> None:
    pauses = [RetryPolicy(first=0.5, most=30).pause(failures, 1.0) for failures in range(1, 10)]
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert RetryPolicy(first=0.5, most=30).pause(2, 0.0) == 0.5
    assert RetryPolicy().pause(100_000, 1.0) == 30


def test_a_request_is_repeated_until_it_is_answered_and_the_outage_is_said_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    storage, notices = Availability("s3://bucket", SHORT), []
    storage.on_change = lambda: notices.append(storage.notice)
    assert storage.keep_asking(failing(5)) == "answer"
    said = capsys.readouterr().err
    assert said.count("s3://bucket: waiting for storage since ") == 1 and "Last reason: out" in said
    assert said.count("storage answers again") == 1
    assert notices[0].startswith("waiting for storage since ") and notices[1:] == [""]
    assert storage.lost > 0 and storage.lost == storage.lost


def test_a_failure_that_the_next_request_mends_is_not_worth_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    storage = Availability("s3://bucket", RetryPolicy(first=0.001))
    assert storage.keep_asking(failing(2)) == "answer"
    assert capsys.readouterr().err == "" and storage.notice == ""


def test_retrying_ends_with_the_reason_and_the_time() -> None:
    storage = Availability("s3://bucket", RetryPolicy(seconds=0.05, first=0.01))
    with pytest.raises(NoAnswer, match=r"^out It was waited for 0 s\.$"):
        storage.keep_asking(failing(1_000_000))
    assert storage.keep_asking(failing(0)) == "answer"


def test_a_request_that_is_never_answered_ends_and_is_said_although_others_are_answered(
    capsys: pytest.CaptureFixture[str],
) -> None:
    storage = Availability("s3://bucket", RetryPolicy(seconds=0.2, first=0.001, most=0.01, silent=0.05))
    notices = []

    def write() -> str:
        assert storage.keep_asking(failing(0)) == "answer"  # a full store can still be read
        notices.append(storage.notice)
        raise NoAnswer("full")

    with pytest.raises(NoAnswer, match=r"^full It was waited for 0 s\.$"):
        storage.keep_asking(write)
    said = capsys.readouterr().err
    assert said.count("waiting for storage since") == 1 and "answers again" not in said
    assert notices[-1], "the status line says it all the while"
    storage.keep_asking(failing(0))
    assert "answers again, after 0 s" in capsys.readouterr().err and not storage.notice


def test_all_the_time_is_lost_in_which_a_request_waits_although_others_are_answered(
    clock: SimpleNamespace,
) -> None:
    storage, seen = Availability("s3://bucket", SHORT), list[float]()

    def write() -> str:
        began = clock.monotonic()
        assert storage.keep_asking(failing(0)) == "answer"
        before = storage.lost
        clock.sleep(0.01)
        if seen:
            assert storage.lost - before >= 0.01
        seen.append(began)
        if len(seen) == 3:
            return "answer"
        raise NoAnswer("full")

    assert storage.keep_asking(write) == "answer"
    assert storage.lost >= seen[2] - seen[0] and storage.lost == storage.lost


def test_a_hurried_request_is_made_once_and_shows_the_outage_to_others(clock: SimpleNamespace) -> None:
    storage = Availability("s3://bucket", SHORT)
    with pytest.raises(NoAnswer, match=r"^out$"):
        storage.keep_asking(failing(1), waits=0)
    assert storage.notice
    before = storage.lost
    clock.sleep(0.01)
    assert storage.lost > before
    storage.keep_asking(failing(0))
    assert storage.lost == storage.lost and not storage.notice


@pytest.mark.parametrize("error", [FileNotFoundError("none"), FileExistsError("there"), StorageFault("refused")])
def test_any_other_error_is_an_answer(error: Exception) -> None:
    storage = Availability("s3://bucket", SHORT)
    with pytest.raises(NoAnswer):
        storage.keep_asking(failing(1), waits=0)
    with pytest.raises(type(error)):
        storage.keep_asking(failing(1, error))
    assert not storage.notice


def test_an_old_failure_is_not_part_of_an_outage_that_begins_now(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrying, "SECONDS_UNTIL_FORGOTTEN", 0.0)
    storage = Availability("s3://bucket", RetryPolicy(seconds=0.05, first=0.001))
    with pytest.raises(NoAnswer):
        storage.keep_asking(failing(1), waits=0)
    clock.sleep(0.1)
    assert storage.keep_asking(failing(1)) == "answer"


def test_the_lost_time_never_shrinks_though_an_old_failure_is_forgotten(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrying, "SECONDS_UNTIL_FORGOTTEN", 0.0)
    storage, lost = Availability("s3://bucket", SHORT), [0.0]
    for failures in (1, 1, 1, 0):
        with suppress(NoAnswer):
            storage.keep_asking(failing(failures), waits=0)
        clock.sleep(0.02)
        lost.append(storage.lost)
    assert lost == sorted(lost)

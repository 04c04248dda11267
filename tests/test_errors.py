"""What is wrong with several things is said of all of them at once."""

from __future__ import annotations

import pytest

from mlmclm.errors import EnvironmentFault, MlmclmError, UserError, for_each, printable


def refuse(item: object) -> object:
    if isinstance(item, MlmclmError):
        raise item
    return item


def test_every_item_is_looked_at_and_every_message_said_once() -> None:
    assert for_each([1, 2], refuse) == [1, 2]
    one = UserError("a is wrong")
    with pytest.raises(UserError) as caught:
        for_each([1, one, 2], refuse)
    assert caught.value is one
    with pytest.raises(UserError) as caught:
        for_each([one, 1, UserError("b is wrong"), UserError("a is wrong")], refuse)
    assert str(caught.value) == "a is wrong\nb is wrong"


def test_a_fault_of_the_environment_ends_it_and_is_what_it_is() -> None:
    with pytest.raises(EnvironmentFault) as caught:
        for_each([UserError("a is wrong"), EnvironmentFault("no network"), UserError("never reached")], refuse)
    assert str(caught.value) == "a is wrong\nno network"
    assert caught.value.exit_code == 1
    with pytest.raises(ZeroDivisionError):
        for_each([1, 0], lambda item: 1 // item)


def test_names_of_others_control_no_terminal() -> None:
    assert printable("a\x1b[2J\u202eb\tc\nd") == "a\ufffd[2J\ufffdb\tc\nd"

"""The errors a user can meet: each carries its exit code, and its text says what to do.

`UserError` (exit code 2) is a mistake in what was asked for; `EnvironmentFault` (exit code 1) is a fault of the machine, the
network or a service. The command line prints either as one message without a traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import TypeVar


class MlmclmError(Exception):
    """Base of every error whose text is meant for the user."""

    exit_code = 1


class UserError(MlmclmError):
    """What was asked for cannot be done as asked: the message names the key, the value and what is allowed."""

    exit_code = 2


class EnvironmentFault(MlmclmError):
    """The request is fine but the machine, a server or the disk is not; the same command can succeed later."""

    exit_code = 1


def unknown(kind: str, value: object, allowed: Iterable[object], *, where: str = "") -> UserError:
    """A `UserError` for a value outside a closed set: names the value, the nearest match and all that is allowed."""
    names = [str(item) for item in allowed]
    near = difflib.get_close_matches(str(value), names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    place = f"{where}: " if where else ""
    return UserError(f"{place}unknown {kind} {str(value)!r}.{hint} Allowed: {', '.join(names) or '(none)'}.")


Item = TypeVar("Item")
Result = TypeVar("Result")


def for_each(items: Iterable[Item], work: Callable[[Item], Result]) -> list[Result]:
    """`work` of every item; what is wrong with any of them is said of all at once. A fault of the environment, which would
    meet the others too, ends it.

    Raises:
        UserError: the only one as it is, or one with the messages of all.
        EnvironmentFault: there is one; the messages before it come first.
    """
    results: list[Result] = []
    errors: list[MlmclmError] = []
    for item in items:
        try:
            results.append(work(item))
        except MlmclmError as error:
            if str(error) not in map(str, errors):
                errors.append(error)
            if isinstance(error, EnvironmentFault):
                break
    if len(errors) > 1:
        raise type(errors[-1])("\n".join(map(str, errors))) from errors[0]
    if errors:
        raise errors[0]
    return results

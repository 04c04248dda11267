"""The errors a user can meet: each carries its exit code, and its text says what to do.

`UserError` (exit code 2) is a mistake in what was asked for; `EnvironmentFault` (exit code 1) is a fault of the machine, the
network or a service. The command line prints either as one message without a traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


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

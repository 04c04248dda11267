"""Errors that a user can meet: each has an exit code, and a text that says what to do.

`UserError` (exit code 2) is a mistake in the request. `EnvironmentFault` (exit code 1) is a fault of the machine, the
network or a service. The command line prints either as one message without a traceback.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Characters that change what a terminal or a page does or shows, besides tabs and line feeds."""
OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|\bMemoryError\b|not enough memory|out of memory|can(no|')t allocate memory|running low on memory|bad_alloc"
    r"|CUBLAS_STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)
"""Words with which torch, CUDA, the C library, the kernel or Ray reports that memory ran out; their exceptions share no type."""
LONGEST_SHOWN = 300
"""Maximum number of characters of a value that a message shows."""


class MlmclmError(Exception):
    """Base of all errors whose text is meant for the user."""

    exit_code = 1


class UserError(MlmclmError):
    """The request cannot be fulfilled as it is; the message names the key, the value and what is allowed."""

    exit_code = 2


class UnknownArgument(UserError, TypeError):
    """A function was called with an argument that it does not have; Python's own error for this is a `TypeError`."""


class EnvironmentFault(MlmclmError):
    """The request is fine, but the machine, a server or the disk is not; the same command can succeed later."""


class StorageFault(EnvironmentFault):
    """The storage of the results cannot be used; no cell is at fault."""


class MissingBucket(UserError):
    """The bucket of the results does not exist, which waiting will not change; no cell is at fault."""


def unknown(kind: str, value: object, allowed: Iterable[object], *, where: str = "") -> UserError:
    """Return a `UserError` for a value outside a closed set, with the nearest match and all allowed values."""
    names = [str(item) for item in allowed]
    place = f"{where}: " if where else ""
    listed = ", ".join(names) or "(none)"
    shown = clipped(str(value))
    return UserError(f"{place}unknown {kind} {shown!r}.{meant(shown, names)} Allowed: {listed}.")


def meant(value: str, names: Iterable[str]) -> str:
    """Return " Did you mean 'NAME'?" with the name nearest to a value; the empty text if none is near.

    A name that differs by one letter (`model` for `models`) is nearest. Next are names that end in the value (`17m` for
    `ettin17m`), then names with a similar spelling.
    """
    candidates = list(names)
    endings = [name for name in candidates if len(value) > 1 and name.endswith(value)]
    slip = difflib.get_close_matches(value, candidates, n=1, cutoff=0.9)
    near = slip or endings[:1] or difflib.get_close_matches(value, candidates, n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


def meant_path(path: Path) -> str:
    """Return " Did you mean 'NAME'?" with the name nearest to a missing path in its folder; empty if none is near."""
    with suppress(OSError):  # there is no such folder either, or it may not be read
        return meant(path.name, sorted(entry.name for entry in path.parent.iterdir()))
    return ""


def clipped(text: str, most: int = LONGEST_SHOWN) -> str:
    """Return a text that a message can show: a longer one ends in "..." and its length."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def printable(text: str) -> str:
    """Return a text without characters that control a terminal: names from other people's files may have some."""
    return CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


def one_line(error: object, most: int | None = None) -> str:
    """Return the text of another library's error on one line, cut to `most` characters."""
    return " ".join(str(error).split())[:most]


Item = TypeVar("Item")
Result = TypeVar("Result")


def for_each(items: Iterable[Item], work: Callable[[Item], Result]) -> list[Result]:
    """Apply `work` to every item, and report the errors of all items at once.

    A fault of the environment ends the loop, since it would affect the other items too.

    Raises:
        UserError: the only error, unchanged, or one error with the messages of all.
        EnvironmentFault: an item met such a fault; its text starts with the messages of the errors before it.
    """
    results: list[Result] = []
    errors: list[MlmclmError] = []
    for item in items:
        try:
            results.append(work(item))
        except MlmclmError as error:
            # Items often fail for the same reason, such as one missing file.
            if str(error) not in map(str, errors):
                errors.append(error)
            if isinstance(error, EnvironmentFault):
                break
    if len(errors) > 1:
        # Only the last error can be an `EnvironmentFault`, since that ends the loop.
        raise type(errors[-1])("\n".join(map(str, errors))) from errors[0]
    if errors:
        raise errors[0]
    return results

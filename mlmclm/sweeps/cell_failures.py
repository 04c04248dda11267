"""Failures of cells: their classes, how often a cell is run again after each, and notes of why cells failed.

A note is a small file per cell, `store/cells/failed/<key>.json`, deleted when the cell gets its result. It is for people:
the results alone decide what is computed next.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from mlmclm.configuration import Frozen, Role
from mlmclm.errors import OUT_OF_MEMORY, EnvironmentFault, MlmclmError
from mlmclm.progress import say_once
from mlmclm.storage.files import write_json

if TYPE_CHECKING:
    from mlmclm.storage.objects import ObjectPath

FOLDER = "failed"


class Failure(StrEnum):
    """Reason for which a worker ended without a result."""

    OUT_OF_MEMORY = "out of memory"
    LOST_NODE = "lost node"
    HUNG = "hung"
    TIME_LIMIT = "time limit"
    CRASH = "crash"


class Retries(Frozen):
    """How often a cell is run again after each class of failure.

    Errors that would recur are never retried: bad input, a full disk, a cell over its time limit. A diverged training
    is no failure but a result.
    """

    out_of_memory: Annotated[int, Role.WORK] = Field(default=3, ge=0)
    """Retries after the GPU or the machine ran out of memory. From then on, fewer cells run at once."""
    lost_node: Annotated[int, Role.WORK] = Field(default=20, ge=0)
    """Retries after the node was lost, which is no fault of the cell: spot instances are lost all the time."""
    hung: Annotated[int, Role.WORK] = Field(default=2, ge=0)
    """Retries after a worker hung: it was ended because its cell took many times as long as any other of its task."""
    crash: Annotated[int, Role.WORK] = Field(default=3, ge=0)
    """Retries after any other end of the worker's process, or an unexpected exception."""

    def bound(self, failure: Failure) -> int:
        """Return how often a cell is retried after failures of this class."""
        return 0 if failure is Failure.TIME_LIMIT else int(getattr(self, failure.name.lower()))


def failure_of(error: BaseException) -> Failure:
    """Return the class of the error that ended a worker."""
    # Ray wraps what a task raised in an error that has both its own class and the raised one as bases, so check the names of all
    # bases. Importing torch and Ray for their classes would slow down every command.
    cause = getattr(error, "cause", None) or error
    names = {kind.__name__ for kind in type(cause).__mro__}
    if OUT_OF_MEMORY.search(" ".join([*names, str(cause)])):
        return Failure.OUT_OF_MEMORY
    # Ray has one class for all deaths of actors; only its message shows that the node is gone.
    gone = getattr(error, "preempted", False) or "its node has died" in str(error)
    if names & {"NodeDiedError", "ActorUnavailableError"} or ("RayActorError" in names and gone):
        return Failure.LOST_NODE
    return Failure.CRASH


def describe_error(error: BaseException) -> str:
    """Describe an error in one line; for the error of a Ray task, describe what the task raised."""
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, MlmclmError):
        return str(cause)
    lines = str(cause).strip().splitlines()
    # Ray puts the worker's traceback first and the exception last; a dead actor's message starts with what happened,
    # unless the actor died of an exception as it started.
    raised = "Traceback" in str(cause) or "error raised in its creation task" in str(cause)
    text = (lines[-1] if raised else lines[0]) if lines else ""
    return f"{type(cause).__name__}: {text}"


@dataclass(frozen=True)
class FailureNote:
    """The last failure of a cell."""

    key: str
    reason: str
    """One line, as `describe_error` gives it."""
    kind: str
    """Class of the failure, which bounds its retries: `crash`, `out of memory`, `lost node`, `user error`, ..."""
    count: int
    """How often the cell has failed since it was first noted."""
    node: str
    """Name of the node, empty if unknown."""
    time: str
    """Time of the failure: UTC, ISO 8601, in seconds."""


def record(cells: Path | ObjectPath, key: str, reason: str, kind: str, node: str = "") -> None:
    """Note in the results store's folder (`ResultsStore.folder`) that a cell failed.

    A note that cannot be written (a full disk) is reported once and doesn't raise, because it must not end a sweep.
    """
    path = _path(cells, key)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        before = _read(path)  # an object store may be out of reach
        failure = FailureNote(key, reason, kind, 1 + (before.count if before else 0), node, now)
        write_json(path, asdict(failure))
    except EnvironmentFault as error:
        say_once(f"failures of cells cannot be noted: {error}")


def forget(cells: Path | ObjectPath, key: str) -> None:
    """Remove the note on a cell, if there is one."""
    _path(cells, key).unlink(missing_ok=True)


def failure_notes(cells: Path | ObjectPath) -> dict[str, FailureNote]:
    """Return all notes by the key of their cell; a file that cannot be read is left out."""
    folder = cells / FOLDER
    notes = [_read(path) for path in folder.iterdir() if path.suffix == ".json"] if folder.is_dir() else []
    return {note.key: note for note in notes if note is not None}


def _path(cells: Path | ObjectPath, key: str) -> Path | ObjectPath:
    return cells / FOLDER / f"{key}.json"


def _read(path: Path | ObjectPath) -> FailureNote | None:
    try:
        value = json.loads(path.read_bytes())
        return FailureNote(**{field.name: value[field.name] for field in fields(FailureNote)})
    except (OSError, ValueError, KeyError, TypeError):
        return None

"""Classes of failures of a cell, and how often a cell is retried after each."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from mlmclm.configuration import Frozen, Role


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
    """The GPU's memory, or the machine's. Fewer cells run at once from then on."""
    lost_node: Annotated[int, Role.WORK] = Field(default=20, ge=0)
    """The node went away, which says nothing about the cell: spot instances do so all the time."""
    hung: Annotated[int, Role.WORK] = Field(default=2, ge=0)
    """The worker's process stopped running without ending."""
    crash: Annotated[int, Role.WORK] = Field(default=3, ge=0)
    """Any other end of the worker's process, or an unexpected exception."""

    def bound(self, failure: Failure) -> int:
        """Return how often a cell is retried after failures of this class."""
        return 0 if failure is Failure.TIME_LIMIT else int(getattr(self, failure.name.lower()))


def failure_of(error: BaseException) -> Failure:
    """Return the class of the error that ended a worker."""
    # Ray wraps what a task raised in an error of both classes, so check the names of all base classes. Importing torch
    # and Ray for their classes would slow down every command.
    names = {kind.__name__ for kind in type(getattr(error, "cause", None) or error).__mro__}
    if names & {"OutOfMemoryError", "MemoryError"}:
        return Failure.OUT_OF_MEMORY
    if "RayActorError" in names:
        # Ray has one class for all deaths of actors; only its words say that memory ran out or that the node is gone.
        if "low on memory" in str(error):
            return Failure.OUT_OF_MEMORY
        if getattr(error, "preempted", False) or "its node has died" in str(error):
            return Failure.LOST_NODE
    return Failure.LOST_NODE if names & {"NodeDiedError", "ActorUnavailableError"} else Failure.CRASH

"""Messages for the user when a stage ended early, from what Ray Train raised or the workers noted."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlmclm.errors import EnvironmentFault, MlmclmError, UserError
from mlmclm.plans.recipe import Recipe

VALIDATION_LOSS = "validation loss"
"""Name of the quantity that is not finite where it isn't a step's own loss or gradient."""

_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|\bMemoryError\b|not enough memory|out of memory|can(no|')t allocate memory|running low on memory|bad_alloc",
    re.IGNORECASE,
)
_DISK_FULL = re.compile(r"No space left on device|Disk quota exceeded|the disk is full")
_LISTED = 32


def final(failures: Mapping[int, BaseException]) -> BaseException | None:
    """A failure that starting the workers again from their last checkpoint would only meet once more: a mistake in what was asked for, too
    little memory, or a full disk; None if no worker's failure is of that kind.

    Args:
        failures: what workers raised, or what Ray says of their death, by rank.
    """
    for failure in failures.values():
        raised = getattr(failure, "_base_exc", failure)  # Ray Train's wrapper of what a worker raised
        if isinstance(raised, UserError):
            return raised
        if _OUT_OF_MEMORY.search(str(failure)) or _DISK_FULL.search(str(failure)):
            return failure
    return None


def explain(error: BaseException, *, title: str, folder: Path, recipe: Recipe) -> MlmclmError:
    """The fault behind a failed Ray Train run: a worker's own message for the user, out of memory and a full disk by name, anything
    else by its last line.

    Ray hands on what its workers raised as text, with the traceback; it is told apart by that.

    Args:
        folder: the run's, where its checkpoints are.
    """
    behind = list(_behind(error))
    for item in behind:
        if isinstance(item, UserError):
            return UserError(f"pretraining stage {title!r}: {item}")
    text = "\n".join(str(item) for item in behind)
    kept = f"Its checkpoints are kept in {folder}; the same command goes on from them."
    if _DISK_FULL.search(text):
        return EnvironmentFault(f"pretraining stage {title!r}: the disk is full. Free some space. {kept}")
    if _OUT_OF_MEMORY.search(text):
        micro = recipe.micro_batch or recipe.batch // recipe.workers
        return EnvironmentFault(
            f"pretraining stage {title!r}: a worker ran out of memory. Without another result: lower recipe.micro_batch (now {micro} sequences at once), "
            f"raise recipe.zero_stage (now {recipe.zero_stage}; 3 divides most over workers), or give each worker more room (recipe.workers, now "
            f"{recipe.workers}: fewer on one machine, more over several). A shorter recipe.block_length (now {recipe.block_length}) needs less too, but "
            f"is another model. {kept}"
        )
    for item in behind:
        if isinstance(item, EnvironmentFault):
            return EnvironmentFault(f"pretraining stage {title!r}: {getattr(item, 'cause', item)} {kept}")
    return EnvironmentFault(f"pretraining stage {title!r} failed: {_last_line(error)}. {kept}")


def not_finite(
    stopped: dict[str, Any], blocks: Sequence[int], *, title: str, folder: Path, recipe: Recipe
) -> UserError:
    """The error for a stage that stopped at a loss or gradient that is no number.

    Args:
        stopped: what the workers noted: the step (from 1), what was not finite, and the learning rate.
        blocks: the blocks of that step's batch, in the order of its rows.
    """
    step, what = stopped["step"], stopped["what"]
    listed = ", ".join(map(str, blocks[:_LISTED]))
    more = f" and {len(blocks) - _LISTED:,} more" if len(blocks) > _LISTED else ""
    place = "after" if what == VALIDATION_LOSS else "at"
    batch = "That step's batch, the last that changed the weights," if what == VALIDATION_LOSS else "Its batch"
    return UserError(
        f"pretraining stage {title!r}: the {what} is not finite {place} step {step} (learning rate {stopped['learning_rate']:.3g}). "
        f"{batch} is blocks {listed}{more} of the training corpus; `mlmclm data order STUDY_FILE --steps {step - 1}:{step}` shows their text. "
        f"Lower peak_learning_rate (now {recipe.peak_learning_rate:.3g}) or lengthen warmup_steps; the last good checkpoint is kept in {folder}."
    )


def _behind(error: BaseException) -> Iterator[BaseException]:
    """An error, its causes, and what failed in each worker or in Ray Train's controller."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        yield from getattr(cause, "worker_failures", {}).values()
        controller = getattr(cause, "controller_failure", None)
        if controller is not None:
            yield controller
        cause = cause.__cause__


def _last_line(error: BaseException) -> str:
    """The last cause's type, and the last line of its message."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"

"""Error messages for a stage that ends early, made from Ray Train's exception or the workers' record."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlmclm.errors import OUT_OF_MEMORY, EnvironmentFault, MlmclmError, UserError
from mlmclm.plans.recipe import Recipe
from mlmclm.pretraining.job import VALIDATION_LOSS

_DEVICE_OUT_OF_MEMORY = re.compile(
    r"CUDA out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|Cuda failure.{0,5}'out of memory'"
)
_DISK_FULL = re.compile(r"No space left on device|Disk quota exceeded|the disk is full")
_LISTED = 32


class DeviceMemoryFault(EnvironmentFault):
    """A worker ran out of the memory of its GPU, so that fewer sequences at once may fit."""


def final(failures: Mapping[int, BaseException]) -> BaseException | None:
    """Return a failure that a restart from the last checkpoint would only repeat, or None if there is none.

    Such failures are user errors, running out of memory, and a full disk.

    Args:
        failures: by rank, the exception that the worker raised or Ray's error for its death.
    """
    for failure in failures.values():
        raised = getattr(failure, "_base_exc", failure)  # Ray Train wraps what a worker raised
        if isinstance(raised, UserError):
            return raised
        # Match text: these errors come from torch, the C library, the kernel or Ray, each with its own type.
        if OUT_OF_MEMORY.search(str(failure)) or _DISK_FULL.search(str(failure)):
            return failure
    return None


def explain(error: BaseException, *, title: str, folder: Path, recipe: Recipe) -> MlmclmError:
    """Return an error that explains a failed Ray Train run.

    A worker's `UserError` keeps its message. Running out of memory and a full disk are recognised by their text, since
    Ray passes on its workers' exceptions as text with a traceback. Any other failure is described by its last line.
    `folder` is the run folder, which holds the checkpoints.
    """
    chain = list(_causes(error))
    for item in chain:
        if isinstance(item, UserError):
            return UserError(f"pretraining stage {title!r}: {item}")
    text = "\n".join(str(item) for item in chain)
    kept = f"Its checkpoints are kept in {folder}; the same command resumes from them."
    if _DISK_FULL.search(text):
        return EnvironmentFault(f"pretraining stage {title!r}: the disk is full. Free some space. {kept}")
    if OUT_OF_MEMORY.search(text):
        micro = f"micro_batch (now {recipe.sequences_at_once(recipe.workers)} sequences at once)"
        if recipe.micro_batch_tokens is not None:
            micro = f"micro_batch_tokens (now {recipe.micro_batch_tokens:,})"
        fault = DeviceMemoryFault if _DEVICE_OUT_OF_MEMORY.search(text) else EnvironmentFault
        return fault(
            f"pretraining stage {title!r}: a worker ran out of memory. To keep the same result, lower recipe.{micro}, "
            f"raise recipe.zero_stage (now {recipe.zero_stage}; 3 divides most over workers), or give each worker more room (recipe.workers, now "
            f"{recipe.workers}: fewer on one machine, more over several). A shorter recipe.block_length (now {recipe.block_length}) needs less too, but "
            f"is another model. {kept}"
        )
    for item in chain:
        if isinstance(item, EnvironmentFault):
            return EnvironmentFault(f"pretraining stage {title!r}: {getattr(item, 'cause', item)} {kept}")
    return EnvironmentFault(f"pretraining stage {title!r} failed: {_last_line(error)}. {kept}")


def not_finite(
    stopped: dict[str, Any], blocks: Sequence[int], *, title: str, folder: Path, recipe: Recipe
) -> UserError:
    """Return the error for a stage that stopped at a loss or gradient that is not finite.

    Args:
        stopped: the workers' record: the step (from 1), the quantity that was not finite, and the learning rate.
        blocks: the blocks in that step's batch, in the order of its rows.
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


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its chain of causes, and the worker and controller failures attached to each by Ray Train."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        yield from getattr(cause, "worker_failures", {}).values()
        controller = getattr(cause, "controller_failure", None)
        if controller is not None:
            yield controller
        cause = cause.__cause__


def _last_line(error: BaseException) -> str:
    """Return the type of the root cause and the last line of its message."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"

"""Interface of memory that all workers of a process group can write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class SharedMemory(Protocol):
    """Memory in which workers sum gradients, and keep one copy of weights and moments, in place of messages.

    Each worker *owns* the same share of every tensor. It sums and updates that share only.
    """

    rank: int

    def owned(self, tensor: Tensor) -> list[Tensor]:
        """Return views of the parts of a contiguous tensor that this worker owns."""
        ...

    def sum(self, tensors: Sequence[Tensor]) -> float:
        """Sum this worker's parts of contiguous fp32 tensors over all workers, in place and in the order of ranks.

        Returns:
            The norm of all sums, bit-identical on every worker.
        """
        ...

    def zeros(self, shapes: Sequence[torch.Size]) -> list[Tensor]:
        """Return zeroed fp32 tensors that all workers share; collective."""
        ...

    def meet(self) -> None:
        """Wait for all workers; what each has written into shared memory before is then visible to all."""
        ...

"""Computation that gives the same bits each time on the same device, or an error."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from mlmclm.errors import UserError

CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Variable with which cuBLAS adds up in the same order each time, as its streams share no workspace; read when CUDA starts.

Source: cuBLAS documentation, Results reproducibility.
"""
NCCL = {"NCCL_ALGO": "Ring"}
"""Variable with which NCCL adds up in the order of the ring, and never by an algorithm that adds up in a network switch."""
_NO_FORM = re.compile(r"(\S+) does not have a deterministic implementation")


def set_variables(variables: dict[str, str]) -> None:
    """Set environment variables that aren't set yet."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


@contextmanager
def deterministic(wanted: bool, where: str) -> Iterator[None]:
    """Return a context in which, if `wanted`, torch and cuDNN compute the same bits each time.

    Args:
        where: the settings that want it, for the message.

    Raises:
        UserError: an operation has no deterministic form here; the message names it.
    """
    if not wanted:
        yield
        return
    import torch  # late: the code that starts workers needs only the variables, not torch

    set_variables(CUBLAS)
    cudnn = torch.backends.cudnn
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    chosen = cudnn.deterministic, cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    # cuDNN would otherwise time its algorithms, and take another one when the machine is busy.
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    except RuntimeError as error:
        operation = _NO_FORM.search(str(error))
        if operation is None:
            raise
        raise UserError(
            f"{where}.deterministic: {operation[1]} has no deterministic form on this device; set it to false, or try "
            "MLMCLM_BACKEND=reference, which computes with torch's operations alone."
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        cudnn.deterministic, cudnn.benchmark = chosen

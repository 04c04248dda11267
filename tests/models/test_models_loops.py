"""Loops compile on every CPU and round as torch does; what is compiled is found wherever it fits, and torch takes over where it can't be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import mlmclm
from mlmclm.models import loops
from mlmclm.models.kernels import put, wide

SOURCE = str(Path(mlmclm.__file__).parents[1])


@loops.compiled(set())
def _round_all(values: loops.Array, rounded: loops.Array) -> None:
    for i in range(values.shape[0]):
        put(rounded, i, wide(values[i]))


def rounded(values: torch.Tensor) -> torch.Tensor:
    out = torch.empty(len(values), dtype=torch.bfloat16)
    _round_all(values.numpy(), out.view(torch.uint16).numpy())
    return out


def floats() -> torch.Tensor:
    """Of each sign and exponent (zeros, denormals and what isn't finite among them): the values around ties, and others."""
    upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << np.uint32(16)
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xC000, 0xFFFF], dtype=np.uint32)
    return torch.from_numpy((upper | lower).ravel().view(np.float32))


def test_rounding_to_bfloat16_gives_torch_s_bits() -> None:
    values = floats()
    found, expected = rounded(values), values.to(torch.bfloat16)
    number = ~values.isnan()
    assert torch.equal(found[number].view(torch.int16), expected[number].view(torch.int16))
    assert found[~number].isnan().all()
    assert (found[~number].view(torch.int16) & 0x40).all(), "quiet"


ON_ANOTHER_CPU = """
import torch
from mlmclm.models import kernels, tiles
from mlmclm.models.tile_instructions import available
x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
assert not available()
normed, _ = kernels.norm(x, torch.ones(64), 0.0, torch.bfloat16)
expected = torch.nn.functional.rms_norm(x, (64,), eps=0.0)
torch.testing.assert_close(normed.float(), expected, rtol=2**-8, atol=0)
tiles.weight_gradient(x[:, :32].bfloat16().repeat(4, 1), x.bfloat16().repeat(4, 1), torch.float32)
print("computed")
"""


@pytest.mark.parametrize(
    "cpu",
    [
        "haswell",
        pytest.param("znver3", marks=pytest.mark.slow),
        pytest.param("icelake-server", marks=pytest.mark.slow),
        pytest.param("generic", marks=pytest.mark.slow),
    ],
)
def test_bfloat16_is_computed_on_cpus_without_instructions_for_it(cpu: str, tmp_path: Path) -> None:
    """LLVM takes the rounding to be a function's call there, which ended the process; and tiles are not compiled for them."""
    done = python(ON_ANOTHER_CPU, NUMBA_CPU_NAME=cpu, NUMBA_CPU_FEATURES="", NUMBA_CACHE_DIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "computed\n"), done.stderr


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip

"""The GPU's backend computes with Liger's kernels, here in Triton's interpreter, and says so where they are missing."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import varlen_on_cpu

from mlmclm.backends.attention_settings import AttentionSettings
from mlmclm.backends.cuda import Cuda
from mlmclm.backends.packing import Packing
from mlmclm.backends.reference import Reference
from mlmclm.errors import UserError

MISSING = [name for name in ("liger_kernel", "triton") if importlib.util.find_spec(name) is None]


@pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}: make .venv/.installed-dev, on Linux")
def test_the_kernels_give_what_torch_gives() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    tests = Path(__file__).with_name("liger_interpreted.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)], capture_output=True, text=True,
        timeout=1500, check=False, env=environment | {"TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


def test_without_the_kernels_the_backend_says_how_to_install_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mlmclm.backends.cuda.liger", raising=False)
    monkeypatch.delattr("mlmclm.backends.cuda.liger", raising=False)  # another test in this process may have loaded it
    for name in ("liger_kernel", *(name for name in sys.modules if name.startswith("liger_kernel."))):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r'cuda needs liger-kernel.*pip install .*"\.\[cuda\]".*MLMCLM_BACKEND'):
        Cuda().losses(torch.randn(2, 5), 5, torch.tensor([1, 2]))


@pytest.mark.parametrize("causal", [False, True])
def test_equally_long_sequences_are_a_batch(causal: bool) -> None:
    packing = Packing.uniform(3, 10)
    query, key, value = (
        torch.randn(1, heads, 30, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2)
    )
    found, expected = (
        backend.packed_attention(query, key, value, packing, AttentionSettings(causal, 0.3))
        for backend in (Cuda(), Reference())
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_windows_of_joined_rows_need_no_mask(causal: bool) -> None:
    varlen_on_cpu.register()
    settings = AttentionSettings(causal, 0.3, window=4)
    query, key, value = (
        torch.randn(3, heads, 10, 8, generator=torch.Generator().manual_seed(heads)).bfloat16() for heads in (4, 2, 2)
    )
    found, expected = (backend.attention(query, key, value, settings) for backend in (Cuda(), Reference()))
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)

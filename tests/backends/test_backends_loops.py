"""Loops compile on every CPU and round as torch does; what is compiled is found wherever it fits, and torch takes over where it can't be."""

from __future__ import annotations

import fcntl
import gc
import os
import platform
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from numba.core.dispatcher import Dispatcher
from transformers import EuroBertConfig, EuroBertForMaskedLM

import mlmclm
from mlmclm.backends import choice
from mlmclm.backends.choice import autocast, backend_of
from mlmclm.backends.cpu import loops, ready
from mlmclm.backends.cpu.scalars import put, wide
from mlmclm.backends.model_shape import ModelShape
from mlmclm.backends.optimizers.updates import TorchUpdates
from mlmclm.backends.packing import Packing
from mlmclm.finetuning.loop import optimizer_for
from mlmclm.finetuning.protocol import Protocol
from mlmclm.models.build import PretrainingModel
from mlmclm.models.encoder import encode, pack_ids
from mlmclm.models.warm_up import compile_all
from mlmclm.storage.files import write_atomic

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
    """The values around ties, and others, for each sign and exponent: zeros, denormals and what isn't finite among them."""
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
from mlmclm.backends.cpu import kernels
from mlmclm.backends.cpu import tiles
from mlmclm.backends.cpu.tile_instructions import available
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
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=1500, check=False,
        env={**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip


def shape(**changes: object) -> ModelShape:
    return replace(ModelShape(2, 1, 32, fused=True, dropout=False, weights="float32", products="bfloat16"), **changes)


def test_what_is_compiled_before_is_all_that_training_calls() -> None:
    """No loop gets another signature in pretraining, or in fine-tuning, of a model of the shape."""
    compile_all([shape()])
    before = signatures()
    config = EuroBertConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, mask_token_id=3, tie_word_embeddings=False,
    )  # fmt: skip
    model = EuroBertForMaskedLM(config)
    pretraining = PretrainingModel(model, precision="bf16-autocast")
    ids = torch.randint(4, 300, (3, 40), generator=torch.Generator().manual_seed(0))
    labels = torch.where(ids % 3 == 0, ids, -100)
    for causal in (True, False):
        for packing in (None, Packing.of([50, 7, 63], fine=True)):
            pretraining(ids, labels, causal, packing).backward()
            with torch.no_grad():
                pretraining(ids, ids, causal, packing, count=True)
    model.zero_grad()
    head, packing = torch.nn.Linear(64, 2), Packing.of([9, 40, 33])
    optimizer = optimizer_for(model.base_model, head, Protocol(), 1e-3, 3)
    for _ in range(3):
        with autocast(torch.device("cpu"), True):
            row = pack_ids([np.arange(length) for length in packing.lengths], packing)
            loss = head(encode(model.base_model, row, packing, causal=True)).float().square().mean()
        loss.backward()
        optimizer.step(1e-3, 1 / max(1.0, optimizer.norm()))
    optimizer.finish()
    assert signatures() == before


def signatures() -> dict[str, list[object]]:
    """Shared by all compiled loops of this process."""
    found = [item for item in gc.get_objects() if isinstance(item, Dispatcher)]
    return {f"{item.py_func.__qualname__} {id(item)}": item.signatures for item in found if item.signatures}


@pytest.mark.slow
def test_kept_code_is_found_by_what_it_is_made_of(tmp_path: Path) -> None:
    """By another installation of the same sources, and not by one with another line in a function that is inlined elsewhere."""
    code = "from mlmclm.backends.cpu import loops; print(loops.cache_folder())"
    folders = []
    for name, change in (("a", ""), ("b", ""), ("c", "\n_OTHER = 1\n")):
        copied = tmp_path / name / "mlmclm"
        shutil.copytree(Path(SOURCE) / "mlmclm", copied, ignore=shutil.ignore_patterns("__pycache__"))
        with (copied / "backends" / "cpu" / "kernels.py").open("a") as handle:
            handle.write(change)
        done = python(code, PYTHONPATH=str(tmp_path / name), NUMBA_CACHE_DIR=str(tmp_path / "kept"))
        folders.append(done.stdout.strip())
    assert folders[0] == folders[1] != folders[2]
    assert Path(folders[0]).parent == tmp_path / "kept"
    other = python(code, NUMBA_CPU_NAME="haswell", NUMBA_CPU_FEATURES="", NUMBA_CACHE_DIR=str(tmp_path / "kept"))
    assert other.stdout.strip() not in folders


def test_another_python_finds_no_code_and_no_note_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """numba keeps code for each version of Python apart, so what is ready for one is not for another."""
    own = loops._stamp.__wrapped__()
    monkeypatch.setattr(platform, "python_version_tuple", lambda: ("3", "99", "0"))
    assert loops._stamp.__wrapped__() != own


def test_without_a_home_code_is_kept_in_the_temporary_folder(tmp_path: Path) -> None:
    done = python(
        "from mlmclm.backends.cpu import loops; print(loops.cache_folder())",
        NUMBA_CACHE_DIR="", XDG_CACHE_HOME="/proc/none", TMPDIR=str(tmp_path),
    )  # fmt: skip
    assert Path(done.stdout.strip()).parent == tmp_path
    assert stat.S_IMODE(Path(done.stdout.strip()).stat().st_mode) == 0o700


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder for compiled code; a backend that is given up is taken again afterwards."""
    monkeypatch.setattr(ready, "cache_folder", lambda: tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield tmp_path
    try_again()


def try_again() -> None:
    choice._given_up.clear()
    choice._chosen.clear()


def given_up() -> bool:
    return backend_of("cpu").name == "reference"


def prepare(folder: Path, code: str, announce: Callable[[str], None], *shapes: ModelShape) -> None:
    """`ready.prepare` with other code in the process that compiles."""
    # Atomically, because a process that another thread started may be importing it.
    write_atomic(folder / "stand_in.py", code)

    def compute(shapes: Iterable[ModelShape]) -> None:
        raise AssertionError("compiled in this process")

    compute.__module__ = "stand_in"
    ready.prepare(list(shapes) or [shape()], announce, compute)


@pytest.mark.parametrize(
    "end, reason", [("os.abort()", "SIGABRT"), ("raise RuntimeError('no such instruction')", "no such instruction")]
)
def test_where_loops_cannot_be_compiled_torch_takes_over_and_says_so_once(end: str, reason: str, kept: Path) -> None:
    said: list[str] = []
    prepare(kept, f"import os; {end}", said.append)
    assert given_up()
    assert len(said) == 2 and said[0].startswith("compiling loops for this CPU, once") and reason in said[1]
    try_again()
    prepare(kept, "raise AssertionError('tried again')", said.append)
    assert given_up() and said[2] == said[1]


def test_loops_are_compiled_once_whoever_asks_first(kept: Path) -> None:
    code = f"open({str(kept / 'times')!r}, 'a').write('x')"
    said: list[str] = []
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: prepare(kept, code, said.append), range(4)))
    assert (kept / "times").read_text() == "x" and not given_up()
    assert sum(line.startswith("compiling loops") for line in said) == 1
    assert all(line.startswith(("compiling loops", "waiting for another process")) for line in said)
    prepare(kept, code, said.append, shape(), shape(heads=4))
    assert (kept / "times").read_text() == "xx"


def test_a_compiler_that_was_killed_is_tried_again(kept: Path) -> None:
    prepare(kept, "import os; os.kill(os.getpid(), 9)", lambda _: None)
    assert given_up()
    try_again()
    prepare(kept, "", lambda _: None)
    assert not given_up()


@pytest.mark.parametrize("error", ["OSError(28, 'No space left on device')", "MemoryError()", "ImportError('torch')"])
def test_a_fault_that_is_not_the_cpu_s_is_said_and_tried_again(error: str, kept: Path) -> None:
    code = f"from mlmclm.models import warm_up\ndef fail(_): raise {error}\nwarm_up.compile_all = fail\nwarm_up.main()"
    said: list[str] = []
    prepare(kept, code, said.append)
    assert given_up() and error.partition("(")[0] in said[-1] and "Delete" not in said[-1]
    try_again()
    prepare(kept, "", said.append)
    assert not given_up()


def test_who_waits_for_a_compiling_process_is_told(kept: Path) -> None:
    lines: SimpleQueue[str] = SimpleQueue()
    with (kept / ".lock").open("w") as lock, ThreadPoolExecutor(1) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = pool.submit(prepare, kept, "", lines.put)
        try:
            assert lines.get(timeout=1500) == "waiting for another process, which compiles loops for this CPU"
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)
        done.result()
    assert not given_up()


@pytest.mark.parametrize("causal", [True, False])
def test_pretraining_by_torch_s_operations_gives_what_loops_give(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EuroBertConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, mask_token_id=3, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = PretrainingModel(EuroBertForMaskedLM(config), precision="fp32")
    ids = torch.randint(4, 97, (3, 20))
    labels, found = torch.where(torch.rand(3, 20) < 0.4, ids, -100), []
    for backend in ("cpu", "reference"):
        monkeypatch.setenv("MLMCLM_BACKEND", backend)
        for packing in (None, Packing.of([11, 30, 19])):
            model.zero_grad()
            loss = model(ids, labels, causal, packing)
            loss.backward()
            found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    for with_loops, with_torch in zip(found[:2], found[2:], strict=True):
        for one, other in zip(with_loops, with_torch, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert isinstance(optimizer_for(model.model.base_model, torch.nn.Linear(32, 2), Protocol(), 1e-3, 1), TorchUpdates)

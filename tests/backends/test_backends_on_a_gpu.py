"""The kernels for GPUs on a GPU: what they compute is what torch's operations do. Skipped where there is none."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from kernel_models import makers, randomised, state_types
from torch import Tensor
from transformers import (
    PreTrainedModel,
)

from mlmclm.backends.attention_settings import AttentionSettings
from mlmclm.backends.choice import backend_of
from mlmclm.backends.determinism import CUBLAS, deterministic, set_variables
from mlmclm.backends.packing import Packing
from mlmclm.models.build import PretrainingModel
from mlmclm.models.cross_entropy import LabelledCrossEntropyHead

GPU = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
if torch.cuda.is_available():
    set_variables(CUBLAS)  # before CUDA starts

LENGTHS = [200, 1, 130, 64, 117]
"""Lengths of the documents in a batch of 512 tokens."""
COMMON: dict[str, Any] = {
    "vocab_size": 997, "hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 3, "num_attention_heads": 3,
    "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.05,
}  # fmt: skip
MODELS = makers(COMMON, window=50, head_width=64, local=64)


def random_model(kind: str) -> PreTrainedModel:
    return randomised(MODELS[kind])


def batch(labelled: float, *, documents: bool) -> tuple[Tensor, Tensor, Tensor, Packing | None]:
    """Return token ids, labels and their places of one micro-batch of 512 tokens, and its documents if they are isolated."""
    generator = torch.Generator().manual_seed(1)
    shape = (1, sum(LENGTHS)) if documents else (4, sum(LENGTHS) // 4)
    ids = torch.randint(4, COMMON["vocab_size"], shape, generator=generator)
    labels = torch.where(torch.rand(shape, generator=generator) < labelled, ids.flip(1), -100)
    where = (labels.flatten() != -100).nonzero().flatten()
    packing = Packing.of(LENGTHS, torch.device(GPU)) if documents else None
    return ids.to(GPU), labels.to(GPU), where.to(GPU), packing


def step(
    model: PreTrainedModel, precision: str, *, labelled: float, causal: bool, documents: bool, compiled: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the loss of a micro-batch and its gradient as one vector, in fp64."""
    pretraining = PretrainingModel(copy.deepcopy(model).to(GPU), precision=precision, compiled=compiled)
    ids, labels, where, packing = batch(labelled, documents=documents)
    kinds = state_types(pretraining.model.base_model)
    loss = pretraining(ids, labels, causal, packing, where=where) / len(where)
    loss.backward()
    if precision == "bf16-residual":
        assert kinds == {torch.bfloat16}
    gradients = [part.grad.double().flatten() for part in pretraining.parameters() if part.grad is not None]
    return loss.detach().double(), torch.cat(gradients)


CASES = [
    ("eurobert", 0.4, False),
    ("eurobert", 1.0, True),
    ("qwen2, windows", 0.4, False),
    ("qwen2, windows", 0.9, True),
    ("qwen3", 1.0, True),
    ("modernbert", 0.4, False),
    ("modernbert", 1.0, True),
    ("bert", 0.4, False),
]


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16-autocast", "bf16-residual"])
@pytest.mark.parametrize(("kind", "labelled", "causal"), CASES)
def test_losses_and_gradients_of_pretraining(
    kind: str, labelled: float, causal: bool, precision: str, documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held against torch's operations in fp64, which are as far away in the same precision."""
    if (kind, precision) == ("bert", "bf16-residual"):
        pytest.skip("refused")
    given = {"labelled": labelled, "causal": causal, "documents": documents}
    model = random_model(kind)
    monkeypatch.setenv("MLMCLM_BACKEND", "reference")
    exact = step(model.double(), "fp32", **given)  # type: ignore[arg-type]
    model = model.float()
    torch_s = step(model, precision, **given)  # type: ignore[arg-type]
    monkeypatch.setenv("MLMCLM_BACKEND", "cuda")
    found = step(model, precision, **given)  # type: ignore[arg-type]
    rounding = 1e-6 if precision == "fp32" else 2e-3
    for wanted, other, value in zip(exact, torch_s, found, strict=True):
        assert (other - wanted).norm() < 30 * rounding * wanted.norm()
        assert (value - wanted).norm() < 1.5 * (other - wanted).norm() + rounding * wanted.norm()


@pytest.mark.parametrize("vocabulary", [50_368, 128_256])
@pytest.mark.parametrize("bf16", [False, True])
def test_the_head_s_loss_and_gradients(vocabulary: int, bf16: bool) -> None:
    """More positions than are computed at once, and a vocabulary of more than a kernel's block."""
    generator = torch.Generator(GPU).manual_seed(0)
    weight = torch.randn(vocabulary, 64, device=GPU, generator=generator) / 4
    hidden = torch.randn(8192 + 300, 64, device=GPU, generator=generator).requires_grad_()
    labels = torch.randint(vocabulary, (len(hidden),), device=GPU, generator=generator)
    rounded = (lambda tensor: tensor.detach().bfloat16()) if bf16 else (lambda tensor: tensor.detach())
    exact = [rounded(each).double().requires_grad_() for each in (hidden, weight)]
    head = LabelledCrossEntropyHead(torch.nn.Parameter(weight))
    total = head(hidden, labels, bf16=bf16)
    total.backward()
    expected = torch.zeros((), device=GPU, dtype=torch.float64)
    for start in range(0, len(hidden), 1000):  # in parts, for their logits in fp64 are large
        part = functional.cross_entropy(
            exact[0][start : start + 1000] @ exact[1].t(), labels[start : start + 1000], reduction="sum"
        )
        part.backward()
        expected += part.detach()
    assert abs(float(total) / float(expected) - 1) < (1e-3 if bf16 else 1e-6)
    for own, wanted in zip((hidden, head.weight), exact, strict=True):
        assert own.grad is not None and wanted.grad is not None
        assert (own.grad - wanted.grad).norm() < (1e-2 if bf16 else 2e-6) * wanted.grad.norm()


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("pending", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [256, 1152, 2624, 9000])
def test_an_addition_and_its_norm(width: int, pending: torch.dtype, centred: bool) -> None:
    from mlmclm.backends.cuda.add_and_norm import AddAndNorm

    generator = torch.Generator(GPU).manual_seed(0)
    one, two, weight = (
        torch.randn(*shape, device=GPU, generator=generator) for shape in ((3, 1111, width), (3, 1111, width), (width,))
    )
    given = [one.requires_grad_(), two.to(pending).requires_grad_(), weight.requires_grad_()]
    exact = [each.detach().double().requires_grad_() for each in given]
    total = exact[0] + exact[1]
    norm = functional.layer_norm if centred else functional.rms_norm
    expected = total, norm(total, (width,), exact[2], eps=1e-5)
    found = AddAndNorm.apply(*given, 1e-5, torch.float32, centred)
    upstream = torch.randn(2, 3, 1111, width, device=GPU, generator=generator)
    for results in (expected, found):
        parts = zip(results, upstream.to(results[0].dtype), strict=True)
        sum((each * factor).sum() for each, factor in parts).backward()
    for result, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(result.double(), wanted, rtol=1e-5, atol=1e-5)
    for own, wanted in zip(given, exact, strict=True):
        rounding = 1e-5 if own.dtype == torch.float32 else 2**-8
        assert (own.grad.double() - wanted.grad).norm() < rounding * wanted.grad.norm()


def test_the_gated_unit_is_the_exact_gelu() -> None:
    from mlmclm.backends.cuda.modernbert import _GatedGelu

    generator = torch.Generator(GPU).manual_seed(0)
    joined = 2 * torch.randn(700, 2 * 2624, device=GPU, generator=generator)
    upstream = torch.randn(700, 2624, device=GPU, generator=generator)
    exact = joined.double().requires_grad_()
    value, gate = exact.chunk(2, dim=-1)
    expected = functional.gelu(value) * gate
    (expected * upstream).sum().backward()
    given = joined.clone().requires_grad_()
    found = _GatedGelu.apply(given * 1)
    (found * upstream).sum().backward()
    torch.testing.assert_close(found.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    assert given.grad is not None
    torch.testing.assert_close(given.grad.double(), exact.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, 33), (True, 33)])
@pytest.mark.parametrize("key_heads", [6, 2])
@pytest.mark.parametrize("lengths", [LENGTHS, [128] * 4])
def test_packed_attention(
    causal: bool, window: int | None, key_heads: int, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sequence by itself, in fp64, is what the kernel computes in bf16."""
    generator = torch.Generator(GPU).manual_seed(0)
    packing = Packing.of(lengths, torch.device(GPU))
    tokens = packing.padded_tokens
    given = [
        torch.randn(1, heads, tokens, 64, device=GPU, generator=generator).bfloat16().requires_grad_()
        for heads in (6, key_heads, key_heads)
    ]
    upstream = torch.randn(1, 6, sum(lengths), 64, device=GPU, generator=generator)
    settings = AttentionSettings(causal=causal, scale=0.125, dropout=0.0, window=window)
    monkeypatch.setenv("MLMCLM_BACKEND", "cuda")
    found = backend_of(GPU).packed_attention(*given, packing=packing, settings=settings)
    found = found.transpose(1, 2)[:, :, : sum(lengths)]
    (found * upstream).sum().backward()
    exact = [each.detach().double().requires_grad_() for each in given]
    parts, start = [], 0
    for length in lengths:
        q, k, v = (each[:, :, start : start + length] for each in exact)
        k, v = (each.repeat_interleave(6 // key_heads, 1) for each in (k, v))
        ahead = torch.arange(length, device=GPU) - torch.arange(length, device=GPU)[:, None]
        seen = ahead.abs() < (length + 1 if window is None else window)
        scores = (q @ k.mT * 0.125).masked_fill(~(seen & (ahead <= 0) if causal else seen), -torch.inf)
        parts.append(scores.softmax(-1) @ v)
        start += length
    expected = torch.cat(parts, 2)
    (expected * upstream).sum().backward()
    assert (found - expected).norm() < 5e-3 * expected.norm()
    for own, wanted in zip(given, exact, strict=True):
        assert own.grad is not None and wanted.grad is not None
        assert (own.grad - wanted.grad).norm() < 2e-2 * wanted.grad.norm()


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("kind", ["eurobert", "modernbert"])
def test_compiled_layers_compute_the_same(kind: str, documents: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"labelled": 0.4, "causal": False, "documents": documents}
    model = random_model(kind)
    monkeypatch.setenv("MLMCLM_BACKEND", "reference")
    exact = step(model.double(), "fp32", **given)  # type: ignore[arg-type]
    torch_s = step(model.float(), "bf16-autocast", **given)  # type: ignore[arg-type]
    monkeypatch.setenv("MLMCLM_BACKEND", "cuda")
    found = step(model.float(), "bf16-autocast", compiled=True, **given)  # type: ignore[arg-type]
    for wanted, other, value in zip(exact, torch_s, found, strict=True):
        assert (value - wanted).norm() < 1.5 * (other - wanted).norm() + 2e-3 * wanted.norm()


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("kind", ["eurobert", "modernbert", "bert"])
def test_deterministic_steps_have_the_same_bits(kind: str, documents: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLMCLM_BACKEND", "cuda")
    model = random_model(kind)
    with deterministic(True, "recipe"):
        one, two = (step(model, "bf16-autocast", labelled=0.4, causal=False, documents=documents) for _ in range(2))
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])


@pytest.fixture
def no_waits() -> Iterator[None]:
    """An operation for which the host waits is an error."""
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("kind", ["eurobert", "modernbert"])
def test_the_host_waits_nowhere_in_a_pass(
    kind: str, documents: bool, monkeypatch: pytest.MonkeyPatch, no_waits: None
) -> None:
    monkeypatch.setenv("MLMCLM_BACKEND", "cuda")
    pretraining = PretrainingModel(random_model(kind).to(GPU), precision="bf16-autocast")
    ids, labels, where, packing = batch(0.4, documents=documents)
    for mode in ("default", "error"):  # the first pass compiles kernels
        torch.cuda.set_sync_debug_mode(mode)
        pretraining(ids, labels, False, packing, where=where).backward()


ENGINE = """
import json, os, sys, warnings
import torch, torch.distributed as distributed
zero, device = int(sys.argv[2]), sys.argv[3]
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", DS_ACCELERATOR=device)
group = {"cuda": "nccl", "cpu": "gloo"}[device]
distributed.init_process_group(group, rank=0, world_size=1, init_method=f"file://{sys.argv[1]}/rendezvous")
from transformers import EuroBertConfig
from mlmclm.models.build import PretrainingModel, build_model
from mlmclm.objectives.mlm import Masked
from mlmclm.plans.recipe import Recipe
from mlmclm.pretraining.engine import Engine
from mlmclm.pretraining.partitioning import partitioning_of

config = EuroBertConfig(vocab_size=300, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, mask_token_id=3,
    tie_word_embeddings=False)
recipe = Recipe(batch=8, block_length=16, workers=1, micro_batch=2, precision="fp32", clip=1.3, zero_stage=zero,
    deepspeed={"zero_optimization": {}} if zero else {})
engine = Engine(PretrainingModel(build_model(config, 0), precision="fp32"), recipe, partitioning_of(recipe), None, None)
losses, waits = [], []
for step in range(8):
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(4, 300, (8, 16), generator=generator)
    labels = torch.where(torch.rand(8, 16, generator=generator) < 0.4, ids, -100)
    batches = [(ids[i:i + 2], labels[i:i + 2]) for i in range(0, 8, 2)]
    if device == "cuda":
        batches = [tuple(each.pin_memory() for each in pair) for pair in batches]
        torch.cuda.set_sync_debug_mode("warn" if step >= 4 else "default")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        total, labelled, _, norm = engine.step(batches, Masked(40), rate=1e-2)
    waits += [f"{each.filename}:{each.lineno}" for each in caught if "synchroniz" in str(each.message)]
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    losses.append(total / labelled)
print(json.dumps({"losses": [float(each) for each in losses], "waits": waits}))
"""


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_steps_of_deepspeed_are_the_cpu_s(zero: int, tmp_path: Path) -> None:
    """And the host waits in none, but under ZeRO 3, where DeepSpeed does."""
    found = {}
    for device in ("cpu", "cuda"):
        folder = tmp_path / device
        folder.mkdir()
        done = subprocess.run(
            [sys.executable, "-c", ENGINE, str(folder), str(zero), device], env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, timeout=1500,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        found[device] = json.loads(done.stdout.splitlines()[-1])
    assert found["cuda"]["losses"] == pytest.approx(found["cpu"]["losses"], rel=1e-5)
    assert zero == 3 or found["cuda"]["waits"] == []

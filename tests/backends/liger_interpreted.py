"""Liger's kernels in Triton's interpreter: values and gradients are those of torch's operations.

`test_backends_liger.py` runs this file in a process of its own, because `TRITON_INTERPRET` must be set before Triton is
imported, and would hold for all other tests too.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import varlen_on_cpu
from kernel_models import makers, randomised, state_types
from torch import Tensor
from torch.nn import Module
from transformers import (
    LlamaConfig,
    LlamaModel,
    PreTrainedModel,
)
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle, tl

from mlmclm.backends import choice
from mlmclm.backends.cuda import Cuda, liger, modernbert
from mlmclm.backends.cuda.add_and_norm import AddAndNorm
from mlmclm.backends.cuda.rotation import Rotation
from mlmclm.backends.packing import Packing
from mlmclm.models.architectures import layers_of
from mlmclm.models.attention import use_attention
from mlmclm.models.build import PretrainingModel, round_states
from mlmclm.models.encoder import encode, pool

LENGTHS = [9, 1, 14, 5, 3]
"""Lengths of the documents in the blocks."""
COMMON: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3,
}  # fmt: skip
MODELS = makers(COMMON, window=3, head_width=16, local=8)


def scalar(argument: Any, convert: Any = interpreter._implicit_cvt) -> Any:
    """Convert a kernel's argument as the compiler does: Python's floats become fp32 scalars.

    The interpreter leaves them as they are, and then they lack the methods that kernels call (`eps.to`).
    """
    if isinstance(argument, float):
        return tl.tensor(TensorHandle(np.array([argument], np.float32), tl.float32), tl.float32)
    return convert(argument)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    assert os.environ["TRITON_INTERPRET"] == "1"
    monkeypatch.setattr(interpreter, "_implicit_cvt", scalar)
    # The norms take this function from CUDA's library, which the interpreter has none of.
    monkeypatch.setattr("liger_kernel.ops.rms_norm.rsqrt", lambda value: tl.rsqrt(value))
    # The GPU's backend for the CPU, under a name of its own.
    monkeypatch.setitem(choice._chosen, ("cpu", "liger"), Cuda())
    yield


def random_model(kind: str) -> PreTrainedModel:
    return randomised(MODELS[kind])


def accumulated(
    model: PreTrainedModel, backend: str, monkeypatch: pytest.MonkeyPatch, *, labelled: float, causal: bool, documents: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the losses of one batch of documents, or of two of blocks, and their gradients' sum as one vector, in fp64."""
    monkeypatch.setenv("MLMCLM_BACKEND", backend)
    pretraining = PretrainingModel(model, precision="fp32")
    generator = torch.Generator().manual_seed(1)
    losses = []
    for shape in [(2, 16)] if documents else [(2, 4), (1, 5)]:
        ids = torch.randint(4, COMMON["vocab_size"], shape, generator=generator)
        labels = torch.where(torch.rand(shape, generator=generator) < labelled, ids.flip(1), -100)
        loss = pretraining(ids, labels, causal, Packing.of(LENGTHS) if documents else None)
        (loss / 7).backward()
        losses.append(loss.detach().double())
    gradients = [part.grad.double().flatten() for part in pretraining.parameters() if part.grad is not None]
    return torch.stack(losses), torch.cat(gradients)


def all_three(model: Module, compute: Callable[[Any, str], tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
    """Yield each result of a computation by torch in fp64, by torch in the model's dtype, and by the kernels in that."""
    ways = ((copy.deepcopy(model).double(), "reference"), (copy.deepcopy(model), "reference"), (model, "liger"))
    yield from zip(*(compute(*way) for way in ways), strict=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_leave_their_gradient(dtype: torch.dtype) -> None:
    """The stride of the rows of logits is larger than their length."""
    buffer = 10 * torch.randn(12, 420, generator=torch.Generator().manual_seed(0)).to(dtype)
    labels = torch.randint(411, (12,), generator=torch.Generator().manual_seed(1))
    logits = buffer[:, :411].double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    expected.backward()
    behind = buffer[:, 411:].clone()
    summed = liger.losses(buffer, 411, labels)
    assert summed.dtype == torch.float32
    torch.testing.assert_close(summed.double(), expected.detach(), rtol=1e-6, atol=1e-5)
    rounding = 2e-6 if dtype == torch.float32 else 2**-7  # the interpreter cuts off what bf16 has no bits for
    torch.testing.assert_close(buffer[:, :411].double(), logits.grad, rtol=rounding, atol=2e-7)
    assert torch.equal(buffer[:, 411:], behind)


@pytest.mark.parametrize(
    ("kind", "labelled", "causal", "documents"),
    [
        ("eurobert", 0.4, False, True),
        ("eurobert, tied", 0.4, False, False),
        ("qwen2, windows", 0.4, False, False),
        ("qwen2, windows", 0.9, True, False),
        ("qwen3", 1.0, True, False),
        ("modernbert", 0.4, False, True),
        ("modernbert", 1.0, True, False),
        ("bert", 0.4, False, False),
    ],
)
def test_losses_and_gradients_of_pretraining(
    kind: str, labelled: float, causal: bool, documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with transformers' layers and torch's operations in fp64; torch in fp32 is as far away from these."""
    model = random_model(kind)
    assert Cuda().fuses(model.base_model) == (kind != "bert")

    def compute(model: PreTrainedModel, backend: str) -> tuple[Tensor, Tensor]:
        return accumulated(model, backend, monkeypatch, labelled=labelled, causal=causal, documents=documents)

    for exact, torch_s, by_kernels in all_three(model, compute):
        assert (torch_s - exact).norm() < 1e-4 * exact.norm()
        assert (by_kernels - exact).norm() < 2 * (torch_s - exact).norm() + 1e-6 * exact.norm()


@pytest.mark.parametrize(
    ("kind", "weights", "residual"),
    [("llama", torch.float16, False), ("modernbert", torch.float32, False), ("llama", torch.float32, True)],
)
def test_half_precision_is_as_exact_as_torch_s(
    kind: str, weights: torch.dtype, residual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights in fp16, autocast, and autocast with a residual stream in fp16: the interpreter cannot multiply bf16."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        llama = kind == "llama"
        model = LlamaModel(LlamaConfig(**COMMON, num_key_value_heads=1)) if llama else MODELS[kind]().base_model
        model = model.to(weights)
    varlen_on_cpu.register()
    packing = Packing.uniform(2, 5)
    ids = torch.randint(4, 97, (1, 10), generator=torch.Generator().manual_seed(1))

    def compute(model: PreTrainedModel, backend: str) -> tuple[Tensor, Tensor]:
        monkeypatch.setenv("MLMCLM_BACKEND", backend)
        use_attention(model)
        kinds = state_types(model)
        if residual:
            layers_of(model)[0].register_forward_pre_hook(round_states)
        with torch.autocast("cpu", torch.float16, enabled=model.dtype == torch.float32):
            states = encode(model, ids, packing, causal=True)
        assert kinds == {torch.float16 if residual and model.dtype == torch.float32 else model.dtype}
        assert residual or states.dtype == model.dtype
        pool(states, packing, "mean").square().mean().backward()
        return states.detach().double(), torch.cat([part.grad.double().flatten() for part in model.parameters()])

    for exact, torch_s, by_kernels in all_three(model, compute):
        assert 1e-4 * exact.norm() < (torch_s - exact).norm() < 0.1 * exact.norm()
        assert (by_kernels - exact).norm() < 1.5 * (torch_s - exact).norm()


@pytest.mark.parametrize(
    ("centred", "pending", "read"),
    [
        (False, torch.float32, "both"),
        (False, torch.float16, "normed"),
        (True, torch.float32, "normed"),
        (True, torch.float16, "both"),
    ],
)
def test_an_addition_and_its_norm_have_torch_s_gradients(centred: bool, pending: torch.dtype, read: str) -> None:
    generator = torch.Generator().manual_seed(0)
    one, two, weight = (torch.randn(*shape, generator=generator) for shape in ((3, 25, 40), (3, 25, 40), (40,)))
    exact = [tensor.double().requires_grad_() for tensor in (one, two.to(pending), weight)]
    total = exact[0] + exact[1]
    norm = torch.nn.functional.layer_norm if centred else torch.nn.functional.rms_norm
    expected = total, norm(total, (40,), exact[2], eps=1e-5)
    inputs = [
        tensor.detach().to(kind).requires_grad_()
        for tensor, kind in zip(exact, (torch.float32, pending, torch.float32), strict=True)
    ]
    outputs = AddAndNorm.apply(*inputs, 1e-5, torch.float32, centred)
    upstream = torch.randn(2, 3, 25, 40, generator=generator)
    for results in (expected, outputs):
        parts = zip(results, upstream.to(results[0].dtype), strict=True)
        sum((tensor * factor).sum() for tensor, factor in (parts if read == "both" else list(parts)[1:])).backward()
    for result, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(result.double(), wanted, rtol=1e-5, atol=1e-6)
    for leaf, wanted in zip(inputs, exact, strict=True):
        assert leaf.grad.dtype == leaf.dtype
        rounding = 1e-5 if leaf.dtype == torch.float32 else 2**-10
        torch.testing.assert_close(leaf.grad.double(), wanted.grad, rtol=rounding, atol=1e-5)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (0, 3, 2, 1), None])
def test_a_rotation_has_torch_s_gradients(order: tuple[int, ...] | None) -> None:
    """The gradients arrive in any order of dimensions, or as one number for a whole head."""
    heads, generator = [3, 2, 2], torch.Generator().manual_seed(0)
    vectors, upstream = torch.randn(2, 1, 5, 7, 12, generator=generator)
    angles = torch.randn(1, 5, 6, generator=generator).repeat(1, 1, 2)
    exact = vectors.double().requires_grad_()
    query, key, value = torch.split(exact, heads, 2)
    expected = *apply_rotary_pos_emb(query, key, angles.double().cos(), angles.double().sin(), unsqueeze_dim=2), value
    inputs = vectors.clone().requires_grad_()
    outputs = Rotation.apply(inputs * 1, heads, angles.cos(), angles.sin())
    for result, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(result.double(), wanted.detach(), rtol=1e-5, atol=1e-6)
    for results in (outputs, expected):
        parts = zip(results, torch.split(upstream, heads, 2), strict=True)
        pairs = (
            (result.permute(order), factor.permute(order).contiguous()) if order else (result.sum(3), factor[..., 0])
            for result, factor in parts
        )
        sum((result * factor).sum() for result, factor in pairs).backward()
    torch.testing.assert_close(inputs.grad.double(), exact.grad, rtol=1e-5, atol=1e-6)


def test_the_gated_unit_is_the_exact_gelu_over_several_blocks() -> None:
    joined = 2 * torch.randn(3, 2 * 1500, generator=torch.Generator().manual_seed(0))
    upstream = torch.randn(3, 1500, generator=torch.Generator().manual_seed(1))
    exact = joined.double().requires_grad_()
    value, gate = exact.chunk(2, dim=-1)
    expected = torch.nn.functional.gelu(value) * gate
    (expected * upstream).sum().backward()
    inputs = joined.clone().requires_grad_()
    output = modernbert._GatedGelu.apply(inputs * 1)
    (output * upstream).sum().backward()
    torch.testing.assert_close(output.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(inputs.grad.double(), exact.grad, rtol=1e-5, atol=1e-6)


def test_fp64_is_left_to_torch() -> None:
    logits, labels = torch.randn(5, 40, dtype=torch.float64), torch.arange(5)
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    torch.testing.assert_close(Cuda().losses(logits.clone(), 40, labels), expected, rtol=1e-14, atol=0)
    assert not Cuda().fuses(random_model("eurobert").base_model.double())


def test_after_a_pass_through_blocks_a_layer_is_transformers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One model computes the same by the CPU's blocks, the GPU's and transformers' own layers in turn."""
    model = random_model("eurobert").base_model
    use_attention(model)
    packing, ids = Packing.uniform(2, 4), torch.arange(10, 18)[None]
    states = []
    for backend, fused in (("liger", True), ("", True), ("liger", True), ("liger", False), ("", False)):
        monkeypatch.setenv("MLMCLM_BACKEND", backend)
        with torch.no_grad():
            states.append(encode(model, ids, packing, causal=False, fused=fused))
    for other in states[1:]:
        torch.testing.assert_close(other, states[0], rtol=1e-4, atol=1e-5)

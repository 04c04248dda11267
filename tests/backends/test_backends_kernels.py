"""The compiled loops give what torch gives in fp32 on the same values, rounded once; what isn't finite stays so."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from mlmclm.backends.attention_settings import AttentionSettings
from mlmclm.backends.cpu import kernels
from mlmclm.backends.cpu.packed_attention import TILE, Heads, attend, attend_backward
from mlmclm.backends.packing import Packing

TYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(value: Tensor, expected: Tensor) -> None:
    """Equal to the rounding of `value`'s type."""
    rtol = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float64: 1e-12}[value.dtype]
    torch.testing.assert_close(value.double(), expected.double(), rtol=rtol, atol=rtol)


@pytest.mark.parametrize("dtype", TYPES)
def test_norm_and_its_gradients(dtype: torch.dtype, threads: int) -> None:
    x, weight = random(700, 96, seed=1), 1 + random(96, seed=2)
    grad, residual = random(700, 96, dtype=dtype, seed=3), random(700, 96, seed=4)
    normed, inverse = kernels.norm(x, weight, 1e-5, dtype)
    total, grad_weight = kernels.norm_backward(grad, x, weight, inverse, residual)
    y, w = x.double().requires_grad_(), weight.double().requires_grad_()
    expected = torch.nn.functional.rms_norm(y, (96,), w, 1e-5)
    expected.backward(grad.double())
    assert y.grad is not None
    assert w.grad is not None
    close(normed, expected.detach())
    close(inverse, (y.detach().square().mean(1) + 1e-5).rsqrt())
    close(total, y.grad + residual)
    torch.testing.assert_close(grad_weight.double(), w.grad, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", TYPES)
def test_gated_and_its_gradient(dtype: torch.dtype, threads: int) -> None:
    gate_up, grad = 8 * random(500, 2 * 72, dtype=dtype), random(500, 72, dtype=dtype, seed=1)
    product, grad_gate_up = kernels.gated_backward(gate_up, grad)
    x = gate_up.double().requires_grad_()
    expected = torch.nn.functional.silu(x[:, :72]) * x[:, 72:]
    expected.backward(grad.double())
    assert x.grad is not None
    close(kernels.gated(gate_up), expected.detach())
    close(product, expected.detach())
    close(grad_gate_up, x.grad)


@pytest.mark.parametrize("dtype", [*TYPES, torch.float64])
def test_softmax_over_the_keys_that_are_seen(dtype: torch.dtype, threads: int) -> None:
    scores, grad = 20 * random(5, 6, 40, dtype=dtype), random(5, 6, 40, dtype=dtype, seed=1)
    keys = torch.tensor([40, 1, 17, 39, 25])
    position = 30 + torch.arange(6) % 4
    for causal in (False, True):
        hidden = torch.arange(40) >= keys[:, None, None]
        if causal:
            hidden = hidden | (torch.arange(40) > position[:, None])
        x = scores.double().masked_fill(hidden, -torch.inf).requires_grad_()
        expected = torch.softmax(x, -1)
        expected.backward(grad.double())
        weights, moved = scores.clone(), grad.clone()
        kernels.softmax(weights, keys, 4, 30, causal)
        close(weights, expected.detach())
        kernels.softmax_backward(moved, weights)
        assert x.grad is not None
        torch.testing.assert_close(moved.double(), x.grad, rtol=1e-2, atol=1e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("dtype", TYPES)
def test_cross_entropy_leaves_its_gradient(dtype: torch.dtype, threads: int) -> None:
    whole = 10 * random(70, 999, dtype=dtype)
    labels = torch.randint(990, (70,), generator=torch.Generator().manual_seed(1))
    x = whole[:, :990].double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(x, labels, reduction="sum")
    expected.backward()
    behind = whole[:, 990:].clone()
    torch.testing.assert_close(
        kernels.cross_entropy(whole, 990, labels).double(), expected.detach(), rtol=1e-6, atol=1e-5
    )
    assert x.grad is not None
    close(whole[:, :990], x.grad)
    assert torch.equal(whole[:, 990:], behind)


@pytest.mark.parametrize("dtype", TYPES)
def test_sums(dtype: torch.dtype, threads: int) -> None:
    x, y = random(333, 65), random(333, 65, dtype=dtype, seed=1)
    assert torch.equal(kernels.add(x, y), x + y.float())
    assert torch.equal(kernels.add(y, y), (y.float() + y.float()).to(dtype))


def test_the_exponential_is_exact_to_rounding_over_its_whole_range() -> None:
    values = torch.linspace(-87, 0, 200_001)
    scores = torch.stack((torch.zeros_like(values), values), 1).unsqueeze(1)  # [N, 1, 2]
    kernels.softmax(scores, torch.full((len(values),), 2), 1, 0, False)
    expected = torch.sigmoid(values.double())
    torch.testing.assert_close(scores[:, 0, 1].double(), expected, rtol=4e-7, atol=1e-37)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("what", [math.nan, math.inf])
def test_what_is_not_finite_stays_so(dtype: torch.dtype, what: float) -> None:
    x, weight = random(4, 64, dtype=dtype), torch.ones(64)
    x[2, 5] = what
    gradient = torch.ones(4, 64, dtype=dtype)
    found = {
        "norm": kernels.norm(x, weight, 1e-5, dtype)[0],
        "norm's gradient": kernels.norm_backward(x, gradient, weight, torch.ones(4), gradient)[0],
        "gated": kernels.gated(torch.cat((gradient, x), 1)),
        "gated's gradient": kernels.gated_backward(torch.cat((gradient, gradient), 1), x)[1],
        "sum": kernels.add(gradient, x),
    }
    scores = x.clone().unsqueeze(1)
    kernels.softmax(scores, torch.full((4,), 64), 1, 0, False)
    found["softmax"] = scores[:, 0]
    logits = x.clone()
    assert not kernels.cross_entropy(logits, 64, torch.zeros(4, dtype=torch.int64)).isfinite()
    for name, tensor in found.items():
        finite = tensor.isfinite().all(1).tolist()
        assert finite == [True, True, False, True], name


def test_threads_do_not_change_a_bit() -> None:
    before = torch.get_num_threads()
    x, weight, grad = random(2000, 64), random(64, seed=1), random(2000, 64, dtype=torch.bfloat16, seed=2)
    found = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        normed, inverse = kernels.norm(x, weight, 1e-5, torch.bfloat16)
        found.append((normed, *kernels.norm_backward(grad, x, weight, inverse, x)))
    torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("lengths", [[2 * TILE], [3 * TILE + 7, 2 * TILE + 1, 5], [40, 3], [24, 10]])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("key_heads", [1, 2])
def test_attention_equals_torch_s_sequence_by_sequence(lengths: list[int], causal: bool, key_heads: int) -> None:
    packing = Packing.of(lengths)
    rows = packing.padded_tokens
    torch.empty(100_000).fill_(torch.nan)  # so that memory that is never written to is likely noticed
    query, key, value = random(rows, 2, 16), random(rows, key_heads, 16, seed=1), random(rows, key_heads, 16, seed=2)
    grad = random(rows, 2, 16, seed=3)
    output, kept = attend(
        Heads(query, 0, 2),
        Heads(key, 0, key_heads),
        Heads(value, 0, key_heads),
        packing,
        AttentionSettings(causal, 0.3),
    )
    grads = [torch.full_like(tensor, torch.nan) for tensor in (query, key, value)]
    attend_backward(grad, kept, *(Heads(tensor, 0, tensor.shape[1]) for tensor in grads))
    for start, length in zip(packing.starts, packing.lengths, strict=True):
        piece = slice(int(start), int(start + length))
        own = [tensor[piece].transpose(0, 1).double().requires_grad_() for tensor in (query, key, value)]
        expected = torch.nn.functional.scaled_dot_product_attention(
            *own, is_causal=causal, scale=0.3, enable_gqa=True
        ).transpose(0, 1)
        expected.backward(grad[piece].double())
        torch.testing.assert_close(output[piece].double(), expected.detach(), rtol=1e-5, atol=1e-5)
        for mine, theirs in zip(grads, own, strict=True):
            assert theirs.grad is not None
            torch.testing.assert_close(mine[piece].double(), theirs.grad.transpose(0, 1), rtol=1e-4, atol=1e-5)
    assert not output[packing.tokens :].any()
    assert not any(tensor[packing.tokens :].any() for tensor in grads)

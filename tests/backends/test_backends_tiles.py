"""Products and attention by tile instructions equal fp64 on the same values; and without the instructions all is as with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mlmclm.backends.attention_settings import AttentionSettings
from mlmclm.backends.choice import backend_of
from mlmclm.backends.cpu import tile_attention, tiles
from mlmclm.backends.cpu.tile_instructions import available
from mlmclm.backends.packing import Packing
from mlmclm.models.attention import attention_forward

needs_tiles = pytest.mark.skipif(not available(), reason="this CPU has no AMX tiles for bfloat16")


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    request.addfinalizer(lambda: torch.set_num_threads(before))


def whole(*shape: int, seed: int = 0) -> Tensor:
    """Whole numbers of few bits, so that sums of products are exact."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("rows", [32, 64, 288, 1120, 2080])
@pytest.mark.parametrize("outputs, inputs", [(32, 32), (96, 64), (64, 160), (1024, 512), (288, 768)])
@needs_tiles
def test_sums_of_products_are_exact(rows: int, outputs: int, inputs: int, threads: None) -> None:
    left, right = whole(rows, outputs + 32)[:, :outputs], whole(rows, inputs, seed=1)
    expected = left.double().t() @ right.double()
    out = torch.full((outputs, inputs), torch.nan)
    tiles.add_weight_gradient(left, right, out, first=True)
    assert torch.equal(out.double(), expected)
    tiles.add_weight_gradient(left, right, out, first=False)
    assert torch.equal(out.double(), 2 * expected)
    assert torch.equal(tiles.weight_gradient(left, right, torch.float32).double(), expected)


@needs_tiles
def test_products_are_the_tiles_where_they_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that always falls back to torch would pass the tests of values."""
    calls = []
    loop = tiles._sum_products
    monkeypatch.setattr(tiles, "_sum_products", lambda *given: (calls.append(given), loop(*given)))
    tiles.weight_gradient(whole(64, 64), whole(64, 32), torch.float32)
    assert len(calls) == 1


@pytest.mark.parametrize(
    "left, right, dtype",
    [
        (whole(60, 64), whole(60, 32), torch.float32),
        (whole(64, 40), whole(64, 32), torch.float32),
        (whole(64, 40), whole(64, 96), torch.float32),
        (whole(64, 64).float(), whole(64, 32).float(), torch.float32),
        (whole(64, 64).double(), whole(64, 32).double(), torch.float64),
        (whole(64, 64), whole(64, 32), torch.bfloat16),
    ],
)
def test_other_shapes_and_types_are_torch_s(left: Tensor, right: Tensor, dtype: torch.dtype) -> None:
    expected = (left.double().t() @ right.double()).to(left.dtype).to(dtype)
    assert torch.equal(tiles.weight_gradient(left, right, dtype), expected)
    out = torch.ones_like(expected)
    tiles.add_weight_gradient(left, right, out, first=False)
    torch.testing.assert_close(out, expected + 1)


@needs_tiles
def test_what_is_not_finite_stays_in_its_row() -> None:
    left, right = whole(64, 64), whole(64, 64, seed=1)
    left[3, 7] = torch.nan
    found = tiles.weight_gradient(left, right, torch.float32).isfinite()
    assert found.all(1).tolist() == [row != 7 for row in range(64)]


def reference(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, causal: bool, window: int | None, grad: Tensor
) -> list[Tensor]:
    """Output and gradients in fp64, both 0 where a query is padding."""
    q, k, v = (tensor.double().requires_grad_() for tensor in (q, k, v))
    each = keys.repeat_interleave(len(q) // len(keys))
    position, key = torch.arange(q.shape[1]) % k.shape[1], torch.arange(k.shape[1])
    distance = position[:, None] - key
    seen = (key < each[:, None])[:, None, :] & (distance > -1 if causal else distance.abs() > -1)
    if window is not None:
        seen = seen & (distance.abs() < window)
    seen = seen | (~seen.any(2, keepdim=True))
    out = torch.softmax((q @ k.transpose(1, 2)).masked_fill(~seen, -torch.inf), 2) @ v
    out = out * (position < each[:, None])[..., None]
    out.backward(grad.double())
    assert q.grad is not None and k.grad is not None and v.grad is not None
    return [out.detach(), q.grad, k.grad, v.grad]


SHAPES = [  # heads, queries a head of keys, length, width, sequences
    (2, 1, 64, 64, 2),
    (4, 1, 48, 32, 2),
    (3, 2, 48, 64, 1),
    (6, 3, 64, 32, 3),
    (1, 1, 16, 96, 1),
    (2, 1, 544, 64, 1),
    (1, 1, 1056, 64, 1),
    (1, 4, 528, 32, 1),
]


@pytest.mark.parametrize("window", [None, 2, 30, 100])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads, repeat, length, width, sequences", SHAPES)
@needs_tiles
def test_attention_and_its_gradients(
    heads: int, repeat: int, length: int, width: int, sequences: int, causal: bool, window: int | None, threads: None
) -> None:
    n, rows = heads * sequences, repeat * length
    keys = torch.randint(max(1, length - 40), length + 1, (sequences,), generator=torch.Generator().manual_seed(3))
    q, k, v = random(n, rows, width) * 0.3, random(n, length, width, seed=1), random(n, length, width, seed=2)
    real = (torch.arange(rows) % length < keys.repeat_interleave(heads)[:, None])[..., None]
    grad = random(n, rows, width, seed=4) * real
    expected = reference(q, k, v, keys, causal, window, grad)
    torch.empty(1_000_000).fill_(torch.nan)  # so that memory that is never written to is likely noticed
    out, normalisers = torch.full_like(q, torch.nan), torch.full((n, rows), torch.nan)
    found = [torch.full_like(tensor, torch.nan) for tensor in (q, k, v)]
    tile_attention.forward(q, k, v, keys, causal, window, out, normalisers)
    tile_attention.backward(q, k, v, keys, causal, window, out, normalisers, grad, *found)
    assert out.isfinite().all(), "padding too"
    for value, exact in zip((out * real, *found), expected, strict=True):
        # Weights, output and gradients are rounded to 8 bits on their way.
        assert (value.double() - exact).norm() <= 1e-2 * exact.norm()
        assert (value.double() - exact).abs().max() <= 2e-2 * exact.abs().max()


@needs_tiles
def test_threads_change_no_bit_of_attention() -> None:
    q, k, v, grad = (random(8, 128, 64, seed=seed) for seed in range(4))
    keys, before, found = torch.tensor([128, 100]), torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        written = [torch.empty_like(q) for _ in range(4)]
        normalisers = torch.empty(8, 128)
        tile_attention.forward(q, k, v, keys, True, None, written[0], normalisers)
        tile_attention.backward(q, k, v, keys, True, None, written[0], normalisers, grad, *written[1:])
        found.append([*written, normalisers])
    torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@needs_tiles
def test_what_is_not_finite_stays_in_its_sequence_of_attention() -> None:
    q, k, v, grad = (random(4, 64, 64, seed=seed) for seed in range(4))
    q[1, 5, 3] = torch.nan
    written, normalisers = [torch.empty_like(q) for _ in range(4)], torch.empty(4, 64)
    keys = torch.tensor([64])
    tile_attention.forward(q, k, v, keys, False, None, written[0], normalisers)
    tile_attention.backward(q, k, v, keys, False, None, written[0], normalisers, grad, *written[1:])
    assert written[0].isfinite().all(2)[1].tolist() == [row != 5 for row in range(64)]
    for tensor in written:
        assert tensor.isfinite().flatten(1).all(1).tolist() == [True, False, True, True]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("key_heads", [1, 2])
def test_attention_with_and_without_tiles_is_the_same(
    causal: bool, window: int | None, key_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over packed sequences of different lengths, against fp64; on a CPU without tiles both ways are one."""
    packing = Packing.of([100, 3, 290, 64, 17])
    rows = packing.padded_tokens
    query, key, value = (random(1, h, rows, 64, seed=seed) for seed, h in enumerate((2, key_heads, key_heads)))
    real = torch.arange(rows) < packing.tokens
    grad = random(1, rows, 2, 64, seed=5) * real[None, :, None, None]

    def attended(*tensors: Tensor) -> list[Tensor]:
        own = [tensor.clone().requires_grad_() for tensor in tensors]
        output = backend_of("cpu").packed_attention(*own, packing, AttentionSettings(causal, 0.1, window=window))
        output.backward(grad.to(output.dtype))
        return [output.detach()[:, real], *(tensor.grad for tensor in own if tensor.grad is not None)]

    exact = attended(query.double(), key.double(), value.double())
    with_tiles = attended(query, key, value)
    monkeypatch.setattr(tile_attention, "available", lambda: False)
    without = attended(query, key, value)
    for found in (with_tiles, without):
        for one, other in zip(found, exact, strict=True):
            assert (one.double() - other).norm() <= 8e-3 * other.norm()


@pytest.mark.parametrize("length", [96, 544])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("key_heads", [1, 2])
@needs_tiles
def test_attention_of_a_plain_batch_is_by_tiles_too(
    length: int, causal: bool, window: int | None, key_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers' models call it: against fp64, through torch's kernel."""
    calls: list[int] = []
    monkeypatch.setattr(tile_attention, "forward", spied(tile_attention.forward, calls))
    query, key, value = (random(3, h, length, 64, seed=seed) for seed, h in enumerate((2, key_heads, key_heads)))
    grad = random(3, length, 2, 64, seed=5)

    def attended(kind: torch.dtype) -> list[Tensor]:
        own = [tensor.to(kind, copy=True).requires_grad_() for tensor in (query, key, value)]
        output, _ = attention_forward(
            torch.nn.Module(), *own, None, scaling=0.1, is_causal=causal, sliding_window=window
        )
        output.backward(grad.to(kind))
        return [output.detach(), *(tensor.grad for tensor in own if tensor.grad is not None)]

    exact = attended(torch.float64)
    assert not calls
    for one, other in zip(attended(torch.bfloat16), exact, strict=True):
        assert (one.double() - other).norm() <= 8e-3 * other.norm()
    assert len(calls) == 1


def spied(function: Callable[..., None], calls: list[int]) -> Callable[..., None]:
    """The function, which notes its calls."""

    def called(*arguments: Any) -> None:
        calls.append(1)
        function(*arguments)

    return called

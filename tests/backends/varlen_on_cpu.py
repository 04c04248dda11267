"""torch's variable-length attention by plain matrix products for the CPU, for which torch has no kernel."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.attention import varlen


def register() -> None:
    """Have torch compute the operation and its gradient on the CPU by `attend` and `attend_backward`, in this process."""
    varlen._varlen_attn.register_kernel("cpu")(attend)
    varlen._varlen_attn_backward.register_kernel("cpu")(attend_backward)


def _sequences(ends: Tensor, window: list[int]) -> Iterator[tuple[slice, Tensor]]:
    """Yield each sequence's tokens, and a bool [length, length] mask of what a query (row) sees."""
    for first, last in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        ahead = torch.arange(last - first) - torch.arange(last - first)[:, None]
        left, right = (math.inf if reach < 0 else reach for reach in window)
        yield slice(first, last), (-ahead <= left) & (ahead <= right)


def _scores(query: Tensor, key: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Return [heads, length, length] for query and key [length, heads, width]."""
    return torch.einsum("qhd,khd->hqk", query, key).mul(scale).masked_fill(~seen, -math.inf)


def attend(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, ends_of_keys: Tensor | None, longest: int,
    longest_keys: int, is_causal: bool = False, scale: float | None = None, window_size: list[int] | None = None,
    enable_gqa: bool = False, seqused_k: Tensor | None = None, block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    assert scale is not None and window_size is not None and longest == int(ends.diff().max())
    q, k, v = (tensor.float() for tensor in (query, key, value))
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    out, sums = torch.empty_like(q), q.new_empty(q.shape[1], len(q))
    for part, seen in _sequences(ends, window_size):
        scores = _scores(q[part], k[part], seen, scale)
        sums[:, part] = scores.logsumexp(-1)
        out[part] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[part])
    return out.to(query.dtype), sums, torch.zeros(2, dtype=torch.uint64)


def attend_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, ends: Tensor,
    ends_of_keys: Tensor, longest: int, longest_keys: int, is_causal: bool, rng_state: Tensor,
    scale: float | None = None, window_size: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    assert scale is not None and window_size is not None
    grad, q, k, v = (tensor.float() for tensor in (grad_out, query, key, value))
    repeat = q.shape[1] // k.shape[1]
    k, v = (tensor.repeat_interleave(repeat, 1) for tensor in (k, v))
    to_q, to_k, to_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for part, seen in _sequences(ends, window_size):
        weights = (_scores(q[part], k[part], seen, scale) - lse[:, part, None]).exp()
        to_v[part] = torch.einsum("hqk,qhd->khd", weights, grad[part])
        to_weights = torch.einsum("qhd,khd->hqk", grad[part], v[part])
        shared = (grad[part] * out[part].float()).sum(-1).t()[:, :, None]
        to_scores = weights * (to_weights - shared) * scale
        to_q[part] = torch.einsum("hqk,khd->qhd", to_scores, k[part])
        to_k[part] = torch.einsum("hqk,qhd->khd", to_scores, q[part])
    to_k, to_v = (tensor.unflatten(1, (-1, repeat)).sum(2) for tensor in (to_k, to_v))
    return to_q.to(query.dtype), to_k.to(key.dtype), to_v.to(value.dtype)

"""Attention for models of transformers: one set of weights, bidirectional or causal, chosen at each call.

Importing this module registers the implementation `mlmclm`; `use_attention(model)` selects it. The model's forward then
takes `is_causal=True` (a decoder) or False (an encoder) and passes it down to every layer.

On the CPU at short lengths the products are written out: torch's fused CPU kernel spends three times as long in its
backward pass (measured at 128 tokens, 64-wide heads, bf16: 10.4 ms against 3.0 ms forward and backward).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from mlmclm.models import tile_attention
from mlmclm.models.packed_attention import near, packed_attention
from mlmclm.models.packing import Packing

NAME = "mlmclm"
COMPILED = "mlmclm-compiled"
LONGEST_WRITTEN_OUT = 512
"""Longest sequence for which the score matrix is materialised on the CPU."""


def use_attention(model: nn.Module, *, compiled: bool = False) -> None:
    """Selects this module's attention in a transformers model.

    Args:
        compiled: for layers under torch.compile. Attention over packed sequences stays outside of what is compiled, since its
            shapes are never the same twice.
    """
    if compiled:
        apart = partial(attention_forward, attend=torch.compiler.disable(within_sequences))  # type: ignore[no-untyped-call]
        _register(COMPILED, apart)
    model.set_attn_implementation(COMPILED if compiled else NAME)  # type: ignore[operator]


def _register(name: str, forward: Callable[..., tuple[Tensor, None]]) -> None:
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, AttentionMaskInterface._global_mapping["sdpa"])


def within_sequences(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    *,
    causal: bool,
    scale: float,
    dropout: float,
    window: int | None,
) -> Tensor:
    """`packed_attention`, but on the CPU without score matrices of sequences longer than `LONGEST_WRITTEN_OUT`: each of these
    by itself through torch's kernel, unless tiles do without such matrices."""
    short_enough = int(packing.lengths.max()) <= LONGEST_WRITTEN_OUT
    if query.device.type != "cpu" or short_enough or _by_tiles(query, dropout):
        return packed_attention(query, key, value, packing, causal=causal, scale=scale, dropout=dropout, window=window)
    places = np.split(np.arange(packing.tokens), packing.starts[1:])  # of each sequence's tokens in the row
    short = [place for place in places if len(place) <= LONGEST_WRITTEN_OUT]
    long = [place for place in places if len(place) > LONGEST_WRITTEN_OUT]
    pieces = []  # [1, tokens, heads, width] each
    for place in long:
        part = slice(int(place[0]), int(place[-1]) + 1)
        seen = near(len(place), causal, window, query.device) if window is not None and window < len(place) else None
        attended = functional.scaled_dot_product_attention(
            query[:, :, part], key[:, :, part], value[:, :, part], attn_mask=seen, dropout_p=dropout,
            is_causal=causal and seen is None, scale=scale, enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
        pieces.append(attended.transpose(1, 2))
    if short:
        inner = Packing.of([len(place) for place in short])
        rows = np.concatenate([*short, np.full(inner.padded_tokens - inner.tokens, packing.tokens)])
        index = torch.from_numpy(rows)
        attended = packed_attention(
            query[:, :, index], key[:, :, index], value[:, :, index], inner,
            causal=causal, scale=scale, dropout=dropout, window=window,
        )  # fmt: skip
        pieces.append(attended[:, : inner.tokens].to(pieces[0].dtype))
    padding = np.arange(packing.tokens, query.shape[2])
    pieces.append(pieces[0].new_zeros(1, len(padding), *pieces[0].shape[2:]))
    order = np.concatenate([*long, *short, padding])
    return torch.cat(pieces, 1)[:, torch.from_numpy(np.argsort(order))]


def _by_tiles(query: Tensor, dropout: float) -> bool:
    """Whether `packed_attention` computes these queries [..., width] by tiles."""
    dtype = query.dtype
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
    return query.device.type == "cpu" and not dropout and tile_attention.fits(dtype, query.shape[-1])


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    packing: Packing | None = None,
    attend: Callable[..., Tensor] = within_sequences,
    **_: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention, the signature that transformers calls.

    Args:
        query: [batch, heads, length, head width]; key and value may have fewer heads (grouped queries).
        attention_mask: None, or what `sdpa` would get (boolean, True where attention is allowed, broadcastable to
            [batch, heads, length, length]).
        is_causal: True hides later positions; None or False hides nothing beyond `attention_mask`.
        sliding_window: positions at this distance or more are hidden, unless `attention_mask` says what is.
        packing: where the sequences of a concatenated batch lie; attention is within each, whatever `attention_mask`.
        attend: what computes that.

    Returns:
        [batch, length, heads, head width], and None in place of attention weights.
    """
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    window = _window(module, sliding_window, bool(is_causal))
    if packing is not None:
        attended = attend(
            query, key, value, packing, causal=bool(is_causal), scale=scale, dropout=dropout, window=window
        )
        return attended, None
    alike = query.shape[2] == key.shape[2]
    # What torch compiles can't have this project's loops in it.
    if attention_mask is None and alike and attend is within_sequences and _by_tiles(query, dropout):
        batch, length = query.shape[0], query.shape[2]
        query, key, value = (
            tensor.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] for tensor in (query, key, value)
        )
        packing = Packing.uniform(batch, length)
        attended = packed_attention(
            query, key, value, packing, causal=bool(is_causal), scale=scale, dropout=dropout, window=window
        )
        return attended.view(batch, length, *attended.shape[2:]), None
    if window is not None and window < query.shape[2] and attention_mask is None:
        attention_mask, is_causal = near(query.shape[2], bool(is_causal), window, query.device), False
    groups = query.shape[1] // key.shape[1]
    if query.device.type == "cpu" and query.shape[2] <= LONGEST_WRITTEN_OUT and alike:
        if groups > 1:
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        output = _written_out(query, key, value, attention_mask, bool(is_causal), scale, dropout)
    else:
        output = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            dropout_p=dropout,
            is_causal=bool(is_causal) and attention_mask is None,
            scale=scale,
            enable_gqa=groups > 1,
        )
    return output.transpose(1, 2).contiguous(), None


def _window(module: nn.Module, sliding_window: int | None, causal: bool) -> int | None:
    """The smallest distance that is hidden, from what a layer's class gives for its own direction.

    With `local_attention` L transformers' ModernBertModel sees L / 2 tokens to each side (`sliding_window` is L / 2 + 1), its
    ModernBertDecoderModel, which counts the token itself, L / 2 - 1 to the left (L / 2). Weights that can be either's are run as
    the class of the direction that is asked for, whichever class holds them.
    """
    if sliding_window is None:
        return None
    if not getattr(module, "is_causal", True):
        return sliding_window - 1 if causal else sliding_window
    decoder = getattr(getattr(module, "config", None), "model_type", None) == "modernbert-decoder"
    return sliding_window + 1 if decoder and not causal else sliding_window


def _written_out(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float, dropout: float
) -> Tensor:
    """softmax(scale q k') v by two batched products; all tensors [batch, heads, length, width], all of one head
    count."""
    batch, heads, length, width = query.shape
    scores = torch.bmm(
        (query * scale).reshape(batch * heads, length, width), key.reshape(batch * heads, length, width).transpose(1, 2)
    )  # [batch * heads, length, length]
    if causal:
        hidden = torch.ones(length, length, dtype=torch.bool, device=query.device).triu_(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    if mask is not None:
        scores = scores.view(batch, heads, length, length)
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        scores = scores.view(batch * heads, length, length)
    weights = functional.softmax(scores, dim=-1).to(value.dtype)
    if dropout:
        weights = functional.dropout(weights, dropout)
    return torch.bmm(weights, value.reshape(batch * heads, length, width)).view(batch, heads, length, width)


_register(NAME, attention_forward)

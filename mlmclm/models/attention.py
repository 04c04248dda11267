"""Attention for transformers models: one set of weights, bidirectional or causal, chosen at each call.

Importing this module registers the implementation `mlmclm`; `use_attention(model)` selects it. The model's forward then
takes `is_causal=True` (a decoder) or False (an encoder) and passes it down to every layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from mlmclm.backends.attention_settings import AttentionSettings, window_of
from mlmclm.backends.choice import backend_of
from mlmclm.backends.packing import Packing

NAME = "mlmclm"
COMPILED = "mlmclm-compiled"


def use_attention(model: nn.Module, *, compiled: bool = False) -> None:
    """Select this module's attention in a transformers model.

    Args:
        compiled: for layers under torch.compile. Attention over packed sequences stays outside the compiled code,
            because its shapes change with each batch, unless it is a single operation (`Reference.traces_packed`).
    """
    if compiled:
        _register(COMPILED, partial(attention_forward, traced=True))
    model.set_attn_implementation(COMPILED if compiled else NAME)  # type: ignore[operator]


def _register(name: str, forward: Callable[..., tuple[Tensor, None]]) -> None:
    AttentionInterface.register(name, forward)
    # Without a mask function of this name transformers would drop every mask.
    AttentionMaskInterface.register(name, AttentionMaskInterface._global_mapping["sdpa"])


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
    traced: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute `Reference.attention`, with the signature that transformers calls; attention weights are returned as None.

    Args:
        attention_mask: None, or what `sdpa` would get.
        is_causal: None means False.
        sliding_window: used if there is no `attention_mask`; see `window_of`.
        packing: layout of a concatenated batch; attention stays within each sequence, and `attention_mask` is ignored.
    """
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    causal = bool(is_causal)
    settings = AttentionSettings(causal, scale, dropout, window_of(module, sliding_window, causal), traced)
    backend = backend_of(query.device)
    if packing is not None:
        attend: Callable[..., Tensor] = backend.packed_attention
        if traced and not backend.traces_packed(query, settings):
            attend = torch.compiler.disable(attend)  # type: ignore[no-untyped-call]
        return attend(query, key, value, packing, settings), None
    return backend.attention(query, key, value, settings, attention_mask), None


_register(NAME, attention_forward)

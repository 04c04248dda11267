"""Run a transformers base model over packed sequences: token ids in, hidden states or one vector per sequence out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor
from transformers import PreTrainedModel

from mlmclm.backends.choice import backend_of
from mlmclm.backends.packing import Packing
from mlmclm.errors import UserError
from mlmclm.models.architectures import final_states

PADDED = "computes_padded"
"""Attribute of a model whose attention can't be exchanged, so that its own forward computes a batch with padding."""


def pack_ids(sequences: Sequence[np.ndarray[Any, Any]], packing: Packing) -> Tensor:
    """Return int64 [1, T]: the sequences' token ids end to end, then zeros."""
    ids = np.zeros((1, packing.padded_tokens), dtype=np.int64)
    np.concatenate(sequences, out=ids[0, : packing.tokens], casting="same_kind")
    return torch.from_numpy(ids).to(packing.device)


def encode(
    model: PreTrainedModel,
    input_ids: Tensor,
    packing: Packing,
    *,
    causal: bool,
    fused: bool = True,
    token_types: Tensor | None = None,
) -> Tensor:
    """Compute final hidden states [T, hidden] of a transformers base model over a packed batch.

    Rows from `packing.tokens` on are padding.

    Args:
        model: prepared with `mlmclm.models.attention.use_attention`; its weights don't determine the direction.
        input_ids: [1, T] of `pack_ids`.
        causal: hide later positions of the same sequence.
        fused: compute in the backend's blocks, if it has them for the model.
        token_types: [1, T] of `pack_ids`; ignored if the model has only one type.
    """
    if getattr(model.config, "type_vocab_size", 1) < 2:
        token_types = None
    if getattr(model, PADDED, False):
        check_direction(model, causal=causal)
        return _padded(model, input_ids, packing, token_types)
    backend = backend_of(packing.device)
    if fused and backend.fuses(model):
        return backend.blocks(model, input_ids, packing, causal=causal)
    states = final_states(
        model,
        input_ids,
        causal=causal,
        position_ids=packing.position_ids,
        # transformers passes a four-dimensional mask on unchanged, and then builds none over the whole row.
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=packing.device),
        packing=packing,
        **({} if token_types is None else {"token_type_ids": token_types}),
    )
    return states[0]


def check_direction(model: PreTrainedModel, *, causal: bool) -> None:
    """Raise a UserError if `encode` can't hide later tokens from earlier ones although it should."""
    if causal and getattr(model, PADDED, False):
        raise UserError(
            f"attention: causal: a model of the architecture {model.config.model_type!r} sees both sides only. Leave it bidirectional."
        )


def _padded(model: PreTrainedModel, input_ids: Tensor, packing: Packing, token_types: Tensor | None) -> Tensor:
    """Compute `encode` by the model's own forward over sequences side by side, padded to the longest."""
    position = np.arange(int(packing.lengths.max()))
    inside = position < packing.lengths[:, None]
    real = torch.from_numpy(inside).to(packing.device)
    index = torch.from_numpy(np.where(inside, packing.starts[:, None] + position, 0)).to(packing.device)
    padding = model.config.pad_token_id or 0
    types = {} if token_types is None else {"token_type_ids": token_types[0, index].masked_fill(~real, 0)}
    ids = input_ids[0, index].masked_fill(~real, padding)  # [sequences, longest]
    states = model(input_ids=ids, attention_mask=real.long(), **types).last_hidden_state[real]
    return functional.pad(states, (0, 0, 0, packing.padded_tokens - packing.tokens))


def pool(hidden: Tensor, packing: Packing, how: str) -> Tensor:
    """Return one vector per sequence, [S, hidden]: its first (`bos`), its `last`, or the `mean` (in fp32 at least)."""
    if how == "mean":
        wide = torch.promote_types(hidden.dtype, torch.float32)
        sums = hidden.new_zeros(len(packing.lengths), hidden.shape[-1], dtype=wide)
        sums = sums.index_add(0, packing.sequence_of_token, hidden[: packing.tokens].to(wide))
        return (sums / torch.from_numpy(packing.lengths).to(hidden.device).unsqueeze(1)).to(hidden.dtype)
    return hidden.index_select(0, packing.first_tokens if how == "bos" else packing.last_tokens)

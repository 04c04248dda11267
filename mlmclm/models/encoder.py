"""Run a transformers base model over packed sequences: token ids in, hidden states or one vector per sequence out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from mlmclm.backends.choice import backend_of
from mlmclm.backends.packing import Packing
from mlmclm.models.architectures import final_states


def pack_ids(sequences: Sequence[np.ndarray[Any, Any]], packing: Packing, padding: int = 0) -> Tensor:
    """Return int64 [1, T]: the sequences' token ids end to end, then `padding`."""
    ids = np.full((1, packing.padded_tokens), padding, dtype=np.int64)
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
    backend = backend_of(packing.device)
    if fused and backend.fuses(model):
        return backend.blocks(model, input_ids, packing, causal=causal)
    typed = token_types is not None and getattr(model.config, "type_vocab_size", 1) > 1
    states = final_states(
        model,
        input_ids,
        causal=causal,
        position_ids=packing.position_ids,
        # transformers passes on a four-dimensional mask as it is, and builds none over the whole row.
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=packing.device),
        packing=packing,
        **({"token_type_ids": token_types} if typed else {}),
    )
    return states[0]


def pool(hidden: Tensor, packing: Packing, how: str) -> Tensor:
    """Return one vector per sequence, [S, hidden]: its first (`bos`), its `last`, or the `mean` (in fp32 at least)."""
    if how == "mean":
        wide = torch.promote_types(hidden.dtype, torch.float32)
        sums = hidden.new_zeros(len(packing.lengths), hidden.shape[-1], dtype=wide)
        sums = sums.index_add(0, packing.sequence_of_token, hidden[: packing.tokens].to(wide))
        return (sums / torch.from_numpy(packing.lengths).to(hidden.device).unsqueeze(1)).to(hidden.dtype)
    return hidden.index_select(0, packing.first_tokens if how == "bos" else packing.last_tokens)

"""Masked language modelling: which positions are predicted is a function of (seed, step, row, position)."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from mlmclm.corpora.hashing import fold, unit_interval

_PURPOSE = 2
"""Keeps the draws of masking and of the order of batches independent under one seed."""

IGNORED = -100
"""The label of a position without a prediction (`torch.nn.functional.cross_entropy`'s default)."""


def mask_tokens(
    ids: NDArray[np.int64],
    *,
    rows: NDArray[np.int64],
    ratio: float,
    mask_id: int,
    special_ids: Collection[int],
    seed: int,
    step: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Replaces each token by [MASK] with probability `ratio`; special tokens never.

    All selected positions become [MASK]: no random and no kept tokens, as in the study (EuroBERT's pretraining code).

    Args:
        ids: tokens, int64 [b, T].
        rows: int64 [b], each row's index in the *global* batch, so that the split over ranks and micro batches is
            immaterial.
        ratio: probability of a position to be predicted, in (0, 1).
        special_ids: tokens that are never masked, such as EOS.

    Returns:
        (input_ids, labels), both int64 [b, T]; labels are -100 where nothing is predicted.

    Raises:
        ValueError: shapes that do not fit, or a ratio outside (0, 1).
    """
    if ids.ndim != 2 or rows.shape != (ids.shape[0],):
        raise ValueError(f"need ids [b, T] and rows [b], got {ids.shape} and {rows.shape}")
    if not 0.0 < ratio < 1.0:
        raise ValueError(f"the mask ratio must be between 0 and 1, got {ratio}")
    positions = np.arange(ids.shape[1], dtype=np.uint64)[None, :]
    draws = unit_interval(fold(_PURPOSE, seed, step, rows.astype(np.uint64)[:, None], positions))  # [b, T]
    chosen = (draws < ratio) & ~np.isin(ids, np.fromiter(special_ids, dtype=np.int64))
    return np.where(chosen, np.int64(mask_id), ids), np.where(chosen, ids, np.int64(IGNORED))

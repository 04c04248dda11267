"""Hiding tokens: which ones, and what stands in their place, is a function of (seed, step, row, position)."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from mlmclm.corpora.hashing import fold, unit_interval
from mlmclm.objectives.objective import UNLABELLED

_PURPOSE = 2
"""Keeps the draws of masking and of the order of batches independent under one seed."""

_FATE, _REPLACEMENT = 1, 2
"""Which draw of a position it is; the one that chooses it has no number."""


def mask_tokens(
    ids: NDArray[np.int64],
    *,
    rows: NDArray[np.int64],
    ratio: float,
    mask_id: int,
    special_ids: Collection[int],
    seed: int,
    step: int,
    random: float = 0.0,
    keep: float = 0.0,
    replacements: NDArray[np.int64] | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Chooses each token with probability `ratio` to be predicted, special tokens never, and hides it.

    By default all chosen positions become [MASK]: no random and no kept tokens, as in the study (EuroBERT's pretraining
    code). BERT's are random 0.1 and keep 0.1 (arXiv 1810.04805, section 3.1). Which positions are chosen doesn't depend on it.

    Args:
        ids: tokens, int64 [b, T].
        rows: int64 [b], each row's index in the *global* batch, so that the split over ranks and micro batches is
            immaterial.
        ratio: probability of a position to be predicted, in (0, 1).
        special_ids: tokens that are never masked, such as EOS.
        random: share of the chosen positions that get a uniformly drawn token of `replacements`; it may be the same one.
        keep: share of the chosen positions that stay as they are; what neither names becomes [MASK].
        replacements: int64 [k], needed where `random` is not 0.

    Returns:
        (input_ids, labels), both int64 [b, T]; labels are -100 where nothing is predicted.

    Raises:
        ValueError: shapes that do not fit, a ratio outside (0, 1), shares outside [0, 1] in all, or no replacements.
    """
    if ids.ndim != 2 or rows.shape != (ids.shape[0],):
        raise ValueError(f"need ids [b, T] and rows [b], got {ids.shape} and {rows.shape}")
    if not 0.0 < ratio < 1.0:
        raise ValueError(f"the mask ratio must be between 0 and 1, got {ratio}")
    if random < 0 or keep < 0 or random + keep > 1:
        raise ValueError(f"the shares of random and kept tokens must lie in [0, 1] in all, got {random} and {keep}")
    positions = np.arange(ids.shape[1], dtype=np.uint64)[None, :]
    counters = (_PURPOSE, seed, step, rows.astype(np.uint64)[:, None], positions)
    draws = unit_interval(fold(*counters))  # [b, T]
    chosen = (draws < ratio) & ~np.isin(ids, np.fromiter(special_ids, dtype=np.int64))
    inputs = np.where(chosen, np.int64(mask_id), ids)
    if random or keep:
        fates = unit_interval(fold(*counters, _FATE))  # [b, T]
        kept = chosen & (fates < keep)
        inputs[kept] = ids[kept]
        replaced = chosen & ~kept & (fates < keep + random)
        if random and (replacements is None or not len(replacements)):
            raise ValueError("random replacement needs tokens to choose from")
        if replacements is not None:
            which = unit_interval(fold(*counters, _REPLACEMENT)[replaced]) * len(replacements)
            inputs[replaced] = replacements[which.astype(np.int64)]
    return inputs, np.where(chosen, ids, np.int64(UNLABELLED))

"""Masking as a pure function of (seed, step, row, position): which tokens are hidden and what replaces them."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from mlmclm.corpora.hashing import fold, unit_interval
from mlmclm.objectives.objective import UNLABELLED

_PURPOSE = 2
"""Keeps the draws for masking independent of those for the batch order, although both use one seed."""

_FATE, _REPLACEMENT = 1, 2
"""Numbers of a position's further draws. The draw that decides whether it is hidden has none."""


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
    """Choose each token for prediction with probability `ratio`, and hide it. Special tokens are never chosen.

    By default every chosen position becomes [MASK], with no random and no kept tokens, as in the study (EuroBERT's
    pretraining code). BERT uses random 0.1 and keep 0.1 (arXiv 1810.04805, section 3.1). The choice of positions does
    not depend on these shares.

    Args:
        ids: tokens, int64 [b, T].
        rows: int64 [b], each row's index in the *global* batch, so that the result does not depend on how the batch is
            split over ranks and micro-batches.
        ratio: probability that a position is predicted, in (0, 1).
        special_ids: tokens that are never masked, such as EOS.
        random: share of the chosen positions that get a token drawn uniformly from `replacements`, which may be the
            original token.
        keep: share of the chosen positions that are left unchanged. The remaining share becomes [MASK].
        replacements: int64 [k], needed if `random` is not 0.

    Returns:
        (input_ids, labels), both int64 [b, T]; labels are -100 where nothing is predicted.

    Raises:
        ValueError: if the shapes do not match, `ratio` is outside (0, 1), `random` and `keep` or their sum are outside
            [0, 1], or replacements are needed and there are none.
    """
    if ids.ndim != 2 or rows.shape != (ids.shape[0],):
        raise ValueError(f"need ids [b, T] and rows [b], got {ids.shape} and {rows.shape}")
    if not 0.0 < ratio < 1.0:
        raise ValueError(f"the mask ratio must be between 0 and 1, got {ratio}")
    if random < 0 or keep < 0 or random + keep > 1:
        raise ValueError(f"the shares of random and kept tokens must lie in [0, 1] in all, got {random} and {keep}")
    # Counter-based random numbers: each draw is a hash of its counters, so no generator state needs saving to resume.
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

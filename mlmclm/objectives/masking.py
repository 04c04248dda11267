"""Masking as a pure function of (seed, step, row, position): which tokens are hidden and what replaces them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mlmclm.corpora.hashing import fold, unit_interval
from mlmclm.objectives.objective import UNLABELLED, Masking

_PURPOSE = 2
"""Keeps the draws for masking independent of those for the batch order, although both use one seed."""

_FATE, _REPLACEMENT = 1, 2
"""Numbers (`purpose`) of a position's further draws. The draw that decides whether it is hidden has no number."""


def draws(masking: Masking, positions: NDArray[np.int64], *purpose: int) -> NDArray[np.float64]:
    """Return uniform numbers in [0, 1), one for each row and position: float64 [b, positions].

    Args:
        positions: int64 [positions], any integers.
        purpose: distinguishes several draws of an objective at one position.
    """
    # Counter-based random numbers: each draw is a hash of its counters, so no generator state needs saving to resume.
    rows = masking.rows.astype(np.uint64)[:, None]
    return unit_interval(
        fold(_PURPOSE, masking.seed, masking.step, rows, positions.astype(np.uint64)[None, :], *purpose)
    )


def mask_tokens(ids: NDArray[np.int64], masking: Masking, ratio: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Choose each token for prediction with probability `ratio`, and hide it (`hide`).

    The choice of positions does not depend on the corruption, nor on how the batch is split over ranks and
    micro-batches.

    Args:
        ids: tokens, int64 [b, T].
        ratio: probability that a position is predicted, in (0, 1).

    Returns:
        (input_ids, labels), both int64 [b, T]; labels are -100 where nothing is predicted.

    Raises:
        ValueError: there is no token to replace others with.
    """
    return hide(ids, masking, draws(masking, np.arange(ids.shape[1])) < ratio)


def hide(
    ids: NDArray[np.int64], masking: Masking, chosen: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Hide the chosen tokens, except special ones, and label them with what they were.

    By default every chosen position becomes [MASK], with no random and no kept tokens, as in the study (EuroBERT's
    pretraining code). BERT uses random 0.1 and keep 0.1 (arXiv 1810.04805, section 3.1). A random token is drawn
    uniformly from the ordinary ones, and may be the original token.

    Args:
        ids: tokens, int64 [b, T].
        chosen: bool [b, T].

    Returns:
        (input_ids, labels), as `mask_tokens`.

    Raises:
        ValueError: there is no token to replace others with.
    """
    random, keep = masking.corruption.random, masking.corruption.keep
    chosen = chosen & ~np.isin(ids, masking.vocabulary.special)
    inputs = np.where(chosen, np.int64(masking.vocabulary.mask), ids)
    if random or keep:
        positions = np.arange(ids.shape[1])
        fates = draws(masking, positions, _FATE)  # [b, T]
        kept = chosen & (fates < keep)
        inputs[kept] = ids[kept]
        replaced = chosen & ~kept & (fates < keep + random)
        ordinary = masking.vocabulary.ordinary
        if random and not len(ordinary):
            raise ValueError("random replacement needs tokens to choose from")
        which = draws(masking, positions, _REPLACEMENT)[replaced] * len(ordinary)
        inputs[replaced] = ordinary[which.astype(np.int64)]
    return inputs, np.where(chosen, ids, np.int64(UNLABELLED))

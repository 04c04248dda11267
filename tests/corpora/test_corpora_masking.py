"""Which tokens are masked."""

from __future__ import annotations

import numpy as np
import pytest

from mlmclm.corpora.masking import IGNORED, mask_tokens

MASK, EOS = 3, 2


def batch(rows: int = 64, length: int = 256) -> np.ndarray:
    ids = np.random.default_rng(0).integers(4, 1000, size=(rows, length))
    ids[:, ::17] = EOS
    return ids


def mask(
    ids: np.ndarray, rows: np.ndarray, ratio: float = 0.4, seed: int = 1, step: int = 5
) -> tuple[np.ndarray, np.ndarray]:
    return mask_tokens(ids, rows=rows, ratio=ratio, mask_id=MASK, special_ids=[0, 1, EOS, MASK], seed=seed, step=step)


@pytest.mark.parametrize("ratio", [0.01, 0.2, 0.4, 0.5, 0.99])
def test_the_masked_share_is_within_four_deviations_of_the_ratio(ratio: float) -> None:
    ids = batch()
    _, labels = mask(ids, np.arange(64), ratio)
    n = int((ids != EOS).sum())
    assert abs(int((labels != IGNORED).sum()) - n * ratio) < 4 * (n * ratio * (1 - ratio)) ** 0.5


def test_special_tokens_are_never_masked_and_labels_are_the_tokens_that_were_there() -> None:
    ids = batch()
    inputs, labels = mask(ids, np.arange(64))
    chosen = labels != IGNORED
    assert not chosen[ids == EOS].any()
    assert (labels[chosen] == ids[chosen]).all()
    assert (inputs[chosen] == MASK).all()
    assert (inputs[~chosen] == ids[~chosen]).all()
    assert inputs.dtype == labels.dtype == np.int64


def test_the_split_into_ranks_and_micro_batches_does_not_matter() -> None:
    ids = batch()
    whole = mask(ids, np.arange(64))
    order = np.random.default_rng(1).permutation(64)
    for part in np.array_split(order, 5):
        inputs, labels = mask(ids[part], part)
        assert (inputs == whole[0][part]).all()
        assert (labels == whole[1][part]).all()


def test_a_position_depends_on_seed_step_row_and_position_only() -> None:
    ids = batch()
    base = mask(ids, np.arange(64))[1] != IGNORED
    other_text = np.where(ids == EOS, ids, ids + 1)
    assert ((mask(other_text, np.arange(64))[1] != IGNORED) == base).all()
    shorter = mask(ids[:, :100], np.arange(64))[1] != IGNORED
    assert (shorter == base[:, :100]).all()
    changed = [
        mask(ids, np.arange(64), seed=2)[1] != IGNORED,
        mask(ids, np.arange(64), step=6)[1] != IGNORED,
        mask(ids, np.arange(64) + 64)[1] != IGNORED,
    ]
    for other in changed:
        agreement = (other == base)[ids != EOS].mean()
        assert 0.48 < agreement < 0.56  # 0.4 * 0.4 + 0.6 * 0.6 = 0.52 if independent


def test_a_larger_ratio_masks_a_superset() -> None:
    ids = batch()
    small, large = (mask(ids, np.arange(64), ratio)[1] != IGNORED for ratio in (0.2, 0.5))
    assert not (small & ~large).any()


@pytest.mark.parametrize("ratio", [0.0, 1.0, -0.1])
def test_a_ratio_outside_zero_and_one_is_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match="ratio"):
        mask(batch(2, 8), np.arange(2), ratio)


def test_rows_must_fit() -> None:
    with pytest.raises(ValueError, match="rows"):
        mask(batch(2, 8), np.arange(3))

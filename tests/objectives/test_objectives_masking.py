"""Which tokens are masked."""

from __future__ import annotations

import numpy as np
import pytest

from mlmclm.corpora.tokenizer import Vocabulary
from mlmclm.objectives.corruption import Corruption
from mlmclm.objectives.masking import mask_tokens
from mlmclm.objectives.objective import UNLABELLED as IGNORED
from mlmclm.objectives.objective import Masking

MASK, EOS = 3, 2
VOCABULARY = Vocabulary(1000, MASK, (0, 1, EOS, MASK))

WORD = 2**64
ORDINARY = np.arange(4, 1000)


def batch(rows: int = 64, length: int = 256) -> np.ndarray:
    ids = np.random.default_rng(0).integers(4, 1000, size=(rows, length))
    ids[:, ::17] = EOS
    return ids


def mask(
    ids: np.ndarray,
    rows: np.ndarray,
    ratio: float = 0.4,
    seed: int = 1,
    step: int = 5,
    random: float = 0.0,
    keep: float = 0.0,
) -> tuple[np.ndarray, np.ndarray]:
    corruption = Corruption(mask=1 - random - keep, random=random, keep=keep)
    return mask_tokens(ids, Masking(rows, step, seed, VOCABULARY, corruption), ratio)


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


def splitmix(value: int) -> int:
    """SplitMix64's finaliser in Python's integers."""
    value = (value + 0x9E3779B97F4A7C15) % WORD
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % WORD
    return value ^ (value >> 31)


def uniform(*counters: int) -> float:
    """The draw of some counters, in [0, 1)."""
    state = 0
    for counter in counters:
        state = splitmix(state ^ splitmix(counter))
    return (state >> 11) / 2**53


@pytest.mark.parametrize(
    ("random", "keep", "ratio"), [(0.1, 0.1, 0.4), (0.5, 0.2, 0.15), (0.0, 0.3, 0.8), (1.0, 0.0, 0.3), (0.0, 0.0, 0.4)]
)
def test_inputs_and_labels_equal_a_loop_over_single_positions(random: float, keep: float, ratio: float) -> None:
    ids, rows, seed, step = batch(6, 40), np.array([3, 0, 70, 9, 2303, 5]), 11, 41_999
    inputs, labels = mask(ids, rows, ratio, seed, step, random, keep)
    for index, row in enumerate(rows.tolist()):
        for position in range(40):
            token = int(ids[index, position])
            expected, label = token, -100
            if token != EOS and uniform(2, seed, step, row, position) < ratio:
                label, fate = token, uniform(2, seed, step, row, position, 1)
                if fate >= random + keep:
                    expected = MASK
                elif fate >= keep:
                    expected = 4 + int(uniform(2, seed, step, row, position, 2) * 996)
            assert (inputs[index, position], labels[index, position]) == (expected, label)


@pytest.mark.parametrize("ratio", [0.15, 0.4, 0.8])
def test_a_million_tokens_are_masked_replaced_and_kept_in_their_shares(ratio: float) -> None:
    ids = np.random.default_rng(0).integers(4, 1000, size=(1024, 1024))
    ids[:, ::64] = EOS
    inputs, labels = mask(ids, np.arange(1024), ratio, seed=5, step=7, random=0.1, keep=0.1)
    ordinary, chosen = ids != EOS, labels != IGNORED
    assert ordinary.sum() > 1_000_000
    assert not (chosen & ~ordinary).any()
    assert (inputs[~chosen] == ids[~chosen]).all()
    assert (labels[chosen] == ids[chosen]).all()
    n, hits = int(ordinary.sum()), int(chosen.sum())
    assert within_four_deviations(hits, n, ratio)
    masked = chosen & (inputs == MASK)
    same = chosen & (inputs == ids)  # kept, or by chance replaced by itself
    other = chosen & ~masked & ~same
    for found, share in ((masked, 0.8), (same, 0.1 + 0.1 / 996), (other, 0.1 * 995 / 996)):
        assert within_four_deviations(int(found.sum()), hits, share)
    assert np.isin(inputs[other], ORDINARY).all()
    counts = np.bincount(inputs[other], minlength=1000)[4:]
    mean = counts.mean()
    assert ((counts - mean) ** 2 / mean).sum() < 995 + 4 * (2 * 995) ** 0.5, "replacements are uniform (chi squared)"


def within_four_deviations(hits: int, n: int, share: float) -> bool:
    return abs(hits - n * share) < 4 * (n * share * (1 - share)) ** 0.5


@pytest.mark.parametrize(("random", "keep"), [(-0.1, 0.0), (0.0, -0.1), (0.6, 0.5)])
def test_impossible_shares_are_refused(random: float, keep: float) -> None:
    with pytest.raises(ValueError, match=r"greater than or equal to 0"):
        mask(batch(2, 8), np.arange(2), random=random, keep=keep)


def test_a_vocabulary_without_replacements_is_refused() -> None:
    masking = Masking(np.arange(2), 0, 0, Vocabulary(4, MASK, (0, 1, EOS, MASK)), Corruption(mask=0.9, random=0.1))
    with pytest.raises(ValueError, match="tokens to choose from"):
        mask_tokens(batch(2, 8), masking, 0.4)

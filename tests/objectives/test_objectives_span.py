"""Span masking against a loop over single positions, and the lengths and shares of its spans."""

from __future__ import annotations

import numpy as np
import pytest

from mlmclm.corpora.tokenizer import Vocabulary
from mlmclm.objectives.corruption import Corruption
from mlmclm.objectives.masking import draws
from mlmclm.objectives.objective import UNLABELLED, Masking
from mlmclm.objectives.span import _LENGTH, _START, BEYOND, LONGEST, Spans, start_rate

MASK, EOS = 3, 2
VOCABULARY = Vocabulary(1000, MASK, (0, 1, EOS, MASK))


def masking(rows: np.ndarray, corruption: Corruption | None = None) -> Masking:
    return Masking(rows, 5, 1, VOCABULARY, corruption or Corruption())


def tokens(rows: int, length: int) -> np.ndarray:
    ids = np.random.default_rng(0).integers(4, 1000, size=(rows, length))
    ids[:, 16::17] = EOS
    return ids


def test_span_lengths_are_spanbert_s() -> None:
    """Geometric with p = 0.2, of which lengths above 10 are left out: a mean of 3.8, as the paper says."""
    weights = np.array([0.2 * 0.8 ** (length - 1) for length in range(1, 11)])
    weights /= weights.sum()
    assert [weights[length:].sum() for length in range(10)] == pytest.approx(BEYOND)
    assert (weights * np.arange(1, 11)).sum() == pytest.approx(BEYOND.sum()) == pytest.approx(3.8, abs=0.01)


def test_labels_are_those_of_a_loop_over_spans() -> None:
    ids, given = tokens(16, 64), masking(np.arange(16))
    inputs, labels = Spans(15).label(ids, given)
    positions = np.arange(-9, 64)
    starts, lengths = draws(given, positions, _START), draws(given, positions, _LENGTH)
    hidden = set()
    for row in range(16):
        for place, position in enumerate(positions):
            if starts[row, place] < start_rate(0.15):
                reach = next(n for n in range(1, LONGEST + 1) if n == LONGEST or lengths[row, place] >= BEYOND[n])
                hidden |= {(row, each) for each in range(position, position + reach) if 0 <= each < 64}
    hidden -= {(row, place) for row, place in hidden if ids[row, place] == EOS}
    assert set(zip(*np.nonzero(labels != UNLABELLED), strict=True)) == hidden
    assert all(labels[at] == ids[at] and inputs[at] == MASK for at in hidden)
    assert (inputs == MASK).sum() == len(hidden) > 100


@pytest.mark.parametrize("percent", [1, 15, 50, 99])
def test_the_stated_share_is_hidden_at_every_position(percent: int) -> None:
    ids = np.full((20_000, 24), 7)
    _, labels = Spans(percent).label(ids, masking(np.arange(20_000)))
    shares = (labels != UNLABELLED).mean(axis=0)
    assert shares == pytest.approx(np.full(24, percent / 100), abs=0.018)
    assert shares.mean() == pytest.approx(percent / 100, abs=0.008)


def test_labels_do_not_depend_on_how_the_batch_is_split() -> None:
    ids, corruption = tokens(8, 64), Corruption(mask=0.8, random=0.1, keep=0.1)
    whole = Spans(30).label(ids, masking(np.arange(8), corruption))
    parts = [Spans(30).label(ids[[row]], masking(np.array([row]), corruption)) for row in range(8)]
    for side in (0, 1):
        assert (np.concatenate([part[side] for part in parts]) == whole[side]).all()
    kept = (whole[0] == ids)[whole[1] != UNLABELLED].mean()
    assert 0.03 < kept < 0.2

"""The order of batches."""

from __future__ import annotations

import numpy as np
import pytest

from mlmclm.corpora.order import sample_rows


def batch(n: int, size: int, seed: int, step: int) -> np.ndarray:
    return sample_rows(n, range(step * size, (step + 1) * size), seed)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 16, 17, 100, 257])
def test_every_epoch_is_a_permutation_of_the_blocks(n: int) -> None:
    for epoch in range(3):
        rows = batch(n, n, 7, epoch)
        assert rows.dtype == np.int64
        assert sorted(rows.tolist()) == list(range(n))


def test_epochs_and_seeds_have_different_orders() -> None:
    orders = [tuple(batch(100, 100, seed, epoch).tolist()) for seed in (0, 1) for epoch in (0, 1)]
    assert len(set(orders)) == 4
    assert tuple(range(100)) not in orders


def test_samples_do_not_depend_on_the_batch_size() -> None:
    one = sample_rows(37, range(120), 3).tolist()
    for size in (1, 7, 40, 60):
        steps = [batch(37, size, 3, step).tolist() for step in range(120 // size)]
        joined = [row for step in steps for row in step]
        assert joined == one[: len(joined)]


def test_a_batch_larger_than_the_corpus_spans_epochs() -> None:
    rows = batch(10, 25, 0, 0).tolist()
    assert sorted(rows[:10]) == sorted(rows[10:20]) == list(range(10))


def test_a_late_step_of_a_large_corpus_costs_no_more_than_an_early_one() -> None:
    rows = batch(50_000_000_000, 64, 0, 3_000_000_000)
    assert len(set(rows.tolist())) == 64
    assert rows.min() >= 0
    assert rows.max() < 50_000_000_000


def test_order_looks_random() -> None:
    rows = batch(4096, 4096, 1, 0).astype(np.float64)
    assert abs(np.corrcoef(rows[:-1], rows[1:])[0, 1]) < 0.06
    assert abs(np.corrcoef(np.arange(4096.0), rows)[0, 1]) < 0.06

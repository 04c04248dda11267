"""Steps, rates and batches of a fine-tuning."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mlmclm.finetuning.batching import batches_by_length, training_rows
from mlmclm.finetuning.protocol import Protocol
from mlmclm.schedules.decay import finetuning_rate


def test_steps_are_whichever_limit_comes_first() -> None:
    assert Protocol(max_steps=1000, epochs=1.0).steps(14041) == 439
    assert Protocol(max_steps=100, epochs=1.0).steps(14041) == 100
    assert Protocol(max_steps=100).steps(10) == 100
    with pytest.raises(ValueError, match="max_steps"):
        Protocol(max_steps=None)


def test_the_learning_rate_rises_over_the_warm_up_and_falls_to_zero() -> None:
    rates = [finetuning_rate(1.0, step, 20, 0.1) for step in range(20)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[-1] == pytest.approx(1 / 18)
    assert all(after < before for before, after in itertools.pairwise(rates[2:]))
    assert finetuning_rate(1.0, 0, 1, 0.0) == 1.0


def test_every_example_comes_once_a_pass_whatever_the_batch() -> None:
    for size in (3, 7, 32):
        rows = training_rows(10, size, seed=5)
        seen = np.concatenate([next(rows) for _ in range(70 // size + 1)])[:70].reshape(7, 10)
        assert all(sorted(epoch) == list(range(10)) for epoch in seen)
        assert len({tuple(epoch) for epoch in seen}) == 7


def test_batches_by_length_keep_to_the_budget_and_leave_nothing_out() -> None:
    lengths = np.random.default_rng(0).integers(1, 200, 300)
    lengths[7] = 5000
    batches = list(batches_by_length(lengths, 1000))
    assert sorted(np.concatenate(batches)) == list(range(300))
    assert all(lengths[batch].sum() <= 1000 or len(batch) == 1 for batch in batches)

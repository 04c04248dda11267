"""The fall of the loss and its interval agree with the textbook's ratio estimate and with a bootstrap over documents."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from mlmclm.reports.adaptation_words import loss_sentence, task_sentences
from mlmclm.results.document_losses import DocumentLosses, loss_difference


def drawn(fall: float, count: int = 400) -> tuple[DocumentLosses, DocumentLosses]:
    chance = np.random.default_rng(0)
    tokens = chance.integers(5, 200, count)
    before = chance.normal(3, 0.5, count) * tokens
    after = before - chance.normal(fall, 0.2, count) * tokens
    return DocumentLosses(before, tokens), DocumentLosses(after, tokens)


def test_the_interval_is_that_of_a_bootstrap_over_documents() -> None:
    before, after = drawn(0.1)
    found = loss_difference(before, [after])
    falls = before.sums - after.sums
    assert found.value == pytest.approx(before.loss - after.loss)
    rows = np.random.default_rng(1).integers(0, len(falls), (4000, len(falls)))
    drawn_again = falls[rows].sum(axis=1) / before.tokens[rows].sum(axis=1)
    assert found.error == pytest.approx(drawn_again.std(), rel=0.05)
    assert (found.low, found.high) == pytest.approx(np.quantile(drawn_again, [0.025, 0.975]), abs=0.004)


def test_equally_long_documents_have_the_interval_of_a_paired_t_test() -> None:
    before, after = drawn(0.1)
    tokens = np.full(len(before.tokens), 10)
    found = loss_difference(DocumentLosses(before.sums, tokens), [DocumentLosses(after.sums, tokens)])
    tested = stats.ttest_1samp((before.sums - after.sums) / 10, 0)
    assert found.p == pytest.approx(tested.pvalue)
    assert (found.low, found.high) == pytest.approx(tuple(tested.confidence_interval()))


def test_runs_that_differ_widen_the_interval() -> None:
    before, after = drawn(0.1)
    other = DocumentLosses(after.sums + 0.3 * after.tokens, after.tokens)
    one, two = loss_difference(before, [after, after]), loss_difference(before, [after, other])
    assert two.error > 3 * one.error and two.freedom < 2
    with pytest.raises(ValueError, match="cannot be paired"):
        loss_difference(before, [DocumentLosses(after.sums, after.tokens + 1)])


def test_the_words_say_helped_hurt_or_not_shown() -> None:
    for fall, word in ((0.2, "helped"), (-0.2, "hurt"), (0.03, "not shown to help or hurt")):
        before, after = drawn(fall)  # the draw's own mean is -0.03
        said = loss_sentence(before.loss, [after.loss], loss_difference(before, [after]), len(before.tokens))
        assert word in said and "one pretraining run" in said and "400 held-out documents" in said
    row = {"task": "reviews", "first": 0.8, "second": 0.7, "difference": 0.1, "low": 0.05, "high": 0.15, "apart": True}
    (said,) = task_sentences([row])
    assert said.startswith("On reviews, the training helped: 80.00 with it and 70.00 without, +10.00")
    assert "not shown" in task_sentences([{**row, "low": -0.05, "apart": False}])[0]

"""Every objective: its name, its labels by a loop over single positions, its share of labelled tokens."""

from __future__ import annotations

import numpy as np
import pytest

from mlmclm.corpora.tokenizer import Vocabulary
from mlmclm.objectives.clm import Causal
from mlmclm.objectives.corruption import Corruption
from mlmclm.objectives.mlm import Masked
from mlmclm.objectives.mntp import MaskedNextToken
from mlmclm.objectives.objective import OBJECTIVES, UNLABELLED, Masking, parse_objective

MASK, EOS = 3, 2
VOCABULARY = Vocabulary(1000, MASK, (0, 1, EOS, MASK))
EXAMPLES = [name for kind in OBJECTIVES.values() for name in kind.examples]


def tokens(rows: int = 8, length: int = 64, every: int = 17) -> np.ndarray:
    ids = np.random.default_rng(0).integers(4, 1000, size=(rows, length))
    ids[:, every - 1 :: every] = EOS
    return ids


def masking(rows: int = 8, separator: int | None = None) -> Masking:
    return Masking(np.arange(rows), 5, 1, VOCABULARY, Corruption(), separator)


def test_every_file_s_objective_is_known_by_its_name() -> None:
    assert {Causal, Masked, MaskedNextToken} <= set(OBJECTIVES.values())
    for name in EXAMPLES:
        assert str(parse_objective(name, where="here")) == name
        assert parse_objective(name, where="here") == parse_objective(name, where="here")
    assert parse_objective("mlm40", where="here") != parse_objective("mntp40", where="here")


@pytest.mark.parametrize("separator", [None, EOS])
def test_causal_labels_are_the_next_tokens(separator: int | None) -> None:
    ids = tokens()
    inputs, labels = Causal().label(ids, masking(separator=separator))
    assert (inputs == ids).all()
    for row in range(8):
        for place in range(64):
            none = place == 63 or (separator is not None and ids[row, place] == EOS)
            assert labels[row, place] == (UNLABELLED if none else ids[row, place + 1])


@pytest.mark.parametrize("separator", [None, EOS])
def test_masked_next_tokens_are_predicted_one_position_earlier(separator: int | None) -> None:
    """The same tokens are hidden as under MLM; one that no position of its document comes before is predicted by none."""
    ids = tokens()
    inputs, labels = MaskedNextToken(40).label(ids, masking(separator=separator))
    masked_inputs, masked = Masked(40).label(ids, masking(separator=separator))
    assert (inputs == masked_inputs).all()
    predicted = 0
    for row in range(8):
        assert labels[row, 63] == UNLABELLED
        for place in range(63):
            hidden = masked[row, place + 1] != UNLABELLED
            first = separator is not None and ids[row, place] == EOS
            assert labels[row, place] == (ids[row, place + 1] if hidden and not first else UNLABELLED)
            predicted += int(labels[row, place] != UNLABELLED)
    assert 100 < predicted < 300


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("separator", [None, EOS])
def test_the_labelled_share_is_that_of_many_rows(name: str, separator: int | None) -> None:
    """The share of tokens without special ones but the documents' ends, which the share leaves out but which stay few."""
    objective, rows, length, every = parse_objective(name, where="here"), 512, 400, 100
    _, labels = objective.label(tokens(rows, length, every), masking(rows, separator))
    documents = 1 if separator is None else length // every
    found = (labels != UNLABELLED).mean()
    assert found == pytest.approx(objective.labelled_share(length, documents), abs=0.012)


def test_an_objective_says_whether_it_needs_a_mask_token() -> None:
    for name in EXAMPLES:
        objective = parse_objective(name, where="here")
        inputs, _ = objective.label(tokens(), masking())
        assert (inputs == MASK).any() == objective.masks

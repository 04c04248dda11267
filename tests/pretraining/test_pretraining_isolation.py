"""Isolated documents on their way through pretraining: labels, the batches that `data order` shows, and what can't isolate them."""

from __future__ import annotations

import numpy as np
import pytest

from mlmclm.corpora.row_lengths import document_lengths
from mlmclm.corpora.tokenizer import special_ids, vocabulary
from mlmclm.errors import UserError
from mlmclm.models.architectures import ARCHITECTURES
from mlmclm.models.sizes import SIZES
from mlmclm.objectives.objective import UNLABELLED
from mlmclm.plans.recipe import Recipe
from mlmclm.pretraining.collator import Collator, separator
from mlmclm.pretraining.initial import check_architecture
from mlmclm.pretraining.seen import training_batches
from mlmclm.pretraining.state_facts import flops
from mlmclm.storage.place import Place
from mlmclm.studies.prepare import PreparedStudy, prepare_study
from mlmclm.studies.study_file import load_study
from small_study import write_study


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> PreparedStudy:
    """Documents of 5 to 60 words in blocks of 32 tokens."""
    path = write_study(tmp_path_factory.mktemp("isolation"))
    study = load_study(path)
    recipe = Recipe.model_validate(study.recipe.model_dump() | {"isolate_documents": True})
    place = Place(tmp_path_factory.mktemp("store"), path.parent / "data")
    return prepare_study(study.model_copy(update={"recipe": recipe}), place)


def test_only_a_document_s_first_tokens_lose_their_label_and_masks_stay_as_they_were(made: PreparedStudy) -> None:
    recipe, tokenizer = made.study.recipe, made.corpus.tokenizer
    end = separator(recipe, tokenizer)
    assert end == special_ids(tokenizer)["eos"]
    assert separator(Recipe(), tokenizer) is None
    rows = np.arange(len(made.corpus.train))
    tokens = made.corpus.train.take(rows)
    assert (tokens == end).sum() > 50
    for objective in {str(stage.objective): stage.objective for stage in made.plan.stages}.values():
        apart, together = (
            Collator(objective, vocabulary(tokenizer), recipe.corruption, 0, which)(tokens, rows=rows, step=3)
            for which in (end, None)
        )
        assert np.array_equal(apart[0], together[0])
        before = np.zeros(tokens.shape, dtype=bool)  # positions whose next token begins a document
        before[:, :-1] = tokens[:, :-1] == end
        changed = apart[1] != together[1]
        assert np.array_equal(changed, before if objective.causal else np.zeros_like(before))
        assert (apart[1][changed] == UNLABELLED).all()
        # what is masked cannot hide where a document ends
        assert np.array_equal(document_lengths(apart[0], end), document_lengths(tokens, end))


def test_data_order_shows_the_labels_that_are_trained_on(made: PreparedStudy) -> None:
    recipe = made.study.recipe
    name = next(name for name in made.study.parsed if str(name) == "1m-clm-30")
    (batch,) = training_batches(made.corpus.train, recipe, range(4, 5), model=name, tokenizer=made.corpus.tokenizer)
    assert batch.labels is not None
    ends = batch.input_ids[:, :-1] == separator(recipe, made.corpus.tokenizer)
    assert ends.any() and np.array_equal(batch.labels[:, :-1] == UNLABELLED, ends)


def test_every_document_of_the_corpus_is_found(made: PreparedStudy) -> None:
    tokens = made.corpus.train.take(np.arange(len(made.corpus.train)))
    end = special_ids(made.corpus.tokenizer)["eos"]
    lengths = document_lengths(tokens, end)
    assert lengths.sum() == tokens.size and lengths.min() >= 1 and lengths.max() <= 32
    cut = int((tokens[:, -1] != end).sum())  # documents that go on in the next block
    assert len(lengths) == int((tokens == end).sum()) + cut


def test_the_flops_of_a_card_count_attention_within_documents(made: PreparedStudy) -> None:
    state = made.target(next(name for name in made.study.parsed if str(name) == "1m-clm-30"))
    recipe, corpus = made.study.recipe, made.corpus
    together, apart = (
        flops(state, recipe.model_copy(update={"isolate_documents": isolated}), SIZES["1m"], corpus.vocabulary, corpus)
        for isolated in (False, True)
    )
    tokens = corpus.train.take(np.arange(len(corpus.train)))
    lengths = document_lengths(tokens, special_ids(corpus.tokenizer)["eos"])  # all of them: the corpus is small
    trained = 30 * 8 * 32
    fewer_keys = 2 * 12 * 128 * (32 / 2 - (lengths**2).sum() / 2 / lengths.sum())
    fewer_labels = 6 * 128 * corpus.vocabulary * (31 / 32 - 1 + len(lengths) / lengths.sum())
    assert together - apart == pytest.approx(trained * (fewer_keys + fewer_labels), rel=1e-3)


def test_an_architecture_that_cannot_isolate_documents_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    monkeypatch.setitem(ARCHITECTURES, "qwen2", dataclasses.replace(ARCHITECTURES["qwen2"], isolates=False))
    with pytest.raises(UserError, match=r"isolate_documents: 'qwen2' models .* one of: eurobert, modernbert, qwen3"):
        check_architecture("qwen2", Recipe(isolate_documents=True))
    check_architecture("qwen2", Recipe())
    check_architecture("modernbert", Recipe(isolate_documents=True))


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_an_architecture_without_a_residual_stream_is_refused_by_name(kind: str) -> None:
    with pytest.raises(
        UserError, match=rf"precision: bf16-residual: .*'{kind}' .* one of: eurobert, modernbert, qwen2"
    ):
        check_architecture(kind, Recipe(precision="bf16-residual"))
    check_architecture("qwen3", Recipe(precision="bf16-residual"))

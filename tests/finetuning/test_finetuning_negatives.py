"""Hard negatives of retrieval: the loss with them, batches without a text twice, and mining by BM25."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn

from mlmclm.errors import UserError
from mlmclm.finetuning.batching import training_rows
from mlmclm.finetuning.cell import Cell
from mlmclm.finetuning.protocol import Protocol
from mlmclm.finetuning.run import run_cell
from mlmclm.models.folder import load_encoder, load_tokenizer, weights_hash
from mlmclm.tasks.declaration import Task
from mlmclm.tasks.declared_tasks import get_task
from mlmclm.tasks.load import load_task
from mlmclm.tasks.look import preview_task
from mlmclm.tasks.negatives import mine_negatives
from mlmclm.tasks.prepare_task import prepare_task
from mlmclm.tasks.prepared_task import Lists, PreparedTask
from small_models import save_small_model, write_retrieval, write_table
from trainings import trained

PROTOCOL = Protocol(max_steps=4, max_length=48, stride=8, batch_size=3, precision="fp32")
PAIRS = {"query": ["red", "blue", "green", "grey", "pink"], "positive": [f"film of {n}" for n in range(5)]}
RAGGED = [["a dull film", "a slow film"], ["no film"], [], ["an old film"], ["a new film", "a cut"]]


def own_task(**changes: Any) -> Task:
    return Task.model_validate({**get_task("reqa_squad").model_dump(), **changes})


GIVEN = own_task(columns={**get_task("reqa_squad").columns, "negative": "negative"})
MINED = own_task(negatives={"bm25": 2})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("negatives") / "model"
    save_small_model(folder)
    return folder


def write(root: Path, train: dict[str, Any]) -> Path:
    write_retrieval(root)
    write_table(root / "reqa_squad", "train", train)
    return root


def made_of(task: Task, root: Path, model: Path, **changes: Any) -> PreparedTask:
    return prepare_task(task, model, PROTOCOL.model_copy(update=changes), root / "store", root)


def direct(made: PreparedTask, rows: list[int]) -> Any:
    """Vectors for a batch of these rows, its loss, and the loss by loops over all candidates."""
    batch = made.batch(np.array(rows))
    vectors = nn.functional.normalize(torch.randn(len(batch.sequences), 16, dtype=torch.float64), dim=-1)
    temperature, size = made.settings.temperature, len(rows)
    queries, candidates = vectors[:size], vectors[size:]
    wanted = []
    for row, query in enumerate(queries):
        scores = [math.exp(float(query @ other) / temperature) for other in candidates]
        wanted.append(-math.log(scores[row] / sum(scores)))
    if made.settings.symmetric:
        for row in range(size):
            scores = [math.exp(float(query @ candidates[row]) / temperature) for query in queries]
            wanted.append(-math.log(scores[row] / sum(scores)))
    return batch, vectors, made.loss_of(vectors, batch.targets).item(), float(np.mean(wanted))


@pytest.mark.parametrize("symmetric", [False, True])
def test_every_query_is_told_from_all_positives_and_all_hard_negatives(
    tmp_path: Path, model: Path, symmetric: bool
) -> None:
    made = made_of(GIVEN, write(tmp_path, {**PAIRS, "negative": RAGGED}), model, symmetric=symmetric)
    held = made.rows["train"]
    batch, _, found, wanted = direct(made, list(range(held)))
    negatives = sum(map(len, made.table("train")["negative"].to_pylist()))
    assert negatives > 3 and len(batch.sequences) == 2 * held + negatives
    assert found == pytest.approx(wanted, rel=1e-12)


def test_the_loss_is_that_of_sentence_transformers(tmp_path: Path, model: Path) -> None:
    losses = pytest.importorskip(
        "sentence_transformers.sentence_transformer.losses", reason="pip install 'mlmclm[dev]'"
    )
    negatives = [[f"dull {n}", f"slow {n}"] for n in range(5)]
    made = made_of(GIVEN, write(tmp_path, {**PAIRS, "negative": negatives}), model)
    rows = [0, 1, 2]
    _, vectors, found, _ = direct(made, rows)
    queries, positives, others = vectors[:3], vectors[3:6], vectors[6:]

    class Given(nn.Module):
        """Embeds each column of texts as given."""

        similarity_fn_name = "cosine"

        def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
            return features

    columns = [queries, positives, others[0::2], others[1::2]]
    loss = losses.MultipleNegativesRankingLoss(Given(), scale=1 / made.settings.temperature)
    theirs = loss([{"sentence_embedding": column} for column in columns], None)
    assert found == pytest.approx(theirs.item(), abs=1e-6)


def test_a_text_that_answers_the_query_is_no_negative_even_where_the_batch_has_it_twice(
    tmp_path: Path, model: Path
) -> None:
    """Row 0's positive is row 1's negative, and rows 2 and 3 ask the same."""
    train = {"query": ["red", "blue", "green", "green"], "positive": ["a", "b", "c", "d"]}
    table = {**train, "negative": ["x", "a", "y", "z"]}
    splits = {"validation_fraction": 0.01, "validation_group": None}
    task = GIVEN.model_copy(update={"splits": GIVEN.splits.model_copy(update=splits)})
    copies = {name: values * 3 for name, values in table.items()}  # one row of twelve is held out
    made = made_of(task, write(tmp_path, copies), model)
    texts = load_task(task, store=tmp_path, data_root=tmp_path).train["positive"].to_pylist()
    rows = [texts.index(wanted) for wanted in "abcd"]
    batch, vectors, found, _ = direct(made, rows)
    cosines = vectors[:4] @ vectors[4:].T / made.settings.temperature
    for query, candidate in ((0, 5), (2, 3), (3, 2)):
        cosines[query, candidate] = -math.inf
    assert len(batch.sequences) == 12
    wanted = float((cosines.logsumexp(1) - cosines.diagonal()).mean())
    assert found == pytest.approx(wanted, rel=1e-12)


def test_no_batch_has_a_text_twice_and_no_row_is_lost(tmp_path: Path, model: Path) -> None:
    count = 60
    train = {
        "query": [f"query {n % 40}" for n in range(count)],
        "positive": [f"document {n % 45}" for n in range(count)],
        "negative": [f"document {(n + 7) % 45}" for n in range(count)],
    }
    made = made_of(GIVEN, write(tmp_path, train), model)
    texts, size = made.distinct, made.rows["train"]
    assert texts is not None and size == 57
    generator = training_rows(size, 6, 5, texts)
    batches = [next(generator) for _ in range(95)]  # ten passes
    for rows in batches:
        inside = np.concatenate([texts[row] for row in rows])
        assert len(rows) == 6 and len(set(inside.tolist())) == len(inside)
    seen = np.bincount(np.concatenate(batches), minlength=size)
    assert seen.min() >= 9 and seen.max() <= 11
    plain = [next(rows) for rows in [training_rows(size, 6, 5)] for _ in range(95)]
    assert any(len(set(t)) < len(t) for t in (np.concatenate([texts[row] for row in rows]) for rows in plain))
    assert not np.array_equal(batches, plain)
    again = training_rows(size, 6, 5, texts)
    assert all(np.array_equal(rows, next(again)) for rows in batches)


def test_frequent_texts_neither_starve_a_pair_nor_pile_up() -> None:
    chance = np.random.default_rng(0)
    count, size = 2000, 64
    texts = [np.unique(np.append(chance.zipf(1.5, 3) % 300, 1000 + n)) for n in range(count)]
    lists = Lists(np.concatenate(texts), np.cumsum([0, *map(len, texts)]))
    generator = training_rows(count, size, 1, lists)
    passes = 4
    seen = np.bincount(np.concatenate([next(generator) for _ in range(passes * count // size)]), minlength=count)
    assert seen.min() >= passes - 1 and seen.max() <= passes + 1
    few = Lists(np.arange(count) % 7, np.arange(count + 1))  # no batch can be without a text twice, and all are full
    generator = training_rows(count, size, 1, few)
    batches = [next(generator) for _ in range(passes * count // size)]
    seen = np.bincount(np.concatenate(batches), minlength=count)
    assert {len(batch) for batch in batches} == {size} and seen.min() >= passes - 1 and seen.max() <= passes + 1


def test_negatives_are_mined_as_a_plain_bm25_ranks_them_and_never_the_query_s_own(tmp_path: Path, model: Path) -> None:
    pytest.importorskip("bm25s", reason="pip install 'mlmclm[evaluation]'")
    write_retrieval(tmp_path, train=60)
    data = load_task(MINED, store=tmp_path, data_root=tmp_path)
    settings = PROTOCOL.model_copy(update={"max_length": 128, "max_train_examples": 20})
    table = MINED.kind.encode(data, load_tokenizer(model), settings)["train"]
    decode = load_tokenizer(model).decode
    queries, positives = (data.train[name].to_pylist() for name in ("query", "positive"))
    documents = [text.split() for text in dict.fromkeys(positives)]
    average = np.mean([len(words) for words in documents])

    def score(query: str, words: list[str]) -> float:
        total = 0.0
        for word in query.lower().split():
            having = sum(word in other for other in documents)
            weight = math.log(1 + (len(documents) - having + 0.5) / (having + 0.5))
            count = words.count(word)
            total += weight * count / (count + 1.5 * (1 - 0.75 + 0.75 * len(words) / average))
        return total

    documents = [text.lower().split() for text in dict.fromkeys(positives)]
    assert table.num_rows == 20
    full = 0
    for row in table.to_pylist():
        query = decode(row["query"], skip_special_tokens=True).removeprefix("Query: ")
        query = next(text for text in queries if text.lower().split() == query.lower().split())
        own = {text for asked, text in zip(queries, positives, strict=True) if asked == query}
        ranked = sorted(
            (-round(score(query, words), 4), number)
            for number, (text, words) in enumerate(zip(dict.fromkeys(positives), documents, strict=True))
            if text not in own and score(query, words) > 0
        )
        found = [decode(ids, skip_special_tokens=True).removeprefix("Document: ").split() for ids in row["negative"]]
        best = [-round(score(query, [word.lower() for word in words]), 4) for words in found]
        assert best == [worst for worst, _ in ranked[:2]]
        assert not any(" ".join(words) in own for words in found)
        full += len(found) == 2
    assert full > 10


def test_only_what_is_mined_is_in_the_fingerprint(tmp_path: Path) -> None:
    write_retrieval(tmp_path)
    prints = {
        load_task(task, store=tmp_path, data_root=tmp_path).fingerprint
        for task in (get_task("reqa_squad"), MINED, own_task(negatives={"bm25": 3}))
    }
    assert len(prints) == 3
    # The task's fingerprint from before it could have negatives.
    assert "31068a03f8c6e49d69ab0821fe255013018824a19b6cf0523cf79ee16e356219" in prints


def test_cells_train_on_hard_negatives_in_chunks_as_at_once_and_a_look_shows_them(tmp_path: Path, model: Path) -> None:
    root = write(tmp_path, {**PAIRS, "negative": RAGGED})
    ends = []
    for chunk in (None, 64):
        made = made_of(GIVEN, root, model, chunk_tokens=chunk)
        encoder = load_encoder(model).double()
        ended = trained(encoder, nn.Module(), made, made.settings, learning_rate=1e-3, order=2)  # type: ignore[arg-type]
        ends.append((ended.curve, ended.tokens))
    np.testing.assert_allclose(ends[0][0], ends[1][0], rtol=1e-9)
    assert ends[0][1] == ends[1][1]
    found = preview_task(load_task(GIVEN, store=root, data_root=root), load_tokenizer(model), PROTOCOL, examples=2)
    assert found.lengths["train negative"].sequences >= 4 and any(row["negative"] for row in found.examples)
    cell = Cell("m", model, weights_hash(model), GIVEN.name, made.task_data, PROTOCOL, 1e-3, 0, GIVEN)
    without = dataclasses.replace(cell, declaration=get_task("reqa_squad"))
    assert run_cell(cell, store=root / "store", data_root=root)["status"] == "ok"
    with pytest.raises(UserError, match="the data have changed"):
        run_cell(without, store=tmp_path / "other", data_root=root)


def test_pairs_alone_have_distinct_batches_where_the_protocol_asks_for_them(tmp_path: Path, model: Path) -> None:
    write_retrieval(tmp_path)
    assert made_of(get_task("reqa_squad"), tmp_path, model).distinct is None
    texts = made_of(get_task("reqa_squad"), tmp_path, model, distinct_batches=True).distinct
    assert texts is not None
    rows = next(training_rows(len(texts), 8, 1, texts))
    assert len({text for row in rows for text in texts[row].tolist()}) == 16


def test_texts_among_which_bm25_finds_nothing_are_the_user_s_error() -> None:
    pytest.importorskip("bm25s", reason="pip install 'mlmclm[evaluation]'")
    for positive, message in (
        ("!!!", "no positive has a word"),
        ("film", "t: BM25 finds no document that shares a word"),
    ):
        with pytest.raises(UserError, match=message):
            mine_negatives("t", pa.chunked_array([["a"]]), pa.table({"query": ["a"], "positive": [positive]}), 2)


@pytest.mark.parametrize(
    ("negative", "message"),
    [
        (["a", None, "b", "c", "d"], "row 1: negative is null"),
        ([["a"], ["film of 1", "b"], ["c"], ["d"], ["e"]], "row 1: the positive is among the negatives: 'film of 1'"),
        ([1, 2, 3, 4, 5], "the column 'negative' holds int64, not text"),
    ],
)
def test_a_fault_in_the_negatives_is_named(tmp_path: Path, negative: list[Any], message: str) -> None:
    write(tmp_path, {**PAIRS, "negative": negative})
    with pytest.raises(UserError, match=message):
        load_task(GIVEN, store=tmp_path, data_root=tmp_path)


def test_a_task_cannot_have_given_and_mined_negatives_nor_another_family_any() -> None:
    with pytest.raises(ValueError, match="give either the column 'negative' or 'negatives'"):
        own_task(columns=GIVEN.columns, negatives={"bm25": 2})
    with pytest.raises(ValueError, match="only retrieval has 'negatives'"):
        Task.model_validate({**get_task("sst2").model_dump(), "negatives": {"bm25": 2}})

"""`mlmclm evaluate --mteb`: scores of sentence encoders, against NDCG written out."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mlmclm.cli.main import main
from mlmclm.errors import UserError
from mlmclm.storage.files import read_json, write_json
from small_models import save_framed_model, save_small_decoder, write_retrieval
from tokenizer_kinds import KINDS


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Imported here: each of pytest's processes reads all modules, and one of them runs these tests.
    pytest.importorskip("mteb", reason="pip install 'mlmclm[evaluation]'")
    monkeypatch.setenv("MTEB_CACHE", str(tmp_path / "mteb"))


def sentence_transformer(folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu")


@pytest.fixture
def evaluate(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*words: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["evaluate", *map(str, words), "--store", str(tmp_path / "store")])
        found = capfd.readouterr()
        return int(ended.value.code or 0), found.out, " ".join(found.err.split())

    return call


def written_out(folder: Path, data: Path) -> float:
    """Mean NDCG@10 of the cosines between all queries and all documents."""
    model = sentence_transformer(folder)
    queries, corpus = (pq.read_table(data / f"{part}.parquet").to_pylist() for part in ("queries", "corpus"))
    judged: dict[str, dict[str, int]] = {}
    for row in pq.read_table(data / "qrels.parquet").to_pylist():
        judged.setdefault(row["query-id"], {})[row["corpus-id"]] = row["score"]
    vectors = [model.encode([row["text"] for row in rows]) for rows in (queries, corpus)]
    first, second = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in vectors)
    scores = []
    for query, cosines in zip(queries, first @ second.T, strict=True):
        grades = judged[query["_id"]]
        top = [grades.get(corpus[number]["_id"], 0) for number in np.argsort(-cosines)[:10]]
        gain, ideal = (
            sum(grade / math.log2(rank + 2) for rank, grade in enumerate(each))
            for each in (top, sorted(grades.values(), reverse=True)[:10])
        )
        scores.append(gain / ideal)
    return float(np.mean(scores))


def test_a_local_set_is_scored_once_for_each_model_and_way_to_embed(
    tmp_path: Path, evaluate: Callable[..., tuple[int, str, str]]
) -> None:
    write_retrieval(tmp_path / "data")
    data, folder = tmp_path / "data" / "reqa_squad", save_model(tmp_path / "model")
    code, output, errors = evaluate(folder, "--mteb", data, "--json")
    assert code == 0, errors
    assert "not a sentence-transformers folder" in errors
    (result,) = json.loads(output)["results"]
    assert (result["task"], result["scoring"], result["main"]) == ("reqa_squad", "embedding", "ndcg_at_10")
    assert 0.01 < result["metrics"]["ndcg_at_10"]["score"] < 1
    assert result["metrics"]["ndcg_at_10"]["score"] == pytest.approx(written_out(folder, data), abs=1e-5)
    assert json.loads(evaluate(folder, "--mteb", data, "--json")[1])["results"][0]["computed"] is False
    # Another pooling embeds otherwise, so it is another result.
    sentence_transformer(folder).save(str(folder))
    pooling = folder / "1_Pooling" / "config.json"
    named = {"pooling_mode": "cls"}
    by_flag = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    known = read_json(pooling)
    write_json(pooling, {**known, **(named if "pooling_mode" in known else by_flag)})
    (other,) = json.loads(evaluate(folder, "--mteb", data, "--json")[1])["results"]
    assert other["key"] != result["key"] and other["computed"] and other["metrics"] != result["metrics"]
    assert other["metrics"]["ndcg_at_10"]["score"] == pytest.approx(written_out(folder, data), abs=1e-5)
    code, output, _ = evaluate(folder, "--mteb", data)
    assert "ndcg_at_10" in output and "(found)" in output
    # So is another longest sequence, wherever it is said.
    settings = folder / "tokenizer_config.json"
    write_json(settings, {**read_json(settings), "model_max_length": 4})
    (shorter,) = json.loads(evaluate(folder, "--mteb", data, "--json")[1])["results"]
    assert shorter["computed"]


def test_a_task_that_fails_keeps_no_other_from_being_scored(
    tmp_path: Path, evaluate: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    write_retrieval(tmp_path / "data")
    folder = save_model(tmp_path / "model")
    words = ("--mteb", "CQADupstackRetrieval", "--mteb", tmp_path / "data" / "reqa_squad")
    code, output, errors = evaluate(folder, *words)
    assert code == 2 and "ndcg_at_10" in output
    # An aggregate's parts are loaded, since it has no data of its own.
    assert "--mteb CQADupstackRetrieval: its data set" in errors and "CQADupstackAndroid" in errors


JUDGED = {"query-id": "q", "corpus-id": "d", "score": 1}
GOOD = {
    "queries": [{"_id": "q", "text": "Anna"}],
    "corpus": [{"_id": "d", "title": None, "text": "Berta"}, {"_id": "e", "title": "Norway", "text": "Oslo"}],
    "qrels": [JUDGED],
}


def write_set(folder: Path, **changes: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, rows in (GOOD | changes).items():
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
    return folder


@pytest.mark.parametrize(
    ("part", "rows", "message"),
    [
        ("corpus", [{"_id": "d", "text": None}], "test corpus: row 0: text is null"),
        ("queries", [{"_id": "q", "text": 3}], r"queries.parquet\): the column 'text' holds int64, not text"),
        ("corpus", [{"_id": "d", "text": text} for text in "xy"], "the id 'd' occurs twice"),
        ("qrels", [JUDGED | {"score": 0}], "no document is judged relevant"),
        ("qrels", [JUDGED, JUDGED | {"score": 0}], "the document 'd' has several scores for the query 'q'"),
        ("qrels", [JUDGED | {"score": math.inf}], "the score inf is more than 1,000,000"),
        ("qrels", [JUDGED | {"corpus-id": "x"}], "no corpus_id of a relevant document is in corpus, such as 'x'"),
        ("qrels", [JUDGED | {"query-id": "p"}], "no query_id of a relevant document is in queries, such as 'p'"),
        ("qrels", [JUDGED | {"score": 0.5}], "scores must be whole numbers"),
        (
            "qrels",
            [{"query-id": "q", "doc": "d", "score": 1}],
            r"'corpus-id' is missing.* have the columns _id and text",
        ),
    ],
)
def test_a_local_set_that_would_be_scored_wrongly_is_refused(
    tmp_path: Path, part: str, rows: list[dict[str, Any]], message: str
) -> None:
    from mlmclm.evaluation.mteb_tasks import load_mteb

    folder = write_set(tmp_path / "my_set", **{part: rows})
    with pytest.raises(UserError, match=f"--mteb {folder}: task my_set, .*{message}|--mteb {folder}: qrels: {message}"):
        load_mteb([str(folder)])


def save_model(folder: Path) -> Path:
    save_framed_model(folder)
    return folder


def save_of_class(folder: Path) -> Path:
    """A decoder whose tokenizer's class would split texts otherwise than its tokenizer.json."""
    save_small_decoder(folder, vocabulary=420)
    KINDS["Llama 3"]().save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "Qwen2TokenizerFast", "eos_token": "</s>"})
    return folder


@pytest.mark.parametrize("make", [save_small_decoder, save_model, save_of_class], ids=lambda make: make.__name__)
def test_a_transformers_folder_embeds_a_text_as_the_mean_over_the_tokens_of_tokenizer_json(
    tmp_path: Path, make: Callable[[Path], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModel

    from mlmclm.evaluation.mteb_tasks import SentenceModel

    folder = make(tmp_path / "model")
    texts = ["Anna was in Paris", "12345 Oslo is so warm today", "kind"]
    found = SentenceModel.load(folder, "cpu").model.encode(texts)
    assert "the mean over its tokens" in capfd.readouterr().err
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))
    with torch.no_grad():
        states = [model(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0] for text in texts]
    np.testing.assert_allclose(found, torch.stack([each.mean(0) for each in states]).numpy(), atol=1e-5)


def test_mistakes_are_said(tmp_path: Path, evaluate: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    folder, (data, empty) = save_model(tmp_path / "model"), (write_set(tmp_path / "set"), tmp_path / "empty")
    empty.mkdir()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    for words, message in (
        (["SciFat"], r"no folder, and no task or benchmark of mteb .*Did you mean: 'SciFact'\?"),
        (
            ["SciFact"],
            f"its data set mteb/scifact cannot be loaded.*the cache {tmp_path}/datasets/mteb___scifact, which is missing",
        ),
        ([empty], "queries.parquet, corpus.parquet, qrels.parquet is missing"),
        ([data, "--limit", "3"], "--limit belongs to --task; Winogender and mteb's tasks are evaluated whole"),
    ):
        code, _, errors = evaluate(folder, "--mteb", *words)
        assert code == 2 and re.search(message, errors), errors
    monkeypatch.setattr("mlmclm.evaluation.zero_shot_config.find_spec", lambda name: None)
    code, _, errors = evaluate(folder, "--mteb", "SciFact")
    assert code == 2 and "--mteb needs mteb and sentence_transformers: pip install 'mlmclm[evaluation]'" in errors

"""Folders for sentence-transformers give the vectors that the cell was scored with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import ModernBertConfig, ModernBertForMaskedLM, RobertaConfig, RobertaForMaskedLM

from mlmclm.backends.packing import Packing
from mlmclm.errors import UserError
from mlmclm.finetuning.cell import Cell
from mlmclm.finetuning.protocol import Protocol
from mlmclm.finetuning.run import run_cell
from mlmclm.finetuning.sentence_encoder import export_sentence_encoder
from mlmclm.models.encoder import encode, pack_ids
from mlmclm.models.folder import weights_hash
from mlmclm.tasks.prepare_task import prepare_task
from small_models import save_framed_model, save_small_decoder, write_retrieval, write_sentiment

TASK = "reqa_squad"


def save_other(folder: Path, kind: str) -> None:
    """A small ModernBERT or RoBERTa, with the tokenizer of `save_framed_model`."""
    save_framed_model(folder)
    for file in ("config.json", "model.safetensors"):
        (folder / file).unlink()
    shared = {
        "vocab_size": 400, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2,
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "roberta":
            RobertaForMaskedLM(RobertaConfig(**shared, num_hidden_layers=2)).save_pretrained(folder)
        else:
            more = {"num_hidden_layers": 3, "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2}
            ModernBertForMaskedLM(ModernBertConfig(**shared, **more)).save_pretrained(folder)


def cell_of(place: Path, task: str = TASK, *, model: str = "encoder", **changes: Any) -> Cell:
    write_retrieval(place / "data")
    folder = place / "model"
    if model in ("encoder", "decoder"):
        (save_framed_model if model == "encoder" else save_small_decoder)(folder)
    else:
        save_other(folder, model)
    settings = {"max_steps": 6, "max_length": 12, "stride": 3, "batch_size": 16, "precision": "fp32", **changes}
    protocol = Protocol.model_validate(settings)
    prepared = prepare_task(task, folder, protocol, place / "store", place / "data")
    return Cell("m", folder, weights_hash(folder), task, prepared.task_data, protocol, 1e-3, 0)


def own_vectors(cell: Cell, place: Path) -> tuple[np.ndarray[Any, Any], int]:
    """Unit vectors of the test split, queries first, by the trained encoder; and the number of queries."""
    prepared = prepare_task(cell.task, cell.model_folder, cell.protocol, place / "store", place / "data")
    kept = []

    def keep(encoder: Any, result: dict[str, Any]) -> None:
        sequences = prepared.columns["test"]["input_ids"]
        packing = Packing.of(sequences.lengths)
        with torch.no_grad():
            causal = cell.protocol.attention == "causal"
            hidden = encode(encoder, pack_ids(list(sequences), packing), packing, causal=causal)
            kept.append(prepared.embeddings(hidden, packing).numpy())

    run_cell(cell, store=place / "store", data_root=place / "data", on_end=keep)
    return kept[0], int(prepared.table("test")["is_query"].to_numpy().sum())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pooling": "last", "special_tokens": "tokenizer", "query_prefix": "ask: "},
        {"model": "decoder"},
        {"model": "decoder", "attention": "causal", "pooling": "last"},
        {"model": "modernbert", "attention": "causal"},
        {"model": "roberta"},
    ],
    ids=str,
)
def test_vectors_of_sentence_transformers_are_those_of_the_cell(tmp_path: Path, changes: dict[str, Any]) -> None:
    library = pytest.importorskip("sentence_transformers", reason="pip install 'mlmclm[dev]'")
    import pyarrow.parquet as pq

    cell = cell_of(tmp_path, **changes)
    wanted, queries = own_vectors(cell, tmp_path)
    export_sentence_encoder(cell, tmp_path / "out", store=tmp_path / "store", data_root=tmp_path / "data")
    model = library.SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert model.max_seq_length == 12
    assert model.prompts["query"] == cell.protocol.query_prefix
    texts = [
        pq.read_table(tmp_path / "data" / TASK / f"{part}.parquet")["text"].to_pylist()
        for part in ("queries", "corpus")
    ]
    found = np.concatenate([model.encode_query(texts[0]), model.encode_document(texts[1])])
    assert len(texts[0]) == queries and found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
    card = (tmp_path / "out" / "README.md").read_text()
    code = card.split("```python\n")[1].split("```")[0].replace("path/to/this/folder", str(tmp_path / "out"))
    scope: dict[str, Any] = {}
    exec(code, scope)
    assert scope["queries"].shape == (1, 32) and f"fine-tuned on {TASK}" in card
    # The check could fail: another prompt gives other vectors.
    assert np.abs(model.encode(texts[0]) - wanted[:queries]).max() > 1e-3


def test_ndcg_at_10_is_mteb_s_of_the_exported_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTEB_CACHE", str(tmp_path / "mteb"))
    pytest.importorskip("mteb", reason="pip install 'mlmclm[evaluation]'")
    from mlmclm.evaluation.mteb_tasks import SentenceModel, load_mteb

    cell = cell_of(tmp_path)
    result = export_sentence_encoder(cell, tmp_path / "out", store=tmp_path / "store", data_root=tmp_path / "data")
    (task,) = load_mteb([str(tmp_path / "data" / TASK)])
    score = task.run(SentenceModel.load(tmp_path / "out", "cpu")).metrics["ndcg_at_10"]["score"]
    assert 0.1 < score < 1 and score == pytest.approx(result["scores"]["test"]["ndcg@10"], abs=1e-5)


def test_only_a_retrieval_cell_is_exported_and_nothing_is_overwritten(tmp_path: Path) -> None:
    places: dict[str, Any] = {"store": tmp_path / "store", "data_root": tmp_path / "data"}
    with pytest.raises(UserError, match="there is something already"):
        export_sentence_encoder(cell_of(tmp_path), tmp_path / "data", **places)
    write_sentiment(tmp_path / "data")
    with pytest.raises(UserError, match="sst2 is sequence-classification: only a retrieval cell"):
        export_sentence_encoder(cell_of(tmp_path, task="sst2"), tmp_path / "out", **places)
    assert not (tmp_path / "out").exists()

"""Names of the Hub that cannot be read: the message says what is the matter and what to do, on a stand-in for the Hub."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from huggingface_hub import constants

from mlmclm.corpora.hub_repository import load_at_commit
from small_hub import Hub
from small_models import save_small_model
from small_study import write_study

Run = Callable[..., tuple[int, str, str]]
GATED, MODEL, TEXTS = "lab/gated-texts", "lab/encoder", "lab/texts"


def parquet(rows: dict[str, list[Any]]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(rows), file)
    return file.getvalue()


def texts(word: str = "lovely", count: int = 200) -> dict[str, bytes]:
    """The files of a data set."""
    rows = {"text": [f"{word} film number {number} was here today again" for number in range(count)]}
    return {"README.md": b"# texts\n", "data/train-00000-of-00001.parquet": parquet(rows)}


@pytest.fixture
def words(hub: Hub, tmp_path: Path) -> list[str | Path]:
    """A study whose corpus and tokenizer are names of the Hub, and the folders of a command."""
    hub.put(TEXTS, texts(), "dataset")
    hub.put(GATED, texts(), "dataset")
    hub.repositories[GATED].readers = {"hf_reader"}
    hub.put(MODEL, save_small_model(tmp_path / "model"))
    study = write_study(
        tmp_path, corpus={"source": TEXTS, "max_tokens": 2000}, tokenizer={"name": MODEL}, models=["1m-mlm40-30"], baseline=None, space=None
    )  # fmt: skip
    (tmp_path / "none").mkdir()
    return [study, "--store", tmp_path / "store", "--data", tmp_path / "none"]


def change(study: Any, **changes: Any) -> None:
    study.write_text(yaml.safe_dump(yaml.safe_load(study.read_text()) | changes))


MISTAKES: dict[str, tuple[dict[str, Any], str | None, tuple[str, ...]]] = {
    "a missing data set": ({"corpus": {"source": "nobody/nothing"}}, None, ("has no data set 'nobody/nothing'", "HF_TOKEN")),
    "a mistyped data set": ({"corpus": {"source": "lab/tests"}}, None, ("'lab/tests'", "Did you mean 'lab/texts'?")),
    "a mistyped owner": ({"corpus": {"source": "lob/texts"}}, None, ("Did you mean 'lab/texts'?",)),
    "a missing data set, with a token": ({"corpus": {"source": "nobody/nothing"}}, "hf_any", ("private to another account",)),
    "a missing revision": ({"corpus": {"source": TEXTS, "revision": "mian"}}, None, ("no revision 'mian'", "Did you mean 'main'?", "It has: main")),
    "a gated data set without a token": ({"corpus": {"source": GATED}}, None, ("is gated, and there is no access token", f"datasets/{GATED}", "hf auth login")),
    "a gated data set without access": ({"corpus": {"source": GATED}}, "hf_other", ("this access token has no access", f"datasets/{GATED}")),
    "a missing tokenizer": ({"tokenizer": {"name": "lab/encodr"}}, None, ("tokenizer.name", "has no model 'lab/encodr'", "Did you mean 'lab/encoder'?")),
    "a missing revision of a tokenizer": ({"tokenizer": {"name": MODEL, "revision": "v9"}}, None, ("tokenizer.name", "no revision 'v9'")),
    "a missing model": ({"initial": {"own": "lab/encodr"}, "models": ["own-mlm40-30"], "tokenizer": None}, None, ("lab/encodr", "Did you mean 'lab/encoder'?")),
    "a missing revision of a model": ({"initial": {"own": f"{MODEL}@v9"}, "models": ["own-mlm40-30"], "tokenizer": None}, None, ("no revision 'v9'",)),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_dry_run_finds(
    mistake: str, words: list[str | Path], run_apart: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, token, expected = MISTAKES[mistake]
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    change(words[0], **changes)
    code, _, errors = run_apart("pretrain", *words, "--dry-run")
    errors = " ".join(errors.split())
    assert code == 2, errors
    assert all(part in errors for part in expected), errors
    assert "Traceback" not in errors and not (tmp_path / "store" / "hub").exists()


@pytest.mark.parametrize(
    ("corpus", "expected"),
    [
        ({"split": "trian"}, ("split 'trian'", "Did you mean 'train'?")),
        ({"split": "trian", "streaming": True}, ("split 'trian'", "Did you mean 'train'?")),
        ({"config_name": "defualt"}, ("defualt", "Did you mean 'default'?")),
        ({"text_column": "txt"}, ("column 'txt'", "Did you mean 'text'?")),
    ],
)
def test_preparing_finds(
    corpus: dict[str, Any], expected: tuple[str, ...], words: list[str | Path], run_apart: Run
) -> None:
    change(words[0], corpus={"source": TEXTS, **corpus})
    code, _, errors = run_apart("data", *words)
    assert code == 2 and all(part in errors for part in expected), errors


def test_a_model_without_weights_or_tokenizer_is_refused(
    words: list[str | Path], run_apart: Run, hub: Hub, tmp_path: Path
) -> None:
    files = hub.repositories[MODEL].files("main")
    for missing in ("model.safetensors", "tokenizer.json"):
        hub.put(f"lab/no-{missing}", {path: content for path, content in files.items() if path != missing})
        change(words[0], initial={"own": f"lab/no-{missing}"}, models=["own-mlm40-30"], tokenizer=None)
        code, _, errors = run_apart("data", *words)
        assert code == 2 and missing.partition(".")[0] in errors and "Traceback" not in errors, errors


def test_a_gated_data_set_is_read_with_a_token_that_may(
    words: list[str | Path], run_apart: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    change(words[0], corpus={"source": GATED, "max_tokens": 2000})
    code, _, errors = run_apart("data", *words)
    assert code == 0, errors


def test_without_an_answer_or_a_cache_it_is_said_what_to_do(
    words: list[str | Path],
    run_apart: Run,
    at_address: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_address("http://127.0.0.1:9")
    for changes in ({}, {"initial": {"own": MODEL}, "models": ["own-mlm40-30"]}):
        change(words[0], **changes)
        code, _, errors = run_apart("data", *words)
        errors = " ".join(errors.split())
        assert code == 1 and "cannot be reached" in errors and "Check the network" in errors, errors
        assert "Traceback" not in errors
    for library in (constants, datasets.config):
        monkeypatch.setattr(library, "HF_HUB_OFFLINE", True)
    code, _, errors = run_apart("data", *words)
    assert code == 1 and MODEL in errors and "switched off by HF_HUB_OFFLINE. Unset it" in " ".join(errors.split())


def corpus_of(run_apart: Run, words: list[str | Path]) -> Any:
    code, output, errors = run_apart("data", *words, "--json")
    assert code == 0, errors
    return json.loads(output)["corpus"]


@pytest.mark.slow
def test_a_store_keeps_to_the_commits_that_it_first_read(
    words: list[str | Path], run_apart: Run, hub: Hub, tmp_path: Path
) -> None:
    first = corpus_of(run_apart, words)
    moved = hub.put(TEXTS, texts("dull"), "dataset"), hub.put(MODEL, {"README.md": b"nothing any more"})
    assert corpus_of(run_apart, words) == first
    shards = [*(tmp_path / "store" / "corpora").glob("*/train-*.bin")]
    before = {path: path.read_bytes() for path in shards}
    for path in shards:
        path.unlink()
    assert corpus_of(run_apart, words) == first, "lost shards are made again of the same text"
    assert {path: path.read_bytes() for path in before} == before
    pins = {path.name.partition("-")[0]: path for path in (tmp_path / "store" / "hub").iterdir()}
    pins["dataset"].unlink()
    corpus_of(run_apart, words)
    assert len({path.parent for path in (tmp_path / "store" / "corpora").glob("*/train-*.bin")}) == 2
    assert moved[0] in pins["dataset"].read_text()


def test_the_cache_never_gives_another_commit_than_the_one_that_is_asked_for(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = {word: hub.put(TEXTS, texts(word), "dataset") for word in ("lovely", "dull")}
    for commit in commits.values():
        load_at_commit(TEXTS, None, split="train", revision=commit)
    for library in (constants, datasets.config):
        monkeypatch.setattr(library, "HF_HUB_OFFLINE", True)
    before = len(hub.calls)
    for word, commit in commits.items():
        assert word in load_at_commit(TEXTS, None, split="train", revision=commit)[0]["text"]
    for streaming in (False, True):
        with pytest.raises(FileNotFoundError, match=f"not {'f' * 40}"):
            load_at_commit(TEXTS, None, split="train", revision="f" * 40, streaming=streaming)
    assert len(hub.calls) == before

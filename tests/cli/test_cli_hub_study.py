"""A whole study on the Hub's names, against a stand-in: read, trained, pushed, loaded by name, and found again offline."""

from __future__ import annotations

import io
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from mlmclm.storage.files import read_json
from small_hub import Hub, served
from small_models import BAD, CITIES, FILL, GOOD, NAMES, save_small_decoder, write_sentiment

MODEL, TEXTS, FEELINGS = "lab/decoder", "lab/texts", "lab/feelings"
TOKEN = "hf_mine"
LOAD = """
import sys
from datasets import load_dataset
from transformers import AutoModelForMaskedLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("me/encoder")
logits = AutoModelForMaskedLM.from_pretrained("me/encoder")(**tokenizer("a lovely film", return_tensors="pt")).logits
print(*logits.shape[:2], load_dataset("me/study", data_files="results.csv", split="train").num_rows)
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with served() as found:
        yield found


@pytest.fixture
def study(hub: Hub, tmp_path: Path) -> Path:
    """A study on a streamed data set, a model and a task that the stand-in has; each by a revision of another kind."""
    chance = random.Random(0)
    words = NAMES + CITIES + GOOD + BAD + FILL
    rows = {"text": [" ".join(chance.choices(words, k=chance.randint(5, 60))) for _ in range(400)]}
    file = io.BytesIO()
    pq.write_table(pa.table(rows), file, row_group_size=50)
    hub.put(TEXTS, {"README.md": b"# Texts\n", "data/train-00000-of-00001.parquet": file.getvalue()}, "dataset")
    hub.repositories[TEXTS].branches["cleaned"] = hub.repositories[TEXTS].branches["main"]
    initial = hub.put(MODEL, save_small_decoder(tmp_path / "decoder", length=64))
    hub.repositories[MODEL].tags["v1"] = initial
    write_sentiment(tmp_path / "made", train=160, test=40)
    task = {
        "name": "feelings", "family": "sequence-classification", "title": "Films, good or bad", "source": FEELINGS,
        "revision": hub.put(FEELINGS, tmp_path / "made" / "sst2", "dataset"), "columns": {"text": "sentence"},
        "splits": {"train": "train", "validation_fraction": 0.2, "test": "validation"}, "metric": "accuracy",
        "licence": "mine", "citation": "none",
    }  # fmt: skip
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "feelings.yaml").write_text(yaml.safe_dump(task))
    space = {
        "tasks": ["feelings"], "learning_rates": [1e-2], "seeds": [0, 1],
        "protocol": {"batch_size": 16, "max_steps": 4, "max_length": 32},
    }  # fmt: skip
    (tmp_path / "space.yaml").write_text(yaml.safe_dump(space))
    described = {
        "name": "by-name",
        "initial": {"own": f"{MODEL}@v1"},
        "models": ["own-untrained", "own-mlm40-6"],
        "baseline": "own-untrained",
        "corpus": {
            "source": TEXTS, "revision": "cleaned", "streaming": True, "max_tokens": 8000, "validation_fraction": 0.1,
            "workers": "local",
        },
        "recipe": {"block_length": 32, "batch": 8, "peak_learning_rate": 3e-3, "warmup_steps": 2, "decay_steps": 2, "evaluation_blocks": 8},
        "space": str(tmp_path / "space.yaml"),
    }  # fmt: skip
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(described))
    return path


def run(hub: Hub, folder: Path, *words: str | Path, offline: bool = False) -> str:
    """Run Python in a process of its own, to which the stand-in is the Hub; return its output."""
    (folder / "home").mkdir(exist_ok=True)
    (folder / "nothing").mkdir(exist_ok=True)
    environment = {
        **os.environ, "HOME": str(folder / "home"), "HF_HOME": str(folder / "hf"), "HF_ENDPOINT": hub.address, "HF_TOKEN": TOKEN,
        "HF_HUB_OFFLINE": str(int(offline)), "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, *map(str, words)], env=environment, capture_output=True, text=True, timeout=1500, check=False, cwd=folder / "nothing"
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def keys_of(store: Path) -> dict[str, dict[str, int]]:
    """The keys of what a store has, with the time at which each was made."""
    parts = ("corpora", "tokenizers", "initial", "states", "prepared", "cells", "hub")
    found = {part: [*(store / part).rglob("*")] for part in parts}
    return {
        part: {str(path.relative_to(store)): path.stat().st_mtime_ns for path in paths if path.is_file()}
        for part, paths in found.items()
    }


@pytest.mark.slow
def test_a_study_by_names_is_pushed_loaded_by_name_and_found_again_offline(
    hub: Hub, study: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    place = ("--store", store, "--task-dir", tmp_path / "tasks")
    run(hub, tmp_path, "-m", "mlmclm", "study", study, *place)
    made = keys_of(store)
    assert all(made.values()), {part: len(found) for part, found in made.items()}
    commits = {(each["name"], each["revision"]): each["commit"] for each in map(read_json, (store / "hub").iterdir())}
    assert commits == {(TEXTS, "cleaned"): hub.repositories[TEXTS].branches["main"]}
    read = [(path, status) for method, path, status in hub.calls if "/cdn/" in path and method == "GET"]
    assert any(status == 206 for _, status in read), "the corpus is streamed by ranges"

    models = store / "studies" / "by-name" / "models"
    assert (models / "own-mlm40-6").is_dir()
    words = ("export", study, "own-mlm40-6", "--store", store, "--to", tmp_path / "exported")
    run(hub, tmp_path, "-m", "mlmclm", *words, "--push-to-hub", "me/encoder")
    words = ("bundle", "by-name", "--store", store, "--to", tmp_path / "bundle")
    run(hub, tmp_path, "-m", "mlmclm", *words, "--push-to-hub", "me/study")
    assert {name: hub.repositories[name].kind for name in ("me/encoder", "me/study")} == {
        "me/encoder": "model",
        "me/study": "dataset",
    }
    assert any(path.startswith("/lfs/") for method, path, _ in hub.calls if method == "PUT"), "weights go by git-lfs"
    first, tokens, rows = map(int, run(hub, tmp_path, "-c", LOAD).split())
    assert first == 1 and tokens > 2 and rows == 4, "two models, two seeds"

    # Everything moves on; a second run asks nobody.
    for name, kind in ((TEXTS, "dataset"), (FEELINGS, "dataset"), (MODEL, "model")):
        moved: dict[str, Any] = {"README.md": b"# Nothing any more\n"}
        hub.repositories[name].branches["cleaned"] = hub.put(name, moved, kind)
    hub.repositories[MODEL].tags["v1"] = hub.repositories[MODEL].branches["main"]
    before = len(hub.calls)
    run(hub, tmp_path, "-m", "mlmclm", "study", study, *place, offline=True)
    assert hub.calls[before:] == []
    assert keys_of(store) == made, "nothing is computed twice"

    # The bundle names the commits, so the same weights are trained elsewhere, though the names have moved on.
    place = ("--store", tmp_path / "elsewhere", "--task-dir", tmp_path / "tasks")
    assert "1 equal" in run(
        hub, tmp_path, "-m", "mlmclm", "bundle", "verify", tmp_path / "bundle", "--cells", "1", *place
    )

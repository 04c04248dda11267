"""Uploads to a stand-in for the Hub: bundles as data sets, models that transformers loads by their names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from datasets import load_dataset
from huggingface_hub import DatasetCard
from transformers import AutoModelForMaskedLM, AutoTokenizer

from mlmclm.corpora.hub_repository import HubRepository
from mlmclm.errors import UserError
from mlmclm.models.hub import add_to_collection, files_to_upload, push
from small_hub import Hub, commit
from small_models import save_small_model
from small_record import make_record, small_record


def test_a_folder_with_its_folders_is_uploaded_as_a_data_set(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "mine")
    (tmp_path / "examples").mkdir()
    for name in ("README.md", "results.csv", "examples/sst2.parquet"):
        (tmp_path / name).write_bytes(b"---\npretty_name: small\n---\n")
    push(tmp_path, "me/small", "small: 12 cells", data_set=True)
    asked = hub.asked[0][1]
    assert asked["type"] == "dataset" and (asked.get("private") is True or asked.get("visibility") == "private")
    assert set(hub.repositories["me/small"].files("main")) == {"README.md", "results.csv", "examples/sst2.parquet"}


def test_a_bundles_card_says_licence_task_and_size_as_the_hub_names_them(tmp_path: Path) -> None:
    record = small_record()
    make_record(tmp_path / "bundle")
    card = DatasetCard.load(tmp_path / "bundle" / "README.md")
    data = card.data.to_dict()
    assert (data["license"], data["task_categories"]) == ("unknown", ["text-classification"])
    assert data["size_categories"] == ["n<1K"], "12 cells and 480 outcomes"
    assert "- sst2: SST-2\n" in card.text
    ours = replace(record, study={**record.study, "card": {"licence": "mit"}})
    assert "license: mit\n" in ours.card()


def test_a_model_goes_with_its_scores_and_without_its_decoder_into_the_studys_collection(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "mine")
    for name in ("README.md", "config.json", ".eval_results/mlmclm.yaml", "decoder/config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"- value: 0.5\n")
    for name in ("me/one", "me/two"):
        push(tmp_path, name, "a model")
        add_to_collection(name, "my study")
    add_to_collection("me/two", "my study")
    assert set(hub.repositories["me/one"].files("main")) == set(files_to_upload(tmp_path)) == {
        "README.md", "config.json", ".eval_results/mlmclm.yaml",
    }  # fmt: skip
    assert hub.collections == {"me/my-study": ["me/one", "me/two"]}
    created = [asked for path, asked in hub.asked if path == "/api/collections"]
    assert all(each["private"] and each["title"] == "my study" for each in created)
    add_to_collection("another/two", "my study")
    assert "another/two is not in the collection 'my study'" in " ".join(capsys.readouterr().err.split())


def test_without_a_token_nothing_is_written(hub: Hub, tmp_path: Path, run: Callable[..., tuple[int, str]]) -> None:
    code, output = run("bundle", "quickstart", "--to", tmp_path / "out", "--push-to-hub", "me/small")
    assert code == 2 and "no access token" in output and not (tmp_path / "out").exists()


def test_what_is_pushed_is_loaded_by_its_name(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "mine")
    folder = save_small_model(tmp_path / "model")
    push(folder, "me/encoder", "a model")
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "README.md").write_text("---\npretty_name: small\n---\n")
    (tmp_path / "bundle" / "results.csv").write_text("model,score\na,0.5\nb,0.25\n")
    push(tmp_path / "bundle", "me/study", "a study", data_set=True)
    assert any(method == "PUT" and path.startswith("/lfs/") for method, path, _ in hub.calls), "weights go by git-lfs"
    model, own = (AutoModelForMaskedLM.from_pretrained(place).state_dict() for place in ("me/encoder", folder))
    assert all(torch.equal(model[name], own[name]) for name in own)
    assert AutoTokenizer.from_pretrained("me/encoder")("lovely").input_ids
    assert load_dataset("me/study", revision=commit(1), split="train")["score"][:] == [0.5, 0.25]
    monkeypatch.setenv("HF_TOKEN", "another's")
    with pytest.raises(UserError, match="has no model 'me/encoder' that it shows to you"):
        HubRepository("me/encoder", "model").commit()

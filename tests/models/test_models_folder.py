"""What is not a model folder is refused by name; identity is content."""

from __future__ import annotations

import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mlmclm.corpora.notes import NOTES, add_notes, note_written
from mlmclm.errors import UserError
from mlmclm.models.folder import (
    check_model_folder,
    context_of,
    load_encoder,
    load_tokenizer,
    weights_hash,
)
from small_models import save_small_model, small_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_small_model(tmp_path / "model")


def test_a_pretrained_folder_loads_as_an_encoder_without_touching_the_global_stream(folder: Path) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert check_model_folder(folder)["model_type"] == "eurobert"
    encoder = load_encoder(folder)
    assert next(encoder.parameters()).dtype == torch.float32
    assert torch.equal(torch.get_rng_state(), before)
    assert load_tokenizer(folder).is_fast


def test_the_hash_is_of_the_content_alone(folder: Path, tmp_path: Path) -> None:
    first = weights_hash(folder)
    copy = tmp_path / "another name"
    shutil.copytree(folder, copy)
    (copy / "README.md").write_text("a card")
    assert weights_hash(copy) == first
    assert weights_hash(save_small_model(tmp_path / "other", seed=1)) != first


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_an_exported_folder_with_another_byte_is_refused_until_its_checksums_are_deleted(
    folder: Path, name: str
) -> None:
    first = weights_hash(folder)
    note_written(folder)
    assert weights_hash(folder) == first
    (folder / "README.md").write_text("people write on it")
    file = folder / name
    whole = file.read_bytes()
    file.write_bytes(whole[:-20] + b" " + whole[-19:])
    with pytest.raises(
        UserError, match=rf"{folder}: {name} is not what was written.*Delete {folder}.*delete its check"
    ):
        weights_hash(folder)
    file.write_bytes(whole)
    shutil.copyfile(
        save_small_model(folder.parent / "other", seed=1) / "model.safetensors", folder / "model.safetensors"
    )
    (folder / "checksums.json").unlink()
    assert weights_hash(folder) != first, "a model that was changed on purpose"


@pytest.mark.parametrize("noted", [[512], {"context": 0}, {"context": "512"}])
def test_the_context_is_what_was_noted_else_the_positions(folder: Path, noted: Any) -> None:
    assert context_of(folder) == 128
    add_notes(folder, {"tokenizer": None})
    assert context_of(folder) == 128
    add_notes(folder, {"context": 32})
    assert context_of(folder) == 32
    (folder / NOTES).write_text(json.dumps(noted))
    with pytest.raises(UserError, match=r"mlmclm\.json: (context is a number of tokens|not a JSON object)"):
        context_of(folder)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "config.json is missing"),
        ("model.safetensors", "model.safetensors is missing"),
        ("tokenizer.json", "the tokenizer is missing"),
    ],
)
def test_a_missing_file_is_named(folder: Path, missing: str, message: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(UserError, match=message):
        check_model_folder(folder)


def test_weights_cut_short_are_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"model\.safetensors: cannot be read; is it cut short"):
        check_model_folder(folder)


def test_an_architecture_that_needs_its_own_code_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mystery", "auto_map": {"AutoModel": "mystery.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"'mystery' is not one that transformers has\. It comes with code of its own"):
        check_model_folder(folder)


def test_a_shard_that_is_not_there_is_named(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-2.safetensors"}}))
    with pytest.raises(UserError, match=r"the weights model-2\.safetensors that model\.safetensors\.index\.json names"):
        check_model_folder(folder)


def test_weights_that_lack_a_layer_are_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = 3
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"the weights lack layers\.2"):
        load_encoder(folder)


def test_a_damaged_tokenizer_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="the tokenizer cannot be read"):
        load_tokenizer(folder)


def mapping(file: Path) -> dict[str, int]:
    """KiB of this process's mappings of a file: resident, its share of them, and private copies."""
    found = {"Rss": 0, "Pss": 0, "Anonymous": 0}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, *values = line.split()
        if not head.endswith(":"):
            inside = line.endswith(str(file))
        elif inside and head[:-1] in found:
            found[head[:-1]] += int(values[0])
    return found


@pytest.mark.skipif(not Path("/proc/self/smaps").is_file(), reason="needs Linux's /proc")
def test_base_weights_are_the_file_s_own_pages_which_all_that_map_it_share(tmp_path: Path) -> None:
    """A page that is mapped twice counts by half in Pss, whoever maps it; a copy would be anonymous memory."""
    folder = save_small_model(tmp_path / "model", hidden=256)
    file = folder / "model.safetensors"
    os.sync()
    first = load_encoder(folder)
    copied = copy.deepcopy(first)
    assert all(torch.equal(one, other) for one, other in zip(first.parameters(), copied.parameters(), strict=True))
    alone = mapping(file)
    size = sum(parameter.numel() * 4 for parameter in first.parameters()) // 1024
    assert size > 2000
    assert alone["Rss"] >= size
    assert alone["Anonymous"] == 0, "no page was copied to read the weights or to copy the model"
    second = load_encoder(folder)
    assert all(bool(parameter.isfinite().all()) for parameter in second.parameters())
    both = mapping(file)
    assert both["Rss"] >= 2 * size
    assert both["Pss"] <= both["Rss"] * 0.55
    with torch.no_grad():
        next(second.layers[0].parameters()).zero_()
    assert 0 < mapping(file)["Anonymous"] < size, "what is written becomes the writer's own"
    assert all(torch.equal(one, other) for one, other in zip(first.parameters(), copied.parameters(), strict=True))


def test_a_tokenizer_s_own_truncation_and_padding_are_off(tmp_path: Path) -> None:
    """As in many folders of the Hub, where a text would else lose its end or gain padding."""
    tokenizer = small_tokenizer()
    text = "a b c d e f g h"
    whole = tokenizer.backend_tokenizer.encode(text).ids
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    tokenizer.save_pretrained(tmp_path)
    assert '"max_length": 4' in (tmp_path / "tokenizer.json").read_text()
    assert load_tokenizer(tmp_path).backend_tokenizer.encode(text).ids == whole

"""A cell's result is of the files that its key was hashed from, or there is none: what changes meanwhile is named."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from small_cells import make

from mlmclm.errors import UserError
from mlmclm.finetuning.cell import Cell, Start, cell_key
from mlmclm.finetuning.kept import WEIGHTS, KeptEncoder
from mlmclm.finetuning.run import keep_encoder, run_cell
from mlmclm.storage.files import write_json
from mlmclm.tasks.prepare_task import find_or_prepare
from small_models import write_two


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_two(tmp_path)
    return tmp_path


def computed(
    place: Path, cell: Cell, happens: Callable[[], Any], cache: dict[Any, Any] | None = None
) -> dict[str, Any]:
    """Compute a cell, and have something happen in its second step."""

    def step(number: int, steps: int, loss: float) -> None:
        if number == 2:
            happens()

    return run_cell(cell, store=place / "store", data_root=place / "data", on_step=step, cache=cache)


def flipped(file: Path) -> None:
    """Change a byte in place and set the time back, as a broken disk would."""
    status = file.stat()
    with file.open("r+b") as handle:
        handle.seek(status.st_size // 2)
        (byte,) = handle.read(1)
        handle.seek(-1, 1)
        handle.write(bytes([byte ^ 1]))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


FILES = ["model.safetensors", "tokenizer.json", "test.arrow"]
CHANGES = [*((name, flipped) for name in FILES), ("config.json", Path.unlink)]


@pytest.mark.parametrize(("name", "change"), CHANGES, ids=lambda value: getattr(value, "__name__", value))
def test_a_file_that_changes_while_a_cell_is_computed_leaves_no_result(
    place: Path, name: str, change: Callable[[Path], Any]
) -> None:
    cell = make(place, "sst2")
    tokens = find_or_prepare("sst2", cell.task_data, cell.model_folder, cell.protocol, place / "store", place / "data")
    file = (tokens.folder if name.endswith(".arrow") else place / "model") / name
    cache: dict[Any, Any] = {}
    with pytest.raises(UserError, match=rf"{name}: it has changed since it was hashed"):
        computed(place, cell, lambda: change(file), cache)
    with pytest.raises(UserError):  # nor does a worker that keeps both in memory file another
        computed(place, cell, lambda: None, cache)


def test_a_file_that_is_added_counts_if_it_changes_what_is_loaded(place: Path) -> None:
    cell, model = make(place, "sst2"), place / "model"
    expected = computed(place, cell, lambda: None)["scores"]

    def harmless() -> None:
        (model / "README.md").write_text("a card")
        (model / "notes.txt").write_text("mine")
        (place / "link").hardlink_to(model / "model.safetensors")

    assert computed(place, cell, harmless)["scores"] == expected
    with pytest.raises(UserError, match=r"added_tokens.json: it has changed"):
        computed(place, cell, lambda: write_json(model / "added_tokens.json", {"<new>": 399}))


def test_weights_to_start_from_that_change_while_they_are_loaded_are_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import safetensors.torch

    source, store = make(place, "sst2"), place / "store"
    kept = KeptEncoder(store, cell_key(source))
    kept.ensure(lambda folder: keep_encoder(source, folder, store=store, data_root=place / "data"))
    file = kept.folder / WEIGHTS

    def loaded(path: Path) -> Any:
        save_file({name: tensor + 1 for name, tensor in load_file(path).items()}, path)
        return load_file(path)

    monkeypatch.setattr(safetensors.torch, "load_file", loaded)
    with pytest.raises(UserError, match=f"{file}: it has changed"):
        run_cell(make(place, "sst2", start=Start(kept.key, "sst2")), store=store, data_root=place / "data")
    shutil.rmtree(kept.folder)

"""A flipped byte or a lost half of any file of a store is never believed: what was there comes out again, or a message says what to do."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from small_store import Study

from mlmclm.errors import MlmclmError

KINDS = [
    "corpora/*/index.json",
    "corpora/*/train-00000.bin",
    "corpora/*/validation-00000.bin",
    "corpora/hashes.json",
    "tokenizers/*/tokenizer.json",
    "tokenizers/*/tokenizer_config.json",
    "initial/sources/*.json",
    "initial/sources/*/config.json",
    "initial/sources/*/tokenizer.json",
    "initial/sources/*/tokenizer_config.json",
    "initial/*/config.json",
    "initial/*/initial.json",
    "initial/*/model.safetensors",
    "states/*/state.safetensors",
    "states/*/step.json",
    "states/*/state.json",
    "states/*/metrics.jsonl",
    "states/*/model/config.json",
    "states/*/model/model.safetensors",
    "states/*/model/tokenizer.json",
    "states/*/model/tokenizer_config.json",
    "states/*/model/mlmclm.json",
    "states/*/model.weights.json",
    "prepared/*/train.arrow",
    "prepared/*/test.arrow",
    "prepared/*/validation.arrow",
    "prepared/*/meta.json",
    "cells/*/*.json",
    "cells/*/*.parquet",
    "tuned/*/*/encoder.safetensors",
    "tuned/*/*/result.json",
    "*/checksums.json",
]
CUT = [
    "corpora/*/train-00000.bin",
    "initial/*/model.safetensors",
    "states/*/metrics.jsonl",
    "states/*/model/config.json",
    "prepared/*/train.arrow",
    "cells/*/*.json",
    "cells/*/*.parquet",
    "*/checksums.json",
]
"""One kind of each format, and of each reader."""
UNREAD = [
    "states/*/model/README.md",
    "studies/*",
    "studies/*/models/*/*",
    "studies/*/models/*/decoder/*",
    "*.lock",
]
"""Written for people, hard links to other files, or empty."""


@pytest.fixture(scope="module")
def folder(copied_store: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study, its `store`, and away from where it was, the model that it continues from."""
    return copied_store(tmp_path_factory.mktemp("study") / "small")


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[str, Any]:
    """All that is read of the store as it was written."""
    return Study(folder, folder / "store").all_that_is_read()


def files_of(store: Path) -> list[str]:
    return sorted(path.relative_to(store).as_posix() for path in store.rglob("*") if path.is_file())


def matches(file: str, kind: str) -> bool:
    if kind.startswith("*"):
        return fnmatch(file, kind)
    return len(file.split("/")) == len(kind.split("/")) and fnmatch(file, kind)


def test_every_file_of_the_store_is_of_a_kind_that_is_tried_here(folder: Path, whole: dict[str, Any]) -> None:
    files = files_of(folder / "store")
    assert [name for name in whole if Study(folder, folder / "store").all_that_is_read()[name] != whole[name]] == []
    assert [file for file in files if not any(matches(file, kind) for kind in [*KINDS, *UNREAD])] == []
    assert [kind for kind in KINDS if not any(matches(file, kind) for file in files)] == []


def test_every_file_and_folder_of_the_store_can_be_read_by_its_other_users(folder: Path) -> None:
    """safetensors makes files that only their owner can read."""
    umask = os.umask(0)
    os.umask(umask)
    store = folder / "store"
    unusual = {
        path.relative_to(store).as_posix(): oct(path.stat().st_mode & 0o777)
        for path in store.rglob("*")
        if path.stat().st_mode & 0o777 != (0o777 if path.is_dir() else 0o666) & ~umask
    }
    assert unusual == {}


def damaged(content: bytes, how: str, *, text: bool) -> bytes:
    """The content with another digit (of a text) or bit in its middle, or its first half."""
    if how == "cut":
        return content[: len(content) // 2]
    places = [found.start() for found in re.finditer(rb"\d", content)] if text else []
    place = places[len(places) // 2] if places else len(content) // 2
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


@pytest.mark.parametrize(("kind", "how"), [*((kind, "flip") for kind in KINDS), *((kind, "cut") for kind in CUT)])
def test_damage_is_mended_or_named_with_a_remedy_and_never_believed(
    folder: Path, whole: dict[str, Any], tmp_path: Path, kind: str, how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    shutil.copytree(folder / "store", store, symlinks=True, copy_function=os.link)
    for file in (store / name for name in files_of(store) if matches(name, kind)):
        content = file.read_bytes()
        file.unlink()  # the copies are links
        file.write_bytes(damaged(content, how, text=file.suffix in (".json", ".jsonl")))
    capfd.readouterr()
    remedies = "made again|exported again|hashed again|making .* again|rebuilt from"
    try:
        found = Study(folder, store).all_that_is_read()
    except MlmclmError as error:
        print(error)
        remedies = "Delete|[Pp]ut back|Run|run "
    else:
        assert [name for name in whole if found[name] != whole[name]] == []
    said = " ".join("".join(capfd.readouterr()).split())
    assert re.search(remedies, said), said
    assert str(store) in said or f"making {file.name} again" in said, said
    if kind.endswith(".bin"):
        assert Study(folder, store).all_that_is_read() == whole
    if kind != "*/checksums.json":  # the file that it belongs to is what is named
        assert kind.rpartition("/")[2].lstrip("*").rpartition(".")[0] in said, said

"""`mlmclm store verify` finds a flipped bit in a file of every kind, and changes nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_store import Study

from mlmclm.cli.main import main
from mlmclm.corpora.chunks import chunk_table
from mlmclm.corpora.shard_writer import Position, ShardWriter
from mlmclm.corpora.shelf import Shelf
from mlmclm.finetuning.cell import cell_key
from mlmclm.pretraining import checkpoints
from mlmclm.pydocs.pin import write_pin
from mlmclm.storage.checksums import sealed, unsealed, write_checksums, write_sealed
from mlmclm.storage.files import stable_hash
from mlmclm.storage.place import Place
from mlmclm.studies.artifacts import KINDS as ARTIFACTS
from mlmclm.studies.artifacts import Contents, Verified, pieces_of, verify
from mlmclm.studies.prepare import prepare_study
from mlmclm.studies.recompute import models_in
from mlmclm.sweeps.manifest import write_manifest
from mlmclm.sweeps.results_store import Evaluations, ResultsStore
from mlmclm.sweeps.starts import Planned
from mlmclm.tasks.families.sequence_classification import SequenceClassification
from object_stores import store_at

KINDS = [
    "corpora/*/index.json",
    "corpora/*/chunks-*.json",
    "corpora/*/train-00000.bin",
    "corpora/*/validation-00000.bin",
    "corpora/0000000000000000/train-00000.json",
    "corpora/0000000000000000/train-00000.bin",
    "corpora/1111111111111111/sources.json",
    "corpora/hashes.json",
    "corpora/sources/pydocs.json",
    "corpora/pydocs-*/documents.parquet",
    "tokenizers/*/tokenizer.json",
    "tokenizers/*/checksums.json",
    "tasks/*/train.parquet",
    "hub/*.json",
    "task-data/*.json",
    "prepared/*/train.arrow",
    "prepared/*/meta.json",
    "initial/sources/*.json",
    "initial/sources/*/config.json",
    "initial/*/model.safetensors",
    "states/*/state.safetensors",
    "states/*/step.json",
    "states/*/metrics.jsonl",
    "states/*/model/model.safetensors",
    "states/*/model/mlmclm.json",
    "states/*/model/decoder/config.json",
    "states/*/model.weights.json",
    "revisions/*/state.safetensors",
    "runs/*/ray_train/*/checkpoint_*/step.json",
    "cells/*/*.json",
    "cells/*/*.parquet",
    "evaluations/*/*.json",
    "unfiled/cells/*/*.json",
    "unfiled/cells/*/*.parquet",
    "tuned/*/*/encoder.safetensors",
    "tuned/*/*/result.json",
    "studies/small/cells.json",
    "studies/small/run.json",
]
UNCHECKED = ["studies/*/models/*/README.md", "states/*/model/README.md", "states/*/model/decoder/README.md", "*.lock"]
"""Written for people, or empty."""
EVALUATION = stable_hash("an evaluation")


@pytest.fixture(scope="module")
def folder(copied_store: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study and its store, with a file of every kind; tests leave it as it is."""
    folder = copied_store(tmp_path_factory.mktemp("study") / "small")
    store = folder / "store"
    study = Study(folder, store)
    prepared = prepare_study(study.loaded, study.place)
    own = store / "studies" / "small"
    write_manifest(own, "small", Planned(study.cells(prepared)))
    (own / "run.json").write_text(json.dumps(sealed({"evaluations": [{"model": "m", "task": "t", "key": EVALUATION}]})))
    entries = dict.fromkeys(("model", "task", "scoring", "metrics"))
    Evaluations(store).write({"schema": 1, "key": EVALUATION, "status": "ok", **entries})
    unfiled, result = (
        ResultsStore(store, root=store / "unfiled"),
        {"schema": 1, "key": stable_hash("a cell"), "status": "ok"},
    )
    unfiled.write_examples(result, b"examples")
    unfiled.write(result)
    corpus = prepared.corpus
    chunk_table(corpus.train, 32, 1)
    with ShardWriter(
        Shelf(str(store / "corpora" / ("0" * 16))), "train", 8, np.dtype("<u2"), shard_blocks=2
    ) as writer:  # an unfinished corpus
        for number in range(3):
            writer.add(Position(0, number), np.arange(16, dtype=np.int64), size=10)
    write_sealed(store / "corpora" / ("1" * 16) / "sources.json", {"sources": {"a": corpus.key}})
    write_pin(store, "0123456789abcdef")
    for place, name in (("corpora/pydocs-0123456789abcdef", "documents"), (f"tasks/{'2' * 16}", "train")):
        (store / place).mkdir(parents=True)
        (store / place / f"{name}.parquet").write_bytes(os.urandom(100))
        write_checksums(store / place)
    write_sealed(store / "hub" / "dataset-0123456789abcdef.json", {"commit": "0" * 40})
    write_sealed(store / "task-data" / "own-0123456789ab.json", {"fingerprint": "f", "read": "2026-01-01"})
    state = checkpoints.fresh({"a": torch.arange(4.0)})
    checkpoints.write_folder(store / "revisions" / ("3" * 16), state, {}, ())
    checkpoints.write_folder(store / "runs" / "4" / "ray_train" / "a" / "checkpoint_000001", state, {}, ())
    decoder = next(store.glob("states/*/model")) / "decoder"
    decoder.mkdir()
    (decoder / "config.json").write_text("{}")
    write_checksums(decoder)
    return folder


def look(store: Path, study: str | None = None) -> list[Verified]:
    return verify(pieces_of(Contents(store), study))


def damaged(store: Path, study: str | None = None) -> dict[str, str]:
    """Damaged paths below the store, with the reasons."""
    found = [one for each in look(store, study) for one in each.damaged]
    assert all(one.again for one in found)
    return {one.path.removeprefix(f"{store}/"): one.reason for one in found}


def files_of(store: Path) -> list[str]:
    return sorted(path.relative_to(store).as_posix() for path in store.rglob("*") if path.is_file())


def matches(file: str, kind: str) -> bool:
    return len(file.split("/")) == len(kind.split("/")) and fnmatch(file, kind)


@pytest.fixture
def flipped(folder: Path) -> Iterator[Callable[[str], str]]:
    """Returns a function that flips a bit in a file of a kind, for the time of a test."""
    changed: list[tuple[Path, Path]] = []

    def flip(kind: str) -> str:
        store = folder / "store"
        file = next(store / name for name in files_of(store) if matches(name, kind))
        content = bytearray(file.read_bytes())
        digits = [found.start() for found in re.finditer(rb"\d", content)] if b"json" in file.suffix.encode() else []
        place = digits[len(digits) // 2] if digits else len(content) // 2
        content[place] ^= 1
        kept = folder / "kept"
        file.rename(kept)  # not written into, as another name may be linked to it
        file.write_bytes(content)
        changed.append((kept, file))
        return file.relative_to(store).as_posix()

    yield flip
    for kept, file in changed:
        kept.replace(file)


def test_an_intact_store_is_clean_and_every_file_of_it_is_verified_and_left_as_it_is(folder: Path) -> None:
    store = folder / "store"
    before = {name: (store / name).stat() for name in files_of(store)}
    found = look(store)
    assert {kind.kind for kind in ARTIFACTS} <= {each.kind for each in found}
    assert damaged(store) == {}
    verified = {piece.path.removeprefix(f"{store}/") for piece in pieces_of(Contents(store))}
    inodes = {(store / name).stat().st_ino for name in verified}  # a study's models are links to files of states
    others = [name for name, status in before.items() if name not in verified and status.st_ino not in inodes]
    assert [name for name in others if not any(fnmatch(name, kind) for kind in UNCHECKED)] == []
    assert all((store / name).stat().st_mtime_ns == status.st_mtime_ns for name, status in before.items())
    assert damaged(store, "small") == {}


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_is_found_in_each_kind_of_file(folder: Path, flipped: Callable[[str], str], kind: str) -> None:
    file = flipped(kind)
    found = damaged(folder / "store")
    if file.endswith("checksums.json"):  # which file is damaged cannot be known
        assert found and all(Path(name).parent == Path(file).parent for name in found)
        return
    assert file in found
    # What only the damaged file has a checksum of cannot be verified.
    others = [reason for name, reason in found.items() if name != file]
    assert all("which has its checksum, is damaged" in reason for reason in others)


def test_a_missing_file_is_found(folder: Path) -> None:
    store = folder / "store"
    shard = next(store.glob("corpora/*/validation-00000.bin"))
    model = next(store.glob("studies/small/models/*/model.safetensors"))
    examples = next(store.glob("cells/*/*.parquet"))
    for path in (shard, examples, model):
        path.rename(folder / path.name)
        assert any("missing" in reason for reason in damaged(store).values())
        (folder / path.name).rename(path)
    assert damaged(store) == {}


def test_a_study_has_its_own_results_models_and_corpus(folder: Path, flipped: Callable[[str], str]) -> None:
    flipped("runs/*/ray_train/*/checkpoint_*/step.json")
    store = folder / "store"
    assert damaged(store, "small") == {} != damaged(store)
    kinds = {each.kind: each.files for each in look(store, "small")}
    assert (kinds["results"], kinds["evaluations"], kinds["kept encoders"]) == (2, 1, 2)
    assert "checkpoints" not in kinds and kinds["states"] == 5


def test_results_on_an_object_store_are_verified_there(folder: Path, tmp_path: Path, address: str) -> None:
    store = store_at(tmp_path, address)
    store.mkdir()
    filed, results_store = ResultsStore(folder / "store"), ResultsStore(store)
    for key in sorted(filed.keys()):
        for path, target in (
            (filed.path(key), results_store.path(key)),
            (filed.examples_path(key), results_store.examples_path(key)),
        ):
            target.write_bytes(path.read_bytes())
    assert damaged(store) == {}
    key = min(filed.keys())
    content = bytearray(filed.examples_path(key).read_bytes())
    content[len(content) // 2] ^= 1
    results_store.examples_path(key).write_bytes(bytes(content))
    assert list(damaged(store)) == [str(results_store.examples_path(key))]


def run(*words: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capsys.readouterr()
    code = 0
    try:
        main([str(word) for word in words])
    except SystemExit as ended:
        code = int(ended.code or 0)
    return code, "".join(capsys.readouterr())


def printed(said: str) -> dict[str, Any]:
    """The JSON object at the beginning, which is standard output; messages follow."""
    found: dict[str, Any] = json.JSONDecoder().raw_decode(said)[0]
    return found


def test_the_verb_says_what_is_damaged_and_what_makes_it_again_and_ends_with_1(
    folder: Path, flipped: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("store", "verify", "--store", folder / "store")
    code, said = run(*words, capsys=capsys)
    assert (code, ": all are intact" in said) == (0, True), said
    assert "not covered, as they have no checksum: reports, model cards, logs, MLflow's database, notes of" in said
    code, said = run(*words, folder / "study.yaml", capsys=capsys)
    assert code == 0, said
    file = flipped("cells/*/*.parquet")
    code, said = run(*words, "small", capsys=capsys)
    assert code == 1
    assert (
        f"{folder / 'store' / file}: it is not what was written: its checksum differs. To make it again: `mlmclm sweep retry"
        in said
    )
    assert ": 1 damaged" in said
    code, said = run(*words, "--json", capsys=capsys)
    damage = [one for each in printed(said)["kinds"] for one in each["damaged"]]
    assert (code, [one["path"] for one in damage]) == (1, [str(folder / "store" / file)])


def test_an_unknown_study_is_the_user_s_mistake(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = run("store", "verify", "smal", "--store", folder / "store", capsys=capsys)
    assert (code, "unknown study 'smal'. Did you mean 'small'?" in said) == (2, True), said
    assert run("store", "verify", "--store", folder / "nowhere", capsys=capsys)[0] == 2


def changed_result(store: Path, **changes: Any) -> Path:
    """Changes a filed result, as a faulty machine would have filed it: with a checksum that is right."""
    file = next(store.glob("cells/??/*.json"))
    file.write_text(json.dumps(sealed({**unsealed(json.loads(file.read_text())), **changes})))
    return file


def test_cells_that_are_computed_again_are_equal_or_differ_or_cannot_be_compared(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    shutil.copytree(folder / "store", store, symlinks=True)
    before = files_of(store)
    words = ("store", "verify", "--store", store, "--recompute", 5, "--seed", 1, "--json")

    def again() -> tuple[int, list[tuple[str, str]]]:
        code, said = run(*words, capsys=capsys)
        found = printed(said)["recomputed"]
        return code, sorted((each["status"], each["detail"]) for each in found)

    assert again() == (0, [("equal", ""), ("equal", "")])
    assert files_of(store) == before, "nothing is left in the store"
    with monkeypatch.context() as patch:
        # As a version of the package does that has another metric in place of one.
        added = {**SequenceClassification.metrics, "error_rate": "error rate"}
        measures = SequenceClassification.measures.__func__  # type: ignore[attr-defined]

        def other(cls: type[Any], columns: Mapping[str, Any], classes: int) -> dict[str, Any]:
            known = measures(cls, columns, classes)
            del known["matthews"]
            return {**known, "error_rate": lambda weights: 1 - known["accuracy"](weights)}

        patch.setattr(SequenceClassification, "metrics", added)
        patch.setattr(SequenceClassification, "measures", classmethod(other))
        apart = "new: test error_rate, validation error_rate; gone: test matthews, validation matthews"
        assert again() == (0, [("equal", apart), ("equal", apart)])
    changed_result(store, of_an_earlier_version=1)
    assert again() == (0, [("equal", ""), ("equal", "gone: of_an_earlier_version")])
    changed_result(store, curve=[[1, 0.5]])
    assert again() == (1, [("differs", "curve differ; gone: of_an_earlier_version"), ("equal", "")])
    file = changed_result(store, cost={"backend": "cuda", "device": "a GPU", "versions": {}})
    code, found = again()
    assert (code, [status for status, _ in found]) == (0, ["differs elsewhere", "equal"])
    assert re.search(r"curve differ; gone: .*; backend .* \(it was computed with cuda\); device", found[0][1])
    changed_result(store, weights="0" * 64)
    code, found = again()
    assert (code, [status for status, _ in found]) == (0, ["equal", "not computed"])
    assert "is not here" in found[1][1]
    assert file.is_file()
    assert len({each.folder for each in models_in(store).values()}) == 2


def test_the_keys_of_recomputed_cells_are_those_of_the_study(folder: Path) -> None:
    study = Study(folder, folder / "store")
    cells = study.cells(prepare_study(study.loaded, Place(folder / "store", folder / "data")))
    assert {cell_key(cell) for cell in cells} == ResultsStore(folder / "store").keys()

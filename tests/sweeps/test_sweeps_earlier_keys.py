"""Results under keys by earlier definitions are found: cells and the cells that start from them, scores, given models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlmclm import versions
from mlmclm.cli.main import main
from mlmclm.evaluation.evaluations import Subject, evaluation_key, filed_as
from mlmclm.finetuning.cell import Start, cell_key
from mlmclm.finetuning.run import run_cell
from mlmclm.models.folder import content_hashes, weights_hashes
from mlmclm.pretraining.initial import StoredInitial, StoredSource
from mlmclm.storage.checksums import write_sealed
from mlmclm.storage.files import read_json, stable_hash, write_json
from mlmclm.storage.place import Place
from mlmclm.studies.prepare import find_prepared, prepare_study
from mlmclm.studies.study_file import load_study
from mlmclm.sweeps.cells import SweepModel, recorded_cell
from mlmclm.sweeps.find_model import find_model
from mlmclm.sweeps.grid import grid_difference, grid_of
from mlmclm.sweeps.results_store import Evaluations, ResultsStore
from mlmclm.sweeps.space import Space, find_space
from mlmclm.sweeps.starts import ModelGrid, plan_cells
from mlmclm.tasks.declared_tasks import get_task
from small_models import save_small_decoder, save_small_model, write_two
from small_study import write_study
from sweep_cells import make_result

SPACE: dict[str, Any] = {
    "tasks": ["sst2", "conll2003"],
    "learning_rates": [1e-3, 5e-3],
    "seeds": [0],
    "protocol": {"max_steps": 2, "max_length": 48, "stride": 8, "batch_size": 8, "max_evaluation_examples": 20},
}


def space_of(folder: Path, **changes: Any) -> Space:
    path = folder / "space.yaml"
    path.write_text(yaml.safe_dump({**SPACE, **changes}))
    return find_space(path)


def written_by(folder: Path, version: str) -> Path:
    write_json(folder / "config.json", {**read_json(folder / "config.json"), "transformers_version": version})
    return folder


def test_a_cell_that_was_filed_under_the_hash_of_the_bytes_is_found_and_not_computed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_two(tmp_path)
    folder = written_by(tmp_path / "model", "5.24.0")
    words = [
        "finetune", folder, "sst2", "--lr", "1e-3", "--store", tmp_path / "store", "--data", tmp_path / "data",
        "--space", tmp_path / "space.yaml", "--json",
    ]  # fmt: skip
    space_of(tmp_path)

    def run() -> dict[str, Any]:
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        assert ended.value.code in (None, 0), capfd.readouterr().err
        found: dict[str, Any] = json.loads(capfd.readouterr().out)
        return found

    first, results_store = run(), ResultsStore(tmp_path / "store")
    result = results_store.find(first["key"])
    today, of_bytes = weights_hashes(folder)
    assert result is not None and result["weights"] == today and first["computed"]
    # As the version before filed it.
    cell = recorded_cell(result, find_model(str(folder), tmp_path / "store"), [], where="")
    old = replace(cell, weights=of_bytes, earlier=())
    again = run_cell(old, store=tmp_path / "store", data_root=tmp_path / "data")
    assert again["scores"] == result["scores"]
    results_store.set_aside(first["key"])
    results_store.write(again)
    found = run()
    assert (found["key"], found["weights"], found["computed"]) == (cell_key(old), of_bytes, False)
    written_by(folder, "6.0.0")
    assert run()["computed"], "other bytes, of which the store has no result"
    written_by(folder, "5.24.0")
    assert not run()["computed"]


def test_a_plan_has_the_keys_under_which_results_are_filed_and_so_have_the_cells_that_start_from_them(
    tmp_path: Path,
) -> None:
    space = space_of(tmp_path, start_from={"conll2003": "sst2"})
    data = {"sst2": "a", "conll2003": "b"}
    model = SweepModel("m", tmp_path, "today", ("before", "first"))
    declared = {name: get_task(name) for name in data}
    grids = [ModelGrid(model, space, data, declared)]
    results_store, other = ResultsStore(tmp_path / "store"), ResultsStore(tmp_path / "other")
    sources = plan_cells(grids, results_store).cells
    assert {cell.weights for cell in sources} == {"today"}
    for rate, cell in enumerate(sources):
        score = {"accuracy": rate / 10}
        for place, weights in ((results_store, "first"), (other, "today")):
            old = replace(cell, weights=weights)
            place.write({**make_result(old), "key": cell_key(old), "scores": {"validation": score, "test": score}})
    best = max(sources, key=lambda cell: cell.learning_rate)
    planned = plan_cells(grids, results_store)
    assert not results_store.missing(planned.cells[:2])
    start = cell_key(replace(best, weights="first"))
    assert [each.start for each in planned.cells] == [None, None, Start(start, "sst2"), Start(start, "sst2")]
    # Those are computed under today's key, unless they are there under an earlier one.
    assert {each.weights for each in planned.cells if each.start} == {"today"}
    old = replace(planned.cells[2], weights="before")
    results_store.write({**make_result(old), "key": cell_key(old)})
    assert [cell.weights for cell in plan_cells(grids, results_store).cells] == ["first", "first", "before", "today"]
    assert {cell.weights for cell in plan_cells(grids, other).cells} == {"today"}
    assert plan_cells(grids, other).cells[2].start == Start(cell_key(best), "sst2")


def test_scores_without_training_are_found_under_earlier_hashes(tmp_path: Path) -> None:
    folder = written_by(save_small_model(tmp_path / "model"), "5.24.0")
    write_json(folder / "config_sentence_transformers.json", {"prompts": {}, "__version__": {"transformers": "5.24.0"}})
    results_store = Evaluations(tmp_path / "store")

    class Task:
        name, fingerprint = "t", "f"

    task: Any = Task()
    for subject in (Subject.of("m", folder, "causal"), Subject.of("m", folder, "embedding")):
        assert filed_as(subject, task, results_store) == subject and subject.earlier
        for weights, tokenizer in subject.earlier:
            old = replace(subject, weights=weights, tokenizer=tokenizer)
            key = evaluation_key(old, task)
            assert key != evaluation_key(subject, task)
            entries = {"model": "m", "task": "t", "scoring": "causal", "metrics": {}, "status": "ok"}
            results_store.write({"schema": versions.RESULTS, "key": key, **entries})
            assert filed_as(subject, task, results_store) == old
            results_store.set_aside(key)


def test_the_versions_that_wrote_an_encoder_of_sentences_are_in_no_key(tmp_path: Path) -> None:
    folder = save_small_model(tmp_path / "model")
    found = []
    for version in ("5.23.0", "5.24.0"):
        content = {"prompts": {}, "__version__": {"sentence_transformers": "6.2.0", "transformers": version}}
        write_json(folder / "config_sentence_transformers.json", content)
        found.append(Subject.of("m", written_by(folder, version), "embedding"))
    assert (found[0].weights, found[0].tokenizer) == (found[1].weights, found[1].tokenizer)
    write_json(folder / "config_sentence_transformers.json", {"prompts": {"query": "q: "}})
    assert Subject.of("m", folder, "embedding").tokenizer != found[0].tokenizer


def test_a_store_keeps_to_the_hash_by_which_it_knows_a_given_model(tmp_path: Path) -> None:
    source = written_by(save_small_decoder(tmp_path / "decoder"), "5.24.0")
    path = write_study(tmp_path, initial={"tiny": str(source)}, models=["tiny-untrained"], baseline=None)
    content = yaml.safe_load(path.read_text())
    del content["tokenizer"]
    path.write_text(yaml.safe_dump(content))
    place = Place(tmp_path / "store", tmp_path / "data")
    made = prepare_study(load_study(path), place)
    today, of_bytes = content_hashes(source)
    assert made.initial["tiny"].facts["content"] == today
    assert today in {each.key for each in StoredSource.all(place.store)}
    # As the version before left it.
    kept = StoredSource(place.store, today).folder
    kept.rename(kept.with_name(of_bytes))
    (record,) = kept.parent.glob("*.json")
    write_sealed(record, {"source": str(source), "content": of_bytes, "commit": None})
    tokenizer = made.corpus.tokenizer.name
    old = StoredInitial(place.store, stable_hash([versions.INITIAL_MODELS, of_bytes, tokenizer]))
    made.initial["tiny"].folder.rename(old.folder)
    found = find_prepared(load_study(path), place)
    assert found is not None and found.initial["tiny"].key == old.key


def test_a_grid_of_given_models_by_earlier_hashes_is_no_other_grid(tmp_path: Path) -> None:
    space = space_of(tmp_path)
    before, now = grid_of(space, {"m": ("bytes",)}), grid_of(space, {"m": ("today", "bytes")})
    assert not grid_difference(before, now).lost and not grid_difference(now, now).lost
    assert grid_difference(grid_of(space, {"m": ("other",)}), now).lost == ("m: other weights",)

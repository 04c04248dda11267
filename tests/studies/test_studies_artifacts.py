"""The origins of artifacts, the artifacts that a study uses, and what `store prune` may delete."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_store import Study

from mlmclm.cli.main import main
from mlmclm.errors import UserError
from mlmclm.finetuning.cell import cell_key
from mlmclm.finetuning.kept import KeptEncoder
from mlmclm.models.stored_model import ExportedModel
from mlmclm.plans.names import parse_name
from mlmclm.plans.recipe import Recipe
from mlmclm.plans.stages import history, study_fingerprint
from mlmclm.pretraining import checkpoints
from mlmclm.pretraining.states import StoredRevision, StoredState
from mlmclm.storage.artifact import Artifact
from mlmclm.storage.checksums import sealed, unsealed
from mlmclm.storage.leases import Leases
from mlmclm.studies.artifacts import Contents, disk_by_study, only_of, prune_all
from mlmclm.studies.prepare import prepare_study
from mlmclm.sweeps.manifest import write_manifest
from mlmclm.sweeps.results_store import ResultsStore, StoredResult
from mlmclm.sweeps.starts import Planned

STUDIES = {"small": slice(None), "part": slice(1, None)}
"""Cells of two studies: those of both models, and the trained one's."""


@pytest.fixture(scope="module")
def made(copied_store: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the studies `small` and `part`, which share a model and its cell; tests copy it."""
    folder = copied_store(tmp_path_factory.mktemp("study") / "small")
    store = folder / "store"
    study = Study(folder, store)
    prepared = prepare_study(study.loaded, study.place)
    cells = study.cells(prepared)
    models = store / "studies" / "small" / "models"
    ignored = shutil.ignore_patterns("tiny-untrained")
    shutil.copytree(
        models, store / "studies" / "part" / "models", ignore=ignored
    )  # no links, as on another file system
    for name, own in STUDIES.items():
        write_manifest(store / "studies" / name, name, Planned(cells[own]))
    target = prepared.target(prepared.plan.models[1])
    kept = checkpoints.read_weights(StoredState(store, target.key(prepared.fingerprint)).folder)
    facts = {"size": "tiny", "fingerprint": prepared.fingerprint, "corpus": prepared.corpus.key}
    checkpoints.write_folder(store / "revisions" / ("3" * 64), checkpoints.fresh(dict(kept)), facts, ())
    return folder


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "copy")
    return tmp_path / "copy" / "store"


def files_of(store: Path) -> dict[str, bytes]:
    found = (path for path in store.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(store)): path.read_bytes() for path in found}


def of_kind(contents: Contents, kind: type[Artifact]) -> list[Artifact]:
    return [artifact for artifact in contents.all if type(artifact) is kind]


def names_of(artifacts: Any) -> set[tuple[str, str]]:
    return {(type(each).__name__, each.key) for each in artifacts}


def run(*words: object, capfd: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return int(ended.value.code or 0), *capfd.readouterr()


def test_origins_name_what_an_artifact_was_made_from(made: Path) -> None:
    contents = Contents(made / "store")
    study = Study(made, made / "store")
    prepared = prepare_study(study.loaded, study.place)
    (trained,) = [each for each in of_kind(contents, StoredState) if contents.origin(each).facts]
    kinds = {type(need).__name__: need.key for need in contents.needs(trained)}
    assert kinds == {"StoredCorpus": prepared.corpus.key, "StoredInitial": prepared.initial["tiny"].key}
    (corpus,) = [need for need in contents.needs(trained) if need.key == prepared.corpus.key]
    assert names_of(contents.needs(corpus)) == {("StoredTokenizer", prepared.corpus.tokenizer_key)}
    cell = study.cells(prepared)[1]
    result = StoredResult(made / "store", cell_key(cell))
    facts = contents.origin(result).facts
    assert (facts["weights"], facts["seed"], facts["max_steps"]) == (cell.weights, 0, 2)
    assert names_of(contents.needs(result)) >= {("ExportedModel", trained.key)}
    assert {type(each).__name__ for each in contents.needs(result)} == {"ExportedModel", "StoredPreparation"}
    assert contents.needs(ExportedModel(made / "store", trained.key)) == [trained]
    assert result in contents.users[ExportedModel(made / "store", trained.key)]


def test_what_a_study_uses_is_enough_to_compute_it_again(made: Path, tmp_path: Path) -> None:
    """The study in a store with nothing else gives what it gave, without training."""
    contents = Contents(made / "store")
    kept = contents.of_study("small")
    shutil.copytree(made, tmp_path / "copy", ignore=shutil.ignore_patterns("away"))
    copy = Contents(tmp_path / "copy" / "store")
    for artifact in copy.all:
        if names_of([artifact]).isdisjoint(names_of(kept)):
            artifact.remove()
    before, after = (Study(folder, folder / "store").all_that_is_read() for folder in (made, tmp_path / "copy"))
    assert before == after


def test_a_result_that_started_from_another_cell_s_encoder_needs_both(store: Path) -> None:
    file = next(store.glob("cells/??/*.json"))
    entries = unsealed(json.loads(file.read_text()))
    (kept,) = of_kind(Contents(store), KeptEncoder)
    later = "0" * 64
    ResultsStore(store).write({**entries, "key": later, "start": {"cell": kept.key, "task": "sst2"}})
    needs = Contents(store).needs(StoredResult(store, later))
    assert {kept, StoredResult(store, kept.key)} <= set(needs)


def test_a_study_has_the_revisions_of_its_training(store: Path) -> None:
    contents = Contents(store)
    (revision,) = of_kind(contents, StoredRevision)
    assert revision in contents.of_study("part") and revision in contents.of_study("small")
    assert revision not in only_of(contents, None, results=True)


def test_pruning_a_study_leaves_the_other_as_it_is(store: Path) -> None:
    contents = Contents(store)
    used, before = contents.of_study("part"), files_of(store)
    unused = only_of(contents, "small", results=True)
    assert {type(each).__name__ for each in unused} == {"StoredState", "ExportedModel", "StoredResult", "KeptEncoder"}
    assert files_of(store) == before, "a dry run changes nothing"
    assert list(prune_all(contents, unused, "small"))
    gone = {name for name in before if name not in files_of(store)}
    assert files_of(store) == {name: content for name, content in before.items() if name not in gone}
    assert not (store / "studies" / "small").exists() and (store / "studies" / "part").is_dir()
    left = Contents(store)
    assert left.of_study("part") == used
    assert all(artifact.damage() is None for artifact in used if not isinstance(artifact, StoredState))
    assert (
        sum(len(ResultsStore(store).find_all([artifact.key])) for artifact in used if type(artifact) is StoredResult)
        == 1
    )


def test_results_stay_unless_they_are_asked_for(store: Path) -> None:
    contents = Contents(store)
    for study in ("small", None):
        asked = names_of(only_of(contents, study, results=True))
        left = names_of(only_of(contents, study, results=False))
        assert left <= asked and not any(kind == "StoredResult" for kind, _ in left)
        assert study is None or "KeptEncoder" in dict(left), "it goes with its study"
    shutil.rmtree(store / "studies")
    contents = Contents(store)
    assert names_of(only_of(contents, None, results=True)) == names_of(contents.all)
    kinds = {kind for kind, _ in names_of(only_of(contents, None, results=False))}
    assert kinds & {"StoredState", "StoredRevision", "StoredCorpus", "StoredInitial"} == set(), "what states need stays"
    assert {"ExportedModel", "StoredPreparation", "KeptEncoder"} <= kinds


def damage_list(store: Path) -> None:
    (store / "studies" / "part" / "cells.json").write_text("{")


def damage_origin(store: Path) -> None:
    (file,) = store.glob("states/*/state.json")
    file.write_text("{")


def not_finished(store: Path) -> None:
    (store / "studies" / "new").mkdir()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (damage_list, r"part/cells\.json: .*it isn't known what study 'part' uses"),
        (damage_origin, r"state\.json.*it isn't known what study 'part' uses"),
        (not_finished, "study 'new' is not finished, so it isn't known what it uses"),
    ],
)
def test_nothing_is_pruned_while_it_is_not_known_what_another_study_uses(
    store: Path, change: Callable[[Path], None], reason: str
) -> None:
    change(store)
    with pytest.raises(UserError, match=reason):
        only_of(Contents(store), "small", results=False)


def test_results_that_other_stores_may_use_are_not_pruned(store: Path, tmp_path: Path) -> None:
    store = store.rename(tmp_path / "memory++bucket+prefix")
    with pytest.raises(UserError, match="which other stores may use"):
        only_of(Contents(store), "small", results=True)
    assert only_of(Contents(store), "small", results=False)


def test_nothing_is_pruned_while_a_process_works_on_the_store(store: Path) -> None:
    contents, before = Contents(store), files_of(store)
    unused = only_of(contents, "small", results=False)
    with (
        Leases(store).attempt(["states-1"]),
        pytest.raises(UserError, match=f"process {os.getpid()} on .* is working on it"),
    ):
        list(prune_all(contents, unused, "small"))
    assert files_of(store) == before


def test_the_verbs_say_what_they_would_delete_and_what_there_is(store: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = files_of(store)
    code, out, _ = run("store", "prune", "small", "--store", store, capfd=capfd)
    assert code == 0 and "Nothing is deleted. Give --yes" in out and files_of(store) == before
    code, out, _ = run("store", "prune", "bth", "--store", store, capfd=capfd)
    assert code == 2
    code, out, _ = run("store", "size", "--store", store, "--json", capfd=capfd)
    sizes = json.loads(out)
    assert {each["study"] for each in sizes} == {"", "small", "part"}
    code, out, _ = run("store", "prune", "small", "--store", store, "--yes", "--json", capfd=capfd)
    freed = json.loads(out)
    assert freed["deleted"] and sum(each["bytes"] for each in freed["artifacts"]) == sum(
        each["own"] for each in sizes if each["study"] == "small" and each["kind"] != "results"
    )
    code, out, _ = run("store", "prune", "--store", store, "--yes", capfd=capfd)
    assert code == 0 and "There is nothing to delete" in out


def test_sizes_add_up_to_what_is_on_disk(store: Path) -> None:
    model = next(store.glob("states/*/model/model.safetensors"))
    (store / "studies" / "part" / "models" / "linked").mkdir()
    os.link(model, store / "studies" / "part" / "models" / "linked" / "model.safetensors")
    status = [path.lstat() for path in store.rglob("*") if path.is_file()]
    disk = sum({each.st_ino: each.st_size for each in status}.values())
    found = disk_by_study(Contents(store))
    shared = {each.kind: each.shared for each in found}
    assert sum(each.own for each in found) + sum(shared.values()) == disk
    assert all(each.shared in (0, shared[each.kind]) for each in found)


def test_why_finds_an_artifact_by_its_key_and_by_its_path(
    made: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    store = made / "store"
    contents = Contents(store)
    (trained,) = [each for each in of_kind(contents, StoredState) if contents.origin(each).facts]
    (result,) = contents._exported(store / "studies" / "small" / "models" / "tiny-mlm40-12")
    assert result.key == trained.key
    for named in (
        trained.key,
        trained.key[:8],
        store / "states" / trained.key,
        store / "states" / trained.key / "state.json",
    ):
        assert contents.find(str(named)) == trained
    model = store / "studies" / "part" / "models" / "tiny-mlm40-12"
    assert contents.find(str(model)) == contents.find(str(model / "config.json")) == ExportedModel(store, trained.key)
    filed = StoredResult(store, max(ResultsStore(store).keys()))
    examples = ResultsStore(store).examples_path(filed.key)
    assert contents.find(filed.key[:10]) == contents.find(str(examples)) == filed
    code, out, _ = run("store", "why", trained.key[:12], "--store", store, capfd=capfd)
    assert code == 0 and out.startswith(f"states: {trained.key}")
    assert "peak_learning_rate" in out and "used by models: " in out and "studies that use it: part, small" in out
    code, out, _ = run("store", "why", trained.key, "--store", store, "--json", capfd=capfd)
    assert json.loads(out)["made_of"][0]["kind"] == "corpora"


def test_why_names_the_nearest_key_and_says_which_ones_begin_so(store: Path) -> None:
    with pytest.raises(UserError, match="give at least 6"):
        Contents(store).find("3333")
    with pytest.raises(UserError, match="unknown key '4444444"):
        Contents(store).find("4444444")
    shutil.copytree(store / "revisions" / ("3" * 64), store / "revisions" / f"{'3' * 60}4444")
    with pytest.raises(UserError, match=r"begins several keys of .*: 3333333333333333 \(revisions\), "):
        Contents(store).find("333333")
    with pytest.raises(UserError, match="not the file of an artifact"):
        Contents(store).find(str(store / "studies"))


OTHERS: dict[str, Any] = {
    "batch": 10, "workers": 4, "decay": "1-sqrt", "adam_betas": [0.9, 0.9], "weight_decay": 0.2, "adam_eps": 1e-6, "peak_learning_rate": 1e-2,
    "precision": "fp32", "corruption": {"mask": 0.7, "random": 0.2, "keep": 0.1},
    "loss_weights": {"mlm": 2.0}, "rows": "chunks", "rope_base": 5e4, "local_rope_base": 5e4, "device": "cpu", "micro_batch": 2,
    "fewest_workers": 1, "micro_batch_tokens": 4096, "revisions_every": 2, "revisions_every_tokens": 4096, "zero_stage": 2, "optimizer": "stable-adamw",
}  # fmt: skip
NOT_VARIED = {"phases", "phases_by_size", "mix", "rewarmup_steps", "deepspeed", "callbacks", "pretraining_seeds"}
"""They say when others apply, and enter a key through the history or through what they change; callbacks need a package."""


def other_than(name: str, value: Any) -> Any:
    if name in OTHERS:
        return OTHERS[name]
    return not value if isinstance(value, bool) else value + 1


def test_what_why_lists_as_in_the_key_changes_it_and_the_rest_does_not(made: Path) -> None:
    contents = Contents(made / "store")
    (trained,) = [each for each in of_kind(contents, StoredState) if contents.origin(each).facts]
    origin, model = contents.origin(trained), parse_name("tiny-mlm40-12", ["tiny"])
    recipe = Study(made, made / "store").loaded.recipe.model_copy(update={"zero_stage": 0})
    for name in Recipe.model_fields.keys() - NOT_VARIED:
        changes = {name: other_than(name, getattr(recipe, name))}
        changed = Recipe.model_validate({**recipe.model_dump(mode="json"), **changes})
        keys = [history(model, each).key(study_fingerprint(each, "corpus", 100)) for each in (recipe, changed)]
        assert (name in origin.facts) != (name in origin.free), name
        assert (keys[0] != keys[1]) == (name in origin.facts), name


def test_a_result_s_facts_are_those_of_its_key(made: Path) -> None:
    contents = Contents(made / "store")
    study = Study(made, made / "store")
    cell = study.cells(prepare_study(study.loaded, study.place))[0]
    facts = contents.origin(StoredResult(made / "store", cell_key(cell))).facts
    assert set(cell.identity()) | {"weights", "task", "task_data", "learning_rate", "seed", "engine"} == set(facts)
    for change in ({"weights": "0"}, {"task_data": "0"}, {"learning_rate": 2e-3}, {"seed": 1}):
        assert cell_key(dataclasses.replace(cell, **change)) != cell_key(cell)
    assert cell_key(dataclasses.replace(cell, model="other")) == cell_key(cell)


def test_a_damaged_result_is_named_and_not_taken_for_one_that_needs_nothing(store: Path) -> None:
    file = next(store.glob("cells/??/*.json"))
    file.write_text(json.dumps(sealed({**unsealed(json.loads(file.read_text())), "key": "0"})))
    with pytest.raises(UserError, match="it holds the result of another key"):
        only_of(Contents(store), None, results=False)

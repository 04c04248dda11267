"""How studies and sweeps were last run, as a store remembers it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import mlmclm
from mlmclm.configuration import parse_config
from mlmclm.errors import UserError
from mlmclm.storage.place import Place, packaged_studies
from mlmclm.studies.study_file import AnyFile, StudyFile, SweepFile, load_file, load_study
from mlmclm.studies.study_record import KnownStudy, as_yaml, known_studies, write_record
from mlmclm.studies.study_sweep import StudySweep
from mlmclm.sweeps.space import Space
from small_models import FEELINGS

EXAMPLES = list(packaged_studies().values())


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A store, and folders with data and a task of the user's own."""
    (tmp_path / "data").mkdir()
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "film_feelings.yaml").write_text(FEELINGS)
    return Place(tmp_path / "store", tmp_path / "data", (tmp_path / "own",))


def study_of(folder: Path) -> StudyFile:
    path = folder / "study.yaml"
    shutil.copy(next(file for file in EXAMPLES if file.name == "quickstart.yaml"), path)
    return load_study(path)


def remember(file: AnyFile, place: Place, command: str = "", tasks: tuple[str, ...] = ("sst2",)) -> None:
    space = {"tasks": tasks, "learning_rates": [1e-3], "seeds": [0], "protocol": {"max_steps": 5}}
    write_record(StudySweep(file, place, parse_config(Space, space, where="space")), command, {})


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_the_copy_of_a_study_is_the_study(file: Path, place: Place, tmp_path: Path) -> None:
    study = load_study(file)
    (tmp_path / "copy.yaml").write_text(as_yaml(StudySweep(study, place, Space.model_construct())))
    copied = load_file(tmp_path / "copy.yaml", copy_of=file)
    assert (copied, copied.folder) == (study, study.folder)


def test_a_name_finds_the_study_with_the_data_and_tasks_of_its_last_run(place: Place, tmp_path: Path) -> None:
    study, command = study_of(tmp_path), "mlmclm study study.yaml --data data"
    remember(study, place, command, tasks=("feelings", "sst2"))
    shutil.rmtree(place.task_dirs[0])
    bare = mlmclm.open(place.store)
    by_name, by_file = (bare.study(which) for which in ("quickstart", tmp_path / "study.yaml"))
    for found in (by_name, by_file):
        assert found.file == study and found.command == command
        assert found.place.data_root == place.data_root
        (own,) = found.place.task_dirs
        assert [file.read_text() for file in own.iterdir()] == [FEELINGS]
    assert by_name.file.folder == tmp_path, "paths in the study are still relative to its file"
    # What the command gives comes first.
    (tmp_path / "other").mkdir()
    given = mlmclm.open(place.store, data=tmp_path / "other", task_dirs=[tmp_path / "mine"])
    assert given.study("quickstart").place == given.place
    assert given.study(tmp_path / "study.yaml").command.endswith(f"--data {tmp_path}/other --task-dir {tmp_path}/mine")
    # A later run without the task leaves none behind.
    remember(study, Place(place.store))
    assert bare.study("quickstart").place == bare.place


def test_an_unknown_name_is_an_error_with_the_nearest_and_all_known_names(place: Place, tmp_path: Path) -> None:
    remember(study_of(tmp_path), place)
    (tmp_path / "sweep.yaml").write_text("name: mine\nmodels: {a: a}\nspace: glue\n")
    remember(load_file(tmp_path / "sweep.yaml"), place)
    store = mlmclm.open(place.store)
    assert isinstance(store.study("mine").file, SweepFile)
    with pytest.raises(UserError, match=r"unknown study or sweep 'quickstrat'\. Did you mean 'quickstart'\? Allowed: mine, quickstart\."):  # fmt: skip
        store.study("quickstrat")
    (place.store / "studies" / "older" / "models" / "1m-clm-1k").mkdir(parents=True)
    with pytest.raises(
        UserError, match=r"older: .* has no run\.json: its models are not fine-tuned yet\. Give its file"
    ):
        store.study("older")
    (place.store / "studies" / "mine" / "run.json").write_text("{}")
    with pytest.raises(UserError, match=r"run\.json: damaged \(it has no checksum\)\. Run the study or sweep again"):
        store.study("mine")


def test_the_studies_of_a_store_are_listed(place: Place, tmp_path: Path) -> None:
    assert known_studies(place.store) == []
    remember(study_of(tmp_path), place)
    (place.store / "studies" / "trained" / "models" / "1m-clm-1k").mkdir(parents=True)
    (place.store / "studies" / "empty").mkdir()
    assert known_studies(place.store) == [
        KnownStudy("quickstart", "study", None, 0, 0, 0, 0),
        KnownStudy("trained", "study", None, 1, 0, 0, 0),
    ]

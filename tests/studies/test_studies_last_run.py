"""How studies and sweeps were last run, as a store remembers it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mlmclm.errors import UserError
from mlmclm.studies.last_run import KnownStudy, copy_of, find_run, known_studies, remember_run
from mlmclm.studies.place import Place
from mlmclm.studies.study_file import StudyFile, load_study
from mlmclm.studies.sweep_file import SweepFile, load_sweep
from small_models import FEELINGS

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


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


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_the_copy_of_a_study_is_the_study(file: Path, tmp_path: Path) -> None:
    study = load_study(file)
    (tmp_path / "copy.yaml").write_text(copy_of(study))
    copied = load_study(tmp_path / "copy.yaml", copy_of=file)
    assert (copied, copied.folder) == (study, study.folder)


def test_a_name_finds_the_study_with_the_data_and_tasks_of_its_last_run(place: Place, tmp_path: Path) -> None:
    study = study_of(tmp_path)
    remember_run(study, copy_of(study), place, "mlmclm study study.yaml --data data", tasks=("feelings", "sst2"))
    shutil.rmtree(place.task_dirs[0])
    bare = Place(place.store)
    by_name, by_file = (find_run(which, bare) for which in ("quickstart", str(tmp_path / "study.yaml")))
    for found in (by_name, by_file):
        assert found.file == study and found.command == "mlmclm study study.yaml --data data"
        assert found.place.data_root == place.data_root
        (own,) = found.place.task_dirs
        assert [file.read_text() for file in own.iterdir()] == [FEELINGS]
    assert by_name.file.folder == tmp_path, "paths in the study are still relative to its file"
    # What the command gives comes first.
    given = Place(place.store, tmp_path / "other", (tmp_path / "mine",))
    assert (find_run("quickstart", given).place, find_run(str(tmp_path / "study.yaml"), given).command) == (given, None)
    # A later run without the task leaves none behind.
    remember_run(study, copy_of(study), Place(place.store), "mlmclm study study.yaml", tasks=("sst2",))
    assert find_run("quickstart", bare).place == bare


def test_an_unknown_name_is_an_error_with_the_nearest_and_all_known_names(place: Place, tmp_path: Path) -> None:
    study = study_of(tmp_path)
    remember_run(study, copy_of(study), place, "", tasks=())
    (tmp_path / "sweep.yaml").write_text("name: mine\nmodels: {a: a}\nspace: glue\n")
    remember_run(load_sweep(tmp_path / "sweep.yaml"), "name: mine\nmodels: {a: /a}\nspace: glue\n", place, "", tasks=())
    assert isinstance(find_run("mine", place).file, SweepFile)
    with pytest.raises(UserError, match=r"unknown study or sweep 'quickstrat'\. Did you mean 'quickstart'\? Allowed: mine, quickstart\."):  # fmt: skip
        find_run("quickstrat", place)
    (place.store / "studies" / "older" / "models" / "1m-clm-1k").mkdir(parents=True)
    with pytest.raises(
        UserError, match=r"older: .* has no run\.json: its models are not fine-tuned yet\. Give its file"
    ):
        find_run("older", place)
    (place.store / "studies" / "mine" / "run.json").write_text("{}")
    with pytest.raises(UserError, match=r"run\.json: damaged \(it has no checksum\)\. Run the study or sweep again"):
        find_run("mine", place)


def test_the_studies_of_a_store_are_listed(place: Place, tmp_path: Path) -> None:
    assert known_studies(place.store) == []
    study = study_of(tmp_path)
    remember_run(study, copy_of(study), place, "", tasks=())
    (place.store / "studies" / "trained" / "models" / "1m-clm-1k").mkdir(parents=True)
    (place.store / "studies" / "empty").mkdir()
    assert known_studies(place.store) == [
        KnownStudy("quickstart", "study", None, 0, 0, 0, 0),
        KnownStudy("trained", "study", None, 1, 0, 0, 0),
    ]

"""`import mlmclm`: studies from Python, with the same pipeline, plan and errors as the command line."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import mlmclm
from mlmclm.cli.main import main
from mlmclm.studies.new_study import new_study
from small_study import write_study


def test_importing_the_package_loads_nothing_and_names_everything() -> None:
    code = "import sys, mlmclm; print(*sorted({'torch', 'ray', 'numpy', 'pandas', 'rich', 'pydantic'} & sys.modules.keys())); print(*dir(mlmclm))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded, names = done.stdout.splitlines()
    assert loaded == "" and set(mlmclm.__all__) <= set(names.split())
    assert all(callable(getattr(mlmclm, name)) for name in mlmclm.__all__ if name != "tune") and callable(
        mlmclm.tune.Finetune
    )
    with pytest.raises(AttributeError, match="no attribute 'stduy'"):
        mlmclm.stduy  # noqa: B018


def test_a_room_that_is_imported_does_not_hide_the_function_study() -> None:
    import mlmclm.studies.study

    assert callable(mlmclm.study)


def test_a_dict_is_a_study_as_its_file_is(tmp_path: Path) -> None:
    path = write_study(tmp_path)
    values = yaml.safe_load(path.read_text())
    plans = [mlmclm.study(each, store=tmp_path / "store", data=tmp_path / "data").plan() for each in (values, path)]
    # Numbers that are not known are NaN, and from Python 3.13 on dataclasses that hold them aren't equal.
    assert repr(plans[0]) == repr(plans[1]) and plans[0].steps_to_train == 50
    with pytest.raises(mlmclm.UserError, match=r"study: unknown key 'modles'\. Did you mean 'models'\?"):
        mlmclm.study({**values, "modles": []})
    with pytest.raises(mlmclm.UserError, match="Packaged studies: continue, howto, local-data, paper, quickstart"):
        mlmclm.study("quickstrat")
    assert mlmclm.study("quickstart", store=tmp_path / "store").name == "quickstart"


def test_settings_beside_a_file_are_checked_like_it_and_stand_in_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = mlmclm.study("quickstart", overrides=["name=larger", "recipe.batch=32", "seeds=[0, 1]"], store=tmp_path)
    assert made.trained_file.recipe.batch == 32
    assert (made.name, made.file.seeds) == ("larger", (0, 1))
    assert made.command == "mlmclm study quickstart name=larger recipe.batch=32 'seeds=[0, 1]'"
    spaced = write_study(tmp_path / "my studies")
    assert mlmclm.study(spaced, store=tmp_path).command == f"mlmclm study '{spaced}'"
    with pytest.raises(mlmclm.UserError, match=r"unknown key 'recipe\.bach'\. Did you mean 'recipe\.batch'\?"):
        mlmclm.study("quickstart", overrides=["recipe.bach=32"], store=tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["study", "quickstart", "recipe.batch=none", "--dry-run", "--store", str(tmp_path)])
    assert ended.value.code == 2 and "recipe.batch: " in capsys.readouterr().err


def test_a_plan_counts_the_cells_at_least_and_at_most_of_a_grid_that_extends_itself(tmp_path: Path) -> None:
    path = write_study(tmp_path)
    space = {
        "tasks": ["pydocs-kind", "pydocs-qa"],
        "learning_rates": {"values": [1e-3, 2e-3], "extend": 2},
        "seeds": [0, 1, 2],
        "protocol": {"max_steps": 5, "max_length": 32, "stride": 8},
    }
    values = yaml.safe_load(path.read_text()) | {"space": space}
    plan = mlmclm.study(values, store=tmp_path / "store", data=tmp_path / "data").plan()
    models = len(values["models"])
    at_most = models * 2 * 4 * 3
    assert plan.sweep is not None and plan.sweep.cells == models * 2 * 2 * 3
    # Two at each end: one model can be best at the lowest rate, and another at the highest.
    assert plan.sweep.cells_to_come == plan.as_dict()["cells_to_come_at_most"] == at_most
    assert f"and at most {at_most} at further learning rates" in str(plan)
    values["space"]["learning_rates"] = [1e-3, 2e-3]
    assert "further" not in str(mlmclm.study(values, store=tmp_path / "store", data=tmp_path / "data").plan())


def test_folders_come_from_the_environment_as_for_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_study(tmp_path)
    monkeypatch.setenv("MLMCLM_STORE", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("MLMCLM_DATA", str(tmp_path / "data"))
    place = mlmclm.study(path).place
    assert (place.store, place.data_root) == (tmp_path / "elsewhere", tmp_path / "data")
    with pytest.raises(mlmclm.UserError, match="no such folder"):
        mlmclm.study(path, data=tmp_path / "nowhere")


def test_a_new_study_can_be_read_and_overwrites_nothing(tmp_path: Path) -> None:
    study, space = new_study(tmp_path / "my study")
    made = mlmclm.study(study, store=tmp_path / "store")
    assert made.name == "my-study" and made.file.find_space().tasks
    assert study.read_text().startswith("# A study:") and space.read_text().startswith("# A search space:")
    study.write_text("mine")
    with pytest.raises(mlmclm.UserError, match=r"study\.yaml: it exists and is not overwritten"):
        new_study(tmp_path / "my study")
    assert study.read_text() == "mine"


def public_functions() -> Iterator[tuple[str, Any]]:
    """All that a user calls: the functions of the package and of `mlmclm.tune`, and the methods of the public classes."""
    for name in (each for each in mlmclm.__all__ if each != "tune"):
        found = getattr(mlmclm, name)
        if not inspect.isclass(found):
            yield name, found
        elif not issubclass(found, Exception):
            methods = inspect.getmembers(found, inspect.isfunction)
            yield from ((f"{name}.{own}", each) for own, each in methods if own == "__init__" or own[0] != "_")
    yield "tune.param_space", mlmclm.tune.param_space


def test_every_public_function_refuses_an_argument_that_it_does_not_have() -> None:
    found = dict(public_functions())
    assert {"sweep", "Store.__init__", "Study.run", "tune.param_space"} <= set(found)
    for function in found.values():
        with pytest.raises(TypeError, match="nonsense"):
            function(nonsense=3)
        parameters = inspect.signature(function).parameters
        if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            with pytest.raises(
                mlmclm.UserError, match=r"\(\): unknown argument 'stor'\. Did you mean 'store'\? Allowed: "
            ):
                function(stor="elsewhere")


def test_an_unknown_argument_is_named_with_the_nearest_one() -> None:
    with pytest.raises(mlmclm.UserError, match=r"sweep\(\): unknown argument 'baselin'\. Did you mean 'baseline'\?"):
        mlmclm.sweep("m", ["sst2"], "glue", baselin="m")  # type: ignore[call-arg]
    with pytest.raises(
        mlmclm.UserError, match=r"param_space\(\): unknown argument 'task_dir'\. Did you mean 'task_dirs'\?"
    ):
        mlmclm.tune.param_space("glue", ["m"], task_dir=["tasks"])  # type: ignore[call-arg]
    with pytest.raises(mlmclm.UserError, match=r"open\(\): unknown argument 'dta'\. Did you mean 'data'\?"):
        mlmclm.open(dta="here")  # type: ignore[call-arg]

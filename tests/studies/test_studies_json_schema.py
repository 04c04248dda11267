"""JSON Schemas accept every file that ships, and what validators accept in a short form; they refuse wrong keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlmclm.cli.main import main
from mlmclm.configuration import parse_config, read_yaml
from mlmclm.errors import UserError
from mlmclm.studies.new_study import KINDS, schema_of
from mlmclm.studies.study_file import SweepFile

jsonschema = pytest.importorskip("jsonschema", reason="comes with Ray")
ROOT = Path(__file__).parents[2]
SHIPPED = {
    **dict.fromkeys([*ROOT.glob("examples/*.yaml"), *ROOT.glob("replications/*.yaml")], "study"),
    **dict.fromkeys(ROOT.glob("tune_spaces/*.yaml"), "space"),
    **dict.fromkeys(ROOT.glob("tune_spaces/protocols/*.yaml"), "protocol"),
    **dict.fromkeys(ROOT.glob("claims/*.yaml"), "claims"),
}
SPACE: dict[str, Any] = {"tasks": ["sst2"], "learning_rates": [1e-3], "seeds": [0], "protocol": {"max_steps": 5}}
SWEEP: dict[str, Any] = {"models": ["a"], "space": "glue"}


def errors(kind: str, value: Any) -> list[str]:
    schema = schema_of(kind)
    jsonschema.Draft202012Validator.check_schema(schema)
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(value)]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_file_is_accepted_and_a_wrong_key_in_it_is_not(path: Path) -> None:
    value, kind = read_yaml(path), SHIPPED[path]
    assert errors(kind, value) == []
    assert errors(kind, {**value, "sedes": [0]})


def test_all_kinds_of_shipped_files_were_tried() -> None:
    assert {path.stem for path in SHIPPED} >= {"quickstart", "paper", "skill", "variance", "glue", "study", "standard"}
    assert set(SHIPPED.values()) | {"sweep"} == set(KINDS)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("space", SPACE),
        ("space", {"tasks": ["sst2"], "protocol": "study"}),
        ("space", {"tasks": ["sst2"], "protocol": {"base": "study", "epochs": 1, "max_steps": None}}),
        ("space", {**SPACE, "seeds": [0, {"head": 0, "order": 1, "dropout": 0}]}),
        ("space", {**SPACE, "seeds": {"head": [0], "order": [0, 1], "dropout": [0]}}),
        ("space", {**SPACE, "learning_rates": {"values": [1e-4, 1e-3], "extend": True}}),
        ("space", {**SPACE, "protocol": "standard", "learning_rates": {"extend": 2}}),
        ("space", {**SPACE, "per_task": {"sst2": {"batch_size": 4}}, "per_model": {"a": {"clip_norm": None}}}),
        ("space", {**SPACE, "grid": {"weight_decay": [0, 0.1]}, "task_grids": {"sst2": {"batch_size": [8]}}}),
        ("sweep", SWEEP),
        ("sweep", {**SWEEP, "models": {"mine": "a"}, "tasks": ["sst2"], "per_model": {"mine": {"batch_size": 4}}}),
        ("protocol", {"protocol": {"max_steps": 5}, "seeds": [0]}),
    ],
)
def test_each_accepted_form_is_in_the_schema(kind: str, value: dict[str, Any]) -> None:
    parse_config(KINDS[kind], value, where="file")  # the validators accept it, too
    assert errors(kind, value) == []


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("space", {"tasks": ["sst2"], "protocol": {"max_steps": 5}}),
        ("space", {**SPACE, "protocol": {"max_step": 5}}),
        ("space", {**SPACE, "protocol": {"base": "study", "max_step": 5}}),
        ("space", {**SPACE, "tasks": []}),
        ("space", {**SPACE, "learning_rates": []}),
        ("space", {**SPACE, "learning_rates": [1e-3, 1e-3]}),
        ("space", {**SPACE, "learning_rates": {"values": [1e-4, 1e-3], "extent": True}}),
        ("space", {**SPACE, "learning_rates": {"values": [1e-4, 1e-3], "extend": 11}}),
        ("space", {**SPACE, "seeds": {"head": [0], "order": [0]}}),
        ("space", {**SPACE, "seeds": {"head": [0], "ordre": [0], "dropout": [0]}}),
        ("space", {**SPACE, "per_model": {"a": {"batchsize": 4}}}),
        ("space", {**SPACE, "per_task": {"sst2": {"batchsize": 4}}}),
        ("space", {**SPACE, "grid": {"max_length": [8, 16]}}),
        ("space", {**SPACE, "rule": "median"}),
        ("sweep", {**SWEEP, "models": []}),
        ("sweep", {**SWEEP, "model": "a"}),
        ("sweep", {**SWEEP, "per_model": {"a": {"batchsize": 4}}}),
        ("protocol", {"protocol": {"max_steps": 5}, "tasks": ["sst2"]}),
    ],
)
def test_what_validators_refuse_the_schema_refuses(kind: str, value: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        found = parse_config(KINDS[kind], value, where="file")
        if isinstance(found, SweepFile):
            found.find_space()
    assert errors(kind, value)


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_is_described_and_editors_see_underscores_as_numbers(kind: str) -> None:
    schema = schema_of(kind)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    bare = [
        name for name, key in schema["properties"].items() if not ("description" in key or "$ref" in json.dumps(key))
    ]
    assert set(bare) <= {"description", "device"}
    corpus = {"source": "text", "max_tokens": "4_200_000"}
    study = {"name": "s", "models": ["1m-clm-10"], "corpus": corpus, "recipe": {}, "space": "glue"}
    assert errors("study", study) == []
    assert errors("study", {**study, "corpus": {**corpus, "max_tokens": "many"}})


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["init", "--schema", "space"])
    assert not ended.value.code and json.loads(capsys.readouterr().out) == schema_of("space")
    with pytest.raises(SystemExit) as ended:
        main(["init", "--schema", "spce"])
    assert ended.value.code == 2 and "Did you mean 'space'?" in capsys.readouterr().err

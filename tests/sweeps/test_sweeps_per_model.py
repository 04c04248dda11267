"""Overrides by task and by model: which one holds, for which cells, and what a wrong one is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from mlmclm.errors import UserError
from mlmclm.finetuning.cell import cell_key
from mlmclm.studies.study_file import load_file, load_study
from mlmclm.studies.study_sweep import study_space
from mlmclm.sweeps.cells import SweepModel, expand
from mlmclm.sweeps.space import Space, find_space

SPACE: dict[str, Any] = {
    "tasks": ["sst2", "conll2003"],
    "learning_rates": [1e-3],
    "seeds": [0],
    "protocol": {"base": "study", "batch_size": 16, "weight_decay": 0.05},
    "per_task": {"sst2": {"batch_size": 4, "clip_norm": 2.0}},
    "per_model": {"big": {"batch_size": 2}},
}


def write(folder: Path, name: str, content: dict[str, Any]) -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump(content))
    return path


def settings(space: Space, model: str, task: str) -> tuple[Any, ...]:
    found = space.for_model(model).protocol_for(task)
    return found.batch_size, found.epochs, found.weight_decay, found.clip_norm


def test_a_setting_is_the_model_s_else_the_task_s_else_the_protocol_s(tmp_path: Path) -> None:
    space = find_space(write(tmp_path, "space.yaml", SPACE))
    assert settings(space, "small", "sst2") == (4, None, 0.05, 2.0)
    assert settings(space, "small", "conll2003") == (16, 1, 0.05, 1.0)  # one epoch is the named protocol's own override
    assert settings(space, "big", "sst2") == (2, None, 0.05, 2.0)
    assert settings(space, "big", "conll2003") == (2, 1, 0.05, 1.0)


def test_a_sweep_file_s_overrides_precede_those_of_its_space(tmp_path: Path) -> None:
    write(tmp_path, "space.yaml", SPACE)
    sweep = {
        "models": {"big": "a", "small": "b"}, "space": "space.yaml",
        "per_task": {"sst2": {"batch_size": 5}, "conll2003": {"weight_decay": 0.5}},
        "per_model": {"big": {"clip_norm": 3.0}, "small": {"epochs": 2, "max_steps": None}},
    }  # fmt: skip
    space = load_file(write(tmp_path, "sweep.yaml", sweep)).find_space()
    assert settings(space, "big", "sst2") == (2, None, 0.05, 3.0)
    assert settings(space, "small", "sst2") == (5, 2, 0.05, 2.0)
    assert settings(space, "small", "conll2003") == (16, 2, 0.5, 1.0)
    alone = load_file(write(tmp_path, "one.yaml", {**sweep, "tasks": ["conll2003"], "per_task": {}})).find_space()
    assert (alone.tasks, set(alone.per_task)) == (("conll2003",), {"conll2003"})


def test_an_override_changes_the_cells_of_its_model_only(tmp_path: Path) -> None:
    models = [SweepModel(name, tmp_path, f"weights of {name}") for name in ("big", "small")]
    data = dict.fromkeys(SPACE["tasks"], "data")

    def keys(content: dict[str, Any]) -> dict[tuple[str, str], str]:
        space = find_space(write(tmp_path, "space.yaml", content))
        cells = [cell for model in models for cell in expand(space.for_model(model.name), [model], data)]
        return {(cell.model, cell.task): cell_key(cell) for cell in cells}

    with_override, without = keys(SPACE), keys({**SPACE, "per_model": {}})
    changed = {pair for pair in without if with_override[pair] != without[pair]}
    assert changed == {("big", "sst2"), ("big", "conll2003")}


def test_lengths_of_a_model_are_settled_at_its_own_context(tmp_path: Path) -> None:
    content = {**SPACE, "per_model": {"short": {"max_length": 40, "stride": 8}, "half": {"length_share": 0.5}}}
    space = find_space(write(tmp_path, "space.yaml", content))
    found = {model: space.for_model(model).at_context(512).protocol_for("sst2") for model in ("short", "half", "other")}
    assert {model: (each.max_length, each.stride) for model, each in found.items()} == {
        "short": (40, 8), "half": (256, 64), "other": (507, 126),
    }  # fmt: skip


STUDY: dict[str, Any] = {
    "name": "s",
    "models": ["1m-untrained", "1m-clm-25%-mlm40-40"],
    "corpus": {"source": "text"},
    "tokenizer": {"train_vocab_size": 400},
    "recipe": {"block_length": 64, "decay_steps": 5, "warmup_steps": 5},
    "space": "space.yaml",
}


def test_a_study_s_model_may_be_named_by_shares_and_its_tokens_are_shared(tmp_path: Path) -> None:
    write(tmp_path, "space.yaml", {**SPACE, "per_model": {}})
    study = write(tmp_path, "study.yaml", {**STUDY, "per_model": {"1m-clm-25%-mlm40-40": {"batch_size": 3}}})
    space = study_space(load_study(study))
    assert settings(space, "1m-clm-10-mlm40-40", "sst2")[0] == 3
    assert settings(space, "1m-untrained", "sst2")[0] == 4
    study = write(tmp_path, "study.yaml", {**STUDY, "per_model": {"1m-untrained": {"max_length": 32}}})
    with pytest.raises(UserError, match=r"per_model\.1m-untrained: max_length cannot differ between a study's models"):
        study_space(load_study(study))
    study = write(tmp_path, "study.yaml", {**STUDY, "per_model": {"1m-untraned": {"batch_size": 3}}})
    with pytest.raises(UserError, match=r"per_model: unknown model '1m-untraned'. Did you mean '1m-untrained'\?"):
        study_space(load_study(study))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"per_model": {"big": {"batchsize": 2}}}, "per_model.big: unknown key 'batchsize'. Did you mean 'batch_size'?"),
        ({"per_model": {"big": {"batch_size": 0}}}, "per_model.big: batch_size"),
        ({"per_model": {"big": 3}}, "per_model.big"),
        ({"per_model": {"big": {"head_dropout": 0.2}}, "grid": {"head_dropout": [0.0, 0.1]}},
         "per_model.big: head_dropout is an axis of the grid"),
        ({"per_model": {"big": {"max_steps": None}}}, "per_model.big: give 'max_steps' or 'epochs'"),
    ],
)  # fmt: skip
def test_a_wrong_override_is_refused_when_the_file_is_read(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        find_space(write(tmp_path, "space.yaml", {**SPACE, **change}))
    assert "space.yaml: " in str(caught.value) and message in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": []}, "sweep.yaml: tasks: "),
        ({"tasks": ["sst2", "sst2"]}, "sweep.yaml: tasks: sst2 is listed more than once"),
        ({"per_task": {"sst3": {}}}, "per_task: unknown task 'sst3'. Did you mean 'sst2'?"),
        ({"per_task": {"sst2": {"batchsize": 1}}}, "space.yaml, with what the study or sweep changes: per_task.sst2"),
        ({"per_model": {"big": {"batchsize": 1}}}, "Did you mean 'batch_size'?"),
    ],
)
def test_a_wrong_sweep_file_is_refused_too(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    write(tmp_path, "space.yaml", SPACE)
    path = write(tmp_path, "sweep.yaml", {"models": ["a"], "space": "space.yaml", **change})
    with pytest.raises(UserError) as caught:
        load_file(path).find_space()
    assert message in str(caught.value)

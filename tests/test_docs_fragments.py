"""Blocks of pages that are too costly to run are valid: YAML is accepted, options exist, Python compiles, modules are there."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from typer.main import get_command

import mlmclm
from mlmclm.cli.main import app
from mlmclm.configuration import parse
from mlmclm.errors import UserError
from mlmclm.plans.stages import history
from mlmclm.studies.study_file import StudyFile, SweepFile
from mlmclm.sweeps.space import Space
from mlmclm.tasks.declaration import Task

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = (
    "fine-tuning",
    "pretraining",
    "corpus",
    "evaluation",
    "models",
    "publish",
    "store",
    "deploy",
    "service",
    "studies",
    "replication",
)
STUDY = {
    "name": "example",
    "models": ["1m-clm-100"],
    "corpus": {"source": "texts"},
    "tokenizer": {"train_vocab_size": 1000},
    "recipe": {"block_length": 128, "batch": 32, "warmup_steps": 10, "decay_steps": 10},
    "space": "quickstart",
}
SPACE = {"tasks": ["sst2", "rte", "mnli"], "learning_rates": [1e-4], "seeds": [0], "protocol": {}}
TASK = {
    "name": "example",
    "family": "retrieval",
    "title": "An example",
    "source": "local",
    "folder": "example",
    "splits": {"train": "train", "validation_fraction": 0.1, "test": {"queries": "queries"}},
    "metric": "ndcg@10",
    "licence": "none",
    "citation": "none",
}
SWEEP = {"models": ["folder"], "space": "quickstart"}


def blocks(language: str) -> list[Any]:
    """The blocks of the pages, each named by its page and number; files with a name of their own are left out."""
    found = []
    for page in PAGES:
        text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        for number, (own, name, content) in enumerate(BLOCK.findall(text), 1):
            if own == language and not name:
                found.append(pytest.param(content, id=f"{page}-{number}"))
    return found


def joined(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The base with the block's keys; mappings that both have are joined."""
    both = {
        key: joined(base[key], value) for key, value in own.items() if isinstance(base.get(key), dict) and key != "mix"
    }
    return {**base, **own, **both}


@pytest.mark.parametrize("content", blocks("yaml"))
def test_yaml_is_part_of_a_file_that_is_accepted(content: str) -> None:
    own = yaml.safe_load(content)
    refused = []
    for kind, base in ((StudyFile, STUDY), (SweepFile, SWEEP), (Space, SPACE), (Task, TASK)):
        values = joined(base, own)
        if "corpora" in own:
            del values["corpus"]
        if "phases" in own.get("recipe", {}):  # they have schedules of their own
            values["recipe"] = {
                key: values["recipe"][key] for key in values["recipe"] if key not in ("warmup_steps", "decay_steps")
            }
        try:
            read = parse(kind, values, where=kind.__name__)
            if isinstance(read, StudyFile) and "models" in own:
                for name in read.parsed:
                    history(name, read.recipe)
        except UserError as error:
            refused.append(str(error))
        else:
            return
    pytest.fail("\n".join(refused))


@pytest.mark.parametrize("content", blocks("bash"))
def test_commands_have_verbs_and_options_that_exist(content: str) -> None:
    checked = 0
    for line in content.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        files = [word for word in words if re.match(r"(deploy|examples)/", word)]
        assert all((ROOT / file).exists() for file in files)
        checked += len(files)
        if "job" in words and "--" in words:  # `ray job submit ... -- mlmclm study FILE`
            words = words[words.index("--") + 1 :]
        if words[:1] == ["mlmclm"]:
            command: Any = get_command(app)
            context = click.Context(command, info_name="mlmclm")
            words = words[1:]
            while isinstance(command, click.Group):
                if words[0] not in command.commands:  # `mlmclm sweep FILE` is `mlmclm sweep run FILE`
                    words = [next(iter(command.commands)), *words]
                name, found, words = command.resolve_command(context, words)
                assert found is not None
                command, context = found, click.Context(found, parent=context, info_name=name)
            command.parse_args(context, words)
            checked += 1
        elif words[:2] == ["python", "-m"] and words[2].startswith("benchmarks."):
            assert (ROOT / f"{words[2].replace('.', '/')}.py").is_file()
            checked += 1
        elif words[:4] == ["pip", "install", "-c", "constraints.txt"]:
            pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").lower()
            assert all(f"\n{name}==" in pinned for name in words[4:])
            checked += 1
        elif words[:3] == ["python", "-m", "pytest"]:
            assert all((ROOT / file).is_file() for file in words[3:] if file.startswith("tests/"))
            checked += 1
    assert checked


@pytest.mark.parametrize("content", blocks("python"))
def test_python_compiles_and_names_what_the_package_has(content: str) -> None:
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "mlmclm":
            assert hasattr(mlmclm, node.attr)

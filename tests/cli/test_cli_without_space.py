"""A study without a search space is prepared and pretrained; only fine-tuning needs one. Its sources must be there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from small_study import write_study

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def words(tmp_path: Path) -> list[str | Path]:
    """The words that follow a verb, for a study without a space."""
    path = write_study(tmp_path)
    change(path, space=None)
    return [path, "--store", tmp_path / "store", "--data", tmp_path / "data"]


def change(study: str | Path, **values: Any) -> None:
    """Changes keys of a study file."""
    path = Path(study)
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | values))


def test_its_corpus_is_prepared_and_no_task(words: list[str | Path], run_apart: Call, tmp_path: Path) -> None:
    code, output, errors = run_apart("data", *words, "--json")
    assert code == 0, errors
    described = json.loads(output)
    assert described["tasks"] == {} and described["corpus"]["shards"] > 0
    assert not [*tmp_path.glob("store/tasks/*"), *tmp_path.glob("store/pydocs*")]
    code, output, errors = run_apart("data", *words)
    assert (code, output.splitlines()[-1]) == (0, "no tasks are prepared: the study names no search space")


def test_pretraining_needs_no_space_and_fine_tuning_says_what_to_give(words: list[str | Path], run_apart: Call) -> None:
    code, output, errors = run_apart("pretrain", *words, "--dry-run")
    assert code == 0 and "corpus prose: to be prepared" in output, errors
    for verb in (("study", "--dry-run"), ("study",), ("report",)):
        code, output, errors = run_apart(verb[0], *words, *verb[1:])
        assert (code, output) == (2, "")
        assert "study.yaml: space: it is missing" in errors and "quickstart" in errors


@pytest.mark.parametrize("changes", [{"tasks": ["sst2"]}, {"per_task": {"sst2": {"batch_size": 4}}}])
def test_changes_of_a_space_that_is_not_given_are_refused(
    words: list[str | Path], run_apart: Call, changes: dict[str, Any]
) -> None:
    change(words[0], **changes)
    code, _, errors = run_apart("data", *words)
    assert code == 2 and f"{next(iter(changes))}: it changes a search space, and none is given" in errors


def test_a_dry_run_refuses_a_source_that_neither_a_folder_nor_the_hub_has(
    words: list[str | Path], run_apart: Call, hub: object
) -> None:
    change(words[0], corpus={"source": "proze"})
    code, output, errors = run_apart("pretrain", *words, "--dry-run")
    assert (code, output) == (2, "")
    assert (
        "corpus source 'proze' is neither" in errors
        and "the Hugging Face Hub has no data set 'proze' that it shows" in errors
    )


def test_a_dry_run_that_cannot_ask_the_hub_shows_the_plan_and_fails(words: list[str | Path], run_apart: Call) -> None:
    change(words[0], corpus={"source": "owner/name"})
    code, output, errors = run_apart("pretrain", *words, "--dry-run")
    assert code == 1 and "stage 1m clm 0-30" in output
    assert "corpus source 'owner/name' is neither" in errors and "switched off by HF_HUB_OFFLINE. Unset it" in errors
    (Path(words[0]).parent / "texts").mkdir()
    for missing in ("my_texts", "texts/books"):
        change(words[0], corpus={"source": missing})
        code, output, errors = run_apart("pretrain", *words, "--dry-run")
        assert (code, output) == (2, "") and f"corpus source {missing!r} is neither" in errors, (
            "a folder that is missing"
        )
    for missing, near, status in (("texs/books", "texts", 1), ("my texts/books", "texts", 2), ("texts/a/b", "", 2)):
        change(words[0], corpus={"source": missing})
        code, _, errors = run_apart("pretrain", *words, "--dry-run")
        assert code == status, f"a name that the Hub can't have is a mistake, others may be on the Hub: {errors}"
        assert (f"Did you mean {near!r}?" in errors) == bool(near)

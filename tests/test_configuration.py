"""YAML files: what a reader would overlook is refused, with the file and the lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlmclm.configuration import Frozen, parse, read_yaml
from mlmclm.errors import UserError
from mlmclm.finetuning.protocol import Protocol
from mlmclm.plans.recipe import Recipe
from mlmclm.study.study_file import load_study
from mlmclm.sweeps.space import Space

EXAMPLE = Path(__file__).parents[1] / "examples" / "quickstart.yaml"


def written(folder: Path, text: str) -> Path:
    path = folder / "file.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\n\na: 3\n", "key 'a' is there twice, in lines 1 and 4; write one"),
        ("a: 1\nb:\n  c: 1\n  d: {e: 1, f: 2, e: 1}\n", "key 'e' is there twice, in lines 4 and 4"),
        ("- x: {1: a, '1': b}\n- 2: a\n  2: b\n", "key 2 is there twice, in lines 2 and 3"),
    ],
)
def test_a_key_that_is_there_twice_is_an_error_with_both_lines(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UserError) as caught:
        read_yaml(path)
    assert str(caught.value).startswith(f"{path}: {message}")


def test_keys_of_different_mappings_and_of_a_merge_may_be_the_same(tmp_path: Path) -> None:
    text = "base: &base {a: 1, b: 2}\nown: {<<: *base, b: 3}\nlist: [{a: 1}, {a: 2}]\n"
    assert read_yaml(written(tmp_path, text)) == {
        "base": {"a": 1, "b": 2}, "own": {"a": 1, "b": 3}, "list": [{"a": 1}, {"a": 2}],
    }  # fmt: skip


def test_a_merge_of_a_merge_may_override_a_key(tmp_path: Path) -> None:
    text = "base: &base {a: 1}\nmore: {own: &own {<<: *base, a: 2}}\ntop: {<<: *own, a: 3}\n"
    assert read_yaml(written(tmp_path, text)) == {"base": {"a": 1}, "more": {"own": {"a": 2}}, "top": {"a": 3}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 2024-13-45\n", "month must be in 1..12"),
        (f"a: {'9' * 5000}\n", "Exceeds the limit"),
        ("[" * 3000, "nested too deep"),
    ],
    ids=["date", "digits", "depth"],
)
def test_a_value_that_cannot_be_read_is_the_user_s_mistake(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UserError) as caught:
        read_yaml(path)
    assert str(caught.value).startswith(f"{path}: not valid YAML: {message}")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("recipe:", "recipe:\n  seed: true", "recipe.seed: expected a number (got True)"),
        ("recipe:", "recipe:\n  clip: .inf", "recipe.clip: Input should be a finite number (got inf)"),
        ("recipe:", "recipe:\n  rope_base: .inf", "recipe.rope_base: Input should be a finite number (got inf)"),
        ("recipe:", "recipe:\n  phases: {name: x}", "recipe.phases: expected a list (got {'name': 'x'})"),
        ("recipe:", "recipe:\n  adam_betas: true", "recipe.adam_betas: expected a list (got True)"),
        ("recipe:", "recipe:\n  compile: true", None),
    ],
)
def test_what_yaml_takes_for_a_number_or_a_list_is_refused_if_it_is_none(
    tmp_path: Path, old: str, new: str, message: str | None
) -> None:
    path = written(tmp_path, EXAMPLE.read_text(encoding="utf-8").replace(old, new, 1))
    if message is None:
        assert load_study(path).recipe.compile
        return
    with pytest.raises(UserError) as caught:
        load_study(path)
    assert f"{path}: {message}" in str(caught.value)


@pytest.mark.parametrize(
    ("model", "key"), [(Recipe, "zero_stage"), (Protocol, "max_evaluation_documents"), (Space, "gpus_per_cell")]
)
def test_true_is_no_number_wherever_an_annotation_has_it(model: type[Frozen], key: str) -> None:
    with pytest.raises(UserError, match=f"x: {key}: expected a number"):
        parse(model, {key: True}, where="x")


def test_a_second_recipe_in_a_study_file_does_not_silently_drop_the_first(tmp_path: Path) -> None:
    """README's snippet appended to the quickstart's file left the published recipe in place of the quickstart's."""
    path = written(tmp_path, EXAMPLE.read_text(encoding="utf-8") + "\nrecipe:\n  compile: true\n")
    with pytest.raises(UserError, match=r"file\.yaml: key 'recipe' is there twice, in lines \d+ and \d+"):
        load_study(path)
    assert load_study(EXAMPLE).recipe.block_length == 128

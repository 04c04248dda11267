"""YAML files: what a reader would overlook is refused, with the file and the lines."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mlmclm.configuration import Frozen, parse_config, read_yaml, with_overrides
from mlmclm.errors import UserError
from mlmclm.finetuning.protocol import Protocol
from mlmclm.plans.recipe import Recipe
from mlmclm.studies.study_file import load_study
from mlmclm.sweeps.space import Space
from mlmclm.tasks import declared_tasks
from mlmclm.tasks.declaration import Task

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
        parse_config(model, {key: True}, where="x")


def bomb(levels: int) -> str:
    """A list of ten aliases of a list of ten aliases, and so on."""
    lists = ["&a0 [x, x, x, x, x, x, x, x, x, x]"]
    for level in range(1, levels):
        lists.append(f"&a{level} [{', '.join([f'*a{level - 1}'] * 10)}]")
    return "\n".join(f"l{level}: {text}" for level, text in enumerate(lists)) + "\n"


@pytest.mark.parametrize(
    "text",
    [bomb(6), bomb(40), "a: &a [*a, *a]\n", "a: &a {b: 1}\nc: {<<: [" + ", ".join(["*a"] * 50_000) + "]}\n"],
    ids=["six levels", "forty levels", "a list of itself", "merges"],
)
def test_aliases_that_stand_for_too_much_are_refused_before_anything_is_constructed(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UserError) as caught:
        read_yaml(path)
    assert str(caught.value) == (
        f"{path}: it stands for more than 100,000 values, with what its aliases (*name) repeat; write a smaller file."
    )


def test_aliases_that_stand_for_little_are_read(tmp_path: Path) -> None:
    assert len(read_yaml(written(tmp_path, bomb(3)))["l2"]) == 10


@pytest.mark.parametrize(
    "text",
    [
        bomb(4).replace("l3:", "models:").replace("l0:", "x0:"),
        f"name: {'a' * 100_000}\n",
        f"{'a' * 100_000}: 1\n",
        "models: [" + ", ".join(["1"] * 50_000) + "]\n",
        f"models: [{'m' * 100_000}]\nrecipe: {{decay: {'d' * 100_000}}}\n",
    ],
    ids=["aliases", "value", "key", "many values", "nested"],
)
def test_a_message_about_huge_values_stays_short(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError) as caught:
        load_study(written(tmp_path, text))
    assert len(str(caught.value)) < 20_000


def test_names_in_a_study_that_become_paths_cannot_lead_outside(tmp_path: Path) -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    assert "corpus:\n" in text
    for key in ("config_name", "revision", "split", "validation_split"):
        path = written(tmp_path, text.replace("corpus:\n", f"corpus:\n  {key}: ../../secret\n", 1))
        with pytest.raises(UserError, match=rf"file\.yaml: corpus\.{key}: must not be an absolute path"):
            load_study(path)


@pytest.mark.parametrize("names", ["[no, yes]", "[on, off]", "[0, 1]", "[1.5, good]", "[2020-01-01, null]"])
def test_text_that_yaml_reads_as_something_else_is_refused_with_a_hint_about_quotes(names: str) -> None:
    text = (Path(declared_tasks.FOLDER) / "sst2.yaml").read_text().replace("[negative, positive]", names)
    with pytest.raises(
        UserError, match=r"label_names\.0: expected text\. YAML reads no, yes.*in quotes, such as 'no'"
    ) as caught:
        parse_config(Task, yaml.safe_load(text), where="own.yaml")
    assert len(str(caught.value).splitlines()) == (2 if "good" not in names else 1)


def test_settings_of_the_command_line_take_the_place_of_the_file_s() -> None:
    given = {"recipe": {"batch": 16, "workers": 2}, "seeds": [0], "space": "quickstart"}
    changes = ["recipe.batch=32", "seeds=[0, 1]", "per_model.a.epochs=3", "baseline=null"]
    assert with_overrides(given, changes, where="own.yaml") == {
        "recipe": {"batch": 32, "workers": 2},
        "seeds": [0, 1],
        "space": "quickstart",
        "per_model": {"a": {"epochs": 3}},
        "baseline": None,
    }
    assert given["recipe"] == {"batch": 16, "workers": 2}
    for change, message in (
        ("recipe.batch", r"'recipe\.batch': write KEY=VALUE"),
        ("recipe..batch=1", "write KEY=VALUE"),
        ("space.seeds=[1]", r"space\.seeds=\[1\]: space is 'quickstart' in own\.yaml, which has no keys"),
        ("seeds=[0", r"seeds=\[0: not valid YAML"),
    ):
        with pytest.raises(UserError, match=message):
            with_overrides(given, [change], where="own.yaml")

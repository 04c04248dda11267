"""Suites: the published study's set ships as one, and a wrong file says what is wrong with it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import yaml

from mlmclm.errors import UserError
from mlmclm.studies.recipe import Recipe
from mlmclm.studies.suite import FOLDER, find_suite, suite_names


def write(folder: Path, **content: object) -> str:
    path = folder / "suite.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return str(path)


def test_the_paper_s_suite_is_found_by_name_and_by_path() -> None:
    assert suite_names() == ["paper"]
    assert find_suite("paper") == find_suite(str(FOLDER / "paper.yaml"))


def test_the_paper_s_suite_is_what_its_description_counts() -> None:
    """15 base models and 6 continued; biphasic budgets of 12K, 22K, 42K with five shares of CLM; 6 checkpoints of 2 models."""
    found = [str(name) for name in find_suite("paper").parsed]
    base = [f"{size}-{objective}-42k" for size, objective in itertools.product(
        ["210m", "610m", "1b"], ["clm", "mlm20", "mlm30", "mlm40", "mlm50"])]  # fmt: skip
    biphasic = [f"610m-{objective}-{budget}k" for budget in (12, 22) for objective in ("clm", "mlm40")]
    for budget, share in itertools.product((12, 22, 42), (0.25, 0.5, 0.75)):
        switch = round(share * (budget - 2) * 1000)
        biphasic.append(f"610m-clm-{switch // 1000}k-mlm40-{budget}k" if switch % 1000 == 0 else f"610m-clm-{switch}-mlm40-{budget}k")  # fmt: skip
    continued = [f"610m-{first}-dec42k-mlm40-{42 + more}k" for first in ("clm", "mlm40") for more in (2, 12, 22)]
    middle = [f"610m-{objective}-42k-{step}" for objective in ("clm", "mlm40") for step in (1000, 2000, 5000, 10000, 20000, 40000)]  # fmt: skip
    assert (len(base), len(biphasic), len(continued), len(middle)) == (15, 13, 6, 12)
    assert sorted(found) == sorted(base + biphasic + continued + middle)


def test_the_published_recipe_takes_the_published_number_of_tokens() -> None:
    recipe = Recipe()
    assert recipe.batch * recipe.block_length == 2_359_296
    assert round(42_000 * recipe.batch * recipe.block_length / 1e9) == 99


def test_a_suite_s_size_is_that_of_names_without_one(tmp_path: Path) -> None:
    suite = find_suite(write(tmp_path, size="2m", models=["clm-100", "mlm40-100", "untrained", "1m-clm-100"]))
    assert [str(name) for name in suite.parsed] == ["2m-clm-100", "2m-mlm40-100", "2m-untrained", "1m-clm-100"]


def test_a_suite_s_recipe_changes_the_fields_that_it_names_only(tmp_path: Path) -> None:
    suite = find_suite(write(tmp_path, models=["1m-clm-100"], recipe={"decay_steps": 7}))
    study = Recipe(batch=8, warmup_steps=3)
    assert suite.recipe_over(study, where="here") == Recipe(batch=8, warmup_steps=3, decay_steps=7)


def test_a_suite_s_recipe_that_contradicts_the_study_s_is_refused(tmp_path: Path) -> None:
    suite = find_suite(write(tmp_path, models=["1m-clm-100"], recipe={"workers": 4}))
    with pytest.raises(UserError, match=r"here: .*batch 6 does not divide by workers 4"):
        suite.recipe_over(Recipe(batch=6), where="here")


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ({"modles": []}, "Did you mean 'models'"),
        ({"models": []}, "models"),
        ({"models": ["1m-cml-100"]}, "unknown objective 'cml'"),
        ({"models": ["1m-clm-100", "1m-clm-100"]}, "listed twice: 1m-clm-100"),
        ({"models": ["clm-100", "1m-clm-100"], "size": "1m"}, "listed twice: 1m-clm-100"),
        ({"models": ["clm-100"]}, "'clm-100' has no size"),
        ({"models": ["clm-100"], "size": "3m"}, "unknown size '3m'"),
        ({"models": ["1m-clm-100"], "recipe": {"batchs": 1}}, "Did you mean 'recipe.batch'"),
        ({"models": ["1m-clm-100"], "recipe": {"zero_stage": 4}}, "recipe.zero_stage"),
    ],
)
def test_a_wrong_suite_is_a_user_error_that_names_the_file_and_says_why(
    tmp_path: Path, content: dict[str, object], part: str
) -> None:
    path = write(tmp_path, **content)
    with pytest.raises(UserError) as caught:
        find_suite(path)
    assert part in str(caught.value)
    assert path in str(caught.value)


def test_an_unknown_suite_is_a_user_error_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"unknown suite 'papr'\. Did you mean 'paper'"):
        find_suite("papr")
    with pytest.raises(UserError, match="no such file"):
        find_suite("nowhere/suite.yaml")

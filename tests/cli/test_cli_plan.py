"""`mlmclm plan` on the command line: a table, JSON and a picture say the same; wrong options are refused before anything is written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from mlmclm.models.sizes import SIZES, parameters
from mlmclm.plans.suite import find_suite, suite_names
from small_study import write_study

Run = Callable[..., tuple[int, str]]
NAMES = ("610m-clm-42k", "610m-clm-10k-mlm40-42k", "610m-clm-42k-1000")


def test_json_has_stages_stretches_and_costs(run: Run) -> None:
    code, printed = run("plan", *NAMES, "--json", "--device", "a100", "--utilisation", "0.5")
    found = json.loads(printed)
    assert code == 0
    assert (found["steps"], found["steps_without_sharing"], found["steps_shared"]) == (74_000, 84_000, 10_000)
    assert found["tokens"] == 74_000 * 2_359_296
    assert [(part["from"], part["to"], len(part["models"])) for part in found["stages"][0]["stretches"]] == [
        (0, 1000, 3), (1000, 10_000, 2), (10_000, 42_000, 1),
    ]  # fmt: skip
    assert [stage["depth"] for stage in found["stages"]] == [0, 1]
    assert sum(stage["flops"] for stage in found["stages"]) == found["flops"] < found["flops_without_sharing"]
    assert found["device_hours"] == pytest.approx(found["flops"] / (312e12 * 0.5) / 3600)
    assert (found["device"]["name"], found["utilisation"]) == ("a100", 0.5)


def test_the_price_of_an_hour_gives_the_cost_of_pretraining(run: Run) -> None:
    found = json.loads(run("plan", *NAMES, "--device", "h100", "--price", "2.5", "--json")[1])
    assert found["cost"] == pytest.approx(2.5 * found["device_hours"])
    printed = run("plan", *NAMES, "--device", "h100", "--price", "2.5")[1]
    assert f"Cost of pretraining: {found['cost']:,.0f} for " in printed and "at 2.50 an hour." in printed
    assert run("plan", *NAMES, "--price", "-1")[0] == 2


def test_the_table_says_what_is_shared_and_what_is_assumed(run: Run) -> None:
    code, printed = run("plan", *NAMES, "--device", "h200")
    assert code == 0
    for part in ("610m clm 0-42000", "  610m mlm40 10000-42000", "0-10,000", "74,000", "84,000", "10,000 saved",
                 "NVIDIA H200 SXM, assuming 40% of its 989 TFLOP/s",
                 "at a vocabulary of 128,256 (as published: the paper's, Llama 3's)"):  # fmt: skip
        assert part in printed


def test_sizes_are_counted_with_their_architecture_s_published_vocabulary_unless_another_is_given(run: Run) -> None:
    words = ("plan", "610m-clm-42k", "ettin150m-clm-42k")
    found = json.loads(run(*words, "--json")[1])
    published = {"610m": 128_256, "ettin150m": 50_368}
    assert {name: size["vocabulary"] for name, size in found["sizes"].items()} == published
    assert found["sizes"]["ettin150m"]["parameters"] == parameters(SIZES["ettin150m"], 50_368)
    printed = run(*words)[1]
    assert (
        "ettin150m: 149 M parameters without LM head at a vocabulary of 50,368 (as published: ModernBERT's)" in printed
    )
    given = json.loads(run(*words, "--json", "--vocabulary", "1000")[1])
    assert {size["vocabulary"] for size in given["sizes"].values()} == {1000}
    assert "at a vocabulary of 1,000 (as given)" in run(*words, "--vocabulary", "1000")[1]
    saved = {
        stage["size"]: stage["flops"] - less["flops"]
        for stage, less in zip(found["stages"], given["stages"], strict=True)
    }
    for name, rows in published.items():
        # the LM head alone: 6 FLOPs a weight and labelled token, all tokens of a block but the first
        assert saved[name] == pytest.approx(6 * (rows - 1000) * SIZES[name].hidden * 42_000 * 1152 * 2047)


def test_a_suite_is_planned_by_name_and_by_path_over_a_study_s_recipe(run: Run, tmp_path: Path) -> None:
    code, printed = run("plan", "--suite", "paper", "--json")
    assert code == 0
    assert len(json.loads(printed)["models"]) == 50
    path = tmp_path / "suite.yaml"
    path.write_text(yaml.safe_dump({"size": "1m", "models": ["clm-300"], "recipe": {"batch": 16}}))
    study = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
    code, printed = run("plan", "--suite", path, "--study", study, "--json")
    found = json.loads(printed)
    assert (found["models"], found["tokens"]) == (["1m-clm-300"], 300 * 16 * 128)
    assert (found["sizes"]["1m"]["vocabulary"], found["sizes"]["1m"]["vocabulary_of"]) == (4096, "as given")


def test_the_picture_is_a_page_that_needs_nothing_beside_it(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    assert run("plan", *NAMES, "--picture", path)[0] == 0
    page = path.read_text(encoding="utf-8")
    assert not re.search(r"<(script|link)[^>]+(src|href)=", page)
    for part in ("610m clm 0-42000", "610m mlm40 10000-42000", "steps 0 to 1,000, for", "74,000 steps, 84,000"):
        assert part in page


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "name at least one model"),
        (["1m-clm-3000", "--suite", "paper"], "not both"),
        (["--suite", "papr"], "Did you mean 'paper'"),
        (["2m-clm-42k", "--device", "h1000"], "Did you mean 'h100'"),
        (["2m-clm-42k", "--utilisation", "1.5"], "at most 1"),
        (["2m-clm-42k", "--picture", "plan.svg"], "ends in .html"),
        (["2m-clm-42k", "--picture", "plan.png"], "ends in .html"),
    ],
)
def test_wrong_options_are_user_errors(run: Run, words: list[str], part: str) -> None:
    code, printed = run("plan", *words)
    assert code == 2
    assert part in " ".join(printed.split())


def test_pretrain_takes_the_models_of_a_suite_in_place_of_the_study_s(run: Run, tmp_path: Path) -> None:
    study, suite = write_study(tmp_path), tmp_path / "suite.yaml"
    suite.write_text(yaml.safe_dump({"size": "1m", "models": ["clm-60", "clm-20-mlm40-60"]}))
    words = ("pretrain", study, "--suite", suite, "--store", tmp_path / "store", "--data", tmp_path / "data")
    code, printed = run(*words, "--dry-run", "--json")
    found = json.loads(printed)
    assert code == 0
    assert [stage["title"] for stage in found["stages"]] == ["1m clm 0-60", "1m mlm40 20-60"]
    assert found["steps_to_train"] == 100
    code, printed = run(*words, "1m-clm-30", "--dry-run")
    assert code == 2
    assert "unknown model '1m-clm-30'" in " ".join(printed.split())


def test_a_suite_is_shown_with_its_mixes_and_what_departs_from_its_publication(run: Run) -> None:
    code, printed = run("plan", "--suite", "ettin")
    assert code == 0 and "Suite ettin departs from its publication" in printed
    suite = find_suite("ettin")
    assert suite.departures and all(f"- {each}" in printed for each in suite.departures)
    assert "ext: 70.4 % dclm-dolmino, 15.4 % starcoder" in printed
    found = json.loads(run("plan", "--suite", "ettin", "--json")[1])
    assert found["departures"] == list(suite.departures) and found["mixes"]["ext"]["dclm-dolmino"] == 704
    _, printed = run("plan", "--help")
    assert all(name in printed for name in suite_names())


def test_a_size_without_its_family_s_name_is_recognised(run: Run) -> None:
    for given, meant in (("17m", "ettin17m"), ("400m", "ettin400m"), ("150m", "ettin150m"), ("611m", "610m")):
        code, printed = run("plan", f"{given}-clm-1k")
        assert code == 2 and f"unknown size '{given}'. Did you mean '{meant}'?" in " ".join(printed.split())

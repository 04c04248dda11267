"""Suites: the published study's set ships as one, and a wrong file says what is wrong with it."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import yaml

from mlmclm.corpora.mixes import shares
from mlmclm.errors import UserError
from mlmclm.plans.recipe import Recipe
from mlmclm.plans.segments import segment_at
from mlmclm.plans.stages import make_plan
from mlmclm.plans.suite import FOLDER, find_suite, suite_names
from mlmclm.studies.prepare import with_suite
from mlmclm.studies.study_file import load_study

REFERENCE = Path(__file__).parents[3] / "shared" / "reference" / "mlm-vs-clm.md"


def write(folder: Path, **content: object) -> str:
    path = folder / "suite.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return str(path)


def test_the_paper_s_suite_is_found_by_name_and_by_path() -> None:
    assert suite_names() == ["ettin", "paper"]
    assert find_suite("paper") == find_suite(str(FOLDER / "paper.yaml"))


PUBLISHED = """
210m-clm-42k 210m-mlm20-42k 210m-mlm30-42k 210m-mlm40-42k 210m-mlm50-42k
610m-clm-42k 610m-mlm20-42k 610m-mlm30-42k 610m-mlm40-42k 610m-mlm50-42k
1b-clm-42k 1b-mlm20-42k 1b-mlm30-42k 1b-mlm40-42k 1b-mlm50-42k
610m-mlm40-12k 610m-clm-3k-mlm40-12k 610m-clm-6k-mlm40-12k 610m-clm-9k-mlm40-12k 610m-clm-12k
610m-mlm40-22k 610m-clm-5k-mlm40-22k 610m-clm-11k-mlm40-22k 610m-clm-17k-mlm40-22k 610m-clm-22k
610m-clm-10k-mlm40-42k 610m-clm-21k-mlm40-42k 610m-clm-32k-mlm40-42k
610m-clm-40k-mlm20-42k 610m-clm-40k-mlm30-42k 610m-clm-40k-mlm40-42k 610m-clm-40k-mlm50-42k
610m-clm-dec42k-mlm40-44k 610m-clm-dec42k-mlm40-54k 610m-clm-dec42k-mlm40-64k
610m-mlm40-dec42k-mlm40-44k 610m-mlm40-dec42k-mlm40-54k 610m-mlm40-dec42k-mlm40-64k
"""
"""The models of the published result files (`results/MODEL/...`), written down from them and not from the suite."""


def test_the_paper_s_suite_is_the_38_models_and_50_checkpoints_of_the_published_results() -> None:
    models = PUBLISHED.split()
    checkpoints = [
        f"610m-{objective}-42k-{step}"
        for objective in ("clm", "mlm40")
        for step in (1000, 2000, 5000, 10000, 20000, 40000)
    ]
    assert (len(models), len(models + checkpoints)) == (38, 50)
    assert sorted(map(str, find_suite("paper").parsed)) == sorted(models + checkpoints)


@pytest.mark.skipif(not REFERENCE.is_file(), reason="the reference page is not beside the checkout")
def test_the_biphasic_names_of_the_paper_s_suite_are_those_of_the_reference_page() -> None:
    text = REFERENCE.read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if "Names that exist in the published results" in line)
    listed = []
    for name in re.findall(r"`([^`]+)`", line):
        pattern = name if name.startswith("610m") else f"610m-clm-{name}"
        parts = [part.split(",") if "," in part else [part] for part in re.split(r"[{}]", pattern)]
        listed += ["".join(choice) for choice in itertools.product(*parts)]
    found = [str(name) for name in find_suite("paper").parsed]
    assert sorted(listed) == sorted(name for name in found if re.fullmatch(r"610m-clm-\d+k-mlm\d+-\d+k", name))


def test_every_phase_of_the_paper_s_suite_reaches_the_published_peak_rate() -> None:
    suite = find_suite("paper")
    recipe = suite.recipe_over(Recipe(), where="suite")
    for target in make_plan(suite.parsed, recipe).targets:
        for origin in {segment.origin for segment in target.segments}:
            segments = [segment for segment in target.segments if segment.origin == origin]
            rates = [segment.rate(step, recipe) for segment in segments for step in range(segment.start, segment.stop)]
            # The checkpoint at step 1,000 lies within the warm-up.
            assert max(rates) == (recipe.peak_learning_rate if target.step >= 2000 else 2.5e-4), str(target)


def test_the_published_recipe_takes_the_published_number_of_tokens() -> None:
    recipe = Recipe()
    assert recipe.batch * recipe.block_length == 2_359_296
    assert round(42_000 * recipe.batch * recipe.block_length / 1e9) == 99


def test_ettin_s_suite_has_the_released_models_and_about_their_tokens() -> None:
    suite = find_suite("ettin")
    recipe = suite.recipe_over(Recipe(), where="")
    plan = make_plan(suite.parsed, recipe)
    tokens = {str(name): target.tokens(recipe) for name, target in zip(plan.models, plan.targets, strict=True)}
    assert len(tokens) == 6 * (2 * 3 + 2)
    for size in ("17m", "32m", "68m", "150m", "400m", "1b"):
        share = 3 if size == "1b" else 1  # it saw a third of the tokens (arXiv 2507.11412)
        own = sorted({count for name, count in tokens.items() if name.startswith(f"ettin{size}-")})
        spent = [after - before for before, after in itertools.pairwise((0, *own))]
        published = [count / share for count in (1.7e12, 250e9, 50e9, 50e9)]
        assert spent == pytest.approx(published, rel=0.003)
        kinds = {str(name.last_objective) for name in plan.models if name.size == f"ettin{size}"}
        assert kinds == {"mlm30", "mlm15", "clm", "mntp15"}
    # Rates at the ends of the phases, as shares of the first peak: 1, a half, 4 % of a half, and 2 % of a half.
    (state,) = (target for target in plan.targets if str(target).startswith("ettin150m") and target.step == 434_200
                and str(target.segments[-1].objective) == "mntp15")  # fmt: skip
    ends = [
        segment_at(state.segments, end - 1).rate(end - 1, recipe) / 8e-4 for end in (360_000, 413_000, 423_600, 434_200)
    ]
    assert ends == pytest.approx([1, 0.5, 0.02, 0.01], rel=0.03)


def test_ettin_s_suite_has_the_released_rope_bases_and_a_revision_every_8_5_billion_tokens() -> None:
    recipe = (suite := find_suite("ettin")).recipe_over(Recipe(revisions_every_tokens=10**9), where="")
    for size in {name.size for name in suite.parsed}:
        bases = [(phase.name, phase.rope_base, phase.local_rope_base) for phase in recipe.phases_of(size)]
        local = 1e4 if size == "ettin17m" else 1.6e5
        later = [("ext", 1.6e5, local), ("decay", 1.6e5, 1.6e5), ("cross", 1.6e5, 1.6e5)]
        assert bases == [("pretrain", 1e4, 1e4), *later]
        for phase in recipe.phases_of(size):
            assert recipe.revisions_every is not None and recipe.revisions_every_tokens is None
            tokens = recipe.revisions_every * phase.batch * phase.block_length
            assert tokens == pytest.approx(8.5e9, rel=3e-4)
    Recipe.model_validate(recipe.model_dump() | {"rows": "chunks"})


SHARES = """
dclm 49.1 - -, dclm-dolmino - 70.4 34.1, cc-head 20.9 - -, starcoder 15.5 15.4 -, code-repositories - - 26.5, reddit 4.7 2.5 -,
pes2o 3.4 3.3 -, arxiv 1.6 1.6 3.9, stackexchange 1.1 1.1 5.2, tulu-flan 1.0 1.0 5.4, math 1.4 4.2 6.6, wikipedia 0.4 0.2 3.9,
books 0.3 0.3 13.8, news 0.4 - -, textbooks - - 0.7
"""
"""Per cent of the tokens of pretraining, extension and decay, in the order of the published table (arXiv 2507.11412)."""


def test_ettin_s_phases_have_the_published_mixes_in_a_study_with_their_sources(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {name: columns for name, *columns in (row.split() for row in SHARES.split(","))}
    published = [
        {name: float(columns[phase]) for name, columns in rows.items() if columns[phase] != "-"} for phase in range(3)
    ]
    study = {
        "name": "small", "models": ["1m-clm-5k"], "space": "space.yaml", "tokenizer": {"train_vocab_size": 500},
        "recipe": {"block_length": 64, "batch": 4, "mix": "dclm"},
    }  # fmt: skip
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump({**study, "corpora": {name: {"source": name} for name in rows}}))
    made = with_suite(load_study(file), "ettin")
    assert made.sources.keys() == rows.keys() and not capsys.readouterr().err
    for size in {name.size for name in made.parsed}:
        mixes = [shares(phase.mix or ()) for phase in made.recipe.phases_of(size)]
        assert mixes[3] == mixes[2], "the cross-objective phase reads the decay's text"
        for found, expected in zip(mixes, published, strict=False):
            whole = sum(expected.values())
            assert found == pytest.approx({name: share / whole for name, share in expected.items()})
    # Another study's text is its own, which is said.
    study["recipe"] |= {"mix": {"dclm": 1, "arxiv": 1}}
    file.write_text(yaml.safe_dump({**study, "corpora": {name: {"source": name} for name in ("dclm", "arxiv")}}))
    own = load_study(file)
    made = with_suite(own, "ettin")
    assert {phase.mix for phase in made.recipe.phases_of("ettin17m")} == {own.recipe.mix}
    assert "its mixes are left out" in (said := " ".join(capsys.readouterr().err.split()))
    assert "lack books, cc-head, code-repositories" in said and "arxiv" not in said


def test_a_suite_s_phases_take_the_place_of_the_study_s_schedule() -> None:
    own = Recipe(block_length=128, batch=32, warmup_steps=7, decay_steps=9, decay="cosine", rewarmup_steps=3)
    made = find_suite("ettin").recipe_over(own, where="ettin")
    assert made == find_suite("ettin").recipe_over(Recipe(block_length=128, batch=32), where="ettin")


def test_a_suite_s_size_is_that_of_names_without_one(tmp_path: Path) -> None:
    suite = find_suite(
        write(tmp_path, size="2m", models=["clm-100", "mlm40-100", "mntp15-100", "untrained", "1m-clm-100"])
    )
    assert [str(name) for name in suite.parsed] == [
        "2m-clm-100",
        "2m-mlm40-100",
        "2m-mntp15-100",
        "2m-untrained",
        "1m-clm-100",
    ]


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
        ({"models": ["17m-clm-100"]}, "unknown size '17m'. Did you mean 'ettin17m'?"),
        ({"models": ["1m-clm-100"], "mixes": {"ext": {"web": -1}}}, "web: the weight -1 is not a number of 0 or more"),
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

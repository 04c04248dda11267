"""Claims as files: which models and tasks they speak of, and what a study's results say of them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from analysis_study import TASKS, synthetic_results
from report_study import facts as small_facts

from mlmclm.analysis.analyse import Analysis, analyse
from mlmclm.analysis.claim import Claim, SourcedClaim
from mlmclm.analysis.comparison import against
from mlmclm.analysis.contrasts import PairOnTask, model_weights, weighted_sum
from mlmclm.analysis.effects import Effect
from mlmclm.analysis.power import smallest_difference
from mlmclm.analysis.results import observed_grid
from mlmclm.answers.claim_files import read_claims
from mlmclm.answers.named_facts import phase_facts
from mlmclm.configuration import parse_config
from mlmclm.plans.names import parse_name as parse_name
from mlmclm.plans.names import replicates_among
from mlmclm.reports.claim_pairs import Lacking, at_budgets, find_pairs, traits_of
from mlmclm.reports.study_facts import ModelFacts, StudyFacts, ZeroShotFacts
from mlmclm.reports.tested_claims import ClaimVerdict, verdicts_on
from mlmclm.reports.write_report import render_report
from mlmclm.results.chance import Chance
from mlmclm.results.intervals import estimate
from mlmclm.studies.study_file import StudyFile, load_study

MLM_OVER_CLM = {"says": "MLM is better.", "first": {"objective": "mlm"}, "second": {"objective": "clm"}}
SIX = ("1m-clm-1k", "1m-mlm40-1k", "1m-clm-250-mlm40-1k", "1m-clm-4k", "1m-mlm40-4k", "1m-clm-1k-mlm40-4k")


def claim(**keys: Any) -> Claim:
    return parse_config(Claim, MLM_OVER_CLM | keys, where="test")


def sourced(*claims: Claim) -> list[SourcedClaim]:
    return [SourcedClaim(f"claim{number}", "paper", each) for number, each in enumerate(claims)]


def model(name: str, **more: Any) -> ModelFacts:
    plan = parse_name(name)
    return ModelFacts(name, "pretrained", size=plan.size, phases=phase_facts(plan), tokens=4096 * plan.steps, **more)


def facts_of(*names: str, **more: Any) -> StudyFacts:
    return replace(small_facts(), models=tuple(map(model, names)), **more)


def names_of(pairs: Any) -> list[tuple[str, str]]:
    return [(pair.first.name, pair.second.name) for pair in pairs]


def found_pairs(own: Claim, *names: str) -> Any:
    return find_pairs(own, [traits for each in names if (traits := traits_of(model(each))) is not None])


def has_pairs(own: Claim, *names: str) -> bool:
    try:
        return bool(found_pairs(own, *names))
    except Lacking:
        return False


@pytest.fixture(scope="module")
def equal() -> Analysis:
    """A study of six models that differ in nothing but noise."""
    return analyse(synthetic_results(dict.fromkeys(SIX, 0.7)))


def drawn(analysis: Analysis, generator: np.random.Generator, shifts: dict[str, float]) -> Analysis:
    """The same study with other noise, and with some models better by as many standard errors of a score."""

    def own(model: str) -> Effect:
        error = 0.004 * math.sqrt(generator.chisquare(8) / 8)
        value = 0.7 + 0.004 * (generator.standard_normal() + shifts.get(model, 0))
        return Effect(estimate(value, error, 8), 0.0, np.ones(1), 0.0)

    return replace(analysis, effects={pair: own(pair[0]) for pair in analysis.effects})


def test_pairs_are_alike_in_what_the_claim_says() -> None:
    assert names_of(found_pairs(claim(), *SIX)) == [("1m-mlm40-1k", "1m-clm-1k"), ("1m-mlm40-4k", "1m-clm-4k")]
    other = claim(first={"objective": "clm then mlm"}, second={"objective": "mlm"}, alike=["size", "steps", "mask"])
    assert names_of(found_pairs(other, *SIX)) == [
        ("1m-clm-250-mlm40-1k", "1m-mlm40-1k"),
        ("1m-clm-1k-mlm40-4k", "1m-mlm40-4k"),
    ]
    before = claim(
        first={"objective": "clm then mlm"}, second={"objective": "mlm"}, alike=["size", "steps_before = steps"]
    )
    assert names_of(found_pairs(before, *SIX)) == [("1m-clm-1k-mlm40-4k", "1m-mlm40-1k")]


def test_pairs_can_be_at_some_budgets_only() -> None:
    pairs = found_pairs(claim(), *SIX)
    assert names_of(at_budgets(pairs, (100, 100))) == [("1m-mlm40-4k", "1m-clm-4k")]
    assert names_of(at_budgets(pairs, (0, 25))) == [("1m-mlm40-1k", "1m-clm-1k")]
    with pytest.raises(Lacking, match="longest budget"):
        at_budgets(pairs, (0, 10))


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ({"clm_share": [90, 99]}, []),
        ({"clm_share": 25, "objective": "clm then mlm"}, ["1m-clm-250-mlm40-1k", "1m-clm-1k-mlm40-4k"]),
        ({"decayed": True}, ["1m-clm-dec4k-mlm40-5k"]),
        ({"mask": [15, 25]}, ["1m-mlm20-4k"]),
        ({"made": "encoder from decoder", "decayed": None, "steps": 5000}, ["1m-clm-dec4k-mlm40-5k"]),
        ({"made": "decoder from encoder"}, ["1m-mlm40-1k-clm-4k"]),
    ],
)  # fmt: skip
def test_models_are_found_by_how_they_were_pretrained(query: dict[str, Any], names: list[str]) -> None:
    every = (*SIX, "1m-clm-dec4k-mlm40-5k", "1m-mlm20-4k", "1m-mlm40-1k-clm-4k", "1m-untrained")
    own = claim(first=query, second={"objective": "clm", "steps": 1000}, alike=["size"])
    assert ([first for first, _ in names_of(found_pairs(own, *every))] if has_pairs(own, *every) else []) == names


def test_models_that_go_on_from_given_weights_are_meant_only_where_a_claim_says_so() -> None:
    continued = [replace(each, phases=(), since=each.phases) for each in map(model, SIX)]
    traits = [found for each in continued if (found := traits_of(each)) is not None]
    with pytest.raises(
        Lacking, match=r"^the study has no MLM model trained from scratch, only such that go on from given"
    ):
        find_pairs(claim(), traits)
    meant = claim(first={"objective": "mlm", "given": True}, second={"objective": "clm", "given": True})
    assert names_of(find_pairs(meant, traits)) == names_of(found_pairs(claim(), *SIX))
    with pytest.raises(Lacking, match=r"^the study has no MLM model that goes on from given weights$"):
        found_pairs(meant, *SIX)


def test_one_pair_on_all_tasks_is_the_study_s_own_comparison(equal: Analysis) -> None:
    parts = [PairOnTask("1m-mlm40-1k", "1m-clm-1k", task, 1 / len(TASKS)) for task in TASKS]
    whole = weighted_sum(equal.effects, model_weights(parts)).whole
    row = next(
        row
        for row in against(equal.comparisons, "1m-mlm40-1k")
        if row["model_b"] == "1m-clm-1k" and row["kind"] == "all"
    )
    assert [whole.value, whole.low, whole.high, whole.p] == pytest.approx(
        [row[name] for name in ("difference", "low", "high", "p")], rel=1e-12
    )


def test_a_model_in_two_pairs_counts_once_with_its_noise() -> None:
    effects = {(name, "t"): Effect(estimate(0.5, 0.01, 9), 0.0, np.ones(1), 0.0) for name in "abc"}
    parts = [PairOnTask("a", "c", "t", 0.5), PairOnTask("b", "c", "t", 0.5)]
    whole = weighted_sum(effects, model_weights(parts)).whole
    assert whole.error == pytest.approx(0.01 * math.sqrt(0.25 + 0.25 + 1))


FIVE = sourced(
    claim(),
    claim(tasks={"families": "retrieval"}),
    claim(budgets=[0, 25], direction="lower", than={"budgets": 100}),
    claim(first={"objective": "clm then mlm"}, second={"objective": "mlm"}),
    claim(first={"objective": "clm then mlm"}, second={"objective": "clm"}, direction="differs"),
)


@pytest.mark.slow
def test_equal_recipes_are_seen_or_contradicted_in_at_most_one_study_of_twenty(equal: Analysis) -> None:
    generator, studies = np.random.default_rng(0), 400
    told = 0
    for _ in range(studies):
        found = verdicts_on(FIVE, drawn(equal, generator, {}), facts_of(*SIX))
        told += any(each.verdict in ("seen", "contradicted") for each in found)
    assert told / studies <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / studies)


@pytest.mark.parametrize(("shift", "verdict"), [(12, "seen"), (-12, "contradicted")])
def test_a_planted_difference_is_seen_or_contradicted_as_planted(equal: Analysis, shift: float, verdict: str) -> None:
    generator = np.random.default_rng(1)
    better = {"1m-mlm40-1k": shift, "1m-mlm40-4k": shift}
    found = [verdicts_on(FIVE[:1], drawn(equal, generator, better), facts_of(*SIX))[0] for _ in range(20)]
    assert {each.verdict for each in found} == {verdict}
    assert np.mean([each.difference for each in found]) == pytest.approx(shift * 0.004, rel=0.1)


def test_a_difference_of_the_stated_size_is_seen_at_about_the_stated_power(equal: Analysis) -> None:
    generator, studies = np.random.default_rng(2), 300
    # Of the first claim alone: two pairs on four tasks, so a standard error of .004 / 2.
    parts = [PairOnTask(*pair, task, 1 / 8) for pair in (SIX[1::-1], SIX[4:2:-1]) for task in TASKS]
    effects = {pair: Effect(estimate(0.7, 0.004, 8), 0.0, np.ones(1), 0.0) for pair in equal.effects}
    whole = weighted_sum(effects, model_weights(parts)).whole
    least = smallest_difference(whole.error, whole.freedom, 0.05)
    better = dict.fromkeys((SIX[1], SIX[4]), least / 0.004)
    seen = sum(
        verdicts_on(FIVE[:1], drawn(equal, generator, better), facts_of(*SIX))[0].verdict == "seen"
        for _ in range(studies)
    )
    assert 0.7 < seen / studies < 0.9


LARGER = {"mlm-gains-with-size", "mask-ratio-by-size"}
"""Claims about models of 210 million parameters and more."""


@pytest.mark.parametrize(
    ("name", "lacking"),
    [("study-tiny", LARGER | {"mlm-in-the-decay"}), ("study-small", LARGER), ("ettin-tiny", set()), ("ettin-small", set())],
)  # fmt: skip
def test_replications_have_models_for_every_claim_but_those_about_larger_ones(name: str, lacking: set[str]) -> None:
    whole = load_study(Path(f"replicate-{name}"))
    parts = [whole.of_part(part, where=name) for part in whole.parts]

    def spoken_of(file: StudyFile) -> set[str]:
        names = [each for each in file.models if "untrained" not in each]
        return {each.name for each in file.find_claims() if has_pairs(each.claim, *names)}

    assert {each.name for each in whole.find_claims()} - spoken_of(whole) == lacking
    assert all(map(spoken_of, parts))


def whole_study(levels: dict[str, float], **more: Any) -> list[ClaimVerdict]:
    """The verdicts of a study's fine-tuning runs on the packaged claims."""
    return verdicts_on(read_claims(), analyse(synthetic_results(levels, **more)), facts_of(*levels))


def test_packaged_claims_are_seen_contradicted_open_or_not_tested() -> None:
    levels = dict(zip(SIX, (0.60, 0.62, 0.62, 0.60, 0.70, 0.69), strict=True))
    verdicts = {each.claim: each for each in whole_study(levels)}
    assert verdicts["mlm-higher"].verdict == "seen"
    assert verdicts["mlm-higher"].reason.startswith("one pretraining run each: +")
    assert verdicts["clm-learns-faster"].verdict == "contradicted"
    assert verdicts["clm-lead-shrinks"].verdict == "seen"
    assert verdicts["mask-ratio-matters"].reason == "the study has no MLM model with 10 to 30 % masked."
    assert verdicts["continue-from-clm"].verdict == "not tested here"
    assert verdicts["same-data-order"].verdict == "seen"


def test_what_is_too_small_to_tell_says_what_would_settle_it(equal: Analysis) -> None:
    own = claim(published=0.1, published_for="a paper")
    (found,) = verdicts_on(sourced(own), equal, facts_of(*SIX))
    assert found.verdict == "too small to tell"
    assert "points is found with 80 % power. To find the published +0.10 points (a paper) takes about" in found.settle
    assert "seeds a rate" in found.settle


def test_one_seed_can_tell_nothing_and_says_so() -> None:
    analysis = analyse(synthetic_results(dict.fromkeys(SIX, 0.7), seeds=1))
    (found,) = verdicts_on(sourced(claim()), analysis, facts_of(*SIX))
    assert (found.verdict, found.settle.startswith("Several seeds")) == ("too small to tell", True)


def test_a_lead_at_chance_is_not_seen() -> None:
    levels = {"1m-clm-1k": 0.40, "1m-mlm40-1k": 0.48}
    analysis = analyse(
        synthetic_results(levels, tasks=("pydocs-kind",)), chances={"pydocs-kind": Chance(0.5, "always the same")}
    )
    (found,) = verdicts_on(sourced(claim()), analysis, facts_of(*levels))
    assert found.verdict == "not tested here" and "above chance" in found.reason


def test_what_is_at_chance_is_the_difference_and_not_the_noise_of_the_test_set() -> None:
    levels = {"1m-clm-1k": 0.70, "1m-mlm40-1k": 0.72}
    low = synthetic_results({"1m-clm-1k": 0.45, "1m-mlm40-1k": 0.49}, tasks=("pydocs-kind",))
    high = synthetic_results(levels, tasks=("pydocs-qa",))
    analysis = analyse([*low, *high], chances={"pydocs-kind": Chance(0.5, "always the same")})
    (found,) = verdicts_on(sourced(claim()), analysis, facts_of(*levels))
    assert (
        " points, part of which is at chance and doesn't count, without the noise of the test set, over" in found.reason
    )


def test_replicates_are_one_model_with_several_runs() -> None:
    levels = {"1m-clm-1k": 0.60, "1m-clm-1k-r2": 0.66, "1m-mlm40-1k": 0.64, "1m-mlm40-1k-r2": 0.70}
    replicate_of = replicates_among({name: parse_name(name) for name in levels})
    analysis = analyse(synthetic_results(levels), replicate_of=replicate_of)
    assert list(analysis.groups) == ["1m-clm-1k", "1m-mlm40-1k"]
    (found,) = verdicts_on(sourced(claim(published=4)), analysis, facts_of(*levels))
    # 4 points would be seen by the noise of seeds alone; replicates differ by more.
    assert found.reason.startswith("2 pretraining runs each: +") and found.verdict == "too small to tell"
    assert "pretraining runs of each model" in found.settle
    assert found.pairs == 1


def test_a_claim_on_an_unfinished_grid_says_how_many_of_its_cells_are_missing() -> None:
    """It was "seen" without a word, where advice said that there is no winner yet."""
    made = synthetic_results(dict.fromkeys(SIX[:2], 0.7))
    grid = observed_grid(analyse(made).cells)
    kept = [each for each in made if each["model"] != SIX[0] or each["seed"] or each["task"] != made[0]["task"]]
    (found,) = verdicts_on(sourced(claim()), analyse(kept, grid=grid), facts_of(*SIX[:2]))
    assert f" points, so far ({len(made) - len(kept)} cells have no result yet), without the noise" in found.reason
    (whole,) = verdicts_on(sourced(claim()), analyse(made), facts_of(*SIX[:2]))
    assert "so far" not in whole.reason


def test_sensitivity_is_compared_net_of_noise() -> None:
    flat = dict.fromkeys(("1m-clm-1k", "1m-mlm40-1k"), 0.7)
    own = sourced(claim(statistic="sensitivity", direction="lower"))
    results = synthetic_results(flat, rates=(1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3), seeds=5)
    assert verdicts_on(own, analyse(results), facts_of(*flat))[0].verdict == "too small to tell"
    for each in results:
        if each["model"] == "1m-mlm40-1k":  # flatter by planting
            for split in each["scores"].values():
                metric = each["metric"]
                split[metric] += 0.02 * abs((1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3).index(each["learning_rate"]) - 2)
    analysis = analyse(results)
    assert verdicts_on(own, analysis, facts_of(*flat))[0].verdict == "seen"
    nothing_learned = dict.fromkeys(analysis.families, Chance(0.9, "always the same"))
    (found,) = verdicts_on(own, analyse(results, chances=nothing_learned), facts_of(*flat))
    assert found.verdict == "not tested here" and "above chance" in found.reason
    untrained = synthetic_results({"1m-untrained": 0.72}, rates=(1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3), seeds=5)
    (found,) = verdicts_on(own, analyse([*results, *untrained], "1m-untrained"), facts_of(*flat))
    assert found.verdict == "not tested here" and "above chance and the untrained model" in found.reason
    for each in untrained:
        for split in each["scores"].values():
            split[each["metric"]] -= 0.2
    assert verdicts_on(own, analyse([*results, *untrained], "1m-untrained"), facts_of(*flat))[0].verdict == "seen"


def test_zero_shot_claims_are_paired_over_examples(equal: Analysis) -> None:
    generator = np.random.default_rng(0)
    hard = generator.random(400)

    def answered(model: str, skill: float, metric: str = "acc") -> ZeroShotFacts:
        values = tuple((hard < skill).astype(float).tolist())
        entry = {"score": float(np.mean(values)), "low": 0.0, "high": 1.0, "examples": 400, "chance": None}
        return ZeroShotFacts(model, "piqa", "causal", metric, {metric: entry}, values)

    facts = facts_of(*SIX[:2], zero_shot=(answered("1m-clm-1k", 0.6), answered("1m-mlm40-1k", 0.5)))
    own = claim(statistic="zero_shot", tasks={"names": "piqa"}, direction="lower")
    (found,) = verdicts_on(sourced(own), equal, facts)
    assert found.verdict == "seen" and found.difference == pytest.approx(-0.1, abs=0.03)
    assert "noise of the examples alone" in found.reason


def test_the_report_has_the_table_of_claims() -> None:
    levels = dict(zip(SIX, (0.60, 0.62, 0.62, 0.60, 0.70, 0.69), strict=True))
    page = render_report(analyse(synthetic_results(levels)), facts_of(*levels, claims=read_claims()))
    assert "Which published claims hold here?" in page
    assert "After a full budget, models pretrained by MLM score higher than models pretrained by CLM." in page
    assert "claims not tested here" in page


def test_published_numbers_have_their_source_and_direction() -> None:
    for each in read_claims():
        assert each.source and each.claim.where
        assert (each.claim.published is None) == (not each.claim.published_for), each.name


def test_a_claim_that_is_made_twice_is_tested_once(equal: Analysis) -> None:
    opposite = claim(first={"objective": "clm"}, second={"objective": "mlm"})
    once = verdicts_on(FIVE, equal, facts_of(*SIX))
    twice = verdicts_on([*FIVE, FIVE[0], *sourced(opposite)], equal, facts_of(*SIX))
    assert [each.p_holm for each in twice] == [*(each.p_holm for each in once), once[0].p_holm, once[0].p_holm]

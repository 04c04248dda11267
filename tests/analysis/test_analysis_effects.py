"""Scores that a procedure delivers and those of fresh runs, against simulation with known truth and independent computation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import statsmodels.api as sm
from analysis_study import cells_of
from scipy import stats

from mlmclm.analysis.contrasts import mean_difference
from mlmclm.analysis.effects import Effect, effect, fold_scores
from mlmclm.analysis.model_runs import Runs, runs_of
from mlmclm.analysis.pooled_variances import Unequal, Variances, bartlett, pooled, unequal
from mlmclm.analysis.seed_noise import Fit, fit_tasks, freedom_of
from mlmclm.analysis.selection import picked_cells
from mlmclm.analysis.simulated_choices import choose
from mlmclm.results.intervals import Estimate
from mlmclm.results.measures import WeightedMean
from mlmclm.results.metrics import Rule

RATES = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4)


def task(
    draws: np.random.Generator, seeds: int, correlation: float, *, models: int = 4, spread: Sequence[float] = (1.0,) * 6
) -> dict[str, Runs]:
    """Models with a flat curve at 0, whose validation and test noise are correlated."""
    shape = (models, len(RATES), seeds)
    common, *own = (draws.standard_normal(shape) for _ in range(3))
    both = [np.sqrt(correlation) * common + np.sqrt(1 - correlation) * each for each in own]
    both = [each * np.asarray(spread)[:, None] for each in both]
    return {f"m{n}": Runs(RATES, both[0][n], both[1][n], np.zeros(shape[1:], bool)) for n in range(models)}


def minus(one: Effect, other: Effect) -> Estimate:
    return mean_difference({("one", ""): one, ("other", ""): other}, ("one", "other"), [""]).whole


@pytest.mark.parametrize("rule", ["mean", "per_seed", "on_test"])
@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_intervals_cover_what_the_procedure_delivers_and_what_a_fresh_run_scores(
    rule: Rule, correlation: float
) -> None:
    """A fresh run of a flat curve at 0 scores 0; what is delivered is the mean over many studies of the picked runs' test scores."""
    draws = np.random.default_rng(1)
    shape = (20_000, len(RATES), 3)
    common, *own = (draws.standard_normal(shape) for _ in range(3))
    validation, test = (np.sqrt(correlation) * common + np.sqrt(1 - correlation) * each for each in own)
    picked, _ = choose(validation, test, np.ones(shape[1:], bool), rule)
    delivered = float(np.take_along_axis(test, picked[:, None], axis=1).mean())
    covered, fresh, values = [], [], []
    for _ in range(60):
        runs = task(draws, 3, correlation)
        for name, fit in fit_tasks([runs])[0].items():
            found = effect(runs[name], fit, rule, studies=320)
            at, _ = choose(runs[name].validation, runs[name].test, runs[name].present, rule)
            assert found.seeds.value == pytest.approx(runs[name].test[at, np.arange(3)].mean())
            values.append(found.fresh.value)
            covered.append(found.score().low <= delivered <= found.score().high)
            fresh.append(found.score(fresh=True).low <= 0 <= found.score(fresh=True).high)
    assert abs(np.mean(values)) < 0.35 < (delivered if rule == "on_test" or correlation else 1)
    assert np.mean(covered) > 0.92 and np.mean(fresh) > 0.9


def test_rates_with_equal_scores_do_not_make_the_noise_of_the_others_seem_smaller() -> None:
    draws = np.random.default_rng(12)
    own = task(draws, 3, 0.5, models=1)["m0"]
    dead = np.arange(6)[:, None] > 1  # a model that learns nothing predicts one class with every seed
    whole = Runs(RATES, np.where(dead, -20.0, own.validation), np.where(dead, -20.0, own.test), own.failed)
    some = fit_tasks([{"m": whole}])[0]["m"]
    alone = fit_tasks([{"m": own.at(RATES[:2])}])[0]["m"]
    assert some.deviations[1][:2] == pytest.approx(alone.deviations[1]) and some.freedom == alone.freedom


def test_the_best_rate_may_be_the_noisiest() -> None:
    draws, covered = np.random.default_rng(13), []
    curve, spread = -40.0 * abs(np.arange(6) - 3)[:, None], (1.0, 1.0, 1.0, 5.0, 1.0, 1.0)
    for _ in range(60):
        runs = {
            name: replace(own, validation=own.validation + curve, test=own.test + curve)
            for name, own in task(draws, 3, 0.5, spread=spread).items()
        }
        found = [
            effect(runs[name], fit, "mean", studies=240).score(fresh=True) for name, fit in fit_tasks([runs])[0].items()
        ]
        covered += [own.low <= 0 <= own.high for own in found]
    assert np.mean(covered) >= 0.93


def flat(deviations: Sequence[float], correlation: float) -> tuple[Runs, Fit]:
    """Three seeds whose means are 0 at all rates, and their noise; the first rate is taken."""
    scores = np.asarray(deviations)[:, None] * np.asarray([-1.0, 0.0, 1.0])
    shape, both = scores.shape, np.asarray([deviations, deviations], np.float64)
    runs = Runs(RATES[: len(scores)], scores, scores, np.zeros(shape, bool))
    degrees = np.full(len(scores), 50.0)
    return runs, Fit(np.ones(shape, bool), np.zeros((2, len(scores))), both, 50.0, degrees, correlation, 0.0)


def test_the_noise_of_a_score_is_that_of_the_rate_that_was_taken() -> None:
    """It was that of the rates that others would take, whichever this study took."""
    quiet, noisy = (effect(*flat(own, 0.5), "mean", studies=8_000) for own in ((1, 1, 4, 4), (4, 4, 1, 1)))
    assert noisy.seeds.error / quiet.seeds.error == pytest.approx(4, rel=0.05)


@pytest.mark.parametrize("rule", ["mean", "on_test"])
def test_a_fresh_run_s_score_is_as_uncertain_as_the_picked_one_s_if_its_bias_is_known(rule: Rule) -> None:
    """Its interval was wide enough for any curve where rates don't differ, and covered .99."""
    draws = np.random.default_rng(17)
    common, own = draws.standard_normal((2, 100_000, 6))  # means over seeds, in their standard errors
    picked = (0.9 * common + math.sqrt(1 - 0.9**2) * own)[np.arange(len(own)), common.argmax(axis=1)].var()
    correlation = 1.0 if rule == "on_test" else 0.9
    picked = common.max(axis=1).var() if rule == "on_test" else picked
    found = effect(*flat((1,) * 6, correlation), rule, studies=8_000)
    assert 3 * found.seeds.error**2 == pytest.approx(picked, rel=0.05)
    assert 3 * found.fresh.error**2 == pytest.approx(1 if rule == "on_test" else picked, rel=0.05)


def test_means_that_are_equal_up_to_rounding_go_to_the_smaller_rate() -> None:
    validation = np.asarray([[0.3, 0.2, 0.1], [0.1, 0.2, 0.3]])
    assert validation[0].sum() < validation[1].sum()
    picked, _ = choose(validation, validation, np.ones((2, 3), bool), "mean")
    assert picked.tolist() == [0, 0, 0]


def test_a_rate_at_which_all_runs_diverge_changes_nothing_for_the_others() -> None:
    """Its score was taken for 0 in simulated studies, and drew the other rates' means towards it."""
    scores = 0.7 + 0.01 * np.random.default_rng(3).standard_normal((2, 4, 3))
    lost = np.zeros((4, 3), bool)
    lost[3] = True
    whole = Runs(RATES[:4], *np.where(lost, math.nan, scores), np.zeros((4, 3), bool), diverged=lost)
    without = Runs(RATES[:3], *scores[:, :3], np.zeros((3, 3), bool))
    found, expected = (
        effect(runs, fit_tasks([{"m": runs}])[0]["m"], "mean", studies=16000) for runs in (whole, without)
    )
    assert found.chosen[3] == 0 and found.chosen[:3] == pytest.approx(expected.chosen, abs=0.03)
    assert found.seeds.value == pytest.approx(expected.seeds.value, abs=1e-3)
    assert found.seeds.high - found.seeds.low == pytest.approx(expected.seeds.high - expected.seeds.low, rel=0.1)
    fit = fit_tasks([{"m": whole}])[0]["m"]
    assert fit.present.tolist() == [[True] * 3] * 3 + [[False] * 3]


def test_a_rate_is_not_out_because_its_seeds_are_computed_last() -> None:
    draws, rates = np.random.default_rng(14), list(RATES)
    scores = 0.7 + 0.01 * draws.standard_normal((6, 5))
    scores[3] += 0.1
    cells = cells_of(RATES, scores.tolist())
    left = [cell for cell in cells if (cell["learning_rate"], cell["seed_head"]) != (rates[3], 4)]
    assert {cell["learning_rate"] for cell in picked_cells(left, "mean")} == {rates[3]}
    assert runs_of(left).diverged is None
    few = [cell for cell in left if (cell["learning_rate"], cell["seed_head"]) not in [(rates[3], 2), (rates[3], 3)]]
    assert {cell["learning_rate"] for cell in picked_cells(few, "mean")} == {rates[3]}
    lost = {"diverged": {"status": "diverged"}, "unread": {"test": math.nan}}
    for how in lost.values():
        most = [cell | (how if cell not in few else {}) for cell in cells]
        assert {cell["learning_rate"] for cell in picked_cells(most, "mean")} != {rates[3]}
        assert runs_of(most).counting("mean")[3].sum() == 0 and (runs_of(most).diverged is None) == ("test" in how)


def test_one_rate_has_no_choice_and_students_interval() -> None:
    scores = np.asarray([[0.71, 0.74, 0.69]])
    runs = Runs((1e-3,), scores, scores, np.zeros(scores.shape, bool))
    found = effect(runs, fit_tasks([{"m": runs}])[0]["m"], "mean")
    assert found.fresh == found.seeds
    expected = stats.t.interval(0.95, 2, loc=scores.mean(), scale=stats.sem(scores[0]))
    assert (found.score().low, found.score().high) == pytest.approx(expected)


def test_a_perfect_model_counts_as_noisy_as_the_others() -> None:
    """Against .91 it ended without a p value."""
    other = np.asarray([[0.90, 0.92, 0.91]])
    runs = {
        name: Runs((1e-3,), scores, scores, np.zeros(scores.shape, bool))
        for name, scores in (("perfect", np.ones((1, 3))), ("other", other))
    }
    one, two = (effect(runs[name], fit, "mean") for name, fit in fit_tasks([runs])[0].items())
    error = math.sqrt(other.var(ddof=1) * 2 / 3)
    assert minus(one, two).p == pytest.approx(2 * stats.t.sf(0.09 / error, 2))


def test_equal_variances_are_pooled_and_unequal_ones_stay_apart() -> None:
    draws = np.random.default_rng(2)
    alike = fit_tasks([task(draws, 5, 0.0, models=8)])[0]
    ratios = [fit.deviations[1].max() / fit.deviations[1].min() for fit in alike.values()]
    assert np.median(ratios) < 1.3
    assert np.median([fit.degrees for fit in alike.values()]) > 15
    apart = fit_tasks([task(draws, 5, 0.0, models=8, spread=(0.1, 0.1, 0.1, 1, 1, 1))])[0]
    ratios = [fit.deviations[1][3:].min() / fit.deviations[1][:3].max() for fit in apart.values()]
    assert np.median(ratios) > 1.8
    assert np.median([fit.degrees for fit in alike.values()]) > 100 > np.median([fit.degrees for fit in apart.values()])


def test_unequal_models_and_rates_are_those_of_a_gamma_regression() -> None:
    draws = np.random.default_rng(15)
    freedom = np.asarray([[2.0, 2, 2, 1], [2, 0, 2, 2], [2, 2, 2, 2]])
    variances = draws.chisquare(np.maximum(freedom, 1)) / np.maximum(freedom, 1) * np.asarray([1.0, 1, 4, 9])
    found = pooled(Variances(variances, freedom), Unequal(models=True, rates=True)).values
    rows, rates = np.nonzero(freedom)
    dummies = np.column_stack([rows == row for row in range(3)] + [rates == rate for rate in range(1, 4)]).astype(float)
    family = sm.families.Gamma(sm.families.links.Log())
    fit = sm.GLM(variances[rows, rates], dummies, family=family, var_weights=freedom[rows, rates]).fit(tol=1e-12)
    assert found[rows, rates] == pytest.approx(fit.fittedvalues, rel=1e-3)
    alike = variances / np.asarray([1.0, 1, 4, 9])
    every = pooled(Variances(alike, freedom), Unequal(models=False, rates=False))
    assert every.values == pytest.approx((freedom * alike).sum() / freedom.sum()) and (every.freedom == 21).all()


def test_equal_variances_are_tested_by_bartletts_test() -> None:
    draws = np.random.default_rng(16)
    groups = [draws.standard_normal(size) * spread for size, spread in ((4, 1), (7, 2), (9, 1))]
    squares, freedom = (
        np.asarray([each(own) for own in groups])
        for each in (lambda own: own.var() * len(own), lambda own: len(own) - 1.0)
    )
    statistic, degrees = bartlett(squares, freedom)
    assert statistic == pytest.approx(stats.bartlett(*groups).statistic) and degrees == 2


def test_a_rate_that_is_noisier_than_the_others_stands_for_itself() -> None:
    variances, freedom = np.asarray([[1.0, 1.2, 0.8, 30.0]]), np.full((1, 4), 2.0)
    found = pooled(Variances(variances, freedom), Unequal(models=False, rates=False))
    assert found.values.tolist() == [[1, 1, 1, 30]] and found.freedom.tolist() == [[6, 6, 6, 2]]


def test_heavy_tails_are_no_unequal_variances() -> None:
    draws, found = np.random.default_rng(22), dict[str, list[Unequal]]()
    for noise in ("normal", "skewed"):
        for _ in range(40):
            scores = draws.standard_normal((4, 4, 5, 5))  # tasks, models, rates, seeds
            variances = (np.exp(0.8 * scores) if noise == "skewed" else scores).var(axis=-1, ddof=1)
            found.setdefault(noise, []).append(unequal([Variances(own, np.full((4, 5), 4.0)) for own in variances]))
    assert np.mean([each.excess > 1 for each in found["normal"]]) < 0.1
    assert np.mean([each.excess > 2 for each in found["skewed"]]) > 0.8
    assert all(np.mean([each[side] for each in own]) < 0.4 for own in found.values() for side in (0, 1))
    all_equal = Variances(np.ones((4, 5)), np.full((4, 5), 4.0))
    heavy = pooled(all_equal, Unequal(models=False, rates=False, excess=4.0))
    assert heavy.freedom[0, 0] == 80 / 4 and heavy.values[0, 0] == 1


@pytest.mark.parametrize("models", [1.0, 3.0])
def test_variances_at_several_rates_have_the_degrees_of_freedom_with_which_they_vary(models: float) -> None:
    """Whatever number of rates they were from, they had those of a single one."""
    draws, weights, found, said = np.random.default_rng(23), np.full(6, 1 / 6), [], []
    for _ in range(250):
        runs = task(draws, 3, 0.0, spread=[1, 8, 1, 8, 1, 8])
        scaled = {name: replace(own, test=own.test * models**number) for number, (name, own) in enumerate(runs.items())}
        fit = fit_tasks([scaled])[0]["m0"]
        found.append(float(weights @ fit.deviations[1] ** 2))
        said.append(freedom_of(fit, weights))
    assert np.median(said) == pytest.approx(2 * np.mean(found) ** 2 / np.var(found), rel=0.35)


@pytest.mark.parametrize("models", [False, True])
def test_a_rate_with_one_run_has_the_level_of_the_others(models: bool) -> None:
    variances, freedom = np.asarray([[1.0, 4.0, math.nan], [2.0, 6.0, math.nan]]), np.asarray([[4.0, 4, 0], [4, 4, 0]])
    found = pooled(Variances(variances, freedom), Unequal(models, rates=True))
    assert np.isfinite(found.values).all() and found.freedom[:, 2].tolist() == [8.0 if models else 16.0] * 2
    if not models:
        assert found.values[0] == pytest.approx([1.5, 5.0, 3.25]) and found.freedom[0, :2].tolist() == [8, 8]


def test_likely_means_vary_as_the_true_ones_do_given_the_runs() -> None:
    """Averaged over studies, their variance between rates is the true one: that of the runs' means has noise in it."""
    draws, found = np.random.default_rng(16), []
    for _ in range(80):
        truth = 2.0 * draws.standard_normal(len(RATES))
        runs = {
            name: replace(own, test=own.test + truth[:, None]) for name, own in task(draws, 3, 0.0, models=1).items()
        }
        found.append(fit_tasks([runs])[0]["m0"].likely[1].var(ddof=1))
    assert np.mean(found) == pytest.approx(4, rel=0.25)


@pytest.mark.parametrize(("step", "seeds"), [(0.5, 3), (1.0, 5), (1.0, 10)])
@pytest.mark.parametrize("apart", [0.0, 0.3])
def test_the_error_of_a_score_is_its_deviation_over_studies(step: float, seeds: int, apart: float) -> None:
    """Each step from the best rate costs `step`; `apart` is by how much the curve on validation examples is another one than on test."""
    draws, errors, ratios = np.random.default_rng(18), [], []
    for _ in range(30):
        curves = apart * draws.standard_normal((2, len(RATES), 1)) - step * abs(np.arange(len(RATES)) - 2.0)[:, None]
        studies = [task(draws, seeds, 0.5) for _ in range(20)]
        many = [
            replace(own, validation=own.validation + curves[0], test=own.test + curves[1])
            for runs in studies
            for own in runs.values()
        ]
        fits = fit_tasks([dict(zip("abcd", many[:4], strict=True))])[0].values()
        errors += [
            effect(runs, fit, "mean", studies=1_000).seeds.error ** 2 for runs, fit in zip(many[:4], fits, strict=True)
        ]
        picked, _ = choose(
            *(np.stack([getattr(each, split) for each in many]) for split in ("validation", "test")),
            many[0].present,
            "mean",
        )
        ratios.append(
            np.take_along_axis(np.stack([each.test for each in many]), picked[:, None], axis=1).mean(axis=(1, 2)).var()
        )
    assert np.mean(errors) / np.mean(ratios) == pytest.approx(1, abs=0.12)


@pytest.mark.parametrize("rule", ["mean", "per_seed", "on_test"])
def test_the_choice_in_many_studies_is_that_of_each(rule: Rule) -> None:
    draws = np.random.default_rng(4)
    present = draws.random((6, 3)) < 0.8
    present[2] = True
    validation, test = draws.random((2, 50, 6, 3))
    picked, counts = choose(validation, test, present, rule)
    for number in range(50):
        basis = np.where(present, (test if rule == "on_test" else validation)[number], math.nan)
        if rule == "per_seed":
            seeds = [seed for seed in range(3) if present[:, seed].any()]
            wanted = [int(np.nanargmax(basis[:, seed])) for seed in seeds]
            assert picked[number][counts].tolist() == wanted
        else:
            best = max(
                (rate for rate in range(6) if present[rate].any()),
                key=lambda rate: np.nanmean(basis[rate]),
            )
            assert set(picked[number]) == {best} and (counts[number] == present[best]).all()


def test_simulated_noise_has_the_fitted_moments() -> None:
    fit = Fit(
        present=np.ones((2, 3), bool),
        means=np.asarray([[0.5, 0.6], [0.55, 0.65]]),
        deviations=np.asarray([[0.01, 0.02], [0.03, 0.04]]),
        freedom=4.0,
        degrees=np.asarray([4.0, 4.0]),
        correlation=0.6,
        shared=0.5,
    )
    validation, test = fit.simulate(fit.means, 40_000, np.random.default_rng(0))
    assert test[:, 0].std() == pytest.approx(0.03, rel=0.02) and test[:, 1].std() == pytest.approx(0.04, rel=0.02)
    assert np.corrcoef(validation[:, 0].ravel(), test[:, 0].ravel())[0, 1] == pytest.approx(0.6, abs=0.02)
    assert np.corrcoef(validation[:, 0, 0], validation[:, 1, 0])[0, 1] == pytest.approx(0.5, abs=0.02)


def test_the_jackknife_of_a_mean_has_its_variance() -> None:
    values = np.random.default_rng(6).random(1_000)
    folds = fold_scores(WeightedMean(values), len(values))
    variance = (len(folds) - 1) * folds.var()
    assert len(folds) == 100 and variance == pytest.approx(values.var(ddof=1) / 1_000, rel=0.3)
    few = fold_scores(WeightedMean(values[:50]), 50)
    assert (len(few) - 1) * few.var() == pytest.approx(values[:50].var(ddof=1) / 50), "one example a fold"


def test_differences_on_the_same_examples_have_less_noise_than_their_sides() -> None:
    draws = np.random.default_rng(7)
    hard = draws.random(2_000) < 0.6
    sides = [np.where(draws.random(2_000) < 0.1, ~hard, hard).astype(float) for _ in range(2)]
    folds = [fold_scores(WeightedMean(own), 2_000) for own in sides]
    runs = task(draws, 3, 0.0, models=2)
    fits = fit_tasks([runs])[0]
    one, other = (effect(runs[f"m{n}"], fits[f"m{n}"], "mean", folds=folds[n], studies=240) for n in range(2))
    added = minus(one, other).error ** 2 - one.seeds.error**2 - other.seeds.error**2
    assert added == pytest.approx((sides[0] - sides[1]).var(ddof=1) / 2_000, rel=0.3)
    assert one.score().error ** 2 - one.seeds.error**2 == pytest.approx(sides[0].var(ddof=1) / 2_000, rel=0.3)


def test_models_on_different_test_sets_have_the_noise_of_both() -> None:
    draws = np.random.default_rng(8)
    runs = task(draws, 3, 0.0, models=2)
    fits = fit_tasks([runs])[0]
    folds = [fold_scores(WeightedMean(draws.random(rows)), rows) for rows in (60, 80)]
    one, other = (effect(runs[f"m{n}"], fits[f"m{n}"], "mean", folds=folds[n], studies=240) for n in range(2))
    alone = [own.score().error for own in (one, other)]
    assert minus(one, other).error == pytest.approx(math.hypot(*alone))


def test_other_seeds_choose_as_often_as_is_said() -> None:
    scores = np.asarray([[0.50, 0.51, 0.49], [0.60, 0.61, 0.59], [0.60, 0.62, 0.59]])
    runs = Runs(RATES[:3], scores, scores, np.zeros(scores.shape, bool))
    found = effect(runs, fit_tasks([{"m": runs}])[0]["m"], "mean")
    assert found.chosen.sum() == pytest.approx(1) and found.chosen[0] < 0.01 and min(found.chosen[1:]) > 0.05
    assert 0 <= found.regret < 0.005

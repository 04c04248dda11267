"""Components of variance, against REML of statsmodels on balanced grids and on simulated grids with planted components."""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
import statsmodels.formula.api as smf
from analysis_study import cell

from mlmclm.analysis.analyse import analyse
from mlmclm.analysis.model_runs import Runs
from mlmclm.analysis.results import records
from mlmclm.analysis.statistics.components import UNKNOWN, _components_of
from mlmclm.analysis.summary import task_metrics
from mlmclm.results.intervals import deviation_interval
from mlmclm.seeds import Seeds

RATES = tuple(1e-5 * 2**step for step in range(6))
CURVE = np.asarray([-2.0, -1, 0, 1, 0, -1])
STREAMS = tuple(Seeds(*own) for own in itertools.product(range(3), range(4), range(2)))


def runs(test: np.ndarray, seeds: tuple[Seeds, ...] = ()) -> Runs:
    """The runs of a model with these test scores, [R, S]; NaN where there is none."""
    return Runs(RATES[: len(test)], test, test, np.zeros(test.shape, bool), seeds)


def planted(draws: np.random.Generator, replicates: int, seeds: int, *, rate: float = 1.0) -> list[Runs]:
    """A family with a seed's deviation of 1 at one rate, of which half is the same at all rates; a replicate adds 2."""
    found = []
    for _ in range(replicates):
        noise = draws.standard_normal((6, seeds)) + draws.standard_normal(seeds)
        found.append(runs(rate * CURVE[:, None] + math.sqrt(0.5) * noise + 2 * draws.standard_normal()))
    return found


def reml(members: list[Runs], effects: dict[str, str]) -> dict[str, float]:
    """The variances that statsmodels finds by REML, given formulas of the random effects, and that of the residuals."""
    rows = [
        {"y": member.test[rate, place], "rate": rate, "model": number, "seed": place}
        | (vars(member.seeds[place]) if member.seeds else {})
        for number, member in enumerate(members)
        for rate, place in np.ndindex(member.test.shape)
    ]
    frame = pd.DataFrame(rows).assign(one=1)
    model = smf.mixedlm("y ~ 1", frame, groups="one", re_formula="0", vc_formula=effects)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit = model.fit(reml=True, method=["lbfgs"])
    names = sorted(effects)
    return {**dict(zip(names, map(float, fit.vcomp), strict=True)), "rest": float(fit.scale)}


def test_balanced_rates_and_seeds_have_the_components_of_reml() -> None:
    members = planted(np.random.default_rng(1), 1, 5)
    found = _components_of(members)
    other = reml(members, {"rate": "0+C(rate)", "seed": "0+C(seed)"})
    assert found["rate"].sd ** 2 == pytest.approx(other["rate"], rel=1e-3)
    assert found["seed"].sd ** 2 == pytest.approx(other["seed"] + other["rest"], rel=1e-3)
    within = members[0].test.var(axis=1, ddof=1).mean()
    assert found["seed"].sd ** 2 == pytest.approx(within), "the pooled variance at a rate"


def test_replicates_have_the_components_of_reml() -> None:
    members = planted(np.random.default_rng(8), 4, 3)
    found = _components_of(members)
    own = {"rate": "rate", "replicate": "model", "both": "model:rate", "seed": "model:seed"}
    terms = {name: "0+" + ":".join(f"C({part})" for part in parts.split(":")) for name, parts in own.items()}
    other = reml(members, terms)
    assert min(other.values()) > 0.03, "ANOVA and REML agree where all estimates are positive"
    assert found["rate"].sd ** 2 == pytest.approx(other["rate"], rel=5e-3)
    assert found["replicate"].sd ** 2 == pytest.approx(other["replicate"] + other["both"], rel=5e-3)
    assert found["seed"].sd ** 2 == pytest.approx(other["seed"] + other["rest"], rel=5e-3)


def by_stream(draws: np.random.Generator) -> Runs:
    """Runs in which head, order and dropout add deviations of 2, 1 and 0.5, and their combination 0.5."""
    parts = [2 * draws.standard_normal(3), draws.standard_normal(4), 0.5 * draws.standard_normal(2)]
    fixed = [parts[0][seed.head] + parts[1][seed.order] + parts[2][seed.dropout] for seed in STREAMS]
    return runs(np.asarray(fixed) + 0.5 * draws.standard_normal((3, len(STREAMS))), STREAMS)


def test_streams_that_vary_apart_have_components_of_their_own() -> None:
    draws = np.random.default_rng(0)
    found = [_components_of([by_stream(draws)]) for _ in range(100)]
    assert list(found[0]) == ["rate", "seed", "head", "order", "dropout", "interaction"]
    for name, true in (("head", 2.0), ("order", 1.0), ("dropout", 0.5), ("interaction", 0.5)):
        mean = np.mean([each[name].sd ** 2 for each in found])
        assert mean == pytest.approx(true**2, rel=0.45), name
        covered = np.mean([each[name].low <= true <= each[name].high for each in found])
        assert covered >= 0.9, name
    total = np.mean([each["seed"].sd ** 2 for each in found])
    assert total == pytest.approx(5.5, rel=0.3), "the sum of the parts"


def test_a_stream_that_varies_alone_is_named() -> None:
    draws = np.random.default_rng(0)
    order = tuple(Seeds(0, number, 0) for number in range(4))
    assert list(_components_of([runs(draws.standard_normal((3, 4)), order)])) == ["rate", "order"]
    pair = tuple(Seeds(number, number, 0) for number in range(4))
    assert list(_components_of([runs(draws.standard_normal((3, 4)), pair)])) == ["rate", "head+order"]
    same = tuple(Seeds.of(number) for number in range(4))
    assert list(_components_of([runs(draws.standard_normal((3, 4)), same)])) == ["rate", "seed"]


def covered(replicates: int, seeds: int, *, lost: float = 0.0, rate: float = 1.0) -> dict[str, float]:
    """The share of studies whose intervals cover the planted components; `lost` is the share of runs without a score."""
    draws, found = np.random.default_rng(10 * replicates + seeds), []
    true = {"rate": rate * CURVE.std(ddof=1), "seed": 1.0, "replicate": 2.0}
    for _ in range(120):
        members = planted(draws, replicates, seeds, rate=rate)
        for member in members:
            member.test[draws.random(member.test.shape) < lost] = math.nan
        own = _components_of(members)
        found.append({name: each.low - 1e-12 <= true[name] <= each.high for name, each in own.items()})
    return {name: float(np.mean([each[name] for each in found])) for name in found[0]}


@pytest.mark.parametrize("seeds", [3, 5])
def test_intervals_cover_planted_components(seeds: int) -> None:
    assert min(covered(1, seeds).values()) >= 0.91
    assert min(covered(1, seeds, rate=0.0).values()) >= 0.91, "where the rate does not matter"


def test_intervals_cover_where_cells_are_missing() -> None:
    assert min(covered(1, 5, lost=0.15).values()) >= 0.9


def test_intervals_cover_with_replicates() -> None:
    found = covered(5, 3)
    assert set(found) == {"rate", "seed", "replicate"} and min(found.values()) >= 0.91


def test_missing_cells_leave_the_estimates_unbiased() -> None:
    draws, found = np.random.default_rng(5), []
    for _ in range(150):
        (member,) = planted(draws, 1, 4)
        member.test[draws.random(member.test.shape) < 0.2] = math.nan
        found.append([each.sd**2 for each in _components_of([member]).values()])
    rate, seed = np.mean(found, axis=0)
    assert seed == pytest.approx(1.0, rel=0.12) and rate == pytest.approx(CURVE.var(ddof=1), rel=0.12)


def test_components_that_are_not_known_are_not_guessed() -> None:
    draws = np.random.default_rng(0)
    assert _components_of([runs(draws.standard_normal((6, 1)))]) == {"rate": UNKNOWN, "seed": UNKNOWN}
    assert _components_of([runs(np.full((6, 3), math.nan))]) == {"rate": UNKNOWN, "seed": UNKNOWN}
    equal = _components_of([runs(np.full((6, 3), 0.5))])["seed"]
    assert equal.sd == 0 and math.isnan(equal.high), "equal scores don't show how large their noise is"
    single = _components_of([runs(draws.standard_normal((1, 4)))])
    assert single["rate"] is UNKNOWN
    low, high = deviation_interval(single["seed"].sd, 3)
    assert (single["seed"].low, single["seed"].high) == pytest.approx((low, high), rel=1e-2)
    several = _components_of([runs(draws.standard_normal((6, 1))) for _ in range(3)])
    assert several["replicate"] is UNKNOWN, "one seed is not told from the replicate"


def study(draws: np.random.Generator, **more: Any) -> Any:
    models = {"m": 0.0, "m-r2": 0.02, "m-r3": -0.02, "other": 0.0}
    results = []
    for model, lead in models.items():
        for place, rate in enumerate(RATES):
            for seed in range(3):
                score = 0.7 + lead + 0.01 * CURVE[place] + 0.01 * draws.standard_normal()
                results.append(cell(model, "pydocs-kind", rate, seed, score, score))
    results[0]["scores"]["test"]["accuracy"] = 0.1
    return analyse(results, **more)


def test_failed_runs_are_left_out_and_a_family_has_its_replicates() -> None:
    family = {"m-r2": "m", "m-r3": "m"}
    found = study(np.random.default_rng(0), replicate_of=family)
    rows = {(row["model_family"], row["source"]): row for row in records(found.components)}
    assert list(rows) == [("m", "rate"), ("m", "seed"), ("m", "replicate"), ("other", "rate"), ("other", "seed")]  # fmt: skip
    assert rows["m", "seed"]["runs"] == 53 and rows["m", "seed"]["replicates"] == 3
    assert rows["m", "seed"]["sd"] == pytest.approx(0.01, rel=0.4), "a failed run would make it 0.06"
    metrics = task_metrics(found)
    assert metrics["m-r3", "pydocs-kind"]["component_replicate"] == rows["m", "replicate"]["sd"]
    assert metrics["other", "pydocs-kind"]["component_rate_high"] == rows["other", "rate"]["sd_high"]
    alone = study(np.random.default_rng(0)).components
    assert set(alone["model_family"]) == {"m", "m-r2", "m-r3", "other"} and set(alone["replicates"]) == {1}


def test_the_test_examples_component_is_their_jackknife() -> None:
    folds = 0.7 + 0.0002 * np.random.default_rng(0).standard_normal(100)
    found = study(np.random.default_rng(0), folds=lambda rows: folds)
    (row,) = [row for row in records(found.components) if (row["model_family"], row["source"]) == ("m", "examples")]
    sd = math.sqrt(99 * folds.var())
    assert (row["sd"], row["sd_low"], row["sd_high"]) == pytest.approx((sd, *deviation_interval(sd, 99)))

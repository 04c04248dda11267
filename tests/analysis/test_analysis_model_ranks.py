"""Ranks hold together, pairs are those of the analysis of variance, and the verb reads what `compare` reads."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import statsmodels.formula.api
import statsmodels.stats.multitest

from mlmclm.analysis.model_ranks import RankedModels, TaskScores, level_runs, ranking
from mlmclm.answers.comparison_of_scores import rank
from mlmclm.cli.main import main
from mlmclm.errors import UserError


def test_pairs_are_those_of_an_analysis_of_variance_with_holm_s_correction() -> None:
    draw, names = np.random.default_rng(0), ["a", "b", "c", "d"]
    scores = 0.5 + 0.1 * draw.standard_normal((4, 60)) + 0.2 * draw.standard_normal(60)
    scores += np.asarray([0.08, 0.06, 0.0, -0.03])[:, None]
    found = ranking(names, [TaskScores([own[None] for own in scores])])
    long = pd.DataFrame({"score": scores.ravel(), "model": np.repeat(names, 60), "example": np.tile(np.arange(60), 4)})
    fit = statsmodels.formula.api.ols("score ~ C(model) + C(example)", long).fit()
    error = np.sqrt(2 * fit.mse_resid / 60)
    raw = []
    for pair in found.pairs:
        value = scores[names.index(pair.first)].mean() - scores[names.index(pair.second)].mean()
        raw.append(2 * scipy.stats.t.sf(abs(value) / error, fit.df_resid))
        half = scipy.stats.t.ppf(0.975, fit.df_resid) * error
        assert (pair.difference.value, pair.difference.high) == pytest.approx((value, value + half))
        assert pair.difference.p == pytest.approx(raw[-1])
    wanted = statsmodels.stats.multitest.multipletests(raw, method="holm")[1]
    assert [pair.p_holm for pair in found.pairs] == pytest.approx(wanted)
    for model in found.models:
        assert model.best == 1 + sum(
            p < 0.05 and pair.second == model.model for pair, p in zip(found.pairs, wanted, strict=True)
        )
        assert model.worst == 4 - sum(
            p < 0.05 and pair.first == model.model for pair, p in zip(found.pairs, wanted, strict=True)
        )
    assert [each.model for each in found.models] == sorted(names, key=lambda name: -scores[names.index(name)].mean())


def test_several_seeds_add_their_pooled_variance() -> None:
    draw = np.random.default_rng(1)
    tasks = [TaskScores([draw.normal(0.5, 0.1, (seeds, 30)) for seeds in (2, 3, 4)]) for _ in range(2)]
    pair = next(each for each in ranking(["a", "b", "c"], tasks).pairs if {each.first, each.second} == {"a", "c"})
    shares = []
    for task in tasks:
        means = np.stack([own.mean(axis=0) for own in task.scores])
        rest = means - means.mean(axis=0) - means.mean(axis=1, keepdims=True) + means.mean()
        shares.append((2 * (rest**2).sum() / (2 * 29) / 30 / 4, 2 * 29))
        runs = [own.mean(axis=1) for own in task.scores]
        pooled = sum(((own - own.mean()) ** 2).sum() for own in runs) / 6
        shares.append((pooled * (1 / 2 + 1 / 4) / 4, 6))
    variance = sum(size for size, _ in shares)
    freedom = variance**2 / sum(size**2 / own for size, own in shares)
    assert (pair.difference.error**2, pair.difference.freedom) == pytest.approx((variance, freedom))


@pytest.mark.parametrize("models", [2, 5, 20])
def test_all_ranks_hold_together(models: int) -> None:
    """Near ties, resampled ranks held in at most 5 % of simulations."""
    draw, held, studies = np.random.default_rng(models), 0, 150
    names = [f"m{place}" for place in range(models)]
    true = np.repeat(np.linspace(0, 0.05, (models + 1) // 2), 2)[:models]  # every two models are equal
    for _ in range(studies):
        scores = true[:, None] + draw.normal(0, 0.1, (models, 80)) + draw.normal(0, 0.2, 80)
        found = ranking(names, [TaskScores([own[None] for own in scores])])
        held += all(
            each.best <= 1 + (true > true[names.index(each.model)]).sum()
            and each.worst >= models - (true < true[names.index(each.model)]).sum()
            for each in found.models
        )
    assert held / studies >= 0.92


def test_groups_are_the_longest_runs_without_a_clear_difference() -> None:
    assert level_runs("abcd", {("a", "d"), ("a", "c")}) == [["a", "b"], ["b", "c", "d"]]
    assert level_runs("abc", set()) == [["a", "b", "c"]]
    assert level_runs("abc", set(itertools.combinations("abc", 2))) == []


def write(folder: Path) -> Path:
    draw = np.random.default_rng(2)
    rows = [
        {"run": run, "task": task, "example": place, "score": round(level + value, 6)}
        for run, level in (("best", 0.6), ("also", 0.59), ("last", 0.3))
        for task in ("one", "two")
        for place, value in enumerate(draw.normal(0, 0.1, 40))
    ]
    pd.DataFrame(rows).to_csv(folder / "s.csv", index=False)
    return folder / "s.csv"


def test_the_verb_ranks_the_runs_of_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path)
    frame = pd.read_csv(file)
    parts = []
    for name in ("best", "also", "last"):
        parts.append(tmp_path / f"{name}.csv")
        frame[frame["run"] == name].to_csv(parts[-1], index=False)
    together, apart = rank([file]), rank(parts)
    assert together.ranking == apart.ranking and together.tasks == {"one": "score", "two": "score"}
    with pytest.raises(SystemExit) as ended:
        main(["rank", str(file), "--json"])
    assert not ended.value.code
    told = json.loads(capfd.readouterr().out)
    assert [(each["model"], each["best"], each["worst"]) for each in told["models"]][2] == ("last", 3, 3)
    assert told["groups"] == [[each["model"] for each in told["models"][:2]]]
    with pytest.raises(SystemExit):
        main(["rank", *map(str, parts), "--task", "one"])
    said = " ".join(capfd.readouterr().out.split())
    assert "1 to 2" in said and "2 of 3 pairs differ clearly" in said and "for other examples" in said
    frame[(frame["run"] != "last") | (frame["task"] == "one")].to_csv(file, index=False)
    assert rank([file]).left_out == {"two": "last lack it"}
    with pytest.raises(UserError, match="a ranking needs two models or more"):
        rank(parts[:1])
    frame[(frame["run"] != "last") | (frame["example"] > 0)].to_csv(file, index=False)
    with pytest.raises(UserError, match="best and last cannot be paired, as their examples differ"):
        rank([file])
    assert rank([file], common=True).examples == {"one": 39, "two": 39}


def test_a_ranking_of_two_is_a_comparison() -> None:
    draw = np.random.default_rng(3)
    one, other = draw.random(50), draw.random(50)
    found: RankedModels = ranking(["a", "b"], [TaskScores([one[None], other[None]])])
    assert found.pairs[0].difference.p == pytest.approx(scipy.stats.ttest_rel(one, other).pvalue)

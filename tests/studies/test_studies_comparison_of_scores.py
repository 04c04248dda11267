"""`mlmclm.compare` and `mlmclm compare` on scores that other tools have written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import statsmodels.api as sm

sys.path.insert(0, str(Path(__file__).parents[1] / "readers"))
from mlmclm.answers.comparison_of_scores import compare
from mlmclm.cli.main import main
from mlmclm.errors import UserError
from small_scores import sample, write_lines, write_mteb, write_run, write_samples


def write_table(file: Path, runs: dict[tuple[str, int | None], list[float]]) -> Path:
    rows = [(run, seed, place, score) for (run, seed), own in runs.items() for place, score in enumerate(own)]
    frame = pd.DataFrame(rows, columns=["run", "seed", "example", "score"])
    frame.dropna(axis=1).to_csv(file, index=False)
    return file


def draws(seed: int, number: int, shift: float = 0.0) -> list[float]:
    return [round(float(value), 6) for value in np.random.default_rng(seed).normal(0.5 + shift, 0.2, number)]


def test_interval_and_p_are_those_of_scipy_s_paired_t_test(tmp_path: Path) -> None:
    a, b = draws(0, 12, 0.1), draws(1, 12)
    file = write_table(tmp_path / "s.csv", {("a", None): a, ("b", None): b})
    (row,) = compare("a", "b", [file]).rows
    assert row["difference"] == pytest.approx(np.mean(a) - np.mean(b))
    wanted = scipy.stats.ttest_rel(a, b)
    assert (row["test"], row["p"], row["groups"]) == ("t", pytest.approx(wanted.pvalue), None)
    assert (row["low"], row["high"]) == pytest.approx(tuple(wanted.confidence_interval(0.95)))


def test_examples_of_a_group_count_together(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"run": run, "seed": seed, "example": place, "score": score, "group": f"article {place // 6}"}
        for run, shift in (("a", 0.1), ("b", 0.0))
        for seed in range(2)
        for place, score in enumerate(draws(seed + 7 * (run == "b"), 48, shift))
    ]
    file = tmp_path / "s.csv"
    pd.DataFrame(rows).query("seed == 0").drop(columns="seed").to_csv(file, index=False)
    (row,) = compare("a", "b", [file]).rows
    wanted = scipy.stats.ttest_1samp(np.subtract(draws(0, 48, 0.1), draws(7, 48)).reshape(8, 6).mean(axis=1), 0)
    assert (row["p"], row["groups"], row["examples"]) == (pytest.approx(wanted.pvalue), 8, 48)
    with pytest.raises(SystemExit):
        main(["compare", "a", "b", "--scores", str(file)])
    assert "48 examples in 8 groups: scores" in " ".join(capfd.readouterr().out.split())
    pd.DataFrame(rows).to_csv(file, index=False)
    (row,) = compare("a", "b", [file]).rows
    means = [[np.mean(draws(seed + 7 * side, 48, 0.1 * (1 - side))) for seed in range(2)] for side in (0, 1)]
    of_seeds = sum(np.var(own, ddof=1) / 2 for own in means)
    both = [np.mean([draws(seed + 7 * side, 48, 0.1 * (1 - side)) for seed in range(2)], axis=0) for side in (0, 1)]
    of_groups = np.subtract(*both).reshape(8, 6).mean(axis=1).var(ddof=1) / 8
    freedom = (of_seeds + of_groups) ** 2 / (sum(np.var(own, ddof=1) ** 2 / 4 for own in means) + of_groups**2 / 7)
    half = scipy.stats.t.ppf(0.975, freedom) * np.sqrt(of_seeds + of_groups)
    assert (row["high"] - row["difference"], row["groups"]) == (pytest.approx(half), 8)
    rows[-1]["group"] = "another"
    pd.DataFrame(rows).to_csv(file, index=False)
    with pytest.raises(UserError, match=r"scores: example '47' is in group 'another' for b and in 'article 7' for a\."):
        compare("a", "b", [file])
    pd.DataFrame(rows).drop(columns="seed").iloc[[0, 1]].assign(group=["x", None]).to_json(
        file.with_suffix(".jsonl"), orient="records", lines=True
    )
    with pytest.raises(UserError, match="group is empty"):
        compare("a", "b", [file.with_suffix(".jsonl")])


def test_answers_that_are_right_or_wrong_are_compared_by_mcnemar_s_test(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    a, b = (generator.random(60) < 0.7).astype(int), (generator.random(60) < 0.5).astype(int)
    write_samples(tmp_path / "m1", "boolq", a.tolist())
    write_samples(tmp_path / "m2", "boolq", b.tolist())
    found = compare(str(tmp_path / "m1"), str(tmp_path / "m2"), metric="acc")
    (row,) = found.rows
    counts = [[int((a & b).sum()), int((a & ~b & 1).sum())], [int((~a & 1 & b).sum()), int(((1 - a) & (1 - b)).sum())]]
    exact = sm.stats.mcnemar(counts, exact=True)
    stricter = exact.pvalue - 2 * scipy.stats.binom.pmf(exact.statistic, counts[0][1] + counts[1][0], 0.5)
    assert (row["test"], row["p"]) == ("mcnemar", pytest.approx(0.5 * (exact.pvalue + stricter)))
    assert (row["task"], row["metric"], row["examples"], found.unit) == ("boolq", "acc", 60, "example")
    assert compare(str(tmp_path / "m1"), str(tmp_path / "m2")).rows[0]["metric"] == "acc_norm"


def test_an_interval_with_the_noise_of_seeds_is_welch_s_plus_the_jackknife_s(tmp_path: Path) -> None:
    runs = {
        ("a", 0): [0.6] * 8,
        ("a", 1): [0.7] * 8,
        ("a", 2): [0.65] * 8,
        ("b", 0): [0.5] * 8,
        ("b", 1): [0.4] * 8,
        ("b", 2): [0.41] * 8,
    }
    (row,) = compare("a", "b", [write_table(tmp_path / "s.csv", runs)]).rows
    welch = scipy.stats.ttest_ind([0.6, 0.7, 0.65], [0.5, 0.4, 0.41], equal_var=False)
    assert (row["low"], row["high"]) == pytest.approx(tuple(welch.confidence_interval()))
    assert (row["p"], row["covers"]) == (pytest.approx(welch.pvalue), "seeds and examples")
    noisy = {
        (run, seed): (np.asarray(own) + draws(7, 8) * np.asarray(run == "a")).tolist()
        for (run, seed), own in runs.items()
    }
    (row,) = compare("a", "b", [write_table(tmp_path / "noisy.csv", noisy)]).rows
    own = np.asarray([0.6, 0.7, 0.65]) + np.mean(draws(7, 8))
    # Without one example each, the difference moves by that of the mean of the others.
    left = [np.delete(draws(7, 8), place).mean() for place in range(8)]
    jackknife = 7 / 8 * np.sum((np.asarray(left) - np.mean(left)) ** 2)
    shares = [own.var(ddof=1) / 3, np.var([0.5, 0.4, 0.41], ddof=1) / 3, jackknife]
    freedom = sum(shares) ** 2 / (shares[0] ** 2 / 2 + shares[1] ** 2 / 2 + shares[2] ** 2 / 7)
    half = scipy.stats.t.ppf(0.975, freedom) * np.sqrt(sum(shares))
    assert row["high"] - row["difference"] == pytest.approx(half)


def test_the_task_of_a_table_without_tasks_can_be_named(tmp_path: Path) -> None:
    file = write_table(tmp_path / "s.csv", {("a", None): draws(0, 12), ("b", None): draws(1, 12)})
    assert compare("a", "b", [file], tasks=["scores"]).rows == compare("a", "b", [file]).rows
    with pytest.raises(UserError, match=r"unknown task 'score'\. Did you mean 'scores'\? Allowed: scores"):
        compare("a", "b", [file], tasks=["score"])


def test_mteb_s_results_are_paired_over_tasks(tmp_path: Path) -> None:
    names = [f"T{number}" for number in range(8)]
    one, other = (dict(zip(names, draws(seed, 8), strict=True)) for seed in (0, 1))
    write_mteb(tmp_path / "a", one)
    write_mteb(tmp_path / "b", other)
    found = compare(str(tmp_path / "a"), str(tmp_path / "b"))
    (row,) = found.rows
    assert (found.unit, row["examples"], row["metric"]) == ("task", 8, "main_score")
    assert row["p"] == pytest.approx(scipy.stats.ttest_rel(list(one.values()), list(other.values())).pvalue)
    write_mteb(tmp_path / "b", {"T0": 0.5}, revision="r2")
    with pytest.raises(
        UserError, match=r"their tasks differ: 1 of the same name are others, by their dataset_revision.* \(T0\)"
    ):
        compare(str(tmp_path / "a"), str(tmp_path / "b"))
    assert compare(str(tmp_path / "a"), str(tmp_path / "b"), common=True).rows[0]["examples"] == 7


def test_encodeval_s_models_are_compared_at_their_best_rates_over_common_seeds(tmp_path: Path) -> None:
    for seed in range(3):
        write_run(tmp_path, "a", "sst2", f"lr1e-04_sd{seed}", 0.9, [1, 1, 0, 1])
        write_run(tmp_path, "a", "sst2", f"lr1e-05_sd{seed}", 0.5, [0, 0, 0, 1])
        write_run(tmp_path, "b", "sst2", f"lr1e-04_sd{seed}", 0.5, [0, 0, 0, 0])
        if seed:
            write_run(tmp_path, "b", "sst2", f"lr1e-05_sd{seed}", 0.8, [0, 1, 0, 1])
    write_run(tmp_path, "a", "qed", "lr1e-05_sd0", 0.8, [0, 1, 0, 1])
    found = compare("a", "b", [tmp_path / "results"])
    (row,) = found.rows
    assert (row["first_rate"], row["second_rate"], row["seeds"], row["examples"]) == (1e-4, 1e-5, 2, 4)
    assert found.left_out == {"qed": "only a has it"}
    (row,) = compare("a", "b", [tmp_path / "results"], rule="per_seed", tasks=["sst2"]).rows
    assert row["second_rates"] == [1e-4, 1e-5, 1e-5]


def test_a_choice_among_learning_rates_is_said_to_be_in_no_interval(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two equally good models, one of which minds the rate: 35 % of comparisons claimed a difference, and said nothing."""

    def said() -> str:
        with pytest.raises(SystemExit):
            main(["compare", "a", "b", "--scores", str(tmp_path / "results")])
        return " ".join(capfd.readouterr().out.split())

    for seed in range(2):
        write_run(tmp_path, "a", "sst2", f"lr1e-04_sd{seed}", 0.9, [1, 1, seed, 1])
        write_run(tmp_path, "b", "sst2", f"lr1e-04_sd{seed}", 0.5, [0, seed, 0, 0])
    assert "learning rates was chosen" not in said()
    write_run(tmp_path, "b", "sst2", "lr1e-05_sd0", 0.4, [0, 0, 0, 0])
    assert compare("a", "b", [tmp_path / "results"]).rows[0]["rates_tried"] == 2
    assert "the best of 2 learning rates was chosen on scores that share the noise of those compared" in said()


@pytest.mark.parametrize("common", [False, True])
def test_other_examples_on_the_two_sides_are_refused_by_name(tmp_path: Path, common: bool) -> None:
    write_samples(tmp_path / "a", "t", [1, 0, 1, 1])
    write_lines(
        tmp_path / "b" / "samples_t_2026-01-02T03-04-05.678.jsonl",
        [sample(1, 1), sample(2, 0), sample(3, 1, "other"), sample(9, 1)],
    )
    sides = str(tmp_path / "a"), str(tmp_path / "b")
    if common:
        (row,) = compare(*sides, common=True).rows
        assert (row["examples"], row["examples_left_out"]) == (2, 4)
        return
    with pytest.raises(UserError) as refused:
        compare(*sides)
    assert str(refused.value) == (
        f"t: {sides[0]} and {sides[1]} cannot be paired, as their examples differ: 1 only in {sides[0]} (0); 1 only in {sides[1]} (9); "
        "1 of the same name are others, by their doc_hash (3). --common compares the 2 that both have."
    )


def test_a_task_without_a_score_to_compare_is_left_out_beside_others(tmp_path: Path) -> None:
    sides = [tmp_path / "m1", tmp_path / "m2"]
    for side in sides:
        write_samples(side, "arc", [1, 0, 1])
        write_lines(side / "samples_wiki.jsonl", [sample(at, 1, metrics=["ppl"], ppl=[1.0, 2]) for at in range(3)])
        write_lines(side / "samples_bad.jsonl", [sample(0, 1), {**sample(1, 0), "acc": None}])
    found = compare(*map(str, sides), metric="acc")
    assert [row["task"] for row in found.rows] == ["arc"]
    assert (
        "samples_bad.jsonl, line 2: acc is empty; expected a finite number. --metric names another score: acc_norm."
        in found.left_out["bad"]
    )
    assert "no metric with a number per document" in found.left_out["wiki"]
    assert [row["task"] for row in compare(*map(str, sides)).rows] == ["arc", "bad"]
    for task, said in (("bad", "line 2: acc is empty"), ("wiki", "no metric with a number")):
        with pytest.raises(UserError, match=said):
            compare(*map(str, sides), metric="acc", tasks=["arc", task])


def test_equal_answers_have_an_interval_and_no_clear_difference(tmp_path: Path) -> None:
    file = write_table(tmp_path / "s.csv", {(run, seed): [1.0, 0.0, 1.0] for run in "ab" for seed in (0, 1)})
    (row,) = compare("a", "b", [file]).rows
    assert (row["difference"], row["p"], row["equal_seeds"]) == (0.0, 1.0, True)
    assert row["low"] < 0 < row["high"] and row["covers"] == "examples"


def test_mistakes_say_what_to_do(tmp_path: Path) -> None:
    file = write_table(tmp_path / "s.csv", {("mine", 0): [1, 0], ("theirs", 1): [0, 0], ("third", 0): [0, 1]})
    one = write_table(tmp_path / "one.csv", {("mine", None): [1, 0]})
    for words, said in (
        (
            (str(file), str(one)),
            r"s\.csv: it has 3 runs \(mine, theirs, third\)\. Name two of them: mlmclm compare RUN RUN --scores",
        ),
        (
            ("mine", "thirds", [file]),
            r"s\.csv: unknown run 'thirds'\. Did you mean 'third'\? Allowed: mine, theirs, third",
        ),
        (("mine", "theirs", [file]), r"scores: no seed in common; mine has 0, theirs 1"),
        ((str(one), str(tmp_path / "none.csv")), r"none\.csv: there is no such file or folder"),
    ):
        with pytest.raises(UserError, match=said):
            compare(*words)
    with pytest.raises(UserError, match=r"mine, scores: unknown metric 'f1'"):
        compare("mine", "third", [file], metric="f1")
    with pytest.raises(UserError, match=r"rule per_seed: mine and third have no task with several learning rates"):
        compare("mine", "third", [file], rule="per_seed")
    with pytest.raises(UserError, match=r"unknown task 'sst2'"):
        compare("mine", "third", [file], tasks=["sst2"])
    short = write_table(tmp_path / "short.csv", {("a", None): [1.0], ("b", None): [0.0]})
    with pytest.raises(UserError, match="one test example is too little"):
        compare("a", "b", [short])
    twice = [tmp_path / "twice" / str(at) for at in range(2)]
    for folder in twice:
        write_samples(folder / "m", "t", [1, 0])
    with pytest.raises(UserError, match=r"m: t has two sets of acc\. Give the path of one of them"):
        compare("m", "m", twice)
    write_mteb(tmp_path / "mteb", {"A": 0.5, "B": 0.5})
    with pytest.raises(UserError, match="some have scores of examples and others scores of tasks; take them apart"):
        compare(str(one), str(tmp_path / "mteb"))


def test_scores_without_a_main_metric_need_a_choice(tmp_path: Path) -> None:
    rows = [("a", metric, example, 1) for metric in ("bleu", "rouge") for example in (0, 1)]
    rows += [("b", *rest) for _, *rest in rows]
    pd.DataFrame(rows, columns=["run", "metric", "example", "score"]).to_csv(tmp_path / "s.csv", index=False)
    with pytest.raises(UserError, match=r"choose one of its scores with --metric: bleu, rouge"):
        compare("a", "b", [tmp_path / "s.csv"])


def test_the_verb_prints_the_difference_and_what_it_says(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    a, b = draws(0, 300, 0.1), draws(1, 300)
    runs = {
        (run, seed): (np.asarray(own) + 0.01 * seed).tolist() for run, own in (("a", a), ("b", b)) for seed in range(2)
    }
    file = write_table(tmp_path / "s.csv", runs | {("a", 5): a})

    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([*words])
        captured = capfd.readouterr()
        return int(ended.value.code or 0), " ".join(captured.out.split()), " ".join(captured.err.split())

    code, output, errors = run("compare", "a", "b", "--scores", str(file))
    assert code == 0, errors
    assert (
        "a scores higher on scores." in output
        and "the interval covers other seeds and other test examples: scores" in output
    )
    assert "seeds that only a has are left out: 5" in output
    code, output, errors = run("compare", "a", "b", "--scores", str(file), "--json")
    (row,) = json.loads(output)["tasks"]
    assert row["difference"] == pytest.approx(np.mean(a) - np.mean(b)) and row["p"] < 0.001
    code, _, errors = run("compare", "a", "b", "--scores", str(tmp_path / "x.csv"))
    assert (code, "there is no such file" in errors) == (2, True)
    code, _, errors = run("compare", "a", "b", "--common")
    assert (code, "the option is for scores of other tools" in errors) == (2, True)


def test_no_verdict_rests_on_a_score_that_is_not_above_a_stated_chance_level(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = np.random.default_rng(0)
    one, other = (draw.random(80) < 0.6).astype(float).tolist(), [0.0] * 60 + [1.0] * 20
    file = write_table(tmp_path / "s.csv", {("a", None): one, ("b", None): other})
    end = scipy.stats.ttest_1samp(one, 0).confidence_interval(0.95).low
    for level, low in ((end - 0.01, ["second"]), (end + 0.01, ["first", "second"])):
        (row,) = compare("a", "b", [file], chances={"scores": level}).rows
        assert (row["chance"], row["at_chance"]) == (level, low)
    with pytest.raises(UserError, match=r"chance level of scores: 50; .* up to 1"):
        compare("a", "b", [file], chances={"scores": 50})
    seeds = {("a", 0): [0.6] * 8, ("a", 1): [0.7] * 8, ("b", 0): [0.1] * 8, ("b", 1): [0.2] * 8}
    several = write_table(tmp_path / "several.csv", seeds)
    end = float(scipy.stats.t.interval(0.95, 1, loc=0.65, scale=0.05)[0])
    for level, low in ((end - 0.001, ["second"]), (end + 0.001, ["first", "second"])):
        assert compare("a", "b", [several], chances={"scores": level}).rows[0]["at_chance"] == low

    def printed(*options: str) -> str:
        with pytest.raises(SystemExit):
            main(["compare", "a", "b", "--scores", str(file), *options])
        return " ".join("".join(capsys.readouterr()).split())

    said = printed()
    assert said.count("The chance level of scores is not known, so scores at chance are not recognised there.") == 1
    assert "a scores higher on scores." in said
    said = printed("--chance", "scores=0.65")
    assert "No clear difference on scores." in said and "a scores higher" not in said
    assert "not above chance (65.00): a and b, whose lead counts in no verdict" in said
    assert "Did you mean 'scores'?" in printed("--chance", "score=0.5")
    with pytest.raises(SystemExit):
        main(["compare", "a", "b", "--chance", "scores=0.5"])
    assert "cells have chance levels in the store" in capsys.readouterr().err


def test_many_tasks_are_corrected_for_and_one_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chance = np.random.default_rng(0)
    rows = [
        {"run": run, "task": f"t{task}", "example": example, "score": int(chance.random() < (0.9 if sure else 0.5))}
        for task in range(20)
        for example in range(60)
        for run, sure in (("a", task == 0), ("b", False))
    ]
    file = tmp_path / "s.csv"
    pd.DataFrame(rows).to_csv(file, index=False)
    found = compare("a", "b", [file]).rows
    assert {row["tests"] for row in found} == {20}
    expected = sm.stats.multipletests([row["p"] for row in found], method="holm")[1]
    assert [row["p_holm"] for row in found] == pytest.approx(expected)
    assert sum(row["p"] < 0.05 for row in found) > 1, "a task of coin flips differs by accident"
    with pytest.raises(SystemExit):
        main(["compare", "a", "b", "--scores", str(file)])
    printed = capsys.readouterr().out
    assert "a scores higher on t0." in printed
    assert "p after Holm is corrected over the 20 tasks." in printed
    (row,) = compare("a", "b", [file], tasks=["t3"]).rows
    assert row["p_holm"] == row["p"] and row["tests"] == 1


def test_neither_torch_nor_ray_nor_mlflow_is_imported_for_a_comparison_or_an_import(tmp_path: Path) -> None:
    file = write_table(tmp_path / "s.csv", {("a", None): [1.0, 0.0, 1.0], ("b", None): [0.0, 0.5, 1.0]})
    for model in "ab":
        for seed in range(2):
            write_run(tmp_path, model, "sst2", f"lr1e-04_sd{seed}", 0.75, [1, 0, 1, 1])
    words = [["compare", "a", "b", "--scores", str(file)]]
    words += [["import", "encodeval", str(tmp_path / "results"), "--to", str(tmp_path / "out")]]
    program = f"""
import sys
from mlmclm.cli.main import main
for words in {words!r}:
    try:
        main(words)
    except SystemExit as ended:
        assert not ended.code, ended.code
heavy = {{'torch', 'ray', 'mlflow', 'transformers', 'deepspeed', 'datasets'}} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "one seed; what other seeds would give is not known" in done.stdout

"""`mlmclm import`: a study that another tool has run, analysed like one's own, and the claims about it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "readers"))
from mlmclm.analysis.results import records
from mlmclm.analysis.stated_claims import Verdict, stated_claim
from mlmclm.answers.imported_results import import_results
from mlmclm.answers.study_results import Results
from mlmclm.cli.main import main
from mlmclm.errors import UserError
from small_scores import write_run

RATES = (1e-5, 5e-5, 1e-4, 5e-4)
HEADER = "model,family,dataset,learning_rate,seed,validation_score,test_score"


def write_scores(file: Path, *, seeds: int = 4, lost: bool = False) -> Path:
    """Two models on two tasks: `good` scores higher and depends less on the rate. With `lost`, its runs at the highest rate diverged."""
    generator, rows = np.random.default_rng(0), [HEADER]
    for model, level, slope in (("good", 0.9, 0.001), ("poor", 0.8, 0.05)):
        for task in ("sst2", "qqp"):
            for place, rate in enumerate(RATES):
                for seed in range(seeds):
                    scores = [level - slope * abs(place - 2) + generator.normal(0, 0.004) for _ in range(2)]
                    gone = lost and model == "good" and place == 3
                    rows.append(f"{model},SC,{task},{rate},{seed}," + ("," if gone else f"{scores[0]},{scores[1]}"))
    file.write_text("\n".join(rows) + "\n")
    return file


def verdict(results: Results, claim: str) -> Verdict:
    return stated_claim(claim, results.analysis)


def test_a_table_of_scores_is_analysed_and_its_claims_are_judged(tmp_path: Path) -> None:
    study = import_results("encodeval", write_scores(tmp_path / "s.csv"))
    assert study.analysis.models == ["good", "poor"] and study.analysis.missing == 0
    for claim, expected in (
        ("good > poor", "holds"),
        ("poor > good", "does not hold"),
        ("good > poor on sst2", "holds"),
        ("good > poor on sequence-classification", "holds"),  # all tasks are of this family
        ("good steadier than poor", "holds"),
        ("poor steadier than good on qqp", "does not hold"),
        ("poor steadier than good on sequence-classification", "does not hold"),
    ):
        assert verdict(study, claim).verdict == expected, verdict(study, claim)
    row = next(each for each in records(study.analysis.comparisons) if each["kind"] == "all")
    assert f"{100 * row['difference']:+.2f} points" in verdict(study, "good > poor").reason


def test_a_claim_that_the_seeds_cannot_show_is_unknown(tmp_path: Path) -> None:
    study = import_results("encodeval", write_scores(tmp_path / "s.csv", seeds=1))
    assert verdict(study, "good > poor") == ("unknown", verdict(study, "good > poor").reason)
    assert "the noise of seeds is not known" in verdict(study, "good > poor").reason
    assert verdict(study, "good steadier than poor").verdict == "unknown"


def test_a_claim_on_an_unfinished_grid_says_what_is_missing(tmp_path: Path) -> None:
    """`holds` stood beside "No winner yet" without a word, where the other model lacked its best rate."""
    file = write_scores(tmp_path / "s.csv")
    rows = [row for row in file.read_text().splitlines() if not row.startswith("poor,SC,sst2,0.0001,")]
    file.write_text("\n".join(rows) + "\n")
    study = import_results("encodeval", file)
    assert study.advice.answer.verdict.startswith("No winner yet")
    for claim in ("good > poor", "good > poor on sst2"):
        assert verdict(study, claim).reason.endswith(", so far (4 cells have no result yet)")
    assert "so far" not in verdict(study, "good > poor on qqp").reason
    assert verdict(study, "good steadier than poor").reason.endswith(", so far (4 cells have no result yet)")


def test_claims_about_models_with_several_pretraining_runs_are_about_all_of_them(tmp_path: Path) -> None:
    """A further run was an "unknown task or family", and of two models only the stability of the first runs counted."""
    steady, steep = "1m-mlm40-1k", "1m-clm-1k"
    header, *rows = write_scores(tmp_path / "s.csv").read_text().replace("good", steady).replace("poor", steep).split()
    again = [row.replace(",", "-r2,", 1) for row in rows]
    study = import_results("encodeval", _written(tmp_path / "r.csv", [header, *rows, *again]))
    with pytest.raises(UserError, match=f"{steady}-r2 is a pretraining run of {steady}, .* name {steady}\\."):
        verdict(study, f"{steady}-r2 > {steep}")
    assert verdict(study, f"{steady} steadier than {steep}").verdict == "holds"
    # A second run that depends as much on the rate as the other model.
    like = [f"{steady}-r2{row.removeprefix(steep)}" for row in rows if row.startswith(steep)]
    study = import_results("encodeval", _written(tmp_path / "l.csv", [header, *rows, *like]))
    found = verdict(study, f"{steady} steadier than {steep} on sst2")
    assert found.verdict == "in part" and f"{steady}-r2 and {steep} on sst2: " in found.reason


def _written(file: Path, rows: list[str]) -> Path:
    file.write_text("\n".join(rows) + "\n")
    return file


@pytest.mark.parametrize(
    ("claim", "said"),
    [
        ("good better than poor", r"expected `A > B` or `A steadier than B`"),
        ("good > por", r"unknown model 'por'\. Did you mean 'poor'\?"),
        ("good > poor on sst", r"unknown task or family 'sst'\. Did you mean 'sst2'\?"),
        ("good steadier than poor on sst", r"unknown task or family 'sst'"),
        ("good > good", "compares a model with itself"),
    ],
)
def test_a_claim_that_cannot_be_read_says_why(tmp_path: Path, claim: str, said: str) -> None:
    study = import_results("encodeval", write_scores(tmp_path / "s.csv"))
    with pytest.raises(UserError, match=said):
        verdict(study, claim)


def test_a_rate_with_one_run_gives_no_verdict_and_this_is_said(tmp_path: Path) -> None:
    file = write_scores(tmp_path / "s.csv")
    kept = [line for line in file.read_text().splitlines() if ",0.0005," not in line or ",0.0005,0," in line]
    file.write_text("\n".join(kept) + "\n")
    study = import_results("encodeval", file, tasks=["sst2"])
    assert verdict(study, "good steadier than poor") == (
        "unknown",
        f"deviation over learning rates: sst2: no verdict, as a rate has one run (5e-4), so far ({2 * 3} cells have no result yet)",
    )


def test_models_with_scores_at_different_rates_are_not_said_to_be_steadier(tmp_path: Path) -> None:
    file = write_scores(tmp_path / "s.csv", lost=True)
    study = import_results("encodeval", file, tasks=["sst2"])
    assert verdict(study, "good steadier than poor") == (
        "unknown",
        "deviation over learning rates: sst2: they have scores at different rates",
    )
    study = import_results("encodeval", file, tasks=["sst2"], learning_rates=RATES[:3])
    assert verdict(study, "good steadier than poor").verdict == "holds"
    assert study.facts.command.endswith("--task sst2 --lr 1e-5 --lr 5e-5 --lr 1e-4")
    with pytest.raises(UserError, match=r"unknown learning rate '0\.1'"):
        import_results("encodeval", file, learning_rates=[0.1])
    with pytest.raises(UserError, match=r"unknown model 'god'\. Did you mean 'good'"):
        import_results("encodeval", file, models=["god"])


def tree(root: Path) -> Results:
    generator = np.random.default_rng(0)
    for model in ("a", "b"):
        for rate in ("1e-05", "1e-04"):
            for seed in range(3):
                if (model, rate, seed) != ("b", "1e-04", 2):
                    right = (generator.random(200) < (0.8 if model == "a" else 0.7)).astype(int).tolist()
                    write_run(root, model, "sst2", f"lr{rate}_sd{seed}", float(np.mean(right)), right)
    return import_results("encodeval", root / "results")


def test_a_tree_s_scores_of_examples_add_the_noise_of_the_test_set(tmp_path: Path) -> None:
    study = tree(tmp_path)
    effect = study.analysis.effects["a", "sst2"]
    assert effect.folds is not None and len(effect.folds) == 100
    # The delete-a-group jackknife of a mean of n examples has about the variance s^2 / n.
    row = next(each for each in records(study.analysis.chosen) if each["model"] == "a")
    files = [
        each["file"] for each in study.rows if each["model"] == "a" and each["learning_rate"] == row["learning_rate"]
    ]
    scores = np.mean([json.loads(Path(file).read_text())["test"]["scores_i"] for file in files], axis=0)
    assert 99 * effect.folds.var() == pytest.approx(scores.var(ddof=1) / 200, rel=0.35)
    whole, seeds = effect.score(), effect.seeds
    assert whole.error > seeds.error


def test_two_imported_models_are_compared_as_one_s_own_are(tmp_path: Path) -> None:
    study = tree(tmp_path / "seeds")
    (row,) = study.compare("a", "b").rows
    reported = next(each for each in records(study.analysis.comparisons) if each["kind"] == "task")
    assert abs(row["difference"]) == abs(reported["difference"]) and row["covers"] == "seeds and examples"
    # With one seed, the interval is over the examples.
    right = {"a": [1, 1, 1, 1, 0, 1, 1, 1], "b": [1, 0, 0, 1, 0, 1, 0, 1]}
    for model, scores in right.items():
        write_run(tmp_path / "one", model, "sst2", "lr1e-04_sd0", float(np.mean(scores)), scores)
    (row,) = import_results("encodeval", tmp_path / "one" / "results").compare("a", "b").rows
    assert (row["first"], row["second"], row["covers"], row["examples"]) == (7 / 8, 4 / 8, "examples", 8)
    assert (row["test"], row["p"]) == ("mcnemar", pytest.approx(0.5**3)), "three answers differ, all for a"


def test_runs_that_a_grid_lacks_are_missing_or_diverged(tmp_path: Path) -> None:
    tree(tmp_path)
    lacking = import_results("encodeval", tmp_path).analysis
    diverged = import_results("encodeval", tmp_path, absent="diverged").analysis
    assert (lacking.missing, lacking.diverged) == (1, 0)
    assert (diverged.missing, diverged.diverged) == (0, 1)
    empty = import_results("encodeval", write_scores(tmp_path / "s.csv", lost=True)).analysis
    assert (empty.missing, empty.diverged) == (0, 8)
    with pytest.raises(UserError, match=r"unknown kind of absent run 'lost'"):
        import_results("encodeval", tmp_path, absent="lost")


def test_validation_scores_are_analysed_in_the_place_of_test_scores_that_are_not_known(tmp_path: Path) -> None:
    file = write_scores(tmp_path / "s.csv")
    file.write_text(re.sub(r",[0-9.]+$", ",unread", file.read_text(), flags=re.MULTILINE))
    study = import_results("encodeval", file, split="validation")
    assert verdict(study, "good steadier than poor").verdict == "holds"
    assert (study.analysis.best["test_mean"] == study.analysis.best["validation_mean"]).all()
    none = import_results("encodeval", file)
    assert verdict(none, "good > poor") == ("unknown", "not both have a score on all tasks")
    with pytest.raises(UserError, match=r"unknown split 'dev'"):
        import_results("encodeval", file, split="dev")


def test_the_verb_prints_the_answer_and_writes_report_tables_and_results(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = write_scores(tmp_path / "s.csv")
    options = ["--rule", "per_seed", "--claim", "good > poor", "--to", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as ended:
        main(["import", "encodeval", str(file), *options])
    output = capfd.readouterr().out
    assert not ended.value.code
    assert output.startswith("Best on the mean over 2 tasks: good.")
    assert re.search(r"^holds: good > poor \(\+10\.\d\d points", output, re.MULTILINE)
    assert "sd over rates" in output
    assert {"report.html", "best.csv", "stability.csv", "comparisons.csv", "results.parquet"} <= {
        each.name for each in (tmp_path / "out").iterdir()
    }
    with pytest.raises(SystemExit) as ended:
        main(["import", "encodeval", str(file), "--claim", "poor > good", "--json"])
    found = json.loads(capfd.readouterr().out)
    assert found["verdicts"][0]["verdict"] == "does not hold" and found["rule"] == "mean"
    for wrong, said in (
        (["table", str(file)], "have no grid"),
        (["encodevals", str(file)], "Did you mean 'encodeval'?"),
        (["encodeval", str(file), "--to", f"{file}/out"], f"{file}/out: {file} is a file; name a folder to write to."),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["import", *wrong])
        assert ended.value.code == 2 and said in " ".join(capfd.readouterr().err.split())


def test_a_stated_chance_level_makes_no_winner_of_a_score_at_chance_and_fails_runs_there(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = write_scores(tmp_path / "s.csv")
    assert import_results("encodeval", file).advice.answer.clear
    levels = {"sst2": 0.95, "qqp": 0.95}
    low = import_results("encodeval", file, chances=levels)
    assert set(low.analysis.best["above_chance"]) == {"no"}
    assert (
        low.advice.answer.verdict == "No winner on the mean over 2 tasks: good scores highest, but is not above chance."
    )
    some = import_results("encodeval", file, chances={"sst2": 0.72}).analysis.stability.set_index(["model", "task"])
    runs = import_results("encodeval", file, tasks=["sst2"]).analysis.cells
    below = int(((runs["model"] == "poor") & (runs["test"] <= 0.72)).sum())
    assert below == 4 == some.loc[("poor", "sst2"), "failed"], "those at the lowest rate"
    assert not some.loc[("poor", "qqp"), "failed"]
    with pytest.raises(UserError, match=r"chance level: unknown task 'sst'\. Did you mean 'sst2'\?"):
        import_results("encodeval", file, chances={"sst": 0.5})
    with pytest.raises(UserError, match="chance level of sst2: 50; scores are fractions of 1"):
        import_results("encodeval", file, chances={"sst2": 50.0})

    def printed(*options: str) -> str:
        with pytest.raises(SystemExit):
            main(["import", "encodeval", str(file), *options])
        return "".join(capfd.readouterr())

    unknown = "The chance level of qqp and sst2 is not known, so scores at chance are not recognised there."
    assert printed().count(unknown) == 1
    assert "is not known, so scores at chance" not in printed("--chance", "sst2=0.95", "--chance", "qqp=0.95")
    assert "--chance sst2: write TASK=VALUE" in printed("--chance", "sst2")
    assert "--chance sst2=0.95 --chance qqp=0.95" in low.facts.command
    page = import_results("encodeval", file).write(tmp_path / "out").files["report"].read_text()
    assert page.count(unknown) == 1


def test_runs_with_times_make_advice_with_hours_and_others_say_that_they_are_not_known(tmp_path: Path) -> None:
    generator, rows = np.random.default_rng(0), [HEADER]
    for model, level in (("a", 0.73), ("b", 0.70)):
        for rate in RATES:
            for seed in range(3):
                scores = [level + generator.normal(0, 0.02) for _ in range(2)]
                rows.append(f"{model},SC,sst2,{rate},{seed},{scores[0]},{scores[1]}")
    bare, timed = tmp_path / "bare.csv", tmp_path / "timed.csv"
    bare.write_text("\n".join(rows) + "\n")
    timed.write_text("\n".join([f"{rows[0]},seconds,device", *(f"{row},90,A GPU" for row in rows[1:])]) + "\n")
    price, unknown = import_results("encodeval", bare).advice.open
    assert price.endswith("more cells of both models.") and unknown.startswith("How long cells take is not known")
    (price,) = import_results("encodeval", timed).advice.open
    cells = int(price.partition(" more cells")[0].rpartition(" ")[2].replace(",", ""))
    assert price.endswith(f", about {cells * 90 / 3600:,.1f} worker hours on A GPU.")
    timed.write_text(timed.read_text().replace(",90,", ",-1,", 1))
    with pytest.raises(UserError, match=r"row 1: seconds is '-1'; expected a number above 0"):
        import_results("encodeval", timed)
    for model in ("a", "b"):
        for seed in range(2):
            write_run(tmp_path, model, "sst2", f"lr1e-04_sd{seed}", 0.8, [1, 0, 1, seed])
    assert "1 task of 4 test examples" in import_results("encodeval", tmp_path / "results").advice.rests_on[0]

"""Zero-shot tasks of a study or sweep: computed on Ray once, in the report, in MLflow, and beside it as CSV."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
import yaml

from mlmclm.cli.main import main
from mlmclm.cluster.ray_cluster import ray_session
from mlmclm.configuration import parse_config
from mlmclm.errors import UserError
from mlmclm.evaluation.evaluations import main_metric
from mlmclm.evaluation.zero_shot_config import ZeroShot
from mlmclm.tracking.views import zero_shot_record
from small_models import save_pronoun_model, save_small_decoder, save_small_model, write_sentiment

TEMPLATES = """occupation(0)\tother-participant(1)\tanswer\tsentence
baker\tguest\t0\tThe $OCCUPATION told the $PARTICIPANT that $NOM_PRONOUN was late.
pilot\tguest\t0\tThe $OCCUPATION said that the $PARTICIPANT saw $ACC_PRONOUN today.
"""
SPACE = {
    "tasks": ["sst2"],
    "learning_rates": [1e-3],
    "seeds": [0, 1],
    "max_concurrent": 1,
    "protocol": {"batch_size": 8, "max_steps": 2, "max_length": 16},
}


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """A sweep of an encoder, a decoder, and an encoder that splits pronouns, with Winogender beside one task."""
    write_sentiment(tmp_path / "data", train=24, test=8)
    save_pronoun_model(tmp_path / "euro")
    save_small_decoder(tmp_path / "llama")
    save_small_model(tmp_path / "plain")
    (tmp_path / "wino").mkdir()
    (tmp_path / "wino" / "templates.tsv").write_text(TEMPLATES)
    (tmp_path / "wino" / "occupations-stats.tsv").write_text("occupation\tbls_pct_female\nbaker\t60.5\npilot\t7\n")
    (tmp_path / "space.yaml").write_text(yaml.safe_dump(SPACE))
    content = {
        "name": "given",
        "models": ["euro", "llama", "plain"],
        "space": "space.yaml",
        "device": "cpu",
        "zero_shot": {"winogender": "wino", "winogender_rule": "published"},  # which needs pronouns of one token
    }
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(content))
    return tmp_path / "sweep.yaml"


def here(capfd: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    """Exit code, output and errors of a command line in this process; another would load all libraries anew."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, words)))
    found = capfd.readouterr()
    return int(ended.value.code or 0), found.out, found.err


@pytest.fixture
def session(tmp_path: Path) -> Iterator[None]:
    """A Ray session of one processor: each worker imports what evaluates models, which takes longer than the evaluations."""
    with ray_session(tmp_path / "session", num_cpus=1):
        yield


@pytest.mark.slow
def test_a_sweep_computes_its_zero_shot_tasks_once_and_shows_them_everywhere(
    sweep: Path, session: None, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, store = sweep.parent, sweep.parent / "store"
    options = ("--store", store, "--data", folder / "data")
    _, output, _ = here(capfd, "sweep", sweep, *options, "--dry-run")
    assert "zero-shot evaluations: 3 of 3 to compute" in output
    code, _, errors = here(capfd, "sweep", sweep, *options)
    # One evaluation isn't possible; that keeps nothing else from being done.
    assert code == 1, errors
    assert "1 of 3 evaluations failed" in errors and "plain on winogender: the model's vocabulary has no" in errors
    assert pd.read_csv(store / "studies" / "given" / "best.csv")["n"].tolist() == [2, 2, 2]
    # The same results as those of `evaluate`, which finds them.
    words = ("evaluate", folder / "euro", folder / "llama", "--json", "--store", store)
    code, output, errors = here(capfd, *words, "--winogender", folder / "wino", "--winogender-rule", "published")
    assert code == 0, errors
    results = json.loads(output)["results"]
    assert [result["computed"] for result in results] == [False, False]
    listed = pd.read_csv(store / "studies" / "given" / "zero_shot.csv")
    assert set(zip(listed["model"], listed["scoring"], strict=True)) == {("euro", "masked"), ("llama", "causal")}
    for result in results:
        own = listed[listed["model"] == result["model"]].set_index("metric")
        assert {name: own["score"][name] for name in own.index} == pytest.approx(
            {name: metric["score"] for name, metric in result["metrics"].items()}, nan_ok=True
        )
    page = (store / "studies" / "given" / "report.html").read_text()
    assert 'id="zero-shot"' in page and 'id="pronouns"' in page
    with sqlite3.connect(store / "mlflow" / "mlflow.db") as database:
        found = database.execute(
            "SELECT runs.name, metrics.value FROM runs JOIN metrics USING (run_uuid) "
            "WHERE metrics.key = 'against' AND runs.name LIKE '% zero-shot' ORDER BY runs.name"
        ).fetchall()
    scores = {result["model"]: result["metrics"]["against"]["score"] for result in results}
    assert found == [(f"{name} winogender zero-shot", scores[name]) for name in ("euro", "llama")]
    found = json.loads(here(capfd, "sweep", sweep, *options, "--dry-run", "--json")[1])
    assert (found["evaluations"], found["evaluations_to_compute"], found["cells_to_compute"]) == (3, 1, 0)
    # A report is written from the store alone.
    code, _, errors = here(capfd, "report", sweep, *options, "--to", folder / "again")
    assert code == 0, errors
    assert (folder / "again" / "zero_shot.csv").read_bytes() == (
        store / "studies" / "given" / "zero_shot.csv"
    ).read_bytes()
    # Damaged results are named, all at once, before anything is done.
    damaged = [store / "evaluations" / result["key"][:2] / f"{result['key']}.json" for result in results]
    for file in damaged:
        file.write_text(file.read_text().replace("0.", "1.", 1))
    code, _, errors = here(capfd, "sweep", sweep, *options)
    said = "".join(errors.split())
    assert code == 2 and all(str(file) in said for file in damaged)
    assert "onlythisresultisthencomputedagain" in said and "goeson" not in said


def test_files_are_looked_up_beside_the_study_and_named_where_they_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "words.yaml").write_text("task: words")
    asked = parse_config(ZeroShot, {"tasks": ["words.yaml", "lambada_openai"], "limit": 5}, where="study")
    assert asked.found(tmp_path, None).tasks == (str(tmp_path / "words.yaml"), "lambada_openai")
    with pytest.raises(UserError, match=r"zero_shot\.winogender: wino does not exist \(looked for .*wino"):
        parse_config(ZeroShot, {"winogender": "wino"}, where="study").found(tmp_path, None)
    with pytest.raises(UserError, match="nothing to evaluate on"):
        parse_config(ZeroShot, {"limit": 5}, where="study")


def test_a_missing_harness_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlmclm.evaluation.zero_shot_config.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'mlmclm\[evaluation\]'"):
        ZeroShot(tasks=("lambada_openai",)).read(None)


def test_a_result_is_a_summary_in_mlflow_under_the_common_names() -> None:
    entry = {"score": 0.25, "low": 0.1, "high": None, "examples": 8}
    metrics = {"perplexity": {**entry, "score": 9.0}, "acc": entry, "exact_match, strict": {**entry, "score": None}}
    assert main_metric(metrics) == "acc"
    cost = {"finished": "2026-01-02T03:04:05+00:00", "seconds": 2.0, "commit": "c0ffee"}
    result = {
        "model": "m",
        "task": "sst2",
        "key": "k",
        "scoring": "causal",
        "task_data": "d",
        "main": "acc",
        "metrics": metrics,
        "cost": cost,
    }
    record = zero_shot_record("s", result, about={"objective": "clm", "family": "another"})
    values = {name: value for name, value, _, _ in record.metrics}
    assert values == {"score": 0.25, "score_low": 0.1, "acc": 0.25, "perplexity": 9.0}
    assert record.params == {
        "objective": "clm",
        "family": "zero-shot",
        "model": "m",
        "task": "sst2",
        "scoring": "causal",
    }

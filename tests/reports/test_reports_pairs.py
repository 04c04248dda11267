"""Paired models and zero-shot results in the report."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from analysis_study import TASKS, synthetic_results
from report_study import facts
from scipy import stats

from mlmclm.analysis.analyse import Analysis, analyse
from mlmclm.answers.named_facts import phase_facts
from mlmclm.plans.names import parse_name
from mlmclm.reports.paired_models import pairs
from mlmclm.reports.study_facts import MADE, ModelFacts, StudyFacts, TaskFacts, ZeroShotFacts
from mlmclm.reports.view import ordered_tasks
from mlmclm.reports.write_report import write_report

WAYS = {
    "2m-mlm30-600": "encoder",
    "2m-clm-600": "decoder",
    "2m-clm-600-mntp15-800": "encoder from decoder",
    "2m-mlm30-600-clm-800": "decoder from encoder",
}


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *WAYS.items(),
        ("2m-mlm30-600-mlm15-800", "encoder"),
        ("2m-mlm30-600-mlm15-800-clm-900", "decoder from encoder"),
        ("2m-clm-400-mlm30-600-clm-800", ""),
        ("2m-clm-400-mlm30-600-300", "decoder"),  # a checkpoint from before the change
        ("2m-untrained", ""),
    ],
)
def test_a_model_is_what_the_order_of_its_objectives_makes_it(name: str, way: str) -> None:
    assert ModelFacts(name, "pretrained", phases=phase_facts(parse_name(name))).made == way


def answers(model: str, level: float) -> tuple[float, ...]:
    chance = random.Random(model)
    return tuple(float(chance.random() < level) for _ in range(50))


def study(models: dict[str, str] = WAYS, *, zero_shot: bool = True) -> tuple[Analysis, StudyFacts]:
    levels = {name: 0.6 + 0.02 * number for number, name in enumerate(models)}
    known = tuple(
        ModelFacts(name, "pretrained", tokens=1000 + number, size="2m", phases=phase_facts(parse_name(name)))
        for number, name in enumerate(models)
    )
    found = []
    for name in models:
        values = answers(name, 0.3 if "clm-6" in name else 0.2)
        share = sum(values) / len(values)
        metrics = {"acc": {"score": share, "low": share - 0.1, "high": share + 0.1, "examples": 50},
                   "perplexity": {"score": 1234.5, "low": None, "high": None, "examples": 50}}  # fmt: skip
        found.append(ZeroShotFacts(name, "last_word", "causal", "acc", metrics, values))
    about = replace(
        facts(),
        models=known,
        tasks=tuple(TaskFacts(task, task, family, metric) for task, (family, metric) in TASKS.items()),
        zero_shot=tuple(found) if zero_shot else (),
    )
    return analyse(synthetic_results(levels)), about


def test_a_pair_has_the_scores_of_the_tables_and_differences_of_their_own_kind() -> None:
    analysis, about = study()
    (pair,) = pairs(analysis, about, ordered_tasks(analysis, about))
    assert pair.models == {way: name for name, way in WAYS.items()}
    best = analysis.best.set_index(["model", "task"])
    *tuned, asked = pair.rows
    assert [row.task for row in tuned] == list(TASKS)
    for row in tuned:
        for way, name in pair.models.items():
            assert row.scores[way].value == best.loc[(name, row.task), "score"]
        gap = row.scores["decoder"].value - row.scores["encoder"].value
        assert row.difference is not None and row.difference.value == pytest.approx(gap)
    assert (asked.task, asked.kind, asked.metric) == ("last_word", "zero-shot", "acc")
    ours, theirs = (next(each.values for each in about.zero_shot if each.model == pair.models[way]) for way in ("decoder", "encoder"))  # fmt: skip
    expected = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
    assert asked.difference is not None
    assert (asked.difference.low, asked.difference.high) == pytest.approx((expected.low, expected.high))


def test_equal_answers_have_no_interval() -> None:
    analysis, about = study()
    first = about.zero_shot[0]
    same = {"values": first.values, "metrics": first.metrics}
    about = replace(about, zero_shot=tuple(replace(each, **same) for each in about.zero_shot))
    (pair,) = pairs(analysis, about, ordered_tasks(analysis, about))
    difference = pair.rows[-1].difference
    assert difference is not None and difference.value == 0 and math.isnan(difference.low)


def test_a_score_that_is_no_mean_of_its_examples_has_no_difference_and_is_no_share() -> None:
    analysis, about = study()
    first = about.zero_shot[0]
    entry = {**first.metrics[first.main], "score": 0.9}
    odd = [
        replace(each, main="perplexity", metrics={"perplexity": entry}, values=tuple(-v for v in each.values))
        for each in about.zero_shot
    ]
    (pair,) = pairs(analysis, replace(about, zero_shot=tuple(odd)), ordered_tasks(analysis, about))
    row = pair.rows[-1]
    assert row.metric == "perplexity" and row.difference is None
    assert {str(score) for score in row.scores.values()} == {"0.9"}


def test_of_models_made_alike_the_one_with_the_most_tokens_counts() -> None:
    analysis, about = study({"2m-mlm30-600": "encoder", "2m-mlm30-900": "encoder", "2m-clm-600": "decoder"})
    (pair,) = pairs(analysis, about, ordered_tasks(analysis, about))
    assert pair.models == {"encoder": "2m-mlm30-900", "decoder": "2m-clm-600"}


def test_the_page_and_the_tables_show_pairs_and_zero_shot_results_only_where_there_are_any(tmp_path: Path) -> None:
    analysis, about = study()
    paths = write_report(analysis, about, tmp_path / "with")
    page = paths["report"].read_text()
    assert 'id="pairs"' in page and 'id="zero-shot"' in page and "1,234" in page
    table = pd.read_csv(paths["pairs"])
    assert len(table) == (len(TASKS) + 1) * len(MADE)
    assert len(pd.read_csv(paths["zero_shot"])) == 2 * len(MADE)
    plain = study({"2m-mlm30-600": "encoder", "2m-clm-600": "decoder"}, zero_shot=False)
    paths = write_report(*plain, tmp_path / "without")
    page = paths["report"].read_text()
    assert 'id="pairs"' not in page and 'id="zero-shot"' not in page and "pairs" not in paths

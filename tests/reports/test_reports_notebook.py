"""Results and comparisons in a notebook: the verdict first, and the table that it is based on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import mlmclm
from mlmclm.answers.comparison_of_models import Comparison
from small_record import MODELS, make_record


def test_results_and_comparisons_show_their_verdict_and_their_scores(tmp_path: Path) -> None:
    results = mlmclm.open(tmp_path / "store").results(make_record(tmp_path / "record"))
    said = repr(results)
    assert said.splitlines()[0] == "<results of sweep 'record': 12 cells>" and said.endswith(results.verdict)
    page = results._repr_html_()
    assert page.count("<tr>") + page.count("<tr ") == 1 + len(MODELS) and "fractions of 1" in page
    assert f"{results.best['score'].max():.4g}" in page and "nan" not in page.lower()
    found = results.compare(*MODELS)
    assert repr(found) == f"<comparison of {MODELS[0]} and {MODELS[1]} on 1 task>\n{found.verdict}"
    wide = replace(found, rows=[found.rows[0] | {"difference": 0.1, "apart": True}])
    assert wide.verdict.startswith(f"{MODELS[0]} scores higher on ")
    assert f"{found.rows[0]['difference']:.4g}" in found._repr_html_() and found.verdict in found._repr_html_()


@pytest.mark.parametrize(
    ("p", "difference", "at_chance", "verdict"),
    [
        (0.01, 0.1, [], "The first scores higher on a&b."),
        (0.01, -0.1, [], "The second scores higher on a&b."),
        (0.01, 0.1, ["first"], "No clear difference on a&b."),
        (0.2, 0.1, [], "No clear difference on a&b."),
    ],
)
def test_a_verdict_needs_a_clear_lead_above_chance(
    p: float, difference: float, at_chance: list[str], verdict: str
) -> None:
    row = {
        "task": "a&b",
        "difference": difference,
        "p": 0.0001,
        "p_holm": p,
        "confidence": 0.95,
        "at_chance": at_chance,
    }
    found = Comparison([row], {})
    assert found.verdict == verdict
    assert "a&amp;b" in found._repr_html_() and "a&b" not in found._repr_html_()


def test_a_rate_in_quotes_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(mlmclm.UserError, match=r"--lr '4e-3': a learning rate is a number; write it"):
        mlmclm.finetune("model", "sst2", "4e-3", store=tmp_path)  # type: ignore[arg-type]

"""Printing of a study's plan, which dry runs show, and of its results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlmclm.cli.output import claims_as_json, print_json, show, show_claims, show_table

if TYPE_CHECKING:
    from mlmclm.analysis.analyse import Analysis
    from mlmclm.answers.study_results import Results
    from mlmclm.reports.advice import Advice
    from mlmclm.studies.study_plan import StudyPlan


def show_plan(plan: StudyPlan, *, as_json: bool) -> None:
    """Print a plan; then raise its fault, if it has one."""
    if as_json:
        print_json(plan.as_dict())
    else:
        show(str(plan))
    if plan.fault is not None:
        raise plan.fault


def show_results(results: Results, *, as_json: bool, claims: bool = False, figures: Sequence[Path] = ()) -> None:
    """Print the findings of a study and where its report is; then raise the results' failure, if they have one.

    Args:
        claims: whether to print the verdicts on its claims too, and what it has cost.
        figures: files that were written with the report.
    """
    from mlmclm.analysis.summary import summary
    from mlmclm.reports.wording import baseline_sentence, headline

    analysis = results.analysis
    if as_json:
        report = None if results.report is None else str(results.report)
        tested = {"claims": claims_as_json(results.claims())} if claims else {}
        drawn = {"figures": list(map(str, figures))} if figures else {}
        print_json({"report": report, "provenance": results.facts.provenance, **summary(analysis), **tested, **drawn})
    else:
        answer = headline(analysis)
        show(answer.verdict, style="bold")
        show(answer.detail)
        if analysis.baseline is not None:
            show(baseline_sentence(analysis))
        show_best(analysis)
        if analysis.rule == "on_test":
            show("The learning rates were chosen on these test scores (rule: on_test), which is optimistic.")
        if results.report is not None:
            show(f"report:  {results.report}")
        if figures:
            show(f"figures: {figures[0].parent} ({len(figures)} files)")
        if results.runs:
            show(f"compare: {results.runs}")
        if claims:
            show_claims(results.claims())
            provenance = results.facts.provenance
            for label in ("Computed", "Pretraining", "Fine-tuning"):
                if label in provenance:
                    show(f"{label}: {provenance[label]}")
    if results.failure is not None:
        raise results.failure


def show_advice(advice: Advice) -> None:
    """Print advice."""
    show(advice.answer.verdict, style="bold")
    for line in advice.lines()[1:]:
        show(line)


def show_best(analysis: Analysis) -> None:
    """Print the model-by-task table."""
    from mlmclm.analysis.results import records
    from mlmclm.analysis.selection import best_rates
    from mlmclm.reports import text
    from mlmclm.results.chance import above_chance

    rates = "rates (seeds)" if analysis.rule == "per_seed" else "best rate"
    rows = []
    for row in records(analysis.best):
        score = text.estimate(row["score"], row["score_low"], row["score_high"]) if row["n"] > 0 else "–"
        spread = text.points(row["test_sd"]) if row["n"] > 1 else "–"
        rate = best_rates(row)
        marks = ["one prediction for all"] if row["constant"] and row["constant"] == row["n"] else []
        marks += ["not above"] if above_chance(row["score"], row["score_low"], row["chance"]) == "no" else []
        chance = text.points(row["chance"]) + (f" ({', '.join(marks)})" if marks else "")
        mean = text.points(row["test_mean"])
        fresh = text.estimate(row["fresh"], row["fresh_low"], row["fresh_high"]) if row["n"] > 0 else "–"
        rows.append((row["model"], row["task"], text.metric(row["metric"]), rate, mean, spread, score, fresh, chance))
    columns = (
        *("model", "task", "metric", rates, "mean test", "sd over seeds"),
        *("score [95 %]", "fresh run [95 %]", "chance"),
    )
    show_table(columns, rows, drop=("metric", "sd over seeds", "fresh run [95 %]", rates))
    show(f"Points of 100. mean test: over all chosen runs; score: {text.DELIVERED}; fresh run: {text.FRESH}.")

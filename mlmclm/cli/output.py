"""Printing of results to standard output; messages and progress go to standard error (`mlmclm.progress`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

from mlmclm.errors import printable
from mlmclm.numbers import without_nan
from mlmclm.progress import spoken

if TYPE_CHECKING:
    import pandas as pd

    from mlmclm.analysis.analyse import Analysis
    from mlmclm.answers.study_results import Results
    from mlmclm.reports.advice import Advice
    from mlmclm.studies.plan import StudyPlan

ENDLESS = 100_000
"""Console width at which nothing is ever wrapped."""
VERDICTS = ("seen", "contradicted", "too small to tell", "not tested here")


def show(text: str = "", *, style: str | None = None) -> None:
    """Print text as it is, without wrapping it or reading brackets in paths and names as markup."""
    spoken()
    Console(highlight=False, markup=False, emoji=False, soft_wrap=True).print(printable(text), style=style)


def show_table(
    columns: Sequence[str | Column],
    rows: Sequence[Sequence[str | Text]],
    *,
    title: str | None = None,
    drop: Sequence[str] = (),
    lines: box.Box = box.HEAVY_HEAD,
) -> None:
    """Print a table in which names are never cut.

    On a terminal that is too narrow, columns are dropped and a note names them. A file or a pipe gets all columns.

    Args:
        columns: headers. A column given by its header alone is never wrapped; a `Column` may be.
        drop: headers of columns that may be dropped, the least important first.
    """
    spoken()
    headers = [Column(column, no_wrap=True) if isinstance(column, str) else column for column in columns]
    console = Console(highlight=False, markup=False, emoji=False)
    # The table is measured on an endless console, because rich reports at most the console's width.
    endless = Console(width=ENDLESS, markup=False, emoji=False)
    dropped: list[str] = []
    # Drop columns one at a time until the table fits the terminal.
    while True:
        kept = [number for number, column in enumerate(headers) if column.header not in dropped]
        table = Table(*(headers[number].copy() for number in kept), title=title, title_justify="left", box=lines)
        for row in rows:
            cells = (row[number] for number in kept)
            table.add_row(*(cell if isinstance(cell, Text) else printable(cell) for cell in cells))
        needed = Measurement.get(endless, endless.options, table)
        if not console.is_terminal:
            width = max(console.width, needed.maximum)
            break
        width = max(console.width, needed.minimum)
        if needed.minimum <= console.width or len(dropped) == len(drop):
            break
        dropped.append(drop[len(dropped)])
    Console(highlight=False, markup=False, emoji=False, width=width).print(table)
    if dropped:
        show(f"(omitted, the terminal is too narrow: {', '.join(dropped)})", style="dim")


def print_json(value: Any) -> None:
    """Print one JSON object."""
    spoken()
    typer.echo(json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False))


def flat(facts: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Yield the names and values of nested settings: `corruption.mask`."""
    for name, value in facts.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", str(value)


def show_claims(claims: pd.DataFrame) -> None:
    """Print claims by verdict, each with its source and the reason."""
    for verdict in VERDICTS:
        rows = claims[claims["verdict"] == verdict].to_dict("records")
        if rows:
            show(f"{verdict} ({len(rows)})", style="bold")
        for row in rows:
            show(f"  {row['says']} ({row['source']}; {row['claim']})")
            show(f"    {' '.join(filter(None, (row['reason'], row['settle'])))}")


def claims_as_json(claims: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the table with null for NaN, which JSON doesn't have."""
    return list(map(without_nan, claims.to_dict("records")))


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

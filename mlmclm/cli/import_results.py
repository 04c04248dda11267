"""`mlmclm import`: read the results of a study that another tool has run, and analyse them like one's own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from mlmclm.cli import options
from mlmclm.cli.output import claims_as_json, print_json, show, show_advice, show_best, show_claims, show_table

if TYPE_CHECKING:
    from mlmclm.analysis.analyse import Analysis


def import_results(
    reader: Annotated[str, Argument(help="The format: encodeval.")],
    path: Annotated[
        Path,
        Argument(
            metavar="FOLDER|FILE",
            help="The results: EncodEval's folder `results`, or a CSV file with the columns model, family, dataset, learning_rate, seed, "
            "validation_score and test_score.",
        ),
    ],
    to: Annotated[Path | None, Option(metavar="FOLDER", help="Write the tables and the HTML report here.")] = None,
    rule: options.Rule = None,
    baseline: Annotated[
        str | None, Option(metavar="MODEL", help="The model that the others are compared with.")
    ] = None,
    claim: Annotated[
        list[str] | None,
        Option(
            metavar="CLAIM",
            help="Say whether the results show it: 'A > B', or 'A steadier than B', with 'on TASK' or 'on FAMILY' after it if it is not about "
            "all tasks; may be given several times.",
        ),
    ] = None,
    claims: options.Claims = None,
    model: Annotated[list[str] | None, Option(help="Only this model; may be given several times.")] = None,
    task: Annotated[list[str] | None, Option(help="Only this task; may be given several times.")] = None,
    rate: Annotated[
        list[float] | None, Option("--lr", metavar="RATE", help="Only this learning rate; may be given several times.")
    ] = None,
    split: Annotated[
        str,
        Option(
            metavar="test|validation", help="The scores that are analysed. Learning rates are chosen on validation."
        ),
    ] = "test",
    absent: Annotated[
        str,
        Option(
            metavar="missing|diverged",
            help="What the runs are that the grid lacks: not known, or diverged, as in the published study.",
        ),
    ] = "missing",
    chance: options.Chance = None,
    as_json: options.Json = False,
) -> None:
    """Reads the results of a study that another tool has run, and says what they show: scores, differences, stability.

    Example: mlmclm import encodeval EncodEval/results --rule per_seed --claim '610m-mlm40-42k > 610m-clm-42k' --to published
    """
    from mlmclm.analysis.stated_claims import stated_claim
    from mlmclm.analysis.summary import summary
    from mlmclm.answers.imported_results import import_results as read
    from mlmclm.reports.cautions import without_chance
    from mlmclm.reports.wording import chance_unknown

    results = read(
        reader,
        path,
        rule=rule or "mean",
        baseline=baseline,
        split=split,
        absent=absent,
        models=model or (),
        tasks=task or (),
        learning_rates=rate or (),
        chances=options.chance_levels(chance or ()),
    )
    stated = [(claim_text, stated_claim(claim_text, results.analysis)) for claim_text in claim or ()]
    tested = results.claims(*claims) if claims else None
    report = results.write(to).report if to is not None else None
    if as_json:
        verdicts = [{"claim": claim_text, **answer._asdict()} for claim_text, answer in stated]
        tested_json = {} if tested is None else {"tested": claims_as_json(tested)}
        report_path = None if report is None else str(report)
        print_json({"report": report_path, "verdicts": verdicts, **tested_json, **summary(results.analysis)})
        return
    show_advice(results.advice)
    if lacking := chance_unknown(without_chance(results.analysis)):
        show(f"{lacking} --chance TASK=VALUE states it.")
    if results.analysis.missing:
        show("If the runs that the grid lacks have diverged, --absent diverged says so.")
    show_best(results.analysis)
    _show_stability(results.analysis)
    for claim_text, answer in stated:
        show(f"{answer.verdict}: {claim_text} ({answer.reason})")
    if tested is not None:
        show_claims(tested)
    if report is not None:
        show(f"report: {report}")


def _show_stability(analysis: Analysis) -> None:
    """Print how much scores depend on seeds and on the learning rate, by model and task."""
    from mlmclm.analysis.results import records
    from mlmclm.reports import text

    rows = [
        (
            row["model"],
            row["task"],
            f"{row['cells']:,}",
            f"{row['diverged']:,}",
            text.estimate(row["sd_seeds_pooled"], row["sd_seeds_pooled_low"], row["sd_seeds_pooled_high"]),
            text.estimate(row["sd_rates"], row["sd_rates_low"], row["sd_rates_high"]),
            text.points(row["range_rates"]),
        )
        for row in records(analysis.stability)
    ]
    columns = ("model", "task", "runs", "diverged", "sd over seeds", "sd over rates", "range over rates")
    show_table(columns, rows, drop=("range over rates", "runs"))
    show("Points of 100.")

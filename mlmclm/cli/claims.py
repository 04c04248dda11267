"""`mlmclm claims`: say which claims of papers, or of your own, a study's results show."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from mlmclm.cli import options
from mlmclm.cli.output import print_json, show
from mlmclm.numbers import without_nan

if TYPE_CHECKING:
    import pandas as pd

VERDICTS = ("seen", "contradicted", "too small to tell", "not tested here")
Claims = Annotated[
    list[str] | None,
    Option(
        metavar="NAME|FILE",
        help="Test these claims: a packaged file (mlm-vs-clm, ettin) or one of your own (YAML); may be given several times. By default "
        "those of the study file, or all packaged ones.",
    ),
]


def claims(
    file: options.StudyOrSweep,
    claims: Claims = None,
    store: options.Store = options.DEFAULT_STORE,
    data: options.Data = None,
    task_dir: options.TaskDir = None,
    rule: options.Rule = None,
    as_json: options.Json = False,
) -> None:
    """Says of each claim whether the results so far show it: seen, contradicted, too small to tell, or not tested here, and why.

    The report has the same table. Nothing is computed or written.

    Example: mlmclm claims quickstart
    """
    from mlmclm.studies.api import open as open_store

    found = open_store(store, data=data, task_dirs=task_dir).results(file, rule=rule).claims(*claims or ())
    if as_json:
        print_json({"claims": claims_as_json(found)})
    else:
        show_claims(found)


def show_claims(found: pd.DataFrame) -> None:
    """Print claims by verdict, each with its source and the reason."""
    for verdict in VERDICTS:
        rows = found[found["verdict"] == verdict].to_dict("records")
        if rows:
            show(f"{verdict} ({len(rows)})", style="bold")
        for row in rows:
            show(f"  {row['says']} ({row['source']}; {row['claim']})")
            show(f"    {' '.join(filter(None, (row['reason'], row['settle'])))}")


def claims_as_json(found: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the table with null for NaN, which JSON doesn't have."""
    return list(map(without_nan, found.to_dict("records")))

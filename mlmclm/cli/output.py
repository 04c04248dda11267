"""Printing of results to standard output; messages and progress go to standard error (`mlmclm.progress`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
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

"""`mlmclm store studies`: list the studies and sweeps of a store."""

from __future__ import annotations

from dataclasses import asdict

from mlmclm.cli import options
from mlmclm.cli.output import print_json, show, show_table


def studies(store: options.Store = options.DEFAULT_STORE, as_json: options.Json = False) -> None:
    """Lists the studies and sweeps of a store, whose names `report`, `compare` and `sweep status` take.

    Example: mlmclm store studies
    """
    from mlmclm.studies.last_run import known_studies

    found = known_studies(store.resolve())
    if as_json:
        print_json([asdict(each) for each in found])
    elif not found:
        show(f"{store.resolve()}: no study or sweep was run there yet")
    else:
        rows = [
            (
                each.name,
                each.kind,
                (each.run or "–").replace("T", " ").removesuffix("+00:00"),
                f"{each.models:,}",
                f"{each.tasks:,}",
                f"{each.done:,} of {each.cells:,}",
            )
            for each in found
        ]
        show_table(("name", "kind", "last run (UTC)", "models", "tasks", "cells done"), rows, drop=("kind", "tasks"))

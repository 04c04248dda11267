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

    summaries = known_studies(store.resolve())
    if as_json:
        print_json([asdict(study) for study in summaries])
    elif not summaries:
        show(f"{store.resolve()}: no study or sweep was run there yet")
    else:
        rows = [
            (
                study.name,
                study.kind,
                (study.run or "–").replace("T", " ").removesuffix("+00:00"),
                f"{study.models:,}",
                f"{study.tasks:,}",
                f"{study.done:,} of {study.cells:,}",
            )
            for study in summaries
        ]
        show_table(("name", "kind", "last run (UTC)", "models", "tasks", "cells done"), rows, drop=("kind", "tasks"))

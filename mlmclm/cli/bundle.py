"""`mlmclm bundle`: publish a study as a small folder, join the parts of one, or check one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from mlmclm.cli import options
from mlmclm.cli.bundle_verify import verify
from mlmclm.cli.default_command import DefaultCommand
from mlmclm.cli.output import print_json, show
from mlmclm.errors import UserError

verbs = typer.Typer(
    cls=DefaultCommand,
    help="Writes a study's results as a small folder that others can analyse; `bundle verify` checks one.",
    rich_markup_mode="markdown",
)


@verbs.command(short_help="Writes a study as a folder; `bundle STUDY` does this too.")
def write(
    sources: Annotated[
        list[str],
        Argument(
            metavar="NAME|FILE|BUNDLE...",
            help="A study or sweep, by its name in the store or its file; or the folders of bundles that are parts of one study.",
        ),
    ],
    to: Annotated[Path, Option(metavar="FOLDER", help="Folder to write. It must not exist yet, or be empty.")],
    push_to_hub: Annotated[
        str | None,
        Option(
            metavar="OWNER/NAME",
            help="Also upload the folder as a data set to the Hugging Face Hub, created as private if it doesn't exist.",
        ),
    ] = None,
    examples: Annotated[
        bool,
        Option(
            "--examples/--no-examples",
            help="Whether outcomes of test examples go with it. They hold the tasks' expected answers, which a licence may forbid to "
            "publish; without them, intervals lack the noise of the test sets.",
        ),
    ] = True,
    store: options.Store = options.DEFAULT_STORE,
    data: options.Data = None,
    task_dir: options.TaskDir = None,
    as_json: options.Json = False,
) -> None:
    """Writes a study's results as a small folder that others can analyse and check: cells, test examples, keys, hashes of weights, costs.

    `report`, `claims`, `advise` and `compare --study` take the folder in place of a study's name. Several bundles, such as
    those of a study that was computed in parts on several machines, become one.

    Example: mlmclm bundle quickstart --to published
    """
    from mlmclm.answers.outcomes import Outcomes
    from mlmclm.answers.record import is_bundle
    from mlmclm.studies.api import open as open_store
    from mlmclm.studies.api import published
    from mlmclm.studies.export_model import check_hub

    check_hub(push_to_hub, dry_run=False)
    if all(is_bundle(Path(source)) for source in sources):
        record = published(*sources).record
        record = record if examples else replace(record, kept=Outcomes())
        record.write(to)
    elif len(sources) == 1:
        record = open_store(store, data=data, task_dirs=task_dir).study(sources[0]).publish(to, examples=examples)
    else:
        wrong = next(source for source in sources if not is_bundle(Path(source)))
        raise UserError(f"{wrong}: not a bundle; one study, or several bundles that are parts of one, can be given.")
    commit = None
    if push_to_hub is not None:
        from mlmclm.models.hub import push

        commit = push(to, push_to_hub, f"{record.name}: {len(record.rows):,} cells", data_set=True)
    sizes = {str(path.relative_to(to)): path.stat().st_size for path in sorted(to.rglob("*")) if path.is_file()}
    if as_json:
        print_json(
            {
                "folder": str(to),
                "cells": len(record.rows),
                "models": len(record.setting.grid.models),
                "files": sizes,
                "hub": commit,
            }
        )
        return
    show(
        f"{record.name}: {len(record.rows):,} cells of {len(record.setting.grid.models)} models, {sum(sizes.values()) / 2**20:.2f} MiB: {to}"
    )
    if commit is not None:
        show(f"uploaded: {commit}")


verbs.command()(verify)

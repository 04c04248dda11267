"""`mlmclm bundle`: publish a study as a small folder, join the parts of one, or compute cells of one again."""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column
from typer import Argument, Option

from mlmclm.cli import options
from mlmclm.cli.default_command import DefaultCommand
from mlmclm.cli.output import print_json, show, show_table
from mlmclm.errors import UserError
from mlmclm.numbers import plural, rate_text, time_text

if TYPE_CHECKING:
    from mlmclm.studies.recompute import Recomputed

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
    from mlmclm.studies.exports import check_hub

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


@verbs.command()
def verify(
    bundle: Annotated[Path, Argument(metavar="BUNDLE", help="The folder of a published study (`mlmclm bundle`).")],
    cells: Annotated[int, Option(min=1, metavar="N", help="Number of cells, chosen at random.")] = 10,
    seed: Annotated[
        int | None, Option(min=0, help="Seed of the choice of cells. By default it is another one each time.")
    ] = None,
    store: options.Store = options.DEFAULT_STORE,
    data: options.Data = None,
    task_dir: options.TaskDir = None,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Computes random cells of a published study again, and compares their scores and test examples with the published ones.

    Models whose weights the store lacks are pretrained first, as the bundle's study.yaml says; `--dry-run` says which, and how long that
    took. With the same weights, backend, device and software, results must be equal to the last bit, and the exit code is 1 if one is
    not. Elsewhere a difference is printed beside the noise of other seeds. First, values that the bundle's files state twice are compared,
    for all cells.

    Example: mlmclm bundle verify published --cells 10
    """
    from mlmclm.storage.place import open_place
    from mlmclm.studies.recompute import check_of

    seed = secrets.randbelow(1 << 31) if seed is None else seed
    check = check_of(bundle, cells, seed, open_place(store=store, data=data, task_dirs=task_dir))
    total = len(check.record.rows)
    facts = {
        "seed": seed,
        "cells_of_all": total,
        "keys_made_again": check.keys,
        "pretrained": list(check.pretrained),
        "pretraining_hours": check.pretraining_hours,
        "cell_hours": check.cell_hours,
    }
    if not as_json:
        show(
            f"{check.record.name}: its {plural(total, 'cell')} agree with results.csv, with states.json and, where these are known, with their "
            f"test examples; {check.keys:,} keys agree with the settings of their cells"
        )
        show(
            f"{plural(len(check.rows), 'cell')}, chosen with --seed {seed}, {time_text(check.cell_hours)} where they were computed"
        )
        if check.pretrained:
            took = f", {time_text(check.pretraining_hours)} of one worker" if check.pretraining_hours else ""
            show(f"not in {check.place.store}, and needed: {', '.join(check.pretrained)}{took}")
    if dry_run:
        rows = [(row["model"], row["task"], rate_text(row["learning_rate"]), str(row["seed"])) for row in check.rows]
        if as_json:
            print_json({**facts, "cells": [row["key"] for row in check.rows]})
        else:
            show_table(("model", "task", "rate", "seed"), rows)
        return
    recomputed = check.run()
    share = check.at_most_wrong(recomputed)
    if as_json:
        print_json(
            {**facts, "recomputed": [asdict(cell) for cell in recomputed], "confidence": 0.95, "at_most_wrong": share}
        )
    else:
        show_recomputed(recomputed)
        counts = Counter(cell.status for cell in recomputed)
        show(", ".join(f"{number} {status}" for status, number in counts.items()))
        other_statuses = {cell.status for cell in recomputed} - {"equal", "differs"}
        note = f", counting {' and '.join(sorted(other_statuses))} as wrong" if other_statuses else ""
        show(
            f"with 95 % confidence at most {math.ceil(1000 * share) / 10:g} % of the cells are wrong (seed {seed}){note}"
        )
    if any(cell.status == "differs" for cell in recomputed):
        raise typer.Exit(1)


def show_recomputed(cells: Sequence[Recomputed]) -> None:
    """Print cells that were computed again, and how each differs."""
    rows = [(cell.name, cell.status, cell.detail, cell.key[:12]) for cell in cells]
    show_table(("cell", "computed again", Column("detail"), "key"), rows, drop=("key",))

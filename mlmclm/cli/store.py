"""`mlmclm store verify`: read everything in the store that has a checksum, and compute some cells again."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column
from typer import Argument, Option

from mlmclm.cli import options
from mlmclm.cli.output import print_json, show, show_table
from mlmclm.cli.sweep_status import name_of
from mlmclm.errors import UserError
from mlmclm.progress import Bar, bars

if TYPE_CHECKING:
    from mlmclm.studies.place import Place
    from mlmclm.studies.recompute import Recomputed
    from mlmclm.studies.store_check import Verified
    from mlmclm.sweeps.cells import SweepModel

verbs = typer.Typer(
    help="The store; `store verify` reads everything that has a checksum.",
    callback=lambda: None,  # with a callback a group keeps its only verb's name
    rich_markup_mode="markdown",
)


@verbs.command()
def verify(
    study: Annotated[
        str | None,
        Argument(
            metavar="[NAME|FILE]",
            help="Only this study or sweep, by its name or its file, and what all studies share; by default all of the store.",
        ),
    ] = None,
    store: options.Store = options.DEFAULT_STORE,
    recompute: Annotated[
        int, Option(min=0, metavar="N", help="Also compute N randomly chosen cells again and compare their results.")
    ] = 0,
    seed: Annotated[int, Option(help="Seed of the choice of cells.")] = 0,
    data: options.Data = None,
    task_dir: options.TaskDir = None,
    as_json: options.Json = False,
) -> None:
    """Reads everything in the store that has a checksum, names what is damaged, and says what makes it again.

    Nothing is changed: commands set damaged files aside when they need them. The exit code is 1 if something is damaged.

    Cells that are computed again run in a temporary folder. Where backend, device and software are those of the result, it must be equal
    to the last bit, with every test example; elsewhere a difference is reported and is no damage.

    Examples:

    mlmclm store verify

    mlmclm store verify quickstart --recompute 3
    """
    from mlmclm.studies.store_check import verify as verify_all
    from mlmclm.studies.store_pieces import pieces_of
    from mlmclm.studies.store_scope import WHOLE_STORE, scope_of

    place = options.place(store, data, task_dir)
    if not place.store.is_dir():
        raise UserError(f"--store {store}: no such folder.")
    scope = WHOLE_STORE if study is None else scope_of(name_of(study), place.store)
    with bars() as progress:
        found = verify_all(pieces_of(place.store, scope), progress)
    again = list(_computed_again(recompute, seed, place, study, scope.cells)) if recompute else []
    if as_json:
        print_json({"kinds": [_as_json(each) for each in found], "recomputed": [asdict(each) for each in again]})
    else:
        _show(found, again)
    if any(each.damaged for each in found) or any(each.status == "differs" for each in again):
        raise typer.Exit(1)


def _computed_again(
    count: int, seed: int, place: Place, study: str | None, keys: Collection[str] | None
) -> Iterator[Recomputed]:
    from mlmclm.cli.one_cell import make_ready
    from mlmclm.finetuning.run import keep_encoder, run_cell
    from mlmclm.studies.recompute import recompute
    from mlmclm.sweeps.ledger import Ledger

    def ready(work: Any) -> Any:
        def run(cell: Any, **options: Any) -> Any:
            make_ready(cell)
            return work(cell, **options)

        return run

    there = Ledger(place.store).keys()
    chosen = there if keys is None else there & set(keys)
    models = _models(place, study)
    with Bar("computing cells again", min(count, len(chosen)), unit="cells") as bar:
        done = 0
        for found in recompute(chosen, count, seed, place, models, ready(run_cell), ready(keep_encoder)):
            done += found.status != "not computed"
            bar.update(done, note=found.name)
            yield found


def _models(place: Place, study: str | None) -> dict[str, SweepModel]:
    """Return the store's models, and those that a sweep's file names, by the hash of their weights."""
    from mlmclm.studies.recompute import models_in
    from mlmclm.studies.sweep_file import is_sweep_file, load_sweep
    from mlmclm.sweeps.find_model import find_model

    models = models_in(place.store)
    path = Path(study or "")
    if path.is_file() and is_sweep_file(path):
        for source in load_sweep(path).models.values():
            if not source.endswith("/*"):
                model = find_model(source, place.store, data_root=place.data_root, beside=path.parent)
                models.setdefault(model.weights, model)
    return models


def _as_json(found: Verified) -> dict[str, Any]:
    damaged = [{**asdict(each), "again": each.again} for each in found.damaged]
    return {**asdict(found), "damaged": damaged}


def _show(found: Sequence[Verified], again: Sequence[Recomputed]) -> None:
    from mlmclm.numbers import plural
    from mlmclm.studies.store_pieces import UNCOVERED

    show_table(
        ("kind", "files", "MiB", "damaged", "no checksum"),
        [
            (each.kind, f"{each.files:,}", f"{each.bytes / 2**20:,.1f}", f"{len(each.damaged):,}", f"{len(each.without_checksum):,}")
            for each in found
        ],
    )  # fmt: skip
    for each in found:
        for one in each.damaged:
            show(f"{one.path}: {one.reason}. To make it again: {one.again}.")
    if again:
        rows = [(each.name, each.status, each.detail, each.key[:12]) for each in again]
        show_table(("cell", "computed again", Column("detail"), "key"), rows, drop=("key",))
    files, damaged = sum(each.files for each in found), sum(len(each.damaged) for each in found)
    older = sum(len(each.without_checksum) for each in found)
    note = f"; no checksum, because an earlier version wrote it: {older:,}" if older else ""
    show(f"{plural(files, 'file')}: {f'{damaged:,} damaged' if damaged else 'all with a checksum are intact'}{note}")
    show(f"not covered, as they have no checksum: {', '.join(UNCOVERED)}", style="dim")

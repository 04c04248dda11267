"""The manifest of a sweep, `store/studies/NAME/cells.json`: the cells that it was last started with.

With it, any machine that sees the store can say how far the sweep is, without its models, tasks and data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from mlmclm.errors import UserError, unknown
from mlmclm.finetuning.cell import Cell, cell_key
from mlmclm.seeds import read_seed, seed_value
from mlmclm.storage.addresses import send_file
from mlmclm.storage.checksums import read_sealed, sealed
from mlmclm.storage.files import canonical_json, write_atomic
from mlmclm.sweeps.cells import ListedCell
from mlmclm.sweeps.starts import Planned

FILE = "cells.json"


@dataclass(frozen=True)
class Manifest:
    """The cells of one sweep, in its order."""

    name: str
    planned: str
    """Time at which the sweep listed its cells: UTC, ISO 8601, in seconds."""
    cells: tuple[ListedCell, ...]
    waiting: Mapping[str, int] = field(default_factory=dict)
    """Task -> number of cells that wait for this task's best cell, and so have no key yet (`Planned.waiting`)."""
    to_come: int = 0
    """The most cells that later results may add (`Planned.to_come`)."""


def write_manifest(folder: Path, name: str, planned: Planned) -> None:
    """Write the manifest of a sweep that is about to run into its folder, `store/studies/NAME`.

    Raises:
        EnvironmentFault: the disk is full or not writable.
    """
    value = {
        "name": name,
        "planned": datetime.now(UTC).isoformat(timespec="seconds"),
        "cells": [{**asdict(cell), "seed": seed_value(cell.seed)} for cell in listed_cells(planned.cells)],
        "waiting": planned.waiting,
        **({"to_come": planned.to_come} if planned.to_come else {}),
    }
    write_atomic(folder / FILE, canonical_json(sealed(value)) + "\n")
    send_file(folder / FILE)


def listed_cells(cells: Iterable[Cell]) -> tuple[ListedCell, ...]:
    """Return the cells as a manifest lists them."""
    return tuple(
        ListedCell(
            key=cell_key(cell),
            model=cell.model,
            task=cell.task,
            setting=cell.setting,
            learning_rate=cell.learning_rate,
            seed=cell.seed,
            metric=cell.declared.metric,
            start=cell.start.key if cell.start else None,
        )
        for cell in cells
    )


def read_manifest(name: str, store: Path) -> Manifest:
    """Return the manifest of a sweep or study in a store.

    Raises:
        UserError: there is none, or it is damaged.
    """
    path = store / "studies" / name / FILE
    remedy = "Run the sweep again to write it; finished cells are not computed again."
    if not path.is_file():
        names = sorted(file.parent.name for file in (store / "studies").glob(f"*/{FILE}"))
        if path.parent.is_dir():
            raise UserError(
                f"{name}: none of its cells has been planned yet, so there is no sweep to look at ({path} does not exist). Pretraining "
                "a study does not plan them: `mlmclm study` and `mlmclm sweep` do."
            )
        raise unknown("study or sweep", name, names, where=str(store))
    value = read_sealed(path, remedy)
    try:
        cells = tuple(ListedCell(**{**entry, "seed": read_seed(entry["seed"])}) for entry in value["cells"])
        return Manifest(value["name"], value["planned"], cells, value["waiting"], value.get("to_come", 0))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: not the cells of a sweep ({error}). {remedy}") from error

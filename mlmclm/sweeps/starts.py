"""Which fine-tuned weights cells start from where a space says `start_from: {rte: mnli}`.

The rule: of a model's cells on the other task the one with the best validation score, by that task's main metric; ties go to the
lower learning rate, then the lower seed, then the earlier in the grid. It is chosen when all of them have a result; a diverged
one can't be chosen.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlmclm.finetuning.cell import Cell, Start, cell_key
from mlmclm.finetuning.kept import RESULT, kept_folder
from mlmclm.results.metrics import value_of
from mlmclm.seeds import Seeds
from mlmclm.sweeps.cells import SweepModel, expand
from mlmclm.sweeps.ledger import Ledger, named
from mlmclm.sweeps.space import Space
from mlmclm.tasks.declaration import Task


class KeptWeights(Ledger):
    """The kept encoders of one store, each by the result of the run that made it."""

    part = "tuned"

    def __init__(self, store: Path) -> None:
        super().__init__(store)
        self.store = store

    def path(self, key: str) -> Path:
        return kept_folder(self.store, key) / RESULT


@dataclass(frozen=True)
class Planned:
    """The cells of a sweep that can be named now, and those that start from a cell that isn't chosen yet."""

    cells: list[Cell]
    sources: dict[str, Cell] = field(default_factory=dict)
    """By key the chosen cells that others start from."""
    waiting: dict[str, int] = field(default_factory=dict)
    """By the task that they wait for, how many cells can't be named yet."""
    stranded: dict[str, int] = field(default_factory=dict)
    """By model and task (`m/mnli`), how many cells have nothing to start from, for all of those diverged."""


def best_cell(results: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The result that the rule above chooses; None where all diverged.

    Args:
        results: of one model on one task, with its main metric, in the order of the grid.
    """
    scored = [result for result in results if result["status"] == "ok"]

    def standing(result: Mapping[str, Any]) -> tuple[float, float, Seeds]:
        score = value_of(result["scores"]["validation"], result["metric"])
        seed = result["seed"]
        return -score, result["learning_rate"], Seeds(**seed) if isinstance(seed, Mapping) else Seeds.of(seed)

    return min(scored, key=standing, default=None)


def plan_cells(
    space: Space,
    models: Sequence[SweepModel],
    task_data: Mapping[str, str],
    declarations: Mapping[str, Task],
    ledger: Ledger,
    recut: Collection[str] = (),
) -> Planned:
    """All cells of a sweep whose start is known from the results that are there; arguments as those of `expand`."""
    first = expand(space, models, task_data, declarations, recut=recut)
    if not space.start_from:
        return Planned(first)
    sources: dict[str, Cell] = {}
    starts: dict[tuple[str, str], Start] = {}
    waiting: dict[str, int] = {}
    stranded: dict[str, int] = {}
    for model in models:
        for source in dict.fromkeys(space.start_from.values()):
            behind = sum(space.cells_of(task) for task, other in space.start_from.items() if other == source)
            own = [cell for cell in first if (cell.model, cell.task) == (model.name, source)]
            found = [(cell, ledger.find(cell_key(cell))) for cell in own]
            results = [named(result, cell) for cell, result in found if result is not None]
            if len(results) < len(own):
                waiting[source] = waiting.get(source, 0) + behind
                continue
            best = best_cell(results)
            if best is None:
                stranded[f"{model.name}/{source}"] = behind
                continue
            sources[best["key"]] = next(cell for cell in own if cell_key(cell) == best["key"])
            starts[model.name, source] = Start(best["key"], source)
    return Planned(expand(space, models, task_data, declarations, starts, recut), sources, waiting, stranded)

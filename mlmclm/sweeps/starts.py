"""Choice of the fine-tuned weights that cells start from if a space says `start_from: {rte: mnli}`.

The rule: of a model's cells on the other task, take the one with the best validation score by that task's main metric.
Ties go to the lower learning rate, then to the lower seed, then to the earlier point of the grid. The choice is made
once all of these cells have a result. A diverged cell is never chosen.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mlmclm.finetuning.cell import Cell, Start, cell_key
from mlmclm.finetuning.kept import RESULT, KeptEncoder
from mlmclm.results.metrics import value_of
from mlmclm.seeds import Seed, Seeds, read_seed
from mlmclm.storage.artifact import Artifact
from mlmclm.sweeps.axes import RateGrid
from mlmclm.sweeps.cells import SweepModel, expand
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.sweeps.space import Space
from mlmclm.tasks.declaration import Task

Extend = Callable[
    [Sequence[Mapping[tuple[float, Seed], Mapping[str, Any]]], Sequence[Seed]], tuple[Collection[float], int]
]
"""Function of the results and the seeds of one task and setting; each model's results are by learning rate and seed. It returns
the rates that these results add to the space's list, and the most rates that later results may add."""


class KeptWeights(ResultsStore):
    """The kept encoders in one store, each filed under its cell's key with the result of the run that made it."""

    part = "tuned"

    def __init__(self, store: Path) -> None:
        super().__init__(store, root=store)  # weights stay in the store's folder, even if results are at an address

    def artifact(self, key: str) -> Artifact:
        return KeptEncoder(self.store, key)

    def path(self, key: str) -> Path:
        return KeptEncoder(self.store, key).folder / RESULT


@dataclass(frozen=True)
class Planned:
    """The cells of a sweep that can be computed now, and counts of those whose start is not chosen yet, or cannot be."""

    cells: list[Cell]
    sources: dict[str, Cell] = field(default_factory=dict)
    """Key -> chosen cell that others start from."""
    waiting: dict[str, int] = field(default_factory=dict)
    """Task -> number of cells that wait for its best cell; until it is chosen they have no key."""
    blocked: dict[str, int] = field(default_factory=dict)
    """Model and task (`m/mnli`) -> number of cells with nothing to start from, because all of that model's cells on that task diverged."""
    to_come: int = 0
    """The most cells that later results may add, at further learning rates."""

    def needed(self, missing: Sequence[Cell]) -> set[str]:
        """Return the models whose weights are needed: those with missing cells, or all, if results may add cells of any model."""
        return {cell.model for cell in (self.cells if missing and self.to_come else missing)}


def best_cell(results: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the result that the module's rule chooses; None if all diverged.

    Args:
        results: the results of one model on one task, with its main metric, in the order of the grid.
    """
    scored = [result for result in results if result["status"] == "ok"]

    def standing(result: Mapping[str, Any]) -> tuple[float, float, Seeds]:
        score = value_of(result["scores"]["validation"], result["metric"])
        return -score, result["learning_rate"], Seeds.of(read_seed(result["seed"]))

    # On ties, `min` returns the first: the earlier point of the grid.
    return min(scored, key=standing, default=None)


@dataclass(frozen=True)
class ModelGrid:
    """The grid of one model; arguments of `expand`."""

    model: SweepModel
    space: Space
    task_data: Mapping[str, str]
    declarations: Mapping[str, Task]
    recut: Collection[str] = ()

    def cells(self, starts: Mapping[tuple[str, str], Start], rates: RateGrid) -> list[Cell]:
        """Return the cells at these learning rates, as `expand` does."""
        space = self.space.model_copy(update={"learning_rates": rates})
        return expand(space, [self.model], self.task_data, self.declarations, starts, self.recut)


def plan_cells(
    grids: Sequence[ModelGrid], results_store: ResultsStore, extend: Extend | None = None, *, absent: bool = False
) -> Planned:
    """Plan all cells of a sweep whose start is known from the present results.

    Args:
        grids: the grid of each model, at least one. Their spaces have the same tasks, learning rates, seeds and starts.
        extend: returns the rates that results add to the space's list; None if the space adds none.
        absent: whether the sweep has further models, whose cells cannot be planned yet. Until they are, no rates are added.
    """
    space = grids[0].space

    def planned(
        starts: Mapping[tuple[str, str], Start] = MappingProxyType({}), waits: Collection[str] = ()
    ) -> tuple[list[Cell], Counter[str]]:
        """Return the cells with these starts, and the most that results may add per task; on tasks of `waits`, some cells are unplanned."""
        rates = space.learning_rates
        if extend is None:
            return results_store.as_filed([cell for grid in grids for cell in grid.cells(starts, rates)]), Counter()
        widest = results_store.as_filed([cell for grid in grids for cell in grid.cells(starts, rates.widest)])
        return _extended(widest, rates, extend, results_store, space.tasks if absent else waits)

    # Without `starts` this leaves out the cells that start from another one.
    first, to_come = planned()
    if not space.start_from:
        return Planned(first, to_come=to_come.total())
    sources: dict[str, Cell] = {}
    starts: dict[tuple[str, str], Start] = {}
    waiting: dict[str, int] = {}
    blocked: dict[str, int] = {}
    held = 0
    by_pair: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    for cell in first:
        by_pair[cell.model, cell.task].append(cell)
    for model in (grid.model for grid in grids):
        for source in dict.fromkeys(space.start_from.values()):
            dependent = sum(space.cells_of(task) for task, start in space.start_from.items() if start == source)
            cells = by_pair[model.name, source]
            results = results_store.results(cells)
            # Where rates may still be added, no start is chosen: a better one may come, or the first that did not diverge.
            if len(results) < len(cells) or to_come[source]:
                waiting[source] = waiting.get(source, 0) + dependent
                held += sum(
                    space.cells_added_at_most(task) for task, start in space.start_from.items() if start == source
                )
                continue
            best = best_cell(results)
            if best is None:
                blocked[f"{model.name}/{source}"] = dependent
                continue
            sources[best["key"]] = next(cell for cell in cells if cell_key(cell) == best["key"])
            starts[model.name, source] = Start(best["key"], source)
    cells, to_come = planned(starts, {task for task, source in space.start_from.items() if source in waiting})
    return Planned(cells, sources, waiting, blocked, to_come.total() + held)


def _extended(
    cells: Sequence[Cell], listed: Sequence[float], extend: Extend, results_store: ResultsStore, waits: Collection[str]
) -> tuple[list[Cell], Counter[str]]:
    """Return the cells at the listed rates and at those that the present results add, and the most that later results may add per task.

    Args:
        cells: those at the listed rates and at all that may ever be added.
        waits: tasks on which cells of some models are not planned yet.
    """
    filed = {(result["model"], result["key"]): result for result in results_store.results(cells)}
    groups: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    for cell in cells:
        groups[cell.task, cell.setting].append(cell)
    kept, to_come = set[tuple[str, str]](), Counter[str]()
    for (task, _), group in groups.items():
        results: dict[str, dict[tuple[float, Seed], Mapping[str, Any]]] = {cell.model: {} for cell in group}
        for cell in group:
            result = filed.get((cell.model, cell_key(cell)))
            if result is not None:
                results[cell.model][cell.learning_rate, Seeds.of(cell.seed)] = result
        seeds = list(dict.fromkeys(Seeds.of(cell.seed) for cell in group))
        # A model whose cells are not planned yet counts as one without results.
        added, more = extend([*results.values(), *([{}] if task in waits else [])], seeds)
        kept |= {(cell.model, cell_key(cell)) for cell in group if cell.learning_rate in {*listed, *added}}
        to_come[task] += more * len(seeds) * len(results)
    return [cell for cell in cells if (cell.model, cell_key(cell)) in kept], to_come

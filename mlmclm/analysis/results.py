"""Results of cells as one table, and the coverage of the grid."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from mlmclm.errors import UserError
from mlmclm.results.metrics import value_of
from mlmclm.seeds import Seed, Seeds, read_seed

# Int64 is pandas' nullable integer type, for values that may be missing.
SEED_COLUMNS = {"seed": "Int64", "seed_head": "int64", "seed_order": "int64", "seed_dropout": "int64"}

CELL_COLUMNS = {
    "key": "object",
    "model": "object",
    "task": "object",
    "family": "object",
    "metric": "object",
    "setting": "object",
    "learning_rate": "float64",
    **SEED_COLUMNS,
    "status": "object",
    "validation": "float64",
    "test": "float64",
    "diverged_step": "Int64",
    "steps": "Int64",
    "tokens": "Int64",
    "parameters": "Int64",
}

Record = dict[str, Any]


@dataclass(frozen=True)
class Grid:
    """The cells that a study requests: every model on every task at every learning rate with every seed."""

    models: tuple[str, ...]
    tasks: tuple[str, ...]
    learning_rates: tuple[float, ...]
    seeds: tuple[Seed, ...]
    """Combinations of the streams' seeds if these vary independently."""
    settings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Grid points of the protocol's other settings by task, in order; a single empty string if nothing else varies."""

    def settings_of(self, task: str) -> tuple[str, ...]:
        """Return the grid points of a task."""
        return self.settings.get(task, ("",))


def table(rows: Sequence[Record], columns: dict[str, str]) -> pd.DataFrame:
    """Build a data frame with exactly these columns and types, even if there are no rows."""
    return pd.DataFrame({name: pd.Series([row[name] for row in rows], dtype=kind) for name, kind in columns.items()})


def records(frame: pd.DataFrame) -> list[Record]:
    """Return the rows as dictionaries, in order."""
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict(orient="records")]


def results_table(results: Iterable[Record]) -> pd.DataFrame:
    """Build a table with one row per cell, sorted by model, task, setting, learning rate and seed.

    Columns: key, model, task, family, metric, setting (the grid point, empty without a grid), learning_rate, seed
    (missing if the streams have separate seeds), seed_head, seed_order, seed_dropout, status ("ok" or "diverged"),
    validation and test (the task's main metric as a fraction, correlations from -1 to 1; NaN if the cell diverged or
    lacks the split), diverged_step, steps, tokens, parameters. A result that is given twice counts once. The time a
    cell took is left out, because it is not a property of the result.

    Args:
        results: the JSON objects of the result files.

    Raises:
        UserError: there are two different results for one (model, task, setting, learning rate, seed), a result lacks a
            required entry, or a score is not finite.
    """
    rows: dict[tuple[str, str, str, float, Seeds], Record] = {}
    for result in results:
        row = _row(result)
        place = _place(row)
        # The same result may be given twice; two different ones for one place cannot both be right.
        if place in rows and rows[place]["key"] != row["key"]:
            model, task, _, rate, seed = place
            raise UserError(
                f"two results for model {model!r}, task {task!r}, learning rate {rate:g}, seed {seed.simplest()} (keys "
                f"{rows[place]['key']} and {row['key']}): they come from different weights, data or protocols, so they "
                "cannot be in one analysis."
            )
        rows[place] = row
    return table([rows[place] for place in sorted(rows)], CELL_COLUMNS)


def _row(result: Record) -> Record:
    try:
        metric, diverged = result["metric"], result["status"] == "diverged"
        if result["status"] not in ("ok", "diverged"):
            raise UserError(f"result {result['key']}: unknown status {result['status']!r}. Allowed: ok, diverged.")
        # The result of a diverged cell has null for its scores.
        scores = {} if diverged else result["scores"]
        return {
            "key": result["key"],
            "model": result["model"],
            "task": result["task"],
            "family": result["family"],
            "metric": metric,
            "setting": result.get("setting", ""),  # only results of a grid with other settings have one
            "learning_rate": float(result["learning_rate"]),
            **_seed_entries(result),
            "status": result["status"],
            "validation": _score(result, scores, "validation", metric),
            "test": _score(result, scores, "test", metric),
            "diverged_step": result.get("diverged_step"),
            "steps": result.get("steps"),
            "tokens": result.get("tokens"),
            "parameters": result.get("parameters"),
        }
    except KeyError as error:
        raise UserError(
            f"result {result.get('key', '(without a key)')}: no entry {error}; it is not the result of a cell."
        ) from error


def _seed_entries(result: Record) -> Record:
    try:
        seed = read_seed(result["seed"])
    except ValueError as error:
        raise UserError(f"result {result['key']}: seed: {error} (got {result['seed']!r}).") from error
    seeds = Seeds.of(seed)
    return {
        "seed": seed if isinstance(seed, int) else None,
        "seed_head": seeds.head,
        "seed_order": seeds.order,
        "seed_dropout": seeds.dropout,
    }


def seeds_of(row: Record) -> Seeds:
    """Return the seeds of a row, which distinguish the cells at one learning rate."""
    return Seeds(row["seed_head"], row["seed_order"], row["seed_dropout"])


def wanted_seeds(grid: Grid) -> set[Seeds]:
    """Return the requested seeds."""
    return {Seeds.of(seed) for seed in grid.seeds}


def _score(result: Record, scores: dict[str, dict[str, float]], split: str, metric: str) -> float:
    if split not in scores or scores[split] is None:
        return math.nan
    score = value_of(scores[split], metric)
    if not math.isfinite(score):
        raise UserError(f"result {result['key']}: {split} {metric} is {score}, not a finite number.")
    return score


def scored(cell: Record) -> bool:
    """Return whether a row can take part in the selection: not diverged, with a validation and a test score."""
    return cell["status"] == "ok" and math.isfinite(cell["validation"]) and math.isfinite(cell["test"])


def observed_grid(cells: pd.DataFrame) -> Grid:
    """Return the smallest full grid that contains every cell of the table, the default for the requested grid."""
    return Grid(
        models=tuple(sorted(set(cells["model"]))),
        tasks=tuple(sorted(set(cells["task"]))),
        learning_rates=tuple(sorted(set(cells["learning_rate"]))),
        seeds=tuple(seeds.simplest() for seeds in sorted({seeds_of(row) for row in records(cells)})),
    )


def coverage_table(cells: pd.DataFrame, grid: Grid) -> pd.DataFrame:
    """Count the cells of each (model, task): expected, present, scored, diverged and missing.

    A cell outside the grid is present without being expected. `missing` counts expected cells without any result.
    """
    at_a_point = {(rate, seed) for rate in grid.learning_rates for seed in wanted_seeds(grid)}
    by_pair = cells_by_pair(cells)
    rows = []
    for model, task in all_pairs(cells, grid):
        group = by_pair.get((model, task), [])
        wanted = model in grid.models and task in grid.tasks
        asked = {(point, *cell) for point in grid.settings_of(task) for cell in at_a_point} if wanted else set()
        rows.append(
            {
                "model": model,
                "task": task,
                "expected": len(asked),
                "present": len(group),
                "scored": sum(scored(cell) for cell in group),
                "diverged": sum(cell["status"] == "diverged" for cell in group),
                "missing": len(asked - {_place(cell)[2:] for cell in group}),
            }
        )
    columns = {"model": "object", "task": "object"} | dict.fromkeys(
        ("expected", "present", "scored", "diverged", "missing"), "int64"
    )
    return table(rows, columns)


def cells_by_pair(cells: pd.DataFrame) -> dict[tuple[str, str], list[Record]]:
    """Group the rows of a table of cells by (model, task), each group by increasing learning rate and seed."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for cell in sorted(records(cells), key=_place):
        groups.setdefault((cell["model"], cell["task"]), []).append(cell)
    return groups


def _place(row: Record) -> tuple[str, str, str, float, Seeds]:
    return row["model"], row["task"], row["setting"], row["learning_rate"], seeds_of(row)


def all_pairs(cells: pd.DataFrame, grid: Grid) -> list[tuple[str, str]]:
    """Return every (model, task), sorted, over all models and tasks that were requested or have results."""
    models, tasks = {*grid.models, *cells["model"]}, {*grid.tasks, *cells["task"]}
    return sorted((str(model), str(task)) for model in models for task in tasks)


def by_rate(group: Sequence[Record]) -> dict[float, list[Record]]:
    """Group the cells of one (model, task) by learning rate, in increasing order."""
    rates: dict[float, list[Record]] = {}
    for cell in sorted(group, key=_place):
        rates.setdefault(cell["learning_rate"], []).append(cell)
    return rates

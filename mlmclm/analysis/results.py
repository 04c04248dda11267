"""Results of cells as one table, and the coverage of the grid."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pandas as pd

from mlmclm.errors import UserError
from mlmclm.numbers import rate_text
from mlmclm.results.metrics import value_of
from mlmclm.seeds import STREAMS, Seed, Seeds, read_seed

Record = dict[str, Any]
Pairs = Mapping[tuple[str, str], Sequence[Record]]
"""The cells of each (model, task): rows of `results_table` by increasing learning rate and seed."""


def columns(*runs: str) -> dict[str, str]:
    """Return the type of each column of a table, given texts such as "int64: steps tokens", in the columns' order."""
    parts = [run.partition(":") for run in runs]
    return {name: kind for kind, _, names in parts for name in names.split()}


# Int64 is pandas' nullable integer type, for values that may be missing.
SEED_COLUMNS = columns("Int64: seed", "int64: seed_head seed_order seed_dropout")
CELL_COLUMNS = {
    **columns("object: key model task family metric setting", "float64: learning_rate"),
    **SEED_COLUMNS,
    **columns("object: status", "float64: validation test", "Int64: diverged_step steps tokens parameters"),
}


Ranges = Mapping[str, tuple[float, float]]
"""The lowest and the highest possible main score by task; `ANY_SCORE` for tasks that are absent."""
NO_RANGES: Ranges = {}
ANY_SCORE = (-1.0, 1.0)
"""The range that the scores of every family stay within, see `Family.signed`."""


@dataclass(frozen=True)
class Grid:
    """The cells that a study requests: every model on every task at every learning rate with every seed."""

    models: tuple[str, ...]
    tasks: tuple[str, ...]
    learning_rates: tuple[float, ...]
    seeds: tuple[Seed, ...]
    """Numbers, or combinations of the streams' seeds (head, order, dropout) if these vary independently."""
    settings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Grid points of the protocol's other settings by task, in order; a single empty string if nothing else varies."""
    added: Mapping[tuple[str, str, str], tuple[float, ...]] = field(default_factory=dict)
    """(model, task, setting) -> the rates that a grid that extends itself has added (`extension`); the same for all models of a sweep."""
    grows: bool = False
    """Whether results may add learning rates, which they do once all models have their results."""

    def rates_of(self, model: str, task: str, setting: str) -> tuple[float, ...]:
        """Return the learning rates of a model on a task at a grid point, in the order in which they are requested."""
        return (*self.learning_rates, *self.added.get((model, task, setting), ()))

    def settings_of(self, task: str) -> tuple[str, ...]:
        """Return the grid points of a task."""
        return self.settings.get(task, ("",))


def table(rows: Sequence[Record], kinds: dict[str, str]) -> pd.DataFrame:
    """Build a data frame with exactly these columns and types, even if there are no rows."""
    return pd.DataFrame({name: pd.Series([row[name] for row in rows], dtype=kind) for name, kind in kinds.items()})


def records(frame: pd.DataFrame) -> list[Record]:
    """Return the rows as dictionaries, in order."""
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict(orient="records")]


def results_table(results: Iterable[Record]) -> pd.DataFrame:
    """Build a table with one row per cell, sorted by model, task, setting, learning rate and seed.

    Columns are `CELL_COLUMNS`: `setting` is the grid point (empty without a grid), `seed` is missing if the streams have
    separate seeds, `status` is "ok" or "diverged", and `validation` and `test` are the task's main metric as a fraction
    (correlations from -1 to 1; NaN if the cell diverged or lacks the split). A result that is given twice counts once. The
    time a cell took is left out, because it is not a property of the result.

    Raises:
        UserError: there are two different results for one (model, task, setting, learning rate, seed), a result lacks a
            required entry, or a score is not finite.
    """
    rows: dict[tuple[str, str, str, float, Seeds], Record] = {}
    for result in results:
        row = _row(result)
        place = cell_columns(row)
        if place in rows and rows[place]["key"] != row["key"]:
            model, task, _, rate, seed = place
            raise UserError(
                f"two results for model {model!r}, task {task!r}, learning rate {rate_text(rate)}, seed {seed.simplest()} (keys "
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
            **{name: result[name] for name in ("key", "model", "task", "family", "metric", "status")},
            "setting": result.get("setting", ""),  # only results of a grid with other settings have one
            "learning_rate": float(result["learning_rate"]),
            **_seed_entries(result),
            **{split: _score(result, scores, split, metric) for split in ("validation", "test")},
            **{name: result.get(name) for name in ("diverged_step", "steps", "tokens", "parameters")},
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
    streams = {f"seed_{name}": number for name, number in asdict(Seeds.of(seed)).items()}
    return {"seed": seed if isinstance(seed, int) else None, **streams}


def seeds_of(row: Record) -> Seeds:
    """Return the seeds of a row, which distinguish the cells at one learning rate."""
    return Seeds(row["seed_head"], row["seed_order"], row["seed_dropout"])


def wanted_seeds(grid: Grid) -> set[Seeds]:
    """Return the requested seeds of a task and rate."""
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
    points = cells.groupby("task")["setting"].unique()
    seeds = cells[[f"seed_{name}" for name in STREAMS]].drop_duplicates().to_numpy().tolist()
    return Grid(
        models=tuple(sorted(set(cells["model"]))),
        tasks=tuple(sorted(set(cells["task"]))),
        learning_rates=tuple(sorted(set(cells["learning_rate"]))),
        seeds=tuple(Seeds(*streams).simplest() for streams in sorted(seeds)),
        settings={str(task): tuple(sorted(names)) for task, names in points.items() if any(names)},
    )


def coverage_table(pairs: Pairs, grid: Grid) -> pd.DataFrame:
    """Count the cells of each (model, task): expected, present, scored, diverged and missing.

    A cell outside the grid is present without being expected. `missing` counts expected cells without any result.
    """
    rows, seeds = [], wanted_seeds(grid)
    for model, task in all_pairs(pairs, grid):
        group = pairs.get((model, task), [])
        points = grid.settings_of(task) if model in grid.models and task in grid.tasks else ()
        requested = {
            (point, rate, seed) for point in points for rate in grid.rates_of(model, task, point) for seed in seeds
        }
        absent = requested - {cell_columns(cell)[2:] for cell in group}
        rows.append(
            {
                "model": model,
                "task": task,
                "expected": len(requested),
                "present": len(group),
                "scored": sum(map(scored, group)),
                "diverged": sum(cell["status"] == "diverged" for cell in group),
                "missing": len(absent),
            }
        )
    return table(rows, columns("object: model task", "int64: expected present scored diverged missing"))


def cells_by_pair(cells: pd.DataFrame) -> dict[tuple[str, str], list[Record]]:
    """Group the rows of `results_table` by (model, task)."""
    pairs: dict[tuple[str, str], list[Record]] = {}
    for cell in records(cells):
        pairs.setdefault((cell["model"], cell["task"]), []).append(cell)
    return pairs


def cell_columns(row: Record) -> tuple[str, str, str, float, Seeds]:
    """Return the columns that identify a cell within the tables of a study, in the order of their rows."""
    return row["model"], row["task"], row["setting"], row["learning_rate"], seeds_of(row)


def all_pairs(pairs: Pairs, grid: Grid) -> list[tuple[str, str]]:
    """Return every (model, task), sorted, over all models and tasks that were requested or have results."""
    models, tasks = (
        {*asked, *seen} for asked, seen in zip((grid.models, grid.tasks), zip(*pairs, strict=True), strict=True)
    )
    return sorted(itertools.product(models, tasks))

"""Any table with a score per example: CSV, TSV, JSON Lines or Parquet."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import ClassVar

import numpy as np

from mlmclm.errors import UserError
from mlmclm.readers.reader import Reader, ScoredRun
from mlmclm.readers.rows import number, read_rows, word
from mlmclm.storage.data_files import TABLES, kind_of

COLUMNS = ("run", "example", "score")
OPTIONAL = ("seed", "task", "metric", "group")


class ScoreTable(Reader):
    """A file with the columns run, example and score, and optionally seed, task, metric and group. Examples that belong together
    have the same group. Other columns are ignored."""

    name: ClassVar[str] = "table"
    title: ClassVar[str] = "tables with the columns run, example and score"
    last: ClassVar[bool] = True

    def recognises(self, path: Path) -> bool:
        return path.is_file() and kind_of(path) in TABLES

    def runs(self, path: Path, only: Collection[str] | None = None) -> list[ScoredRun]:
        scores_by_run: dict[tuple[str, ...], dict[str, tuple[float, str]]] = {}
        for place, row in read_rows(path, COLUMNS, OPTIONAL):
            run, example, score = word(row, "run", place), word(row, "example", place), number(row, "score", place)
            if only is not None and run not in only:
                continue
            seed, task, metric, group = (word(row, name, place) if name in row else "" for name in OPTIONAL)
            scores = scores_by_run.setdefault((run, seed, task, metric or "score"), {})
            if example in scores:
                hint = "" if "seed" in row else " Runs with several seeds need a column seed."
                raise UserError(f"{place}: example {example!r} of run {run!r} is there twice.{hint}")
            if scores and bool(group) != bool(next(iter(scores.values()))[1]):
                raise UserError(f"{place}: some examples of run {run!r} have a group and others have none.")
            scores[example] = score, group
        if not scores_by_run and only is None:
            raise UserError(f"{path}: no rows; expected the columns {', '.join(COLUMNS)}.")
        return [
            ScoredRun(
                run,
                task,
                metric,
                list(scores),
                np.asarray([score for score, _ in scores.values()]),
                seed=seed,
                groups=tuple(group for _, group in scores.values() if group),
            )
            for (run, seed, task, metric), scores in scores_by_run.items()
        ]

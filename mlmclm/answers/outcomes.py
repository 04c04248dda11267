"""Outcomes of test examples: as tables of many cells, and as scores that are functions of the examples' weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mlmclm.errors import UserError
from mlmclm.progress import Bar, say
from mlmclm.results.examples import SCORES, ExampleSource, KeptExamples
from mlmclm.results.measures import Array, Measure, WeightedMean, measure
from mlmclm.results.metrics import metric_parts
from mlmclm.tasks.family import family_of


@dataclass(frozen=True, eq=False)
class Outcomes:
    """The outcomes of the test examples of many cells.

    Attributes:
        tables: by task; each has a column `key`, with the rows of a key together, and the columns of `results.examples`.
        labels: the names of classes or tags by key of the cell; cells without any are not in it.
    """

    tables: Mapping[str, pa.Table] = field(default_factory=dict)
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]], kept: ExampleSource) -> Outcomes:
        """Return the outcomes of all scored cells; damaged or missing ones are left out with a message."""
        parts: dict[str, list[pa.Table]] = {}
        labels: dict[str, tuple[str, ...]] = {}
        scored = {row["key"]: row for row in rows if row["status"] == "ok"}
        # Similar cells are next to each other, which makes compression more effective.
        order = sorted(scored.values(), key=lambda row: (row["task"], row["model"], row["learning_rate"], row["key"]))
        with Bar("reading test examples", len(order), unit="cells") as bar:
            for number, row in enumerate(order, 1):
                try:
                    examples = kept.examples(row)
                except UserError as error:
                    say(f"left out of the bundle: {error}")
                    continue
                columns = {**examples.columns, **examples.predictions}
                arrays = {name: pa.array(values, from_pandas=True) for name, values in columns.items()}
                # Without the scores of ranked documents: they are as large as all the rest, don't compress, and no score of a cell needs them.
                table = pa.table({name: array for name, array in arrays.items() if not _numbers(array.type)})
                keys = pa.array([row["key"]] * examples.rows, pa.string())
                parts.setdefault(row["task"], []).append(table.add_column(0, "key", keys))
                if examples.label_names:
                    labels[row["key"]] = examples.label_names
                bar.update(number)
        return cls({task: joined_tables(tables) for task, tables in parts.items()}, labels)

    @cached_property
    def places(self) -> dict[str, dict[str, tuple[int, int]]]:
        """The first row and the number of rows of each cell, by task and key."""
        return {task: _runs(table["key"]) for task, table in self.tables.items()}

    def table_of(self, result: Mapping[str, Any]) -> pa.Table | None:
        """Return the rows of a cell in its task's table; None if there are none."""
        place = self.places.get(result["task"], {}).get(result["key"])
        return None if place is None else self.tables[result["task"]].slice(*place)

    def examples(self, result: Mapping[str, Any]) -> KeptExamples:
        """Return the outcome of each test example in a cell; a `UserError` if there are none."""
        key, table = result["key"], self.table_of(result)
        if table is None:
            raise UserError(
                f"result {key} (model {result['model']}, task {result['task']}): the bundle has no examples of it."
            )
        columns = {
            name: table[name].to_numpy()
            for name in table.column_names
            if name != "key" and table[name].null_count < table.num_rows
        }
        texts = {name: column for name, column in columns.items() if column.dtype == object}
        numbers = {name: column for name, column in columns.items() if name not in texts}
        return KeptExamples(result, numbers, self.labels.get(key, ()), texts)


def joined_tables(tables: Iterable[pa.Table]) -> pa.Table:
    """Return the concatenation of tables; a column that a table lacks is null in its rows."""
    return pa.concat_tables(tables, promote_options="permissive").combine_chunks()


def measure_of(kept: KeptExamples, metric: str) -> Measure:
    """Return a score of a cell as a function of the weights of its examples; a `UserError` if the cell has no such score."""
    return measure(metric, measures_of(kept, metric)(kept.columns, len(kept.label_names)))


def measures_of(kept: KeptExamples, metric: str) -> Callable[[Mapping[str, Array], int], dict[str, Measure]]:
    """Return the function `measures` of `analysis.pairs.compare_sides` for the columns of a cell."""
    if SCORES in kept.columns:
        return lambda columns, _: dict.fromkeys(metric_parts(metric), WeightedMean(columns[SCORES]))
    return family_of(kept.result).measured


def gold_of(kept: KeptExamples) -> tuple[str, ...]:
    """Return the columns of a cell that depend on the test data alone; none for scores of other tools."""
    return () if SCORES in kept.columns else family_of(kept.result).gold_columns


def fold_reader(
    source: ExampleSource, results: Iterable[Mapping[str, Any]]
) -> Callable[[Sequence[Mapping[str, Any]]], Array | None]:
    """Return the function `folds` of `analysis.analyse`, which reads the predictions of these results."""
    from mlmclm.analysis.effects import fold_scores
    from mlmclm.analysis.pairs import mean_over_seeds

    by_key = {result["key"]: result for result in results}

    def folds(rows: Sequence[Mapping[str, Any]]) -> Array | None:
        try:
            kept = [source.examples(by_key[row["key"]]) for row in rows]
        except UserError:  # some predictions are damaged or missing
            return None
        if not kept or kept[0].units < 2 or len({cell.rows for cell in kept}) > 1:
            return None
        return fold_scores(
            mean_over_seeds([measure_of(cell, rows[0]["metric"]) for cell in kept]), kept[0].rows, kept[0].groups
        )

    return folds


def _numbers(kind: pa.DataType) -> bool:
    """Return whether a column holds lists of floating-point numbers."""
    return bool(pa.types.is_list(kind) and pa.types.is_floating(kind.value_type))


def _runs(keys: pa.ChunkedArray) -> dict[str, tuple[int, int]]:
    """Return the first row and the number of rows of each key; the rows of a key are together."""
    coded = (
        keys.combine_chunks().dictionary_encode() if not pa.types.is_dictionary(keys.type) else keys.combine_chunks()
    )
    codes = np.asarray(pc.fill_null(coded.indices, 0))
    if not len(codes):
        return {}
    first = np.flatnonzero(np.r_[True, codes[1:] != codes[:-1]])
    ends = np.r_[first[1:], len(codes)]
    names = coded.dictionary.to_pylist()
    return {names[codes[start]]: (int(start), int(end - start)) for start, end in zip(first, ends, strict=True)}

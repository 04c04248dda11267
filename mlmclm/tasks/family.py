"""The declaration of a task family, and the families by name.

A family is a `Family` in a file of its own, in `mlmclm/tasks/families/` or in another installed package, together with
the `PreparedTask` of its tasks; no other code refers to it by name. It declares the columns of its tasks, how they are
checked, tokenised and shown, and the metrics. All other code uses this declaration.

torch and transformers are imported inside the methods that need them, as in `prepared_task`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute

from mlmclm.errors import UserError
from mlmclm.results.examples import GROUP
from mlmclm.results.measures import Array, Measure, WeightedMean, full_score
from mlmclm.results.metrics import metric_parts
from mlmclm.tasks.columns import Columns, TaskData, check_filled
from mlmclm.tasks.declaration import FAMILIES, Judged, SourceTable, Task
from mlmclm.tasks.metric import METRICS, metrics_of
from mlmclm.tasks.prepared_task import Examples, Lists, PreparedTask, numeric
from mlmclm.tasks.settings import TaskSettings
from mlmclm.tasks.texts import encode_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Read = Callable[[Any, str], Columns]
"""Reads a table, unchanged from its source, given its declaration (a string or `SourceTable`) and the split's name."""
SPLITS = ("train", "validation", "test")


class Family:
    """The declaration of a family: how its tasks are read, checked, shown and tokenised, and how they are scored.

    A family is a class without instances. A task that is ready to train is an instance of its `prepared`.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    prepared: ClassVar[type[PreparedTask]]
    """The class of its prepared tasks."""
    columns: ClassVar[Mapping[str, pa.DataType]]
    """Canonical columns of a training table. `text_pair` is optional: it is null in a task that does not declare it."""
    more_columns: ClassVar[tuple[str, ...]] = ()
    """Canonical names of columns in tables other than the training table."""
    labels: ClassVar[str | None] = None
    """The column of classes (int64) or tags (list<int64>), numbered by the task's label names, if there is one."""
    metrics: ClassVar[Mapping[str, str]]
    """Label in reports of every score that `scores` can return, by the score's name; the first is the usual main score.
    Higher is better. `study.` marks the variants of the study (arXiv 2507.00994)."""
    signed: ClassVar[tuple[str, ...]] = ()
    """The scores that lie between -1 and 1, such as correlations; all others lie between 0 and 1."""
    gold_columns: ClassVar[tuple[str, ...]] = ()
    """Numeric columns of `examples` that depend on the test data alone. Cells that differ in one are not compared."""
    study_metric: ClassVar[str | None] = None
    """Main score in the study; None if the study has no tasks of this family."""
    judged: ClassVar[bool] = False
    """True if an evaluation split consists of queries, a corpus and relevance judgements."""
    unanswerable: ClassVar[bool] = False
    framed: ClassVar[bool] = False
    """True if `encode` supports `special_tokens: tokenizer`."""
    embeds: ClassVar[bool] = False
    """True if the loss is a function (`loss_of`) of the sequences' `embeddings` alone. A large batch can then be encoded
    in chunks, and the fine-tuned encoder, with its pooling and prefixes, is a sentence-transformers model."""
    hub_task: ClassVar[str | None] = None
    """The Hub's name of the family, in model cards; None if it is the same as `name`."""
    token_columns: ClassVar[tuple[str, ...]] = ("input_ids",)
    gold_words: ClassVar[str] = ""
    """Noun for the gold spans that `regained` returns, such as "answers"."""
    overlong_words: ClassVar[str] = "cut"
    """How a sequence longer than `max_length` is made to fit, as a phrase such as "in windows"."""
    shown: ClassVar[Mapping[str, str]] = {"gold": "gold", "prediction": "prediction"}
    """Columns of `examples` that files of predictions hold, by their names in these files. The second is the prediction itself."""

    @classmethod
    def lacks(cls) -> list[str]:
        """Return the faults of a family from another package that would make later steps fail, except missing class attributes."""
        absent = [name for name in (*cls.signed, *filter(None, [cls.study_metric])) if name not in cls.metrics]
        taken = [name for name in cls.metrics if name in METRICS]
        return [
            *([] if cls.metrics else ["has no 'metrics'"]),
            *([f"has no {', '.join(absent)} in 'metrics', which 'signed' or 'study_metric' names"] if absent else []),
            *(f"has a metric {name!r}, which is the name of an added one" for name in taken),
            *([] if len(cls.shown) > 1 else ["needs the gold answer and the prediction in 'shown'"]),
        ]

    @classmethod
    def training_source(cls, task: Task, read: Read) -> Columns:
        """Read the training table, unchanged from its source."""
        return read(task.splits.train, "train")

    @classmethod
    def evaluation(
        cls, task: Task, split: str, source: str | SourceTable | Judged, read: Read, names: tuple[str, ...]
    ) -> Any:
        """Read and check an evaluation split: one table, or the family's own object, which `tables` divides into tables."""
        return cls.table(read(source, split), names)

    @classmethod
    def held_out(cls, table: pa.Table) -> Any:
        """Turn rows held out of the training table into an evaluation split, as `evaluation` returns it."""
        return table

    @classmethod
    def divided(cls, split: Any, held: Callable[[pa.Table], Array]) -> tuple[Any, Any]:
        """Divide an evaluation split into the rows for which `held` is true, and the others."""
        mask = pa.array(held(split))
        return split.filter(mask), split.filter(pa.compute.invert(mask))

    @classmethod
    def grouped(cls, split: Any, groups: pa.Array) -> Any:
        """Return an evaluation split with a column of its examples' `groups`, [rows]."""
        return split.append_column(GROUP, groups)

    @classmethod
    def groups(cls, data: TaskData, settings: TaskSettings) -> pa.ChunkedArray:
        """Return the group of each test example within the settings' limits, in order."""
        return limited(data.test, settings.max_evaluation_examples)[GROUP]

    @classmethod
    def tables(cls, split: Any) -> dict[str, pa.Table]:
        """Return the tables of an evaluation split by name; a single table has the empty name."""
        return {"": split}

    @classmethod
    def table(cls, columns: Columns, names: tuple[str, ...]) -> pa.Table:
        """Return a table in canonical columns, checked."""
        table = pa.table({name: cls.column(columns, name, names) for name in cls.columns})
        check_filled(columns.where, table, pairs=columns.task.pair_template is not None)
        cls.check(columns.task, columns.where, table, names)
        return table

    @classmethod
    def label_names(cls, columns: Columns) -> tuple[str, ...]:
        """Return the names of classes or tags by number, from the training table; empty for a family without labels."""
        return columns.label_names(cls.labels, cls.columns[cls.labels]) if cls.labels else ()

    @classmethod
    def column(cls, columns: Columns, name: str, names: tuple[str, ...]) -> pa.Array:
        """Return one canonical column."""
        if name == "text_pair" and name not in columns.task.columns:
            return pa.nulls(columns.table.num_rows, pa.string())
        if name == cls.labels:
            return columns.numbered(name, cls.columns[name], names)
        return columns.typed(name, cls.columns[name])

    @classmethod
    def converted(cls, task: Task, names: tuple[str, ...], train: pa.Table, *others: Any) -> tuple[Any, ...]:
        """Return the splits, training first, in the form from which examples are made; by default unchanged."""
        return (train, *others)

    @classmethod
    def check(cls, task: Task, where: str, table: pa.Table, names: tuple[str, ...]) -> None:
        """Raise UserError for a row that is invalid in this family. Empty tables and nulls have been refused before.

        The message begins with `where`, and names the row and the fault.
        """

    @classmethod
    def check_settings(cls, task: str, settings: TaskSettings) -> None:
        """Raise UserError for settings of this family alone that contradict each other."""

    @classmethod
    def label_counts(cls, table: Any, names: tuple[str, ...]) -> dict[str, float]:
        """Count the rows (or tags) of each label; a family without labels may return statistics of its own."""
        if cls.labels is None:
            return {}
        column = table[cls.labels].combine_chunks()
        counts = Counter((column.flatten() if pa.types.is_list(column.type) else column).to_pylist())
        return {label: counts[number] for number, label in enumerate(names)}

    @classmethod
    def encode(cls, data: TaskData, tokenizer: PreTrainedTokenizerFast, settings: TaskSettings) -> dict[str, pa.Table]:
        """Tokenise a task into tables by name, one of them `train`. This runs once for all cells.

        By default, `text` and `text_pair` become what `encode_texts` returns, and all other columns are kept.
        """
        template, tables = data.task.pair_template, {}
        for split, table in limited_splits(data, settings).items():
            texts = {name: table[name].to_pylist() for name in ("text", *(["text_pair"] if template else []))}
            columns = encode_texts(texts["text"], texts.get("text_pair"), template, tokenizer, settings)
            others = [name for name in table.column_names if name not in ("text", "text_pair")]
            tables[split] = pa.table({**columns, **{name: table[name].combine_chunks() for name in others}})
        return tables

    @classmethod
    def show(cls, row: dict[str, Any], names: tuple[str, ...], text: Callable[[list[int]], str]) -> dict[str, Any]:
        """Return an encoded training row with its ids decoded by `text`: the model's input and the expected output."""
        return {"text": text(row["input_ids"])}

    @classmethod
    def regained(cls, data: TaskData, encoded: Mapping[str, pa.Table], settings: TaskSettings) -> dict[str, Array]:
        """Return, by split, which gold spans of text can be recovered from their tokens; empty for a family without such spans.

        Args:
            encoded: the tables of `encode` with these settings, which truncate nothing.
        """
        return {}

    @classmethod
    def overlong(cls, table: pa.Table, column: str, settings: TaskSettings) -> Array:
        """Return which sequences of a column, encoded without truncation, exceed `max_length`: bool [rows]."""
        return Lists.of(table, column).lengths > settings.max_length

    @classmethod
    def measures(cls, columns: Mapping[str, Array], classes: int) -> dict[str, Measure]:
        """Return scores as functions of example weights, so that they can be computed again on resampled examples.

        By default, a score is the mean of the column of its name.

        Args:
            columns: the numeric columns of `PreparedTask.examples`.
            classes: the number of label names.
        """
        return {name: WeightedMean(values) for name, values in columns.items()}

    @classmethod
    def scores(cls, examples: Examples, classes: int) -> dict[str, float]:
        """Compute the `metrics` of a split from all its examples; by default those of `measures`."""
        numbers = numeric(examples)
        measures = cls.measures(numbers, classes)
        return {name: full_score(score, numbers) for name, score in measures.items() if name in cls.metrics}

    @classmethod
    def measured(cls, columns: Mapping[str, Array], classes: int) -> dict[str, Measure]:
        """Return the `measures`, and those of added metrics."""
        added = {name: metric.measure(columns, classes) for name, metric in metrics_of(cls.name).items()}
        return cls.measures(columns, classes) | added

    @classmethod
    def labels_of_metrics(cls) -> dict[str, str]:
        """Return the `metrics`, and the added ones."""
        return {**cls.metrics, **{name: metric.title for name, metric in metrics_of(cls.name).items()}}

    @classmethod
    def score_range(cls, metric: str) -> tuple[float, float]:
        """Return the lowest and the highest possible value of a metric, which may join several scores by `+`."""
        signed = {*cls.signed, *(name for name, added in metrics_of(cls.name).items() if added.signed)}
        lows = [-1.0 if name in signed else 0.0 for name in metric_parts(metric)]
        return sum(lows) / len(lows), 1.0


def family_of(result: Mapping[str, Any]) -> type[Family]:
    """Return the family of a cell's result; raise UserError if no installed package has it any longer."""
    name = result["family"]
    family: type[Family] | None = FAMILIES.find(name)
    if family is None:
        raise UserError(
            f"result {result['key']} (task {result['task']}): no installed package has its family {name!r}. Install the one that it "
            "came from."
        )
    return family


def subset(rows: int, limit: int | None) -> Array | None:
    """Return a fixed random subset of row numbers, ascending; None if `limit` keeps all rows."""
    if limit is None or limit >= rows:
        return None
    import torch

    # A fixed seed and not the cell's: all cells of a task must see the same data.
    generator = torch.Generator().manual_seed(42)
    return np.sort(torch.randperm(rows, generator=generator).numpy()[:limit])


def limited(table: pa.Table, limit: int | None) -> pa.Table:
    """Return the table's fixed random subset of at most `limit` rows."""
    rows = subset(table.num_rows, limit)
    return table if rows is None else table.take(pa.array(rows))


def limited_splits(data: TaskData, settings: TaskSettings) -> dict[str, pa.Table]:
    """Return the splits of a task, each a single table, cut to the number of rows that the settings allow."""
    limits = (settings.max_train_examples, settings.max_evaluation_examples, settings.max_evaluation_examples)
    return {split: limited(getattr(data, split), limit) for split, limit in zip(SPLITS, limits, strict=True)}

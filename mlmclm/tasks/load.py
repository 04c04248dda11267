"""A task's data, wherever they are read from (`tasks.reading`), checked and in canonical columns.

Canonical columns are: sequence classification text, text_pair (null without one), label int, regression label float; token classification
tokens list<str>, tags list<int>; question answering id, question, context, answers {text list<str>, answer_start
list<int>}; retrieval query, positive for training and, for evaluation, queries (id, text), corpus (id, text), qrels
(query_id, corpus_id, score).
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from mlmclm.errors import UserError, unknown
from mlmclm.storage.files import canonical_json
from mlmclm.tasks.check import check_labels_seen, check_retrieval, check_table
from mlmclm.tasks.declaration import COLUMNS, Judged, Part, Task
from mlmclm.tasks.pins import check_pin
from mlmclm.tasks.splits import Raw, from_hub, reader


@dataclass(frozen=True)
class RetrievalSet:
    """A retrieval evaluation: queries (id, text), corpus (id, text), qrels (query_id, corpus_id, score)."""

    queries: pa.Table
    corpus: pa.Table
    qrels: pa.Table


@dataclass(frozen=True)
class TaskData:
    """A task's checked data in canonical columns."""

    task: Task
    train: pa.Table
    validation: pa.Table | RetrievalSet
    test: pa.Table | RetrievalSet
    label_names: tuple[str, ...]
    """Classes or tags by number; empty for the families without any."""
    fingerprint: str
    """Hex; changes with anything here that can change a score, and with nothing else."""


def load_task(
    task: Task,
    *,
    store: Path,
    data_root: Path | None,
    progress: Callable[[str, int, int | None], None] | None = None,
) -> TaskData:
    """Reads and checks all splits.

    Args:
        data_root: a folder whose `task.folder`, where it exists, stands in for the Hub.

    Raises:
        UserError: missing or empty split, missing column (with the nearest), a label out of range, tags that don't fit
            their tokens, an answer that isn't in its context, judgements of unknown documents, a damaged file; data of a branch
            of the Hub that have changed since the store first read them.
        EnvironmentFault: the Hub can't be reached.
    """
    read = reader(task, store, data_root, progress)
    source = task.splits.train
    raw = _pairs(task, source, read) if isinstance(source, Judged) else read(source)
    names = _label_names(task, raw)
    if task.family == "sequence-classification" and task.metric == "f1" and len(names) != 2:
        raise UserError(
            f"task {task.name}: the metric f1 is that of the second of two classes, and there are {len(names)} "
            f"({', '.join(names)}); use f1_macro."
        )
    train = _canonical(task, "train", raw, names)
    validation = _evaluation(task, "validation", task.splits.validation, read, names)
    if validation is None:
        train, validation = _hold_out(task, train)
    test = _evaluation(task, "test", task.splits.test, read, names)
    assert test is not None
    if names:
        check_labels_seen(task, train, {"validation": validation, "test": test}, names)
    fingerprint = _fingerprint(task, names, train, validation, test)
    if from_hub(task, data_root):
        check_pin(task, fingerprint, store)
    return TaskData(task, train, validation, test, names, fingerprint)


def _column(task: Task, split: str, raw: Raw, canonical: str) -> pa.ChunkedArray:
    """A source column.

    Raises:
        UserError: it isn't there; the message names the nearest and all there are.
    """
    wanted = raw.columns.get(canonical) or task.column(canonical)
    outer, _, field = wanted.partition(".")
    if wanted not in raw.table.column_names and outer in raw.table.column_names:
        kind = raw.table.schema.field(outer).type
        if pa.types.is_struct(kind) and kind.get_field_index(field) >= 0:
            return pa.compute.struct_field(raw.table[outer], field)
    if wanted not in raw.table.column_names:
        near = difflib.get_close_matches(wanted, raw.table.column_names, n=1, cutoff=0.4)
        hint = f" Nearest: {near[0]!r}." if near else ""
        raise UserError(
            f"task {task.name}, {split} ({raw.where}): the column {wanted!r} is missing.{hint} "
            f"There are: {', '.join(raw.table.column_names) or '(none)'}."
        )
    return raw.table[wanted]


def _label_names(task: Task, raw: Raw) -> tuple[str, ...]:
    """Names of classes or tags: declared, carried by the data, or found as strings in the training split."""
    canonical = {"sequence-classification": "label", "token-classification": "tags"}.get(task.family)
    if canonical is None:
        return ()
    if task.label_names:
        return task.label_names
    carried = raw.label_names.get(task.column(canonical))
    if carried:
        return carried
    column = _column(task, "train", raw, canonical).combine_chunks()
    if canonical == "tags":
        column = column.flatten()
    values = [value for value in column.unique().to_pylist() if value is not None and not _blank(value)]
    if values and all(isinstance(value, str) for value in values):
        return tuple(sorted(values, key=lambda value: (value != "O", value)))
    if values and all(isinstance(value, int) and value >= 0 for value in values):
        return tuple(str(number) for number in range(max(values) + 1))
    raise UserError(
        f"task {task.name} ({raw.where}): the column {task.column(canonical)!r} holds neither names "
        "nor numbers from 0 on."
    )


def _blank(value: Any) -> bool:
    return isinstance(value, str) and not value.strip()


def _numbered(
    task: Task, split: str, where: str, column: pa.ChunkedArray, names: tuple[str, ...], *, nested: bool
) -> pa.Array:
    """Labels as int64; names become numbers.

    Raises:
        UserError: a label is empty, which is how a CSV file says that there is none, or is unknown, or is no number or name.
    """
    values = column.combine_chunks()
    for row, value in enumerate(values.to_pylist()):
        if any(map(_blank, value or ()) if nested else [_blank(value)]):
            raise UserError(
                f"task {task.name}, {split} ({where}): row {row}: the {'tag' if nested else 'label'} is empty."
            )
    number = {name: index for index, name in enumerate(names)}

    def one(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if value not in number:
            raise unknown("label", value, names, where=f"task {task.name}, {split} ({where})")
        return number[value]

    try:
        if nested:
            if pa.types.is_string(values.type.value_type) or pa.types.is_large_string(values.type.value_type):
                return pa.array([[one(v) for v in row] for row in values.to_pylist()], pa.list_(pa.int64()))
            return values.cast(pa.list_(pa.int64()))
        if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
            return pa.array([one(value) for value in values.to_pylist()], pa.int64())
        return values.cast(pa.int64())
    except (pa.ArrowException, AttributeError, TypeError) as error:
        raise UserError(
            f"task {task.name}, {split} ({where}): labels of type {values.type} are not numbers or names."
        ) from error


def _typed(task: Task, split: str, raw: Raw, canonical: str, kind: pa.DataType) -> pa.Array:
    """A source column cast to the canonical type."""
    column = _column(task, split, raw, canonical)
    if kind == pa.string() and not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        if canonical in ("id", "query_id", "corpus_id") and pa.types.is_integer(column.type):
            return column.cast(kind)
        if not pa.types.is_null(column.type):
            raise UserError(
                f"task {task.name}, {split} ({raw.where}): "
                f"the column {task.column(canonical)!r} holds {column.type}, not text."
            )
    try:
        return column.combine_chunks().cast(kind)
    except pa.ArrowException as error:
        raise UserError(
            f"task {task.name}, {split} ({raw.where}): "
            f"the column {task.column(canonical)!r} holds {column.type}, not {kind}."
        ) from error


ANSWERS = pa.struct([("text", pa.list_(pa.string())), ("answer_start", pa.list_(pa.int64()))])


def _canonical(task: Task, split: str, raw: Raw, names: tuple[str, ...]) -> pa.Table:
    """The canonical table of a split, checked."""
    columns: dict[str, Any] = {}
    for canonical in COLUMNS[task.family]:
        if canonical == "text_pair" and "text_pair" not in task.columns:
            columns[canonical] = pa.nulls(raw.table.num_rows, pa.string())
        elif canonical == "label" and task.family == "sequence-regression":
            columns[canonical] = _typed(task, split, raw, canonical, pa.float64())
        elif canonical in ("label", "tags"):
            column = _column(task, split, raw, canonical)
            columns[canonical] = _numbered(task, split, raw.where, column, names, nested=canonical == "tags")
        elif canonical == "tokens":
            columns[canonical] = _typed(task, split, raw, canonical, pa.list_(pa.string()))
        elif canonical == "answers":
            columns[canonical] = _answers(task, split, raw)
        else:
            columns[canonical] = _typed(task, split, raw, canonical, pa.string())
    table = pa.table(columns)
    check_table(task, f"task {task.name}, {split} ({raw.where})", table, names)
    return table


def _answers(task: Task, split: str, raw: Raw) -> pa.Array:
    """The answers column, whose fields may come in any order; of texts alone each is at its first occurrence in the context."""
    column = _column(task, split, raw, "answers").combine_chunks()
    if pa.types.is_list(column.type) and pa.types.is_string(column.type.value_type):
        contexts = _typed(task, split, raw, "context", pa.string()).to_pylist()
        found = [
            {"text": texts, "answer_start": [(context or "").find(text or "") for text in texts or ()]}
            for context, texts in zip(contexts, column.to_pylist(), strict=True)
        ]
        return pa.array(found, ANSWERS)
    fields = (
        [column.type.field(i).name for i in range(column.type.num_fields)] if pa.types.is_struct(column.type) else []
    )
    if not {"text", "answer_start"} <= set(fields):
        raise UserError(
            f"task {task.name}, {split} ({raw.where}): "
            f"the column {task.column('answers')!r} must hold {{text, answer_start}}, it holds {column.type}."
        )
    parts = [column.field("text").cast(pa.list_(pa.string())), column.field("answer_start").cast(pa.list_(pa.int64()))]
    return pa.StructArray.from_arrays(parts, fields=list(ANSWERS))


def _evaluation(
    task: Task,
    split: str,
    source: str | Part | Judged | None,
    read: Callable[[str | Part], Raw],
    names: tuple[str, ...],
) -> Any:
    """A split's table, or a retrieval evaluation; None where it is to be held out of train."""
    if source is None:
        return None
    if not isinstance(source, Judged):
        return _canonical(task, split, read(source), names)
    return _judged(task, split, source, read)


def _judged(task: Task, split: str, source: Judged, read: Callable[[str | Part], Raw]) -> RetrievalSet:
    """Queries, documents and judgements, checked."""
    tables = {}
    for part, columns in (
        ("queries", ("id", "text")),
        ("corpus", ("id", "text")),
        ("qrels", ("query_id", "corpus_id", "score")),
    ):
        raw = read(getattr(source, part))
        kinds = [pa.float64() if column == "score" else pa.string() for column in columns]
        tables[part] = pa.table(
            {
                column: _typed(task, f"{split} {part}", raw, column, kind)
                for column, kind in zip(columns, kinds, strict=True)
            }
        )
        if part == "corpus" and "title" in (*task.columns, *raw.columns):
            titles = pa.compute.fill_null(_typed(task, f"{split} {part}", raw, "title", pa.string()), "")
            texts = pa.compute.binary_join_element_wise(titles, tables[part]["text"].combine_chunks(), " ")
            tables[part] = tables[part].set_column(1, "text", pa.compute.utf8_trim_whitespace(texts))
    judged = RetrievalSet(**tables)
    check_retrieval(f"task {task.name}, {split}", judged.queries, judged.corpus, judged.qrels)
    return judged


def _pairs(task: Task, source: Judged, read: Callable[[str | Part], Raw]) -> Raw:
    """Training pairs of a judged set: a query and each document judged relevant to it, in the judgements' order."""
    judged = _judged(task, "train", source, read)
    relevant = judged.qrels.filter(pa.compute.greater(judged.qrels["score"], 0))
    columns = {
        task.column(name): texts["text"].take(
            pa.compute.index_in(relevant[key], value_set=texts["id"].combine_chunks())
        )
        for name, key, texts in (
            ("query", "query_id", judged.queries),
            ("positive", "corpus_id", judged.corpus),
        )
    }
    return Raw(pa.table(columns), "judged pairs", {}, {})


def _hold_out(task: Task, train: pa.Table) -> tuple[pa.Table, pa.Table | RetrievalSet]:
    """Cuts validation out of train: `validation_fraction` of the rows, in whole groups where there are groups."""
    import torch

    splits = task.splits
    assert splits.validation_fraction is not None
    generator = torch.Generator().manual_seed(splits.validation_seed)
    rows = len(train)
    if splits.validation_group is None:
        order = torch.randperm(rows, generator=generator).numpy()
        held = order[: max(1, round(rows * splits.validation_fraction))]
    else:
        group = train[splits.validation_group].combine_chunks().dictionary_encode().indices.to_numpy()
        counts = np.bincount(group)
        order = torch.randperm(len(counts), generator=generator).numpy()
        wanted = np.cumsum(counts[order]) <= max(1, round(rows * splits.validation_fraction))
        wanted[0] = True
        held = np.flatnonzero(np.isin(group, order[wanted]))
    mask = np.zeros(rows, dtype=bool)
    mask[held] = True
    if mask.all():
        raise UserError(f"task {task.name}: train is too small ({rows} rows) to hold out a validation split.")
    validation, rest = train.filter(pa.array(mask)), train.filter(pa.array(~mask))
    return rest, _as_judged(validation) if task.family == "retrieval" else validation


def _as_judged(pairs: pa.Table) -> RetrievalSet:
    """A retrieval evaluation out of (query, positive) pairs: the corpus is their distinct documents."""
    documents = pairs["positive"].combine_chunks().dictionary_encode()
    queries = pairs["query"].combine_chunks().dictionary_encode()
    judged = sorted(set(zip(queries.indices.to_pylist(), documents.indices.to_pylist(), strict=True)))
    return RetrievalSet(
        pa.table({"id": [f"q{n}" for n in range(len(queries.dictionary))], "text": queries.dictionary}),
        pa.table({"id": [f"d{n}" for n in range(len(documents.dictionary))], "text": documents.dictionary}),
        pa.table(
            {
                "query_id": [f"q{query}" for query, _ in judged],
                "corpus_id": [f"d{document}" for _, document in judged],
                "score": pa.array([1.0] * len(judged), pa.float64()),
            }
        ),
    )


def _fingerprint(task: Task, names: tuple[str, ...], *splits: pa.Table | RetrievalSet) -> str:
    """SHA-256 over what examples and scores are made of."""
    kind = [task.family, task.pair_template, list(names), *(["unanswerable"] if task.unanswerable else [])]
    digest = hashlib.sha256(canonical_json(kind).encode())
    for split in splits:
        tables: Iterable[pa.Table] = (
            (split.queries, split.corpus, split.qrels) if isinstance(split, RetrievalSet) else (split,)
        )
        for table in tables:
            digest.update(canonical_json([table.num_rows, table.column_names]).encode())
            for start in range(0, table.num_rows, 8192):
                digest.update(canonical_json(table.slice(start, 8192).to_pydict()).encode())
    return digest.hexdigest()

"""Checks of a task's content, before anything is trained: each raises one `UserError` with task, split and row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from mlmclm.errors import UserError
from mlmclm.tasks.declaration import Task


def check_table(task: Task, where: str, table: pa.Table, names: tuple[str, ...]) -> None:
    """A table of canonical columns; `where` starts each message."""
    if table.num_rows == 0:
        raise UserError(f"{where}: the split is empty.")
    for column in table.column_names:
        if column != "text_pair" or task.pair_template:
            _no_nulls(where, table, column)
    if task.family == "sequence-classification":
        _in_range(where, "label", table["label"].to_numpy(), np.arange(table.num_rows), names)
    elif task.family == "sequence-regression":
        _check_numbers(where, table["label"].to_numpy())
    elif task.family == "token-classification":
        _check_tags(where, table, names)
    elif task.family == "question-answering":
        _check_answers(task, where, table)


def _no_nulls(where: str, table: pa.Table, column: str) -> None:
    nulls = pyarrow.compute.is_null(table[column]).to_numpy()
    if nulls.any():
        raise UserError(f"{where}: row {int(nulls.argmax())}: {column} is null.")


def _in_range(
    where: str, what: str, labels: np.ndarray[Any, Any], rows: np.ndarray[Any, Any], names: tuple[str, ...]
) -> None:
    bad = np.flatnonzero((labels < 0) | (labels >= len(names)))
    if len(bad):
        value = int(labels[bad[0]])
        hint = " (-1 marks a split without public labels)" if value == -1 else ""
        raise UserError(
            f"{where}: row {int(rows[bad[0]])}: {what} {value} is outside 0..{len(names) - 1}{hint}; "
            f"the labels are {', '.join(names)}."
        )


def _check_numbers(where: str, labels: np.ndarray[Any, Any]) -> None:
    bad = np.flatnonzero(~np.isfinite(labels))
    if len(bad):
        raise UserError(f"{where}: row {int(bad[0])}: the label is {labels[bad[0]]}, not a finite number.")
    if np.ptp(labels) == 0:
        raise UserError(
            f"{where}: every label is {labels[0]:g}; a correlation needs different ones (GLUE's test splits have none)."
        )


def _check_tags(where: str, table: pa.Table, names: tuple[str, ...]) -> None:
    tokens, tags = table["tokens"].combine_chunks(), table["tags"].combine_chunks()
    counts = pyarrow.compute.list_value_length(tokens).to_numpy(zero_copy_only=False)
    tagged = pyarrow.compute.list_value_length(tags).to_numpy(zero_copy_only=False)
    if (counts != tagged).any():
        row = int((counts != tagged).argmax())
        raise UserError(f"{where}: row {row}: {int(tagged[row])} tags for {int(counts[row])} tokens.")
    if (counts == 0).any():
        raise UserError(f"{where}: row {int((counts == 0).argmax())}: there are no tokens.")
    if tokens.flatten().null_count or tags.flatten().null_count:
        raise UserError(f"{where}: a token or tag is null.")
    _in_range(where, "tag", tags.flatten().to_numpy(), np.repeat(np.arange(len(counts)), counts), names)
    strange = [name for name in names if name != "O" and not name.startswith(("B-", "I-"))]
    if strange:
        raise UserError(f"{where}: entity-level scores need tags O, B-... and I-...; there is {strange[0]!r}.")


def _check_answers(task: Task, where: str, table: pa.Table) -> None:
    columns = zip(table["id"].to_pylist(), table["context"].to_pylist(), table["answers"].to_pylist(), strict=True)
    for row, (name, context, answers) in enumerate(columns):
        place = f"{where}: row {row} (id {name})"
        texts, starts = answers["text"] or [], answers["answer_start"] or []
        if len(texts) != len(starts):
            raise UserError(f"{place}: {len(texts)} answer texts for {len(starts)} positions.")
        if not texts and not task.unanswerable:
            raise UserError(
                f"{place}: there is no answer. A task with unanswerable questions says 'unanswerable: true' in its "
                "declaration."
            )
        for text, start in zip(texts, starts, strict=True):
            if not text or context[max(start, 0) : max(start, 0) + len(text)] != text or start < 0:
                found = context.find(text) if text else -1
                hint = f"it is at {found}" if found >= 0 else "it isn't in the context at all"
                raise UserError(
                    f"{place}: the answer {text[:60]!r} is not at character {start} of the context; {hint}."
                )


def check_retrieval(where: str, queries: pa.Table, corpus: pa.Table, qrels: pa.Table) -> None:
    """Queries, documents and judgements that refer to one another."""
    for part, table in (("queries", queries), ("corpus", corpus), ("qrels", qrels)):
        if table.num_rows == 0:
            raise UserError(f"{where}: {part} is empty.")
        for column in table.column_names:
            _no_nulls(f"{where} {part}", table, column)
    ids = {}
    for part, table in (("queries", queries), ("corpus", corpus)):
        values = table["id"].to_pylist()
        ids[part] = set(values)
        if len(ids[part]) != len(values):
            seen: set[str] = set()
            for value in values:
                if value in seen:
                    raise UserError(f"{where} {part}: the id {value!r} occurs twice.")
                seen.add(value)
    for column, part in (("query_id", "queries"), ("corpus_id", "corpus")):
        for row, value in enumerate(qrels[column].to_pylist()):
            if value not in ids[part]:
                raise UserError(f"{where} qrels: row {row}: {column} {value!r} is not in {part}.")
    if not pyarrow.compute.any(pyarrow.compute.greater(qrels["score"], 0)).as_py():
        raise UserError(f"{where} qrels: no document is judged relevant (score above 0).")
    score = qrels["score"].to_numpy()
    if (score != np.round(score)).any() or (score < 0).any():
        raise UserError(f"{where} qrels: scores must be whole numbers from 0 on.")


def check_labels_seen(task: Task, train: pa.Table, others: dict[str, Any], names: tuple[str, ...]) -> None:
    """Every label of an evaluation split occurs in train, or no model could ever predict it."""
    column = "label" if task.family == "sequence-classification" else "tags"

    def seen(table: pa.Table) -> set[int]:
        values = table[column].combine_chunks()
        return set((values.flatten() if column == "tags" else values).unique().to_pylist())

    trained = seen(train)
    for split, table in others.items():
        unseen = sorted(seen(table) - trained)
        if unseen:
            raise UserError(
                f"task {task.name}: {split} has the {'label' if column == 'label' else 'tag'} {names[unseen[0]]!r}, "
                "which train never shows."
            )

"""Four tasks made from Python's documentation, one per family, split by package so that nothing leaks.

| task | family | question |
|---|---|---|
| pydocs-kind | sequence-classification | which part of a documentation a text comes from, its heading removed |
| pydocs-fields | token-classification | parameter names, types and exceptions in flattened sections |
| pydocs-qa | question-answering | what a parameter does or is, what is returned, when an exception is raised |
| pydocs-retrieval | retrieval | the rest of a docstring, given its summary |

Train, validation and test come from different packages (`mlmclm.pydocs.package_splits`), and an evaluation text that
also occurs in train is left out, even if it was written for another package.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mlmclm.corpora.generated_task import GeneratedTask
from mlmclm.corpora.process_map import ordered_map
from mlmclm.errors import UserError, unknown
from mlmclm.progress import bars
from mlmclm.pydocs import fields as pydocs_fields
from mlmclm.pydocs import kind as pydocs_kind
from mlmclm.pydocs import passages as pydocs_retrieval
from mlmclm.pydocs import questions as pydocs_qa
from mlmclm.pydocs.documentation import prepare_pydocs, read_group, read_groups
from mlmclm.pydocs.documented import Documented, Rows
from mlmclm.pydocs.pin import resolved
from mlmclm.pydocs.sections import parse_docstring
from mlmclm.storage.files import stable_hash, write_json

TASK_VERSION = 1
"""Part of every key: raise it when a change of the code changes the examples of any of the four tasks."""

# By task: the family, the label names, the function that makes the tables, and the description for `meta.json`.
_MAKERS: dict[str, tuple[str, list[str], Callable[[Sequence[Documented]], dict[str, Rows]], str]] = {
    "pydocs-kind": ("sequence-classification", pydocs_kind.LABELS, pydocs_kind.make, pydocs_kind.__doc__ or ""),
    "pydocs-fields": ("token-classification", pydocs_fields.LABELS, pydocs_fields.make, pydocs_fields.__doc__ or ""),
    "pydocs-qa": ("question-answering", [], pydocs_qa.make, pydocs_qa.__doc__ or ""),
    "pydocs-retrieval": ("retrieval", [], pydocs_retrieval.make, pydocs_retrieval.__doc__ or ""),
}

PYDOCS_TASKS = tuple(_MAKERS)


def build(task: str, store: Path) -> Path:
    """Return the folder of a task. All four tasks are made together on first use.

    They are made from the store's documentation (`mlmclm.pydocs.pin`) and don't change with the installed packages.

    The folder holds one Parquet file per table, and `meta.json`. The tables of classification, tagging and question
    answering are `train`, `validation` and `test`. Those of retrieval are `train`, and for each of validation and test
    `..._queries`, `..._corpus` and `..._qrels`. `meta.json` has name, family, label_names, rows of each table,
    fingerprint (of the content), pydocs (fingerprint of the text) and how (description).

    Raises:
        UserError: the name is unknown, or there is too little documentation for a task.
        EnvironmentFault: the disk is full, or a worker was killed.
    """
    if task not in _MAKERS:
        raise unknown("task", task, PYDOCS_TASKS)
    folder = find(task, store)
    if folder is not None:
        return folder
    text = prepare_pydocs(store)
    source = resolved(store)
    assert source is not None
    missing = [name for name in _MAKERS if not _stored(name, store, source).find()]
    with bars() as report:
        documents, groups = list[Documented](), read_groups(text)
        for number, part in enumerate(ordered_map(partial(_parse_group, text), range(groups)), start=1):
            documents += part
            report("reading parameters, results and exceptions", number, groups, "parts")
        results = ordered_map(partial(_tables, documents), missing)
        for number, (name, tables) in enumerate(zip(missing, results, strict=True), start=1):
            _stored(name, store, source).ensure(partial(_write, name, tables, source), title=name)
            report("making tasks from the documentation", number, len(missing), "tasks")
    return _stored(task, store, source).folder


def find(task: str, store: Path) -> Path | None:
    """Return the folder of a task that is made already; None if `build` would have work to do."""
    source = resolved(store)
    stored = None if source is None else _stored(task, store, source)
    return stored.folder if stored is not None and stored.find() else None


def _stored(task: str, store: Path, source: str) -> GeneratedTask:
    """Return a task made from a documentation, which may not exist yet."""
    return GeneratedTask(store, stable_hash([TASK_VERSION, task, source])[:16])


def _parse_group(folder: Path, number: int) -> list[Documented]:
    """Parse one row group of the documents, in a worker. Topics have no sections and are left out."""
    return [
        Documented(row["split"], row["package"], row["name"], parse_docstring(row["text"]))
        for row in read_group(folder, number)
        if row["kind"] != "topic"
    ]


def _tables(documents: Sequence[Documented], task: str) -> dict[str, Rows]:
    """Make the tables of one task, in a worker."""
    return _MAKERS[task][2](documents)


def _write(task: str, tables: dict[str, Rows], source: str, folder: Path) -> None:
    """Write a task's files into a folder."""
    import pyarrow
    import pyarrow.parquet

    family, labels, _, how = _MAKERS[task]
    empty = [name for name, table in tables.items() if not table]
    if empty:
        raise UserError(
            f"{task}: there is too little documentation in this environment for {', '.join(empty)}: packages with "
            "parameter descriptions are needed for each split. Choose other tasks, or install such packages."
        )
    meta: dict[str, Any] = {"name": task, "family": family, "label_names": labels, "pydocs": source, "how": how}
    meta["rows"] = {name: len(table) for name, table in tables.items()}
    # A hash of the rows, not of the Parquet files, whose bytes depend on pyarrow's version.
    meta["fingerprint"] = stable_hash([labels, tables])
    for name, table in tables.items():
        content = pyarrow.Table.from_pylist(table)
        text = pyarrow.string()  # of a column without a value, such as text_pair
        schema = [field.with_type(text) if pyarrow.types.is_null(field.type) else field for field in content.schema]
        content = content.cast(pyarrow.schema(schema))
        pyarrow.parquet.write_table(content, folder / f"{name}.parquet", compression="zstd")
    write_json(folder / "meta.json", meta)

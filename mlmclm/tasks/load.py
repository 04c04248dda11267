"""Loading of a task's data from any source (`tasks.splits`), checked and in the canonical columns of its family."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from mlmclm.configuration import Role
from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.results.measures import Array
from mlmclm.storage.addresses import is_local, send_file
from mlmclm.storage.checksums import read_sealed, write_sealed
from mlmclm.storage.files import canonical_json, stable_hash
from mlmclm.tasks.columns import TaskData, check_labels_seen
from mlmclm.tasks.declaration import Judged, SourceTable, Task
from mlmclm.tasks.family import Read
from mlmclm.tasks.splits import reader

_COMMIT = re.compile(r"[0-9a-f]{40}")


def load_task(task: Task, *, store: Path, data_root: Path | None) -> TaskData:
    """Read and check all splits of a task.

    Args:
        data_root: a folder whose `task.folder`, if it exists, replaces the Hub.

    Raises:
        UserError: a split is missing or empty, a column is missing (the message suggests the nearest), a label is out
            of range, tags don't match their tokens, an answer isn't in its context, judgements refer to unknown
            documents, a file is damaged, or the data of a Hub branch have changed since the store first read them.
        EnvironmentFault: the Hub can't be reached.
    """
    read, from_hub = reader(task, store, data_root)
    data = task_from(task, read)
    if from_hub:
        check_pin(task, data.fingerprint, store)
    return data


def task_from(task: Task, read: Read) -> TaskData:
    """Check the splits of a task that `read` returns; the errors are those of `load_task`."""
    family = task.kind
    columns = family.training_source(task, read)
    # Labels are numbered by the training table, and all other splits use its numbers.
    names = family.label_names(columns)
    train = family.table(columns, names)
    test = family.evaluation(task, "test", task.splits.test, read, names)
    if task.group is not None:
        test = family.grouped(test, _groups(task, task.group, read))
    if task.splits.validation is not None:
        validation = family.evaluation(task, "validation", task.splits.validation, read, names)
    elif task.splits.validation_from == "test":
        validation, test = family.divided(test, lambda rows: _held(task, rows))
    else:
        held = pa.array(_held(task, train))
        train, validation = train.filter(pa.compute.invert(held)), family.held_out(train.filter(held))
    train, validation, test = family.converted(task, names, train, validation, test)
    if family.labels:
        check_labels_seen(task, family.labels, train, {"validation": validation, "test": test}, names)
    evaluated = [*family.tables(validation).values(), *family.tables(test).values()]
    return TaskData(task, train, validation, test, names, _fingerprint(task, names, [train, *evaluated]))


def _groups(task: Task, name: str, read: Read) -> pa.Array:
    """Return the number of each test example's group, int64 [rows]."""
    source = task.splits.test
    columns = read(source.queries if isinstance(source, Judged) else source, "test")
    column = columns.plain(name).combine_chunks()
    if column.null_count:
        row = pa.compute.index(column.is_null(), True).as_py()
        raise UserError(f"{columns.where}: row {row}: it has no group, as {name} is null.")
    return column.dictionary_encode().indices.cast(pa.int64())


def _held(task: Task, table: pa.Table) -> Array:
    """Return which rows go to validation, bool [rows]: the `validation_fraction`, in whole groups of `validation_group` if given.

    Raises UserError if no row would be left.
    """
    import torch

    splits = task.splits
    assert splits.validation_fraction is not None
    generator = torch.Generator().manual_seed(splits.validation_seed)
    rows = len(table)
    if splits.validation_group is None:
        order = torch.randperm(rows, generator=generator).numpy()
        held = order[: max(1, round(rows * splits.validation_fraction))]
    else:
        group = table[splits.validation_group].combine_chunks().dictionary_encode().indices.to_numpy()
        counts = np.bincount(group)
        order = torch.randperm(len(counts), generator=generator).numpy()
        taken = np.cumsum(counts[order]) <= max(1, round(rows * splits.validation_fraction))
        taken[0] = True  # even if the first group alone exceeds the fraction: validation must not be empty
        held = np.flatnonzero(np.isin(group, order[taken]))
    mask = np.zeros(rows, dtype=bool)
    mask[held] = True
    if mask.all():
        raise UserError(
            f"task {task.name}: {splits.validation_from} is too small ({rows} rows) to hold out a validation split."
        )
    return mask


def _fingerprint(task: Task, names: tuple[str, ...], tables: list[pa.Table]) -> str:
    """Return the SHA-256 of everything that examples and scores are computed from."""
    # "unanswerable" is left out when False, so that tasks that never declared it keep their fingerprints.
    kind: list[Any] = [task.family, task.pair_template, list(names), *(["unanswerable"] if task.unanswerable else [])]
    # Hard negatives are mined when the training table is tokenised (`tasks.negatives`), so only their settings are hashed.
    kind += [task.negatives.keyed(Role.TOKENS)] if task.negatives else []
    more = task.keyed(Role.TOKENS, Role.EVALUATION)
    kind += [more] if more else []
    digest = hashlib.sha256(canonical_json(kind).encode())
    for table in tables:
        digest.update(canonical_json([table.num_rows, table.column_names]).encode())
        # Hash the JSON of the values in slices: the Arrow buffers' layout is not unique, and the whole table is large.
        for start in range(0, table.num_rows, 8192):
            digest.update(canonical_json(table.slice(start, 8192).to_pydict()).encode())
    return digest.hexdigest()


def check_pin(task: Task, fingerprint: str, store: Path) -> None:
    """Record the fingerprint of data that come from a branch, or raise UserError if the store first read other data.

    A commit is fixed, but a branch of the Hub can move, which would change the data under the task's cells. The file is
    `task-data/NAME-DECLARATION.json`, with the fingerprint and the date of the first reading.
    """
    branches = list(dict.fromkeys(name for name in _revisions(task) if _COMMIT.fullmatch(name) is None))
    if not branches:
        return
    # Another declaration of the same name may have different data.
    where = stable_hash(task.keyed(Role.SOURCE))[:12]
    path = store / "task-data" / f"{task.name}-{where}.json"
    if not is_local(path):
        with suppress(EnvironmentFault):  # this user may have read-only access to the store
            write_sealed(path, {"fingerprint": fingerprint, "read": f"{datetime.now(UTC):%Y-%m-%d}"})
            send_file(path)
        return
    pinned = read_sealed(path, "Delete it to accept the current data.")
    if pinned["fingerprint"] != fingerprint:
        raise UserError(
            f"task {task.name}: the data at {task.source} (revision {', '.join(branches)}) have changed since this store first read "
            f"them on {pinned['read']}: their fingerprint was {pinned['fingerprint'][:12]} and is {fingerprint[:12]} now. To keep the "
            f"earlier data, put a local copy of them under --data, or a commit into the task's 'revision'. To accept the current data, delete {path}: "
            "the task's cells are then computed again."
        )


def _revisions(task: Task) -> Iterator[str]:
    """Yield the revision of every table that the task reads; the Hub's default branch is main."""
    splits = task.splits
    for split in (splits.train, splits.validation, splits.test):
        for part in (split.queries, split.corpus, split.qrels) if isinstance(split, Judged) else (split,):
            if isinstance(part, SourceTable):
                yield part.revision or (task.revision if part.source is None else None) or "main"
            elif part is not None:
                yield task.revision or "main"

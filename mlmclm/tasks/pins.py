"""Pins of Hub data sets that follow a branch: a store accepts only the data that it read first.

A commit is fixed, but a branch can move and would change the data under the task's cells.

task-data/NAME-DECLARATION.json      the fingerprint of the data, and the date they were first read
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from mlmclm.configuration import Role
from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.storage.addresses import is_local, send_file
from mlmclm.storage.checksums import read_sealed, write_sealed
from mlmclm.storage.files import stable_hash
from mlmclm.tasks.declaration import Judged, SourceTable, Task

_COMMIT = re.compile(r"[0-9a-f]{40}")


def check_pin(task: Task, fingerprint: str, store: Path) -> None:
    """Record the fingerprint of data that come from a branch, or raise UserError if the store first read other data."""
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

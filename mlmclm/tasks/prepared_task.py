"""Access to tokenised task data in the store.

This module imports nothing heavy, because `mlmclm report` and dry runs open many prepared tasks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.compute

from mlmclm import versions
from mlmclm.errors import UserError, one_line
from mlmclm.storage.artifact import FolderArtifact, Origin
from mlmclm.storage.checksums import CHECKSUMS
from mlmclm.storage.files import read_json, stable_hash
from mlmclm.tasks.declaration import FAMILIES, Task
from mlmclm.tasks.settings import TaskSettings


@dataclass(frozen=True)
class PreparedTask:
    """A task's tokenised data: a folder of memory-mapped Arrow files."""

    key: str
    folder: Path
    family: str
    task_data: str
    label_names: tuple[str, ...]
    unanswerable: bool = False
    """Question answering: True if the empty answer can be correct."""
    recut: bool = False
    """Pairs: True if truncating the longer text gave other sequences than truncating the joined text
    (`texts.encode_texts`)."""
    starts: bool = False
    """True if each sequence begins with a special token (which `pooling: bos` needs)."""

    @cached_property
    def training_data(self) -> str:
        """Fingerprint of all that a training takes from the task: its tokenised rows, its family and its labels."""
        rows = read_json(self.folder / CHECKSUMS)["train.arrow"]["sha256"]
        return stable_hash([FAMILIES.keyed(self.family), rows, self.label_names, self.unanswerable])

    @cached_property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """Number of rows and of tokens of each table that has tokens."""
        sizes: dict[str, tuple[int, int]] = {}
        for name, ids in self.token_ids():
            rows, tokens = len(ids), len(pa.compute.list_flatten(ids, recursive=True))
            sizes[name] = rows, sizes.get(name, (rows, 0))[1] + tokens
        return sizes

    def token_ids(self) -> Iterator[tuple[str, pa.ChunkedArray]]:
        """Open every table; yield its name with each of its columns of token ids. Raises what `table` does."""
        for name in read_json(self.folder / "meta.json")["rows"]:
            table = self.table(name)
            for column in FAMILIES[self.family].token_columns:
                if column in table.column_names:
                    yield name, table[column]

    def table(self, name: str) -> pa.Table:
        """Open one of the tables that the family's `encode` returned; raise UserError if its file is damaged."""
        try:
            with pa.memory_map(str(self.folder / f"{name}.arrow")) as source:
                return pa.ipc.open_file(source).read_all()
        except (pa.ArrowException, OSError) as error:
            raise UserError(
                f"{self.folder / name}.arrow cannot be read; is it cut short? ({one_line(error)}) Delete {self.folder}: "
                "the same command makes it again."
            ) from error


class StoredPreparation(FolderArtifact):
    """A task's tokenised data in the store."""

    kind = "tasks"
    part = "prepared"
    again = "`mlmclm study` or `mlmclm sweep` sets it aside and makes it again"

    def origin(self) -> Origin:
        """Read what it was made from; the tokenizer is in the key by its hash alone."""
        meta = read_json(self.folder / "meta.json")
        facts = {name: meta[name] for name in ("family", "task_data") if name in meta}
        return Origin({**facts, **meta.get("settings", {})}, {"task": meta.get("task")})

    def open(self) -> PreparedTask:
        """Open intact data."""
        meta = read_json(self.folder / "meta.json")
        more = {name: meta.get(name, False) for name in ("unanswerable", "recut", "starts")}
        facts = meta["family"], meta["task_data"], tuple(meta["label_names"])
        return PreparedTask(self.key, self.folder, *facts, **more)


def prepared_key(task: Task, task_data: str, tokenizer: str, settings: TaskSettings) -> str:
    """Return the key (hex) of prepared data, given the fingerprint of the task's data and the tokenizer's hash."""
    encoding = settings.encoding(pairs=task.pair_template is not None)
    return stable_hash([versions.PREPARED_TASKS, FAMILIES.keyed(task.family), task_data, tokenizer, encoding])


def open_prepared(store: Path, key: str) -> PreparedTask | None:
    """Open the prepared data with this key; None if there are none.

    A damaged folder is set aside and reported, and counts as none.
    """
    stored = StoredPreparation(store, key)
    return stored.open() if stored.find() else None


def check_vocabulary(prepared: PreparedTask, tokenizer_folder: Path) -> None:
    """Raise UserError for a damaged table, or a token id that the model in the folder, if there is one, doesn't know."""
    config = tokenizer_folder / "config.json"
    known = read_json(config).get("vocab_size") if config.is_file() else None
    for _, ids in prepared.token_ids():
        largest = None if known is None else pa.compute.max(pa.compute.list_flatten(ids, recursive=True)).as_py()
        if largest is not None and largest >= known:
            raise UserError(
                f"{tokenizer_folder}: the tokenizer gives the id {largest}, and the model's vocabulary has {known} "
                "(vocab_size of config.json). Is it another model's tokenizer?"
            )

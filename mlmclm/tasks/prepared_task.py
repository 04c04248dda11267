"""Tokenised task data that is there. Nothing heavy is imported here: `mlmclm report` and dry runs open many."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from mlmclm.errors import UserError
from mlmclm.models.folder import tokenizer_hash
from mlmclm.storage.checksums import whole_cache
from mlmclm.storage.files import read_json, stable_hash
from mlmclm.tasks.declaration import Task
from mlmclm.tasks.generator import find_generator
from mlmclm.tasks.load import TaskData, load_task
from mlmclm.tasks.settings import TaskSettings

PREPARATION = 2
"""Raised whenever the same data and settings give other examples."""


@dataclass(frozen=True)
class PreparedTask:
    """A task's tokenised data: a folder of Arrow files, memory-mapped."""

    key: str
    folder: Path
    family: str
    task_data: str
    label_names: tuple[str, ...]
    unanswerable: bool = False
    """Question answering: the empty answer can be the right one."""
    recut: bool = False
    """Pairs: cutting the longer text gave other sequences than cutting the joined text (`texts.encode_texts`)."""
    starts: bool = False
    """A token stands before each text."""

    def table(self, name: str) -> pa.Table:
        """One of the tables that the family's `encode` returned.

        Raises:
            UserError: its file is damaged.
        """
        try:
            with pa.memory_map(str(self.folder / f"{name}.arrow")) as source:
                return pa.ipc.open_file(source).read_all()
        except (pa.ArrowException, OSError) as error:
            raise UserError(
                f"{self.folder / name}.arrow cannot be read; is it cut short? ({' '.join(str(error).split())}) Delete {self.folder}: "
                "the same command makes it again."
            ) from error


def prepared_key(task: Task, task_data: str, tokenizer: str, settings: TaskSettings) -> str:
    """Hex; `task_data` is the data's fingerprint, `tokenizer` the tokenizer's hash."""
    encoding = settings.encoding(pairs=task.pair_template is not None)
    return stable_hash([PREPARATION, task.family, task_data, tokenizer, encoding])


def open_prepared(store: Path, key: str) -> PreparedTask | None:
    """Return what is there under this key, if anything; what is not as it was written is set aside, which a line says."""
    folder = store / "prepared" / key
    if not whole_cache(folder, "meta.json"):
        return None
    try:
        meta = read_json(folder / "meta.json")
        facts = meta["family"], meta["task_data"], tuple(meta["label_names"])
        more = {name: meta.get(name, False) for name in ("unanswerable", "recut", "starts")}
        return PreparedTask(key, folder, *facts, **more)
    except (UserError, KeyError, TypeError) as error:  # of an earlier version, which noted no checksums
        raise UserError(
            f"{folder / 'meta.json'}: damaged ({error}). Delete {folder}: the same command makes it again."
        ) from error


def find_data(data: TaskData, tokenizer_folder: Path, settings: TaskSettings, store: Path) -> PreparedTask | None:
    """Loaded data as they were tokenised before; None where they were not."""
    return open_prepared(store, prepared_key(data.task, data.fingerprint, tokenizer_hash(tokenizer_folder), settings))


def find_task(
    task: Task, tokenizer_folder: Path, settings: TaskSettings, store: Path, data_root: Path | None
) -> PreparedTask | None:
    """Return what `prepare_task` would without any work but reading the data; None where there is some to do."""
    generator = find_generator(task.source)
    if generator is not None and generator.find(task.name, store) is None:
        return None
    return find_data(load_task(task, store=store, data_root=data_root), tokenizer_folder, settings, store)

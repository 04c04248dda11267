"""Preparation of tokenised task data: made once per task, tokenizer and settings, then memory-mapped by every cell."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute

from mlmclm.errors import UserError
from mlmclm.models.folder import check_length, load_tokenizer, tokenizer_hash
from mlmclm.models.sources import tokenizer_file
from mlmclm.progress import say
from mlmclm.results.examples import GROUP
from mlmclm.storage.files import write_json
from mlmclm.storage.unchanged import changed_file_error
from mlmclm.tasks.columns import TaskData
from mlmclm.tasks.declaration import Task
from mlmclm.tasks.declared_tasks import get_task
from mlmclm.tasks.generator import GENERATORS
from mlmclm.tasks.load import load_task
from mlmclm.tasks.prepared_task import PreparedTask, StoredPreparation, check_vocabulary, prepared_key
from mlmclm.tasks.rehearsal import needs_rehearsal, rehearse
from mlmclm.tasks.settings import TaskSettings
from mlmclm.tasks.texts import special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FEW = 8
"""Examples of each split that a dry run tokenises."""


def prepare_task(
    task: str | Task,
    tokenizer_folder: Path,
    settings: TaskSettings,
    store: Path,
    data_root: Path | None,
) -> PreparedTask:
    """Load, check and tokenise a task before any training. Several processes may do so at the same time.

    Args:
        tokenizer_folder: a model folder, or one that holds only a tokenizer.

    Raises:
        UserError: the data or the tokenizer is invalid, or the model does not support the length.
    """
    task = get_task(task) if isinstance(task, str) else task
    check_length(tokenizer_folder, settings.max_length)
    data = load_task(task, store=store, data_root=data_root)
    return prepare_data(data, tokenizer_folder, settings, store)


def prepare_data(data: TaskData, tokenizer_folder: Path, settings: TaskSettings, store: Path) -> PreparedTask:
    """Tokenise checked data, or return the prepared data if they are in the store.

    Raises:
        UserError: the tokenizer lacks a token or gives ids outside the vocabulary of the model in its folder, or the
            stored data are damaged.
    """
    stored = _stored(data.task, data.fingerprint, tokenizer_folder, settings, store)

    def make(folder: Path) -> None:
        tokenizer = load_tokenizer(tokenizer_folder, own_template=settings.special_tokens == "tokenizer")
        if _stored(data.task, data.fingerprint, tokenizer_folder, settings, store) != stored:
            raise changed_file_error(tokenizer_file(tokenizer_folder))
        _encode(data, tokenizer, settings, folder)

    stored.ensure(make, title=f"task {data.task.name}")
    prepared = stored.open(settings)
    check_vocabulary(prepared, tokenizer_folder)
    if settings.pooling == "bos" and not prepared.starts:
        raise UserError(
            f"pooling: bos: the tokenizer in {tokenizer_folder} puts no token before a text. Use pooling: mean or last."
        )
    rehearse(data.task, prepared)
    return prepared


def check_tokens(data: TaskData, tokenizer_folder: Path, settings: TaskSettings) -> None:
    """Raise what `prepare_data` would, on a few examples whose tokens are thrown away."""
    with TemporaryDirectory() as nowhere:
        prepare_data(data, tokenizer_folder, settings.at_most(FEW), Path(nowhere))


def _encode(data: TaskData, tokenizer: PreTrainedTokenizerFast, settings: TaskSettings, folder: Path) -> None:
    """Tokenise checked data into a folder."""
    family = data.task.kind
    framed = settings.special_tokens == "tokenizer"
    if framed and not family.framed:
        raise UserError(
            f"task {data.task.name}: special_tokens: tokenizer is not for {data.task.family}. Give the task special_tokens: end under "
            "per_task."
        )
    tables = family.encode(data, tokenizer, settings)
    if data.task.group is not None:
        tables[GROUP] = pa.table({GROUP: family.groups(data, settings)})
    # Only tables of pairs joined by a template have these columns (`texts.encode_texts`).
    pairs = [table for table in tables.values() if "recut" in table.column_names]
    lost, recut = (sum(pa.compute.sum(table[name]).as_py() or 0 for table in pairs) for name in ("lost", "recut"))
    if lost:
        say(
            f"task {data.task.name}: {lost:,} of {sum(map(len, pairs)):,} pairs lose one of their texts wholly at max_length "
            f"{settings.max_length} (pair_truncation: {settings.pair_truncation})"
        )
    for name, table in tables.items():
        with pa.OSFile(str(folder / f"{name}.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            # One chunk makes one record batch, which `Lists.of` reads without copying.
            writer.write_table(table.combine_chunks())
    meta: dict[str, Any] = {
        "task": data.task.name,
        "family": data.task.family,
        "task_data": data.fingerprint,
        "label_names": list(data.label_names),
        "settings": settings.encoding(pairs=data.task.pair_template is not None),
        "rows": {name: table.num_rows for name, table in tables.items()},
    }
    facts = {
        "unanswerable": data.task.unanswerable,
        "recut": recut > 0,
        "starts": framed and bool(special_tokens(tokenizer)[0]),
    }
    meta |= {name: True for name, value in facts.items() if value}
    write_json(folder / "meta.json", meta)


def find_or_prepare(
    task: str | Task,
    task_data: str,
    tokenizer_folder: Path,
    settings: TaskSettings,
    store: Path,
    data_root: Path | None,
) -> PreparedTask:
    """Return the prepared data with this fingerprint, and read the raw data only if they are not in the store.

    Raises UserError if the raw data no longer match the fingerprint.
    """
    task = get_task(task) if isinstance(task, str) else task
    prepared = find_tokens(task, task_data, tokenizer_folder, settings, store)
    if prepared is not None:
        return prepared
    data = load_task(task, store=store, data_root=data_root)
    if data.fingerprint != task_data:
        raise UserError(
            f"task {task.name}: the data have changed since this sweep was planned (fingerprint "
            f"{data.fingerprint[:12]}, planned {task_data[:12]}). Start the sweep again: it plans with the data that "
            "are there now."
        )
    return prepare_data(data, tokenizer_folder, settings, store)


def find_task(
    task: Task,
    tokenizer_folder: Path,
    settings: TaskSettings,
    store: Path,
    data_root: Path | None,
    *,
    check: bool = False,
) -> PreparedTask | None:
    """Return what `prepare_task` would, but do no work other than reading the data; None if there is more to do.

    A family or metric that is not built in is rehearsed (`tasks.rehearsal`).

    Args:
        check: whether to raise, if there is more to do, those errors of `prepare_task` that a few examples show.
    """
    generator = GENERATORS.find(task.source)
    # Loading the task would make the generator build the data.
    if generator is not None and generator.find(task.name, store) is None:
        return None
    data = load_task(task, store=store, data_root=data_root)
    prepared = find_tokens(task, data.fingerprint, tokenizer_folder, settings, store)
    if prepared is not None:
        rehearse(task, prepared)
    elif needs_rehearsal(task):
        with TemporaryDirectory() as nowhere:
            prepare_data(data, tokenizer_folder, settings, Path(nowhere))
    elif check:
        check_tokens(data, tokenizer_folder, settings)
    return prepared


def find_tokens(
    task: Task, task_data: str, tokenizer_folder: Path, settings: TaskSettings, store: Path
) -> PreparedTask | None:
    """Return the prepared data with this fingerprint; None if they are not in the store, or damaged, which is reported."""
    stored = _stored(task, task_data, tokenizer_folder, settings, store)
    return stored.open(settings) if stored.find() else None


def _stored(
    task: Task, task_data: str, tokenizer_folder: Path, settings: TaskSettings, store: Path
) -> StoredPreparation:
    return StoredPreparation(store, prepared_key(task, task_data, tokenizer_hash(tokenizer_folder), settings))

"""Preview of a task as a model would see it: examples as decoded tokens, labels, lengths. Writes nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import pyarrow as pa

from mlmclm.arguments import StudyFolders, known_arguments
from mlmclm.errors import UserError
from mlmclm.models.folder import check_length, check_model_folder, load_tokenizer, tokenizer_hash
from mlmclm.models.sources import longest
from mlmclm.storage.files import read_json
from mlmclm.storage.place import open_place
from mlmclm.tasks.columns import TaskData
from mlmclm.tasks.declaration import Task
from mlmclm.tasks.declared_tasks import get_task
from mlmclm.tasks.family import Family
from mlmclm.tasks.load import load_task
from mlmclm.tasks.prepared_task import Lists, check_token_ids
from mlmclm.tasks.settings import TaskSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SAMPLE = 10_000
"""Number of examples of each split whose lengths are measured: a fixed random subset."""
QUANTILES = {"min": 0.0, "median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
DEFAULT_LENGTH = 512
WHOLE = 2**30
"""A `max_length` that truncates nothing."""


@dataclass(frozen=True)
class Lengths:
    """Length statistics of a table's sequences in tokens, with the closing token and before truncation.

    Quantiles are lengths of actual sequences (no interpolation).
    """

    sequences: int
    quantiles: dict[str, int]
    truncated: float
    """Share of the sequences that exceed `max_length` and are truncated or split into windows (`Family.overlong`)."""
    lost: dict[str, float] | None = None
    """Share of the pairs that lose one of their texts entirely, by value of `pair_truncation`; None without pairs."""


@dataclass(frozen=True)
class TaskPreview:
    """A preview of a task's checked data, tokenised; rows, labels and lengths by table."""

    task: Task
    rows: dict[str, int]
    labels: dict[str, dict[str, float]]
    """Number of rows of each label, or the family's own statistics (`Family.label_counts`)."""
    lengths: dict[str, Lengths]
    examples: list[dict[str, Any]]
    """The model's input and the expected output of each example."""
    regained: dict[str, dict[str, int]]
    """Numbers of gold answers or tagged words, by split: `regained` can be recovered from their tokens, `of` are all."""
    max_length: int
    """Tokens of the longest sequence."""
    fingerprint: str
    """Hash of the task's data."""


def preview_task(
    data: TaskData, tokenizer: PreTrainedTokenizerFast, settings: TaskSettings, *, examples: int = 3
) -> TaskPreview:
    """Tokenise a sample of a task as fine-tuning would, and show a fixed random choice of training examples.

    The settings' limits on the number of examples are ignored. Raises UserError if the tokenizer has no token to end a
    sequence with, or gives ids outside the vocabulary of the model in its folder.
    """
    family = data.task.kind
    # Encode without truncation first, to measure the real lengths.
    no_limit = settings.at_most(SAMPLE).model_copy(update={"max_length": WHOLE})
    lengths = {}
    untruncated = family.encode(data, tokenizer, no_limit)
    for name, table in untruncated.items():
        for column in family.token_columns:
            if column in table.column_names and table.num_rows:
                check_token_ids(table[column], Path(tokenizer.name_or_path))
                label = name if column == "input_ids" else f"{name} {column}"
                lengths[label] = _lengths(family, table, column, settings)
    if data.task.pair_template is not None:
        for cut in ("longest_first", "joined"):
            limited = settings.at_most(SAMPLE).model_copy(update={"pair_truncation": cut})
            for name, table in family.encode(data, tokenizer, limited).items():
                share = float(np.mean(table["lost"].to_numpy()))
                lengths[name] = replace(lengths[name], lost={**(lengths[name].lost or {}), cut: share})
    encoded = family.encode(data, tokenizer, settings.at_most(max(examples, 1)))
    shown = [family.show(row, data.label_names, tokenizer.decode) for row in encoded["train"].to_pylist()[:examples]]
    splits = {"train": data.train, "validation": data.validation, "test": data.test}
    counts = {name: family.label_counts(split, data.label_names) for name, split in splits.items()}
    labels = {name: count for name, count in counts.items() if count}
    rows = {"train": data.train.num_rows}
    for name in ("validation", "test"):
        rows |= {f"{name} {part}".rstrip(): table.num_rows for part, table in family.tables(splits[name]).items()}
    kept = family.regained(data, untruncated, no_limit)
    regained = {split: {"regained": int(flags.sum()), "of": len(flags)} for split, flags in kept.items()}
    return TaskPreview(data.task, rows, labels, lengths, shown, regained, settings.max_length, data.fingerprint)


def _lengths(family: type[Family], table: pa.Table, column: str, settings: TaskSettings) -> Lengths:
    rows = Lists.of(table, column).lengths
    quantiles = {name: int(np.quantile(rows, share, method="inverted_cdf")) for name, share in QUANTILES.items()}
    return Lengths(len(rows), quantiles, float(np.mean(family.overlong(table, column, settings))))


@known_arguments
def check_task(
    name: str,
    *,
    tokenizer: str | Path | None = None,
    model: str | Path | None = None,
    max_length: int | None = None,
    examples: int = 3,
    **folders: Unpack[StudyFolders],
) -> TaskPreview:
    """Read and check a task's data, and tokenise a sample of them.

    Args:
        tokenizer: folder of a Hugging Face tokenizer; either this or `model`.
        model: folder of a Hugging Face model, whose tokenizer is used.
        max_length: tokens of the longest sequence; by default 512, or fewer if the model takes fewer.
        examples: number of training examples in the preview.
        folders: `StudyFolders`.

    Raises:
        UserError: a name or a folder is wrong, or the data don't fit the task's declaration.
    """
    place = open_place(**folders)
    task = get_task(name, place.task_dirs)
    if (tokenizer is None) == (model is None):
        raise UserError("tasks check: give the tokens either by --tokenizer FOLDER or by --model FOLDER.")
    folder = Path(model or tokenizer or "")
    if model is not None:
        check_model_folder(folder)
    tokenizer_hash(folder)
    if max_length is None:
        most = longest(read_json(folder / "config.json")) if (folder / "config.json").is_file() else None
        max_length = min(DEFAULT_LENGTH, most or DEFAULT_LENGTH)
    check_length(folder, max_length)
    stride = min(TaskSettings.model_fields["stride"].default, max_length // 4)
    loaded = load_task(task, store=place.store, data_root=place.data_root)
    settings = TaskSettings(max_length=max_length, stride=stride)
    return preview_task(loaded, load_tokenizer(folder), settings, examples=examples)

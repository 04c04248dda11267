"""What a model would be given of a task: examples as decoded tokens, labels, lengths. Nothing is written."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerFast

from mlmclm.tasks.declaration import Task
from mlmclm.tasks.families import FAMILIES
from mlmclm.tasks.family import Array, Lists
from mlmclm.tasks.load import RetrievalSet, TaskData
from mlmclm.tasks.question_answering import windows
from mlmclm.tasks.settings import TaskSettings

SAMPLE = 10_000
"""Examples of each split whose lengths are counted: a fixed random subset."""
QUANTILES = {"min": 0.0, "median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
WHOLE = 2**30
"""A length that cuts nothing."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of a table's sequences, the closing one included, before anything is cut; quantiles are those of real
    sequences (no interpolation)."""

    sequences: int
    quantiles: dict[str, int]
    truncated: float
    """Share of the sequences that lose tokens to `max_length`; in question answering, of those that need several windows."""
    lost: dict[str, float] | None = None
    """Pairs: the share that loses one of its texts wholly, by the kind of `pair_truncation`."""


@dataclass(frozen=True)
class Look:
    """A task's checked data through a tokenizer.

    Attributes:
        rows: rows by split; queries, documents and judgements in retrieval.
        labels: by split the number of rows (of words, in token classification) of each label; answered and unanswerable
            questions; least, mean and greatest value in regression; nothing in retrieval.
        lengths: by table.
        examples: of each example what the model is given and what it should say.
    """

    task: str
    rows: dict[str, int]
    labels: dict[str, dict[str, float]]
    lengths: dict[str, Lengths]
    examples: list[dict[str, Any]]

    def plain(self) -> dict[str, Any]:
        """As JSON-able values."""
        return asdict(self)


def look(data: TaskData, tokenizer: PreTrainedTokenizerFast, settings: TaskSettings, *, examples: int = 3) -> Look:
    """Tokenises a sample of a task as fine-tuning would.

    Args:
        settings: lengths, stride and prefixes; its limits on the number of examples are not looked at.
        examples: how many training examples to show, a fixed random choice.

    Raises:
        UserError: the tokenizer has no token to end a sequence with.
    """
    family = FAMILIES[data.task.family]
    whole = _limited(settings, SAMPLE).model_copy(update={"max_length": WHOLE})
    lengths = {}
    for name, table in family.encode(data, tokenizer, whole).items():
        for column in ("input_ids", "query", "positive"):
            if column in table.column_names and table.num_rows:
                label = name if column == "input_ids" else f"{name} {column}"
                lengths[label] = _lengths(table, column, settings)
    if data.task.pair_template is not None:
        for cut in ("longest_first", "joined"):
            limited = _limited(settings, SAMPLE).model_copy(update={"pair_truncation": cut})
            for name, table in family.encode(data, tokenizer, limited).items():
                share = float(np.mean(table["lost"].to_numpy()))
                lengths[name] = replace(lengths[name], lost={**(lengths[name].lost or {}), cut: share})
    encoded = family.encode(_first(data, examples), tokenizer, _limited(settings, max(examples, 1)))
    shown = _examples(data.task, data.label_names, encoded["train"], tokenizer)
    return Look(data.task.name, _rows(data), _labels(data), lengths, shown[:examples])


def _limited(settings: TaskSettings, rows: int) -> TaskSettings:
    limits = ("max_train_examples", "max_evaluation_examples", "max_evaluation_documents")
    return settings.model_copy(update=dict.fromkeys(limits, rows))


def _first(data: TaskData, rows: int) -> TaskData:
    """The data with little else than train, which is all that examples are shown of."""

    def few(split: pa.Table | RetrievalSet) -> pa.Table | RetrievalSet:
        return split if isinstance(split, RetrievalSet) else split.slice(0, rows)

    return replace(data, validation=few(data.validation), test=few(data.test))


def _lengths(table: pa.Table, column: str, settings: TaskSettings) -> Lengths:
    rows = Lists.of(table, column).lengths
    if "passage" in table.column_names:  # question answering: a question, cut at half of max_length, before the passage
        questions = table["passage"].to_numpy()
        kept = np.minimum(questions, settings.max_length // 2)
        room = settings.max_length - kept - 1
        cut = np.array(
            [
                len(windows(int(rest), int(space), settings.stride)) > 1
                for rest, space in zip(rows - questions - 1, room, strict=True)
            ]
        )
    else:
        cut = rows > settings.max_length
    quantiles = {name: int(np.quantile(rows, share, method="inverted_cdf")) for name, share in QUANTILES.items()}
    return Lengths(len(rows), quantiles, float(np.mean(cut)))


def _rows(data: TaskData) -> dict[str, int]:
    rows: dict[str, int] = {}
    for name, split in (("train", data.train), ("validation", data.validation), ("test", data.test)):
        if isinstance(split, RetrievalSet):
            parts = {"queries": split.queries, "documents": split.corpus, "judgements": split.qrels}
            rows |= {f"{name} {part}": table.num_rows for part, table in parts.items()}
        else:
            rows[name] = split.num_rows
    return rows


def _labels(data: TaskData) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for name, split in (("train", data.train), ("validation", data.validation), ("test", data.test)):
        if isinstance(split, RetrievalSet) or data.task.family == "retrieval":
            continue
        if data.task.family == "question-answering":
            answered = sum(bool(row["text"]) for row in split["answers"].to_pylist())
            found[name] = {"answered": answered, "unanswerable": split.num_rows - answered}
        elif data.task.family == "sequence-regression":
            values: Array = split["label"].to_numpy()
            found[name] = {"min": float(values.min()), "mean": float(values.mean()), "max": float(values.max())}
        else:
            tagged = data.task.family == "token-classification"
            column = split["tags" if tagged else "label"].combine_chunks()
            counts = Counter((column.flatten() if tagged else column).to_pylist())
            found[name] = {label: counts[number] for number, label in enumerate(data.label_names)}
    return found


def _examples(
    task: Task, names: tuple[str, ...], table: pa.Table, tokenizer: PreTrainedTokenizerFast
) -> list[dict[str, Any]]:
    """The rows of an encoded training table in words."""

    def text(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    shown = []
    for row in table.to_pylist():
        if task.family == "retrieval":
            shown.append({"query": text(row["query"]), "positive": text(row["positive"])})
            continue
        ids = row["input_ids"]
        example: dict[str, Any] = {"text": text(ids)}
        if task.family == "sequence-classification":
            example["label"] = names[row["label"]]
        elif task.family == "sequence-regression":
            example["label"] = row["label"]
        elif task.family == "question-answering":
            none = row["start"] == len(ids) - 1
            example["answer"] = None if none else text(ids[row["start"] : row["end"] + 1]).strip()
        else:
            tokens = [(text([token]).strip(), word) for token, word in zip(ids, row["words"], strict=True) if word >= 0]
            example["tags"] = [(token, names[row["tags"][word]]) for token, word in tokens]
        shown.append(example)
    return shown

"""Inference of a data file's task (family and columns) from the columns' names and values, and its rows in canonical form.

Nothing is guessed where two readings are plausible: the error names both, and the option that chooses between them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from mlmclm.errors import UserError, clipped, unknown
from mlmclm.storage.data_files import DELIMITERS, kind_of
from mlmclm.tasks.column_kinds import MOST_CLASSES, ColumnKind, finite_number, kinds_of, missing
from mlmclm.tasks.declaration import FAMILIES

CLASSES, NUMBERS, TAGS, ANSWERS, SEARCH = (
    "sequence-classification", "sequence-regression", "token-classification", "question-answering", "retrieval"
)  # fmt: skip
TEXT_NAMES = ("text", "sentence", "content", "review", "body", "document", "comment", "message", "tweet", "utterance")
LABEL_NAMES = (
    "label", "labels", "gold_label", "class", "category", "target", "sentiment", "intent", "topic", "score", "rating", "stars", "y",
)  # fmt: skip
PAIRS = (
    ("text", "text_pair"), ("sentence1", "sentence2"), ("premise", "hypothesis"), ("text1", "text2"), ("text_a", "text_b"),
    ("sentence_a", "sentence_b"), ("question1", "question2"), ("question", "sentence"),
    ("question", "passage"),
)  # fmt: skip
QUERY_NAMES = ("query", "anchor")
POSITIVE_NAMES = ("positive", "positive_passage", "passage", "document", "pos")
TOKEN_NAMES, TAG_NAMES = ("tokens", "words"), ("tags", "ner_tags", "pos_tags", "labels")
ROLES: Mapping[str, tuple[tuple[str, ...], str | None]] = {
    CLASSES: (("text", "text_pair"), "label"),
    NUMBERS: (("text", "text_pair"), "label"),
    TAGS: (("tokens",), "tags"),
    ANSWERS: (("question", "context"), "answers"),
    SEARCH: (("query", "positive"), None),
}
"""Family -> canonical names of the columns of text, and of the label."""
_START = "answer_start"
"""The column, or the key within an answer, that holds the answer's position in the context."""
_WRITTEN = re.compile(r"\s*[\[{]\s*(['\"]|-?\d+[\s,\]])")


@dataclass(frozen=True)
class Overrides:
    """The user's choices for a file; a field that is None or empty is inferred.

    Attributes:
        family: name of a family (`ROLES`).
        text: one or two columns of text, in order: text (and second text), tokens, query and positive, question and context.
        label: the column of labels, tags or answers.
    """

    family: str | None = None
    text: tuple[str, ...] = ()
    label: str | None = None


@dataclass(frozen=True)
class Reading:
    """The family and the columns with which a file is read.

    Attributes:
        columns: the file's columns by canonical name.
        unused: the file's other columns.
        notes: sentences about choices that the user may want to change.
    """

    family: str
    columns: Mapping[str, str]
    unused: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def infer(table: pa.Table, overrides: Overrides, where: object) -> Reading:
    """Return how a table is read.

    Args:
        table: as `column_kinds.plain_columns` returns it.
        where: the file, which starts each message.

    Raises:
        UserError: an override names no family or column, or it isn't clear which columns are meant.
    """
    if overrides.family is not None and overrides.family not in ROLES:
        raise unknown("family", overrides.family, ROLES, where="--family")
    for option, names in (("--text-column", overrides.text), ("--label-column", (overrides.label,))):
        for name in names:
            if name is not None and name not in table.column_names:
                raise unknown("column", name, table.column_names, where=f"{where}: {option}")
    rows = [name for name in table.column_names if len(name.split()) > 6 or finite_number(name) is not None]
    if rows and kind_of(Path(str(where))) in DELIMITERS:
        raise UserError(
            f"{where}: its first line seems to be a row, as it has {clipped(rows[0], 60)!r} where a column's name is expected. Put a line with the "
            "columns' names above it."
        )
    columns = _Columns(kinds_of(table), overrides, str(where))
    family = overrides.family or columns.family()
    chosen, notes = columns.of(family)
    if overrides.family is None and family in (CLASSES, NUMBERS):
        family, more = columns.by_label(chosen["label"])
        notes = (*notes, *more)
    used = {*chosen.values(), _START if family == ANSWERS else None}
    unused = tuple(name for name in table.column_names if name not in used)
    return Reading(family, chosen, unused, notes)


@dataclass(frozen=True)
class _Columns:
    """The columns of a table and the user's overrides, from which a family's columns are chosen."""

    kinds: Mapping[str, ColumnKind]
    overrides: Overrides
    where: str

    def family(self) -> str:
        """Return the family that the columns' names and kinds suggest; classification may prove to be regression (`by_label`)."""
        tokens = [name for name in self._named(TOKEN_NAMES) if self.kinds[name].kind in ("list", "text")]
        if tokens and self._named(TAG_NAMES):
            return TAGS
        answers = any(column.kind == "answers" for column in self.kinds.values()) or self._named(("answer", "answers"))
        if answers and self._named(("question",)) and self._named(("context", "passage")):
            return ANSWERS
        if (
            self._named(QUERY_NAMES)
            and self._named(POSITIVE_NAMES)
            and not self._named(LABEL_NAMES)
            and self.overrides.label is None
        ):
            return SEARCH
        return CLASSES

    def of(self, family: str) -> tuple[dict[str, str], tuple[str, ...]]:
        """Return the columns of a family by canonical name, and notes."""
        texts, label = ROLES[family]
        if len(self.overrides.text) > len(texts):
            raise UserError(f"--text-column: {family} has at most {len(texts)} columns of text ({', '.join(texts)}).")
        if label is None and self.overrides.label is not None:
            raise UserError(f"--label-column: {family} has no column of labels; leave it out.")
        if family in (CLASSES, NUMBERS):
            chosen = self.overrides.label or self._label()
            filled = dict(zip(texts, self.overrides.text or self._texts(chosen), strict=False))
            return {**filled, "label": chosen}, self._pair_note(filled)
        names = {
            TAGS: (TOKEN_NAMES, TAG_NAMES),
            ANSWERS: (("question",), ("context", "passage"), ("answers", "answer")),
            SEARCH: ((*QUERY_NAMES, "question"), POSITIVE_NAMES),
        }[family]
        roles = (*texts, *((label,) if label else ()))
        wanted = dict(zip(texts, self.overrides.text, strict=False)) | (
            {label: self.overrides.label} if label and self.overrides.label else {}
        )
        filled = {
            role: wanted.get(role) or self._one(role, tried, roles) for role, tried in zip(roles, names, strict=True)
        }
        if len(set(filled.values())) < len(filled):
            raise UserError(
                f"{self.where}: one column cannot be two of {', '.join(roles)} (got {', '.join(filled.values())})."
            )
        return filled, ()

    def by_label(self, name: str) -> tuple[str, tuple[str, ...]]:
        """Return the family that a column of labels suggests, and notes."""
        label = self.kinds[name]
        if label.kind == "number":
            return NUMBERS, (f"{name} is a number to predict. If its values are classes: --family {CLASSES}.",)
        if label.kind == "class" and label.whole and label.different > 2:
            return CLASSES, (
                f"the {label.different} numbers in {name} are classes. To predict the number: --family {NUMBERS}.",
            )
        return CLASSES, ()

    def _named(self, names: Sequence[str]) -> list[str]:
        """Return the columns with one of these names that aren't empty, in the order of the names."""
        lower = {name.lower(): name for name, column in self.kinds.items() if column.kind != "empty"}
        return [lower[name] for name in names if name in lower]

    def _one(self, role: str, names: Sequence[str], roles: Sequence[str]) -> str:
        named = self._named(names)
        if len(named) != 1:
            option = (
                "--label-column" if role in ("tags", "answers") else f"--text-column (in the order {', '.join(roles)})"
            )
            what = f"{' and '.join(named)} could each be the column" if named else "it is not clear which is the column"
            raise UserError(f"{self.where}: {what} {role!r}. {self._listing()} Choose with {option}.")
        return named[0]

    def _label(self) -> str:
        kinds = {name: self.kinds[name].kind for name in self._named(LABEL_NAMES)}
        named = [name for name, kind in kinds.items() if kind not in ("id", "list", "answers")]
        if not named and "list" in kinds.values():
            raise UserError(
                f"{self.where}: {', '.join(kinds)} has several labels a row, or labelled spans; one label a row is expected. {self._listing()} "
                "Choose with --label-column."
            )
        others = [name for name in self.kinds if name not in self.overrides.text and name not in named]
        for kind in ("", "class", "number"):
            columns = [name for name in others if self.kinds[name].kind == kind] if kind else named
            if len(columns) == 1:
                return columns[0]
            if columns:
                raise UserError(
                    f"{self.where}: {' and '.join(columns)} could each be the label. {self._listing()} Choose with --label-column."
                )
        raise UserError(f"{self.where}: no column looks like a label. {self._listing()} Choose with --label-column.")

    def _texts(self, label: str) -> tuple[str, ...]:
        lower = {name.lower(): name for name in self.kinds if name != label}
        for first, second in PAIRS:
            if first in lower and second in lower:
                return lower[first], lower[second]
        named = [name for name in self._named(TEXT_NAMES) if name != label]
        if len(named) == 1:
            return (named[0],)
        texts = named or [name for name, column in self.kinds.items() if column.kind == "text" and name != label]
        if len(texts) == 1:
            return (texts[0],)
        what = f"{', '.join(texts)} could each be the text" if texts else "no column looks like text"
        raise UserError(
            f"{self.where}: {what}. {self._listing()} Choose with --text-column, which may be given twice for two texts."
        )

    def _pair_note(self, columns: Mapping[str, str]) -> tuple[str, ...]:
        if "text_pair" not in columns or self.overrides.text:
            return ()
        return (
            f"a row has two texts, {columns['text']} and {columns['text_pair']}. To take one: --text-column {columns['text']}.",
        )

    def _listing(self) -> str:
        words = {
            "class": "classes",
            "id": "ids",
            "empty": "nothing",
            "other": "neither text nor numbers",
            "list": "lists",
        }
        listed = ", ".join(f"{name} ({words.get(column.kind, column.kind)})" for name, column in self.kinds.items())
        return f"Its columns: {listed}."


@dataclass(frozen=True)
class Rows:
    """A file's rows in the family's canonical columns.

    Attributes:
        table: labels and tags are text, so that class numbers need not start at 0.
        left_out: reason for leaving rows out -> number of such rows.
    """

    table: pa.Table
    left_out: Mapping[str, int]


def canonical(table: pa.Table, reading: Reading, where: object) -> Rows:
    """Return the rows of a table as the task's family reads them.

    Raises:
        UserError: a column is missing, or a value isn't allowed in its column; the message names column and row.
    """
    for name in reading.columns.values():
        if name not in table.column_names:
            raise unknown("column", name, table.column_names, where=str(where))
    columns = {role: table[name].to_pylist() for role, name in reading.columns.items()}
    read: Mapping[str, Callable[[str, Any], Any]] = {
        CLASSES: lambda role, value: _label(value) if role == "label" else _text(value),
        NUMBERS: lambda role, value: _number(value) if role == "label" else _text(value),
        TAGS: lambda role, value: _words(value),
        ANSWERS: lambda role, value: _answers(value) if role == "answers" else _text(value),
        SEARCH: lambda role, value: _text(value),
    }
    kept: list[dict[str, Any]] = []
    left: Counter[str] = Counter()
    for number in range(table.num_rows):
        row = {}
        for role, values in columns.items():
            value = values[number]
            if role == "label" and isinstance(value, list) and len(value) == 1:
                value = value[0]
            if _nothing(value):
                left[f"without {reading.columns[role]}"] += 1
                break
            if role == "answers" and _START in table.column_names and not isinstance(value, dict):
                value = {"text": value, _START: table[_START][number].as_py()}
            try:
                row[role] = read[reading.family](role, value)
            except ValueError as error:
                place = f"{where}: column {reading.columns[role]!r}, row {number + 1}"
                raise UserError(f"{place}: {error} (got {clipped(str(value), 60)!r}).") from error
        else:
            why = _unfit(reading.family, row)
            left.update([why] if why else [])
            kept += [] if why else [row]
    if reading.family == TAGS:
        _check_lengths(kept, where)
    return Rows(pa.Table.from_pylist(kept, schema=_schema(reading)), dict(left))


def check_labels(table: pa.Table, family: str, where: object) -> None:
    """Refuse labels that nothing can be learned from.

    Raises:
        UserError: there is one class or value, or almost as many classes as rows.
    """
    if family not in (CLASSES, NUMBERS):
        return
    counts = Counter(table["label"].to_pylist())
    if len(counts) == 1:
        raise UserError(
            f"{where}: all {table.num_rows:,} rows have the label {clipped(str(next(iter(counts))), 60)!r}; two different ones are needed."
        )
    if family == CLASSES and len(counts) > MOST_CLASSES and len(counts) * 2 > table.num_rows:
        raise UserError(
            f"{where}: the label has {len(counts):,} different values in {table.num_rows:,} rows, which are no classes; choose another column with "
            f"--label-column, or --family {NUMBERS} for numbers."
        )


def _nothing(value: object) -> bool:
    if isinstance(value, dict):
        return False
    return missing(value) if not isinstance(value, list) else not value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(
            "a list or an object is not text" if isinstance(value, bytes) else f"{type(value).__name__} is not text"
        )
    return value


def _label(value: object) -> str:
    if isinstance(value, list | dict | bytes):
        raise ValueError("one label a row is expected, not several")
    if isinstance(value, float) and value.is_integer():
        return str(int(value))  # whole numbers are floats where some are missing
    return str(value).strip()


def _number(value: object) -> float:
    number = finite_number(value)
    if number is None:
        raise ValueError("not a finite number")
    return number


def _check_written(value: object) -> None:
    """Raise ValueError for a list or object written as text, as pandas does in CSV: it can't be split into words."""
    if isinstance(value, str) and _WRITTEN.match(value):
        raise ValueError(
            "a list or an object as text, such as pandas writes into CSV. Save the data as JSON Lines or Parquet"
        )


def _words(value: object) -> list[str]:
    _check_written(value)
    if isinstance(value, str):
        return value.split()
    if not isinstance(value, list) or any(missing(item) or isinstance(item, list | dict | bytes) for item in value):
        raise ValueError("a list of words, or words with spaces between them, is expected")
    return [str(item) for item in value]


def _answers(value: object) -> dict[str, list[Any]]:
    """Return the answers' texts and their positions in the context; -1 for positions that the file doesn't give."""
    _check_written(value)
    fields = value if isinstance(value, dict) else {"text": value}
    texts, starts = (item if isinstance(item, list) else [item] for item in map(fields.get, ("text", _START)))
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("an answer, or a list of answers, is expected")
    places = [int(str(start)) if str(start).isdecimal() else -1 for start in starts]
    return {"text": texts, _START: places if len(places) == len(texts) else [-1] * len(texts)}


def _unfit(family: str, row: dict[str, Any]) -> str | None:
    """Return why a row can't be used, else None. An answer without a position gets that of its first occurrence in the context."""
    if family != ANSWERS:
        return None
    texts, starts = row["answers"]["text"], row["answers"][_START]
    if not any(text.strip() for text in texts):
        return "without an answer"
    places = [start if start >= 0 else row["context"].find(text) for text, start in zip(texts, starts, strict=True)]
    if any(row["context"][max(place, 0) :][: len(text)] != text for text, place in zip(texts, places, strict=True)):
        return "whose answer is not in the context"
    row["answers"] = {"text": texts, _START: places}
    return None


def _check_lengths(rows: Sequence[Mapping[str, Any]], where: object) -> None:
    for row in rows:
        if len(row["tokens"]) != len(row["tags"]):
            raise UserError(
                f"{where}: {len(row['tokens'])} words have {len(row['tags'])} tags in {clipped(' '.join(row['tokens']), 60)!r}; every word needs one."
            )


def _schema(reading: Reading) -> pa.Schema:
    kinds = {**FAMILIES[reading.family].columns, "label": pa.float64() if reading.family == NUMBERS else pa.string()}
    kinds |= {"tags": pa.list_(pa.string()), "tokens": pa.list_(pa.string())}
    return pa.schema([(role, kinds[role]) for role in reading.columns])

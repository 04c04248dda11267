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
NAMES_OF = {
    "tokens": TOKEN_NAMES,
    "tags": TAG_NAMES,
    "question": ("question",),
    "context": ("context", "passage"),
    "answers": ("answers", "answer"),
    "query": (*QUERY_NAMES, "question"),
    "positive": POSITIVE_NAMES,
}
"""Canonical name of a column -> names by which it is recognised."""
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
_KIND_WORDS = {
    "class": "classes",
    "id": "ids",
    "empty": "nothing",
    "other": "neither text nor numbers",
    "list": "lists",
}
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
    chosen, notes = columns.of(family), list[str]()
    if "text_pair" in chosen and not overrides.text:
        pair = f"{chosen['text']} and {chosen['text_pair']}"
        notes.append(f"a row has two texts, {pair}. To take one: --text-column {chosen['text']}.")
    if overrides.family is None and family == CLASSES:
        family, more = columns.by_label(chosen["label"])
        notes += more
    used = {*chosen.values(), _START if family == ANSWERS else None}
    unused = tuple(name for name in table.column_names if name not in used)
    return Reading(family, chosen, unused, tuple(notes))


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
        labelled = self._named(LABEL_NAMES) or self.overrides.label is not None
        return SEARCH if self._named(QUERY_NAMES) and self._named(POSITIVE_NAMES) and not labelled else CLASSES

    def of(self, family: str) -> dict[str, str]:
        """Return the columns of a family by canonical name."""
        texts, label = ROLES[family]
        if len(self.overrides.text) > len(texts):
            raise UserError(f"--text-column: {family} has at most {len(texts)} columns of text ({', '.join(texts)}).")
        if label is None and self.overrides.label is not None:
            raise UserError(f"--label-column: {family} has no column of labels; leave it out.")
        if family in (CLASSES, NUMBERS):
            chosen = self.overrides.label or self._label()
            return {**dict(zip(texts, self.overrides.text or self._texts(chosen), strict=False)), "label": chosen}
        roles = (*texts, *((label,) if label else ()))
        wanted: dict[str | None, str | None] = {**dict(zip(texts, self.overrides.text, strict=False))}
        wanted[label] = self.overrides.label
        filled = {role: wanted.get(role) or self._one(role, roles) for role in roles}
        if len(set(filled.values())) < len(filled):
            raise UserError(
                f"{self.where}: one column cannot be two of {', '.join(roles)} (got {', '.join(filled.values())})."
            )
        return filled

    def by_label(self, name: str) -> tuple[str, list[str]]:
        """Return the family that a column of labels suggests, and notes."""
        label = self.kinds[name]
        if label.kind == "number":
            return NUMBERS, [f"{name} is a number to predict. If its values are classes: --family {CLASSES}."]
        if label.kind == "class" and label.whole and label.different > 2:
            numbers = f"the {label.different} numbers in {name} are classes"
            return CLASSES, [f"{numbers}. To predict the number: --family {NUMBERS}."]
        return CLASSES, []

    def _named(self, names: Sequence[str]) -> list[str]:
        """Return the columns with one of these names that aren't empty, in the order of the names."""
        lower = {name.lower(): name for name, column in self.kinds.items() if column.kind != "empty"}
        return [lower[name] for name in names if name in lower]

    def _one(self, role: str, roles: Sequence[str]) -> str:
        named = self._named(NAMES_OF[role])
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

    def _listing(self) -> str:
        listed = (f"{name} ({_KIND_WORDS.get(column.kind, column.kind)})" for name, column in self.kinds.items())
        return f"Its columns: {', '.join(listed)}."


def canonical(table: pa.Table, reading: Reading, where: object) -> tuple[pa.Table, Counter[str]]:
    """Return the rows of a table in the family's canonical columns, and how many are left out, by reason.

    Labels and tags are text, so that class numbers need not start at 0.

    Raises:
        UserError: a column is missing, or a value isn't allowed in its column; the message names column and row.
    """
    for name in reading.columns.values():
        if name not in table.column_names:
            raise unknown("column", name, table.column_names, where=str(where))
    columns = {role: table[name].to_pylist() for role, name in reading.columns.items()}
    label = _number if reading.family == NUMBERS else _label
    read: Mapping[str, Callable[[Any], Any]] = {"label": label, "tokens": _words, "tags": _words, "answers": _answers}
    kept: list[dict[str, Any]] = []
    left: Counter[str] = Counter()
    for number in range(table.num_rows):
        row = {}
        for role, values in columns.items():
            value = values[number]
            if role == "label" and isinstance(value, list) and len(value) == 1:
                value = value[0]
            if value == [] or (not isinstance(value, list | dict) and missing(value)):
                left[f"without {reading.columns[role]}"] += 1
                break
            if role == "answers" and _START in table.column_names and not isinstance(value, dict):
                value = {"text": value, _START: table[_START][number].as_py()}
            try:
                row[role] = read.get(role, _text)(value)
            except ValueError as error:
                place = f"{where}: column {reading.columns[role]!r}, row {number + 1}"
                raise UserError(f"{place}: {error} (got {clipped(str(value), 60)!r}).") from error
        else:
            if reading.family == TAGS and len(row["tokens"]) != len(row["tags"]):
                counts = f"{len(row['tokens'])} words have {len(row['tags'])} tags"
                raise UserError(f"{where}: {counts} in {clipped(' '.join(row['tokens']), 60)!r}; every word needs one.")
            why = _unfit(row) if reading.family == ANSWERS else None
            left.update([why] if why else [])
            kept += [] if why else [row]
    kinds = {**FAMILIES[reading.family].columns, "label": pa.float64() if reading.family == NUMBERS else pa.string()}
    kinds |= {"tags": pa.list_(pa.string()), "tokens": pa.list_(pa.string())}
    return pa.Table.from_pylist(kept, schema=pa.schema([(role, kinds[role]) for role in reading.columns])), left


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


def _unfit(row: dict[str, Any]) -> str | None:
    """Return why a question can't be used, else None. An answer without a position gets that of its first occurrence in the context."""
    texts, starts = row["answers"]["text"], row["answers"][_START]
    if not any(text.strip() for text in texts):
        return "without an answer"
    places = [start if start >= 0 else row["context"].find(text) for text, start in zip(texts, starts, strict=True)]
    if any(row["context"][max(place, 0) :][: len(text)] != text for text, place in zip(texts, places, strict=True)):
        return "whose answer is not in the context"
    row["answers"] = {"text": texts, _START: places}
    return None

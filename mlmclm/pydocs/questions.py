"""Questions about one entry among several of a docstring: a parameter, what is returned, when an error occurs.

The context holds two to four entries of the same docstring; the answer is the entry's type or the beginning of its
description.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mlmclm.pydocs.documented import (
    Documented,
    Rows,
    distinct,
    draw,
    first_sentences,
    new_entries,
    normal,
    select,
    split_words,
)
from mlmclm.pydocs.sections import Field

COUNTS = {"train": 8000, "validation": 500, "test": 500}
LONGEST_DESCRIPTION = 16
LARGEST_CONTEXT = 4
"""Maximum number of entries in a context."""

_ABOUT_PARAMETER = ("What does the parameter {} do?", "What is {}?", "What is the meaning of {}?")
_ABOUT_TYPE = ("What type is {}?", "What is the type of {}?")
_ABOUT_RESULT = ("What is returned?", "What does it return?")
_ABOUT_ERROR = ("When is {} raised?", "What causes {}?")


class _Part(NamedTuple):
    """An entry in a context: its text, and the offsets at which its type and its description start in that text."""

    field: Field
    text: str
    kind: str
    kind_start: int
    description: str
    description_start: int


def make(documents: Sequence[Documented]) -> dict[str, Rows]:
    """Make the tables train, validation and test; columns: id, question, context, answers (text, answer_start)."""
    tables = {}
    for split, entries in new_entries(documents, _part, lambda part: part.description):
        examples = [(row, package) for parts, package in entries for row in _questions(parts)]
        examples = distinct(examples, key=lambda example: normal(example[0]["context"]))
        chosen = select(examples, COUNTS[split], key=lambda e: e[0]["context"], package=lambda e: e[1], salt="qa")
        tables[split] = [{"id": f"{split}-{n}", **row} for n, (row, _) in enumerate(chosen)]
    return tables


def _questions(parts: list[_Part]) -> Rows:
    """Make one question for each run of two to four entries; it is about one of them."""
    parts = [part for part in parts if len(part.description.split()) >= 3]
    rows = []
    start = 0
    while len(parts) - start >= 2:
        size = 2 + draw(parts[start].text, "qa-size", LARGEST_CONTEXT - 1)
        run = parts[start : start + size]
        start += size
        context = " ".join(part.text for part in run)
        # The name that a question about each entry would contain; for all results, it is empty.
        names = [part.field.name or part.field.type if part.field.role != "return" else "" for part in run]
        if len(run) < 2 or len(set(names)) < len(names):
            continue  # With two results, or two conditions of one exception, the question would have two answers.
        target = _preferred(run, context)
        # `_ask` counts from the entry's start, the answer from the context's; one space joins the entries.
        offset = sum(len(part.text) + 1 for part in run[:target])
        question, answer, place = _ask(run[target], context)
        answers = {"text": [answer], "answer_start": [offset + place]}
        rows.append({"question": question, "context": context, "answers": answers})
    return rows


def _preferred(run: list[_Part], context: str) -> int:
    """Choose the entry to ask about.

    Results and exceptions are rare, so in two of three contexts with such an entry the question is about it.
    """
    rare = [number for number, part in enumerate(run) if part.field.role in ("return", "exception")]
    if rare and draw(context, "qa-rare", 3) > 0:
        return rare[draw(context, "qa-which-rare", len(rare))]
    return draw(context, "qa-which", len(run))


def _ask(part: _Part, context: str) -> tuple[str, str, int]:
    """Return (question, answer, offset of the answer in the entry's text)."""
    if part.field.role == "return":
        return _one(_ABOUT_RESULT, context), part.description, part.description_start
    if part.field.role == "exception":
        return _one(_ABOUT_ERROR, context).format(part.field.type), part.description, part.description_start
    if part.kind and draw(context, "qa-type", 3) == 0:
        return _one(_ABOUT_TYPE, context).format(part.field.name), part.kind, part.kind_start
    return _one(_ABOUT_PARAMETER, context).format(part.field.name), part.description, part.description_start


def _one(forms: Sequence[str], context: str) -> str:
    """Choose one of the forms of a question by a hash of the context."""
    return forms[draw(context, "qa-form", len(forms))]


def _part(field: Field) -> _Part:
    """Write an entry as text; parameters take one of two usual layouts."""
    description = first_sentences(field.description, LONGEST_DESCRIPTION).rstrip(".:;, ")
    kind = field.type if field.role != "exception" and len(split_words(field.type)) <= 8 else ""
    if field.role == "return":
        head, middle = "Returns ", ", " if kind else ""
    elif field.role == "exception":
        head, middle = f"Raises {field.type}: ", ""
    elif draw(description, "qa-layout", 2):
        head, middle = (f"{field.name} (", "): ") if kind else (f"{field.name}: ", "")
    else:
        head, middle = f"{field.name} : ", ". " if kind else ""
    before = f"{head}{kind}{middle}"
    return _Part(field, f"{before}{description}.", kind, len(head), description, len(before))

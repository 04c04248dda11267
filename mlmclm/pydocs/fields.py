"""Tagging parameter names, types and exceptions in one to three flattened entries of a docstring.

Colons, brackets around types, line ends, final full stops and initial capitals are gone, the order of name, type and
description varies, and parameter names also occur untagged inside descriptions: what is a name or a type must be
read from the text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

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

LABELS = ["O", "B-PARAM", "B-TYPE", "I-TYPE", "B-EXCEPTION"]
COUNTS = {"train": 6000, "validation": 500, "test": 500}
LONGEST_DESCRIPTION = 16
LONGEST_TYPE = 8
"""Maximum number of words in a type; a longer text is prose."""

# What follows a type without being part of it: "int, optional" or "str, default: 'a'".
_NOT_TYPE = re.compile(r"[,;]? *\(?\b(?:optional|defaults?(?: to|:|=)?|required)\b.*$", re.IGNORECASE)

Tagged = list[tuple[str, str]]


def make(documents: Sequence[Documented]) -> dict[str, Rows]:
    """Make the tables train, validation and test; columns: tokens, tags (indices into `LABELS`)."""
    tables = {}
    for split, entries in new_entries(documents, lambda field: (field, _description(field)), lambda pair: pair[1]):
        examples = [(tagged, package) for described, package in entries for tagged in _examples(described)]
        examples = distinct(examples, key=lambda example: _text(example[0]))
        chosen = select(examples, COUNTS[split], key=lambda e: _text(e[0]), package=lambda e: e[1], salt="fields")
        pairs = (zip(*tagged, strict=True) for tagged, _ in chosen)
        tables[split] = [{"tokens": list(tokens), "tags": list(map(LABELS.index, tags))} for tokens, tags in pairs]
    return tables


def _examples(described: list[tuple[Field, str]]) -> list[Tagged]:
    """Make examples of one to three consecutive entries of a docstring."""
    described = [pair for pair in described if normal(pair[1]).count(" ") >= 2]
    entries = [_entry(field, description) for field, description in described]
    examples = []
    start = 0
    while start < len(entries):
        size = 1 + draw(described[start][1], "fields-size", 3)
        examples.append([pair for entry in entries[start : start + size] for pair in entry])
        start += size
    return [example for example in examples if any(tag != "O" for _, tag in example)]


def _entry(field: Field, text: str) -> Tagged:
    """Turn an entry into tagged words, with its parts in an order that a hash of its text decides."""
    description = [(word, "O") for word in split_words(text)]
    kind = split_words(_NOT_TYPE.sub("", field.type))
    typed: Tagged = []
    if field.role == "exception":
        typed = [(field.type, "B-EXCEPTION")]
    elif 0 < len(kind) <= LONGEST_TYPE:
        typed = [(word, "I-TYPE" if number else "B-TYPE") for number, word in enumerate(kind)]
    # Results and exceptions have no name that a tag could mark.
    named: Tagged = [(field.name, "B-PARAM")] if field.role in ("parameter", "attribute") else []
    orders = [
        # Twice: the usual order, in half of the entries.
        [named, typed, description],
        [named, typed, description],
        [typed, named, description],
        [named, description, typed] if named else [description, typed],
    ]
    return [pair for part in orders[draw(field.name + text, "fields-order", len(orders))] for pair in part]


def _description(field: Field) -> str:
    """Return the beginning of a description, without the capital and full stop that would mark its start and end."""
    text = first_sentences(field.description, LONGEST_DESCRIPTION).rstrip(".:;, ")
    return text[:1].lower() + text[1:] if text[1:2].islower() or text[1:2] == " " else text


def _text(tagged: Tagged) -> str:
    return " ".join(word for word, _ in tagged)

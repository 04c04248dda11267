"""Which part of a documentation a text comes from: the summary, a parameter, a result, an exception or a note.

The heading is gone, and no word decides: "the number of tasks" may be a parameter or a result, "if the file is
missing" a note or an exception. Classes are equally frequent as far as there are texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mlmclm.pydocs.documented import Documented, Rows, distinct, first_sentences, normal, select, split_words

LABELS = ["summary", "parameter", "return", "exception", "note"]
COUNTS = {"train": 8000, "validation": 500, "test": 500}
LONGEST = 32
"""Maximum number of words in a text."""
SHORTEST = 4


def make(documents: Sequence[Documented]) -> dict[str, Rows]:
    """Make the tables train, validation and test; columns: text, text_pair (null), label."""
    tables = {}
    taken: set[str] = set()  # An evaluation text must be in no earlier split, not even with another label.
    for split in COUNTS:
        chosen = (document for document in documents if document.split == split)
        pool = [(text, document.package, label) for document in chosen for text, label in _texts(document)]
        pool = distinct(pool, key=lambda item: normal(item[0]), taken=taken)
        taken |= {normal(text) for text, _, _ in pool}
        tables[split] = _rows(pool, split)
    return tables


def _texts(document: Documented) -> Iterator[tuple[str, int]]:
    """Yield (text, label) of each part of a docstring."""
    parts = [("summary", document.parsed.summary)]
    parts += [(field.role, field.description) for field in document.parsed.fields]
    for role, description in parts:
        text = first_sentences(description, LONGEST)
        if role in LABELS and len(split_words(text)) >= SHORTEST:
            yield text, LABELS.index(role)


def _rows(pool: list[tuple[str, str, int]], split: str) -> Rows:
    """Choose equally many texts of each label, if there are enough, and order them independently of their labels."""
    chosen = []
    for label in range(len(LABELS)):
        candidates = [item for item in pool if item[2] == label]
        count = COUNTS[split] // len(LABELS)
        chosen += select(candidates, count, key=lambda item: item[0], package=lambda item: item[1], salt="kind")
    # Each text counts as its own package here, so that `select` only reorders and leaves nothing out.
    mixed = select(chosen, len(chosen), key=lambda item: item[0], package=lambda item: item[0], salt="kind-order")
    return [{"text": text, "text_pair": None, "label": label} for text, _, label in mixed]

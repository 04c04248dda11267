"""Small functions of text that the four tasks from Python's documentation share."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from mlmclm.corpora.hashing import text_hash
from mlmclm.pydocs.sections import Parsed

Item = TypeVar("Item")

_WORD = re.compile(r"\w+(?:[.'-]\w+)*|[^\w\s]")
_NOT_WORD = re.compile(r"[\W_]+")
_SENTENCE_END = re.compile(r"(?<=[a-z0-9)\]'\"][.!?]) +(?=[A-Z`'\"(])")

EVALUATION_SPLITS = ("validation", "test")

LARGEST_SHARE = 0.15
"""At most this share of a split's examples comes from one package, so that no package's style decides the score."""


class Documented(NamedTuple):
    """A docstring taken apart, with the split of its package and its dotted name inside its module."""

    split: str
    package: str
    name: str
    parsed: Parsed


class Table(NamedTuple):
    """Rows of one Parquet file, and the columns' types in the words of `schema`."""

    rows: list[dict[str, Any]]
    columns: dict[str, str]

    def schema(self) -> Any:
        """The Arrow schema."""
        import pyarrow as pa

        answers = pa.struct([("text", pa.list_(pa.string())), ("answer_start", pa.list_(pa.int64()))])
        types = {
            "text": pa.string(),
            "integer": pa.int64(),
            "texts": pa.list_(pa.string()),
            "integers": pa.list_(pa.int64()),
            "answers": answers,
        }
        return pa.schema([(name, types[kind]) for name, kind in self.columns.items()])


def words(text: str) -> list[str]:
    """Words and single punctuation marks; `a.b`, `don't` and `well-known` are one word."""
    return _WORD.findall(text)


def normal(text: str) -> str:
    """Letters and digits only, in lower case: texts that differ in layout or punctuation only become equal."""
    return _NOT_WORD.sub(" ", text.lower()).strip()


def sentences(text: str) -> list[str]:
    """Splits prose at full stops before a capital."""
    return [part for part in _SENTENCE_END.split(text) if part]


def shortened(text: str, limit: int) -> str:
    """The first sentences of a text that fit into `limit` words; cut inside the first if it is longer."""
    # A piece between spaces holds at least one word, so that nothing after the first `limit` pieces can fit.
    kept: list[str] = []
    left = limit
    for sentence in sentences(" ".join(text.split(maxsplit=limit)[:limit])):
        size = len(words(sentence))
        if size > left:
            if not kept:
                kept.append(_cut(sentence, limit))
            break
        kept.append(sentence)
        left -= size
    return " ".join(kept)


def _cut(sentence: str, limit: int) -> str:
    """The leading pieces of a sentence that fit into `limit` words."""
    pieces = sentence.split(" ")
    for number, piece in enumerate(pieces):
        limit -= len(words(piece))
        if limit < 0:
            return " ".join(pieces[:number])
    return sentence


def draw(text: str, purpose: str, choices: int) -> int:
    """A number in [0, choices) that depends on the text and the purpose only."""
    return text_hash(text, purpose=purpose, seed=0) % choices


def distinct(items: Iterable[Item], key: Callable[[Item], Hashable], taken: Iterable[Hashable] = ()) -> list[Item]:
    """The first item of each key, without the keys in `taken`."""
    seen = set(taken)
    kept = []
    for item in items:
        value = key(item)
        if value not in seen:
            seen.add(value)
            kept.append(item)
    return kept


def select(
    items: Sequence[Item], count: int, *, key: Callable[[Item], str], package: Callable[[Item], str], salt: str
) -> list[Item]:
    """`count` items in the order of a hash of their key, few enough of each package; fewer if there are not enough."""
    limit = max(1, int(LARGEST_SHARE * count))
    used: dict[Any, int] = {}
    chosen: list[Item] = []
    for item in sorted(items, key=lambda item: (text_hash(key(item), purpose=salt, seed=0), key(item))):
        if len(chosen) == count:
            break
        name = package(item)
        if used.get(name, 0) < limit:
            used[name] = used.get(name, 0) + 1
            chosen.append(item)
    return chosen

"""Dividing packages into train, validation and test so that nothing leaks: pure functions of names, sizes and texts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

SHARES = {"train": 0.8, "validation": 0.1, "test": 0.1}
"""Aim for the share of characters in each split."""

PARAGRAPH_CHARACTERS = 40
"""A shorter paragraph ("Parameters", "See Also", "Deprecated.") says nothing about where a text comes from."""

COPIED_SHARE = 0.5
"""An evaluation text is dropped if at least this share of it stands in a training text."""


class Group(NamedTuple):
    """Packages that stay together: name, characters, prevailing docstring style, and whether train must have them."""

    name: str
    size: int
    style: str
    training_only: bool = False


def split_groups(groups: Sequence[Group]) -> dict[str, str]:
    """Group name -> split, balanced by size within each docstring style, so that every style occurs in every split.

    Largest first, each goes where most is missing: a package that is larger than a tenth of its style can only be in
    train. Where a split stays empty although there are three groups or more, it gets the smallest group of train.
    """
    result: dict[str, str] = {}
    for style in sorted({group.style for group in groups}):
        members = sorted(
            (group for group in groups if group.style == style), key=lambda group: (-group.size, group.name)
        )
        total = sum(group.size for group in members if not group.training_only)
        missing = {split: share * total for split, share in SHARES.items()}
        for group in members:
            if group.training_only:
                result[group.name] = "train"
                continue
            chosen = max(SHARES, key=lambda split: missing[split])
            result[group.name] = chosen
            missing[chosen] -= group.size
    spare = sorted(
        (g for g in groups if result[g.name] == "train" and not g.training_only), key=lambda g: (g.size, g.name)
    )
    for split in ("validation", "test"):
        if split not in result.values() and len(spare) > 1:
            result[spare.pop(0).name] = split
    return result


def drop_copies(texts: Sequence[tuple[str, str]]) -> list[bool]:
    """For each (split, text): whether it is an evaluation text and mostly a copy of training text (by paragraphs)."""
    training: set[bytes] = set()
    for split, text in texts:
        if split == "train":
            training.update(key for key, _ in _paragraphs(text))
    return [split != "train" and _copied(text, training) for split, text in texts]


def _copied(text: str, training: set[bytes]) -> bool:
    """Whether at least `COPIED_SHARE` of the characters in long paragraphs stand in training text."""
    paragraphs = _paragraphs(text)
    copied = sum(size for key, size in paragraphs if key in training)
    return copied > 0 and copied >= COPIED_SHARE * sum(size for _, size in paragraphs)


def _paragraphs(text: str) -> list[tuple[bytes, int]]:
    """(hash, length) of each paragraph of at least `PARAGRAPH_CHARACTERS`, white space and case normalised."""
    normal = (" ".join(part.split()).lower() for part in text.split("\n\n"))
    return [
        (hashlib.blake2b(part.encode(), digest_size=12).digest(), len(part))
        for part in normal
        if len(part) >= PARAGRAPH_CHARACTERS
    ]

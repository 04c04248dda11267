"""Division of packages into train, validation and test without leaks: pure functions of names, sizes and texts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

SHARES = {"train": 0.8, "validation": 0.1, "test": 0.1}
"""Target share of characters in each split."""

PARAGRAPH_CHARACTERS = 40
"""Minimum length of a paragraph that is compared: a shorter one ("Parameters", "See Also") doesn't show a text's
origin."""

COPIED_SHARE = 0.5
"""An evaluation text is dropped if at least this share of it is also in training texts."""


class PackageGroup(NamedTuple):
    """Packages that stay together: name, characters, prevailing docstring style, and whether they must be in train."""

    name: str
    size: int
    style: str
    training_only: bool = False


def split_groups(groups: Sequence[PackageGroup]) -> dict[str, str]:
    """Assign each group to a split, balanced by size within each docstring style so that splits have similar styles.

    Groups go, largest first, to the split that lacks the most characters. A split that stays empty gets the smallest
    group of train, if train has more than one.
    """
    result = {group.name: "train" for group in groups if group.training_only}
    # Names break ties, so that the order in which groups are given does not matter.
    free = sorted((group for group in groups if not group.training_only), key=lambda group: (-group.size, group.name))
    for style in sorted({group.style for group in free}):
        members = [group for group in free if group.style == style]
        total = sum(group.size for group in members)
        missing = {split: share * total for split, share in SHARES.items()}
        for group in members:
            chosen = max(SHARES, key=missing.__getitem__)
            result[group.name] = chosen
            missing[chosen] -= group.size
    spare = sorted((group.size, group.name) for group in free if result[group.name] == "train")
    for split in ("validation", "test"):
        if split not in result.values() and len(spare) > 1:
            _, smallest = spare.pop(0)
            result[smallest] = split
    return result


def are_copies(texts: Sequence[tuple[str, str]]) -> list[bool]:
    """Return for each (split, text) whether it is an evaluation text whose paragraphs are mostly in training texts."""
    training: set[bytes] = set()
    for split, text in texts:
        if split == "train":
            training.update(key for key, _ in _paragraphs(text))
    # All training paragraphs must be known before the first evaluation text is compared.
    return [split != "train" and _copied(text, training) for split, text in texts]


def _copied(text: str, training: set[bytes]) -> bool:
    """Return whether at least `COPIED_SHARE` of the characters in long paragraphs are in training paragraphs."""
    paragraphs = _paragraphs(text)
    copied = sum(size for key, size in paragraphs if key in training)
    return copied > 0 and copied >= COPIED_SHARE * sum(size for _, size in paragraphs)


def _paragraphs(text: str) -> list[tuple[bytes, int]]:
    """Return (hash, length) of paragraphs of at least `PARAGRAPH_CHARACTERS`, white space and case normalised."""
    normal = (" ".join(part.split()).lower() for part in text.split("\n\n"))
    return [
        (hashlib.blake2b(part.encode(), digest_size=12).digest(), len(part))
        for part in normal
        if len(part) >= PARAGRAPH_CHARACTERS
    ]

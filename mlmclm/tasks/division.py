"""Division of a data file's rows into training, validation and test rows, as a pure function of the rows' contents."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from mlmclm.results.measures import Array

SHARES = (0.1, 0.2)
"""Shares of the rows that become validation and test."""


def row_groups(*keys: Sequence[str]) -> Array:
    """Return the number of each row's group, int64 [rows]: the connected components of the rows, linked by equal keys.

    Args:
        keys: for each kind of key (the text, or the query and the document), every row's key.
    """
    rows = len(keys[0])
    parent = list(range(rows))

    def root(row: int) -> int:
        while parent[row] != row:
            parent[row] = parent[parent[row]]
            row = parent[row]
        return row

    for column in keys:
        first: dict[str, int] = {}
        for row, key in enumerate(column):
            parent[root(row)] = root(first.setdefault(key, row))
    return np.array([root(row) for row in range(rows)], dtype=np.int64)


def held_out_rows(groups: Array, keys: Sequence[str], strata: Sequence[str], share: float, *, seed: int) -> Array:
    """Return which rows are held out, bool [rows]: whole groups, about the `share` of the rows of each stratum.

    Groups are chosen in the order of a hash of the seed and their alphabetically first key, so the rows' order doesn't matter.
    At least one group of each stratum is not held out. A group is in the stratum of its first row.
    """
    first: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for row, group in enumerate(groups.tolist()):
        first.setdefault(group, row)
        sizes[group] = sizes.get(group, 0) + 1
    members: dict[str, list[int]] = {}
    for group, row in first.items():
        members.setdefault(strata[row], []).append(group)
    key_of: dict[int, str] = {}
    for key, group in zip(keys, groups.tolist(), strict=True):
        key_of[group] = min(key, key_of.get(group, key))
    held: set[int] = set()
    for stratum in members.values():
        stratum.sort(key=lambda group: hashlib.sha256(f"{seed} {key_of[group]}".encode()).digest())
        quota, taken = round(share * sum(sizes[group] for group in stratum)), 0
        for group in stratum[:-1]:
            # A group that is larger than the rest of the quota is skipped.
            if taken + sizes[group] <= quota:
                held.add(group)
                taken += sizes[group]
    return np.isin(groups, list(held))

"""The division of a state's tensors into files, its parts, which the workers write side by side.

A state of up to `PART_BYTES` is one file, `state.safetensors`. A larger one is `state-00001-of-00004.safetensors` and so
on. The division depends on the tensors' names and sizes alone, so any number of workers writes the same files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

PART_BYTES = 2 << 30
"""Most bytes of a part, unless it is a single larger tensor."""


def names_by_part(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Return the names of the tensors in each part, given their sizes in bytes."""
    parts: list[list[str]] = []
    room = 0
    for name in sorted(sizes):
        if not parts or sizes[name] > room:
            parts.append([])
            room = limit
        parts[-1].append(name)
        room -= sizes[name]
    return parts


def owner(part: int, parts: int, world: int) -> int:
    """Return the rank of the worker that writes a part; rank 0 has the first.

    If parts are fewer than workers, their ranks are evenly spaced, which spreads them over nodes: a node's ranks are consecutive.
    """
    return part * world // parts


def own_names(parts: Sequence[Sequence[str]], rank: int, world: int) -> set[str]:
    """Return the names of the tensors in a worker's parts."""
    return {name for number, names in enumerate(parts) if owner(number, len(parts), world) == rank for name in names}


def part_names(count: int) -> list[str]:
    """Return the names of the files of so many parts."""
    if count == 1:
        return ["state.safetensors"]
    return [f"state-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def part_paths(folder: Path) -> list[Path]:
    """Return the paths of all parts of a state, whose number is in each file's name; files may be missing."""
    part = next(folder.glob("state-*-of-*.safetensors"), None)
    return [folder / name for name in part_names(1 if part is None else int(part.stem.rpartition("-")[2]))]

"""mteb's results: a folder with a JSON file per task, as `mteb run` writes to `results/MODEL/REVISION/TASK.json`.

A file holds `task_name`, `dataset_revision`, and `scores`: for each split a list with an object per subset, whose `hf_subset`
is the subset's name and whose `main_score` is the task's score (mteb 1.11 and later). They have no scores of single examples, so
runs are compared over tasks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np

from mlmclm.errors import UserError
from mlmclm.readers.reader import Reader
from mlmclm.readers.rows import Row, an_object, as_number, entry, number, parsed, word
from mlmclm.readers.scored_run import ScoredRun
from mlmclm.storage.data_files import read_text
from mlmclm.storage.received_files import files_inside

_ABOUT = "model_meta.json"
_KEYS = {"task_name", "scores"}


class MtebResults(Reader):
    """A folder of task files; a task's score is the mean over all subsets of its splits, as in mteb."""

    name: ClassVar[str] = "mteb"
    title: ClassVar[str] = "mteb's results"
    unit: ClassVar[str] = "task"
    told_by: ClassVar[str] = "dataset_revision, splits or subsets"

    def recognises(self, path: Path) -> bool:
        return path.is_dir() and any(_looks_right(file) for file in list(_files(path))[:3])

    def runs(self, path: Path, only: Collection[str] | None = None) -> list[ScoredRun]:
        folders: dict[Path, list[Path]] = {}
        for file in _files(path):
            folders.setdefault(file.parent, []).append(file)
        if not folders:
            raise UserError(f"{path}: no result of a task (TASK.json) in it.")
        names = {folder: _model(folder) for folder in folders}
        found = []
        for folder, files in folders.items():
            name = names[folder]
            if list(names.values()).count(name) > 1:  # several revisions of one model
                name = f"{name}@{folder.name}"
            if only is None or name in only:
                found += _runs(name, files)
        return found


def _files(path: Path) -> Iterator[Path]:
    """Yield the files of tasks, in order."""
    yield from (file for file in files_inside(path, "*.json") if file.name != _ABOUT)


def _looks_right(file: Path) -> bool:
    try:
        found = parsed(read_text(file), str(file))
    except UserError:
        return False
    return isinstance(found, dict) and set(found) >= _KEYS


def _model(folder: Path) -> str:
    about = folder / _ABOUT
    if about.is_file():
        return word(an_object(parsed(read_text(about), str(about)), str(about)), "name", str(about))
    return folder.resolve().name


def _runs(name: str, files: list[Path]) -> list[ScoredRun]:
    values: dict[str, dict[str, float]] = {}
    contents: dict[str, str] = {}
    for file in files:
        result = an_object(parsed(read_text(file), str(file)), str(file))
        task = word(result, "task_name", str(file))
        if task in contents:
            raise UserError(f"{file}: a second result of task {task!r} in its folder.")
        splits = {split: _subsets(subsets, split, file) for split, subsets in _scores(result, file).items()}
        data = sorted((split, subset) for split, subsets in splits.items() for subset in subsets)
        contents[task] = f"{result.get('dataset_revision', '')} {data}"
        subsets = [scores for subsets in splits.values() for scores in subsets.values()]
        for metric in set.intersection(*map(set, subsets)):
            values.setdefault(metric, {})[task] = float(np.mean([scores[metric] for scores in subsets]))
    return [
        ScoredRun(name, "", metric, list(own), np.asarray(list(own.values())), [contents[task] for task in own])
        for metric, own in sorted(values.items())
    ]


def _scores(result: Row, file: Path) -> Row:
    found = an_object(entry(result, "scores", str(file)), f"{file}: scores")
    if not found:
        raise UserError(f"{file}: scores has no split.")
    return found


def _subsets(subsets: object, split: str, file: Path) -> dict[str, dict[str, float]]:
    """Return the numbers of each subset of a split by name."""
    place = f"{file}: scores.{split}"
    if not isinstance(subsets, list) or not subsets:
        raise UserError(f"{place} is no list of subsets; expected one object per subset.")
    found: dict[str, dict[str, float]] = {}
    for position, subset in enumerate(subsets):
        where = f"{place}[{position}]"
        row = an_object(subset, where)
        numbers = {key: as_number(value) for key, value in row.items() if not isinstance(value, str)}
        numbers["main_score"] = number(row, "main_score", where)
        name = word(row, "hf_subset", where)
        if name in found:
            raise UserError(f"{where}: a second entry of the subset {name!r}.")
        found[name] = {key: value for key, value in numbers.items() if value is not None}
    return found

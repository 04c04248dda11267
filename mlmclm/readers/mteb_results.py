"""mteb's results: a folder with a JSON file per task, as `mteb run` writes to `results/MODEL/REVISION/TASK.json`.

A file holds `task_name`, `dataset_revision`, and `scores`: for each split a list with an object per subset, whose `hf_subset`
is the subset's name and whose `main_score` is the task's score (mteb 1.11 and later). Before 1.11, a file held
`mteb_dataset_name` and the splits themselves, whose scores may be nested by language and by similarity. No file has scores of
single examples, so runs are compared over tasks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np

from mlmclm.errors import UserError
from mlmclm.progress import say_once
from mlmclm.readers.reader import Reader, ScoredRun
from mlmclm.readers.rows import Row, as_number, entry, json_object, json_value, word
from mlmclm.storage.data_files import read_text
from mlmclm.storage.received_files import files_inside

_ABOUT = "model_meta.json"
_KEYS = {"task_name", "scores"}
_OLD_NAME = "mteb_dataset_name"
_SIMILARITIES = {"cos_sim": "cosine", "dot": "dot", "euclidean": "euclidean", "manhattan": "manhattan", "max": "max"}
"""Keys of nested scores in versions before 1.11, and the prefixes of these scores' names since then."""
_OLD_MAIN = ("ndcg_at_10", "v_measure", "map", "cosine_spearman", "max_ap", "cosine_ap")
"""Main scores of the kinds of tasks whose old results don't name theirs; each occurs in results of its kind alone."""
_OLD_EXCEPTIONS = {
    **dict.fromkeys(("Cmnli", "LegalBenchPC", "Ocnli", "TalemaaderPC"), "max_accuracy"),
    **dict.fromkeys(("LEMBNeedleRetrieval", "LEMBPasskeyRetrieval"), "ndcg_at_1"),
    "BSARDRetrieval": "recall_at_100",
    "FeedbackQARetrieval": "precision_at_1",
    "GermanGovServiceRetrieval": "ndcg_at_5",
    "GermanQuAD-Retrieval": "mrr_at_5",
}
"""Main scores of the tasks whose main score is not that of their kind (mteb's metadata)."""


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
        scored = []
        for folder, files in folders.items():
            name = names[folder]
            if list(names.values()).count(name) > 1:  # several revisions of one model
                name = f"{name}@{folder.name}"
            if only is None or name in only:
                scored += _runs(name, files)
        return scored


def _files(path: Path) -> Iterator[Path]:
    """Yield the files of tasks, in order."""
    yield from (file for file in files_inside(path, "*.json") if file.name != _ABOUT)


def _looks_right(file: Path) -> bool:
    try:
        content = json_value(read_text(file), str(file))
    except UserError:
        return False
    return isinstance(content, dict) and (set(content) >= _KEYS or _OLD_NAME in content)


def _model(folder: Path) -> str:
    about = folder / _ABOUT
    if about.is_file():
        return word(json_object(json_value(read_text(about), str(about)), str(about)), "name", str(about))
    return folder.resolve().name


def _runs(name: str, files: list[Path]) -> list[ScoredRun]:
    values: dict[str, dict[str, float]] = {}
    contents: dict[str, str] = {}
    for file in files:
        result = _as_since_1_11(json_object(json_value(read_text(file), str(file)), str(file)), file)
        task = word(result, "task_name", str(file))
        if task in contents:
            raise UserError(f"{file}: a second result of task {task!r} in its folder.")
        splits = {split: _subsets(subsets, split, file) for split, subsets in _scores(result, file).items()}
        data = sorted((split, subset) for split, subsets in splits.items() for subset in subsets)
        contents[task] = f"{result.get('dataset_revision') or ''} {data}"
        subsets = [scores for subsets in splits.values() for scores in subsets.values()]
        if not all("main_score" in scores for scores in subsets):
            say_once(f"{file}: the main score of task {task} is missing or no finite number; the task is left out.")
            continue
        for metric in set.intersection(*map(set, subsets)):
            values.setdefault(metric, {})[task] = float(np.mean([scores[metric] for scores in subsets]))
    return [
        ScoredRun(name, "", metric, list(means), np.asarray([*means.values()]), [contents[task] for task in means])
        for metric, means in sorted(values.items())
    ]


def _as_since_1_11(result: Row, file: Path) -> Row:
    """Return a result in the layout of mteb 1.11 and later."""
    if _OLD_NAME not in result or set(result) >= _KEYS:
        return result
    task, scores = word(result, _OLD_NAME, str(file)), {}
    mains = (_OLD_EXCEPTIONS[task],) if task in _OLD_EXCEPTIONS else _OLD_MAIN
    for split, part in result.items():
        if isinstance(part, dict):
            part = {key: value for key, value in part.items() if key != "evaluation_time"}
            nested = {key for key, value in part.items() if isinstance(value, dict)} - {*_SIMILARITIES, "v_measures"}
            subsets = {key: part[key] for key in nested} if nested else {"default": part}
            scores[split] = [{"hf_subset": name, **_flat(subset, mains)} for name, subset in sorted(subsets.items())]
    return {"task_name": task, "dataset_revision": result.get("dataset_revision"), "scores": scores}


def _flat(subset: Row, mains: Collection[str]) -> Row:
    """Return the scores of an old subset by their present names, with the main score: the first of `mains` that it has."""
    scores = {key: value for key, value in subset.items() if not isinstance(value, dict)}
    for key, start in _SIMILARITIES.items():
        if isinstance(nested := subset.get(key), dict):
            scores |= {f"{start}_{name}": value for name, value in nested.items()}
    pairs = ("f1",) if {"precision", "recall"} <= scores.keys() else ()  # of bitext mining
    main = next((name for name in (*mains, *pairs) if name in scores), None)
    return {"main_score": None if main is None else scores[main], **scores}


def _scores(result: Row, file: Path) -> Row:
    scores = json_object(entry(result, "scores", str(file)), f"{file}: scores")
    if not scores:
        raise UserError(f"{file}: scores has no split.")
    return scores


def _subsets(subsets: object, split: str, file: Path) -> dict[str, dict[str, float]]:
    """Return the numbers of each subset of a split by name."""
    place = f"{file}: scores.{split}"
    if not isinstance(subsets, list) or not subsets:
        raise UserError(f"{place} is no list of subsets; expected one object per subset.")
    scores_by_subset: dict[str, dict[str, float]] = {}
    for position, subset in enumerate(subsets):
        where = f"{place}[{position}]"
        row = json_object(subset, where)
        numbers = {key: as_number(value) for key, value in row.items() if not isinstance(value, str)}
        numbers["main_score"] = as_number(row.get("main_score"))
        name = word(row, "hf_subset", where)
        if name in scores_by_subset:
            raise UserError(f"{where}: a second entry of the subset {name!r}.")
        scores_by_subset[name] = {key: value for key, value in numbers.items() if value is not None}
    return scores_by_subset

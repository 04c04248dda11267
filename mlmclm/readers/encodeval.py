"""EncodEval's results: `results/MODEL/FAMILY/DATASET/RUN/results.json`, or a CSV file of their scores.

A file holds `validation` and `test`, each with `score` and `scores_i`, the list of the examples' scores; one of the two may
be missing. RUN is `lr1e-04_sd0`, in retrieval with the training set in front (`msmarco_pairs_lr1e-04_sd0`).
Source: github.com/hgissbkh/EncodEval, with the results of arXiv 2507.00994.

The CSV file has a run per row: model, family, dataset, learning_rate, seed, validation_score and test_score. A run without
scores diverged; a score given as `unread` is not known. Two more columns may be there: `seconds`, the time that the run took, and
`device`, the name of the processor or GPU.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mlmclm.errors import UserError
from mlmclm.numbers import rate_text
from mlmclm.progress import Bar, say
from mlmclm.readers.reader import Reader, ScoredRun
from mlmclm.readers.rows import (
    Row,
    as_number,
    columns_of,
    entry,
    json_object,
    json_value,
    named_place,
    number,
    read_rows,
    word,
)
from mlmclm.results.measures import Array
from mlmclm.storage.data_files import DELIMITERS, kind_of, read_text
from mlmclm.storage.received_files import LARGEST_NUMBER, SMALLEST_RATE, files_inside

FAMILIES = {
    "SC": ("sequence-classification", "accuracy"),
    "TC": ("token-classification", "f1"),
    "QA": ("question-answering", "f1"),
    "IR": ("retrieval", "ndcg_at_10"),
    "SR": ("sequence-regression", "spearman"),
}
"""This project's family and metric for each family of EncodEval. EncodEval's F1 differs from this project's: it is macro-averaged
over labels by sentence for TC, over token positions for QA."""
COLUMNS = ("model", "family", "dataset", "learning_rate", "seed", "validation_score", "test_score")
UNREAD = "unread"
_FILE = "results.json"
_RUN = re.compile(r"(?:(?P<trained_on>.+)_)?lr(?P<rate>\d+(?:\.\d+)?(?:e[+-]?\d+)?)_sd(?P<seed>\d+)")
_SAME = 1e-6
"""Largest difference between a score and the mean of its `scores_i`."""


@dataclass(frozen=True)
class _Run:
    """One `results.json` and the names in its path."""

    file: Path
    model: str
    family: str
    dataset: str
    name: str

    @property
    def parts(self) -> re.Match[str] | None:
        return _RUN.fullmatch(self.name)

    @property
    def key(self) -> str:
        return f"{self.model}/{self.family}/{self.dataset}/{self.name}"


class EncodEval(Reader):
    """A folder `results`, any folder in it, a `results.json`, or a CSV file of scores."""

    name: ClassVar[str] = "encodeval"
    title: ClassVar[str] = "EncodEval's results"
    told_by: ClassVar[str] = "number of examples"

    def recognises(self, path: Path) -> bool:
        if path.is_dir():
            file = next(path.rglob(_FILE), None)
            return file is not None and _run_at(file).family in FAMILIES
        if path.name == _FILE:
            return _run_at(path).family in FAMILIES
        return kind_of(path) in DELIMITERS and set(COLUMNS) <= columns_of(path)

    def runs(self, path: Path, only: Collection[str] | None = None) -> list[ScoredRun]:
        if _is_table(path):
            raise UserError(
                f"{path}: it has scores of runs and none of single examples; compare models with `mlmclm import`."
            )
        chosen = [run for run in _runs(path) if only is None or run.model in only]
        names = _task_names(chosen)
        scored = []
        with Bar("reading", len(chosen), unit="runs") as bar:
            for run in chosen:
                content = _content(run.file)
                scores = _scores_of_examples(content, "test", run.file)
                validation = _score(content, "validation", run.file)
                parts, metric = run.parts, FAMILIES.get(run.family, ("", "score"))[1]
                scored.append(
                    ScoredRun(
                        run.model,
                        names[run.file],
                        metric,
                        [str(place) for place in range(len(scores))],
                        scores,
                        seed=parts["seed"] if parts else "",
                        learning_rate=float(parts["rate"]) if parts else None,
                        validation=validation,
                    )
                )
                bar.update(bar.done + 1)
        return scored

    def names(self, path: Path) -> list[str]:
        return list(dict.fromkeys(run.model for run in _runs(path)))

    def results(self, path: Path) -> list[dict[str, Any]]:
        return _results_of_table(path) if _is_table(path) else _results_of_tree(path)

    def test_scores(self, result: Mapping[str, Any]) -> Array | None:
        file = Path(str(result.get("file", "")))
        try:
            return _scores_of_examples(_content(file), "test", file) if file.name == _FILE else None
        except UserError:  # the score is no mean over examples, or no example has a score
            return None


def _is_table(path: Path) -> bool:
    return path.is_file() and path.name != _FILE


def _run_at(file: Path) -> _Run:
    *_, model, family, dataset, name, _ = ("", "", "", "", *named_place(file).parts)
    return _Run(file, model, family, dataset, name)


def _runs(path: Path) -> list[_Run]:
    """Find the runs below a folder, in order."""
    runs = [_run_at(file) for file in ([path] if path.is_file() else files_inside(path, _FILE))]
    if not runs:
        raise UserError(f"{path}: no MODEL/FAMILY/DATASET/RUN/{_FILE} in it.")
    return runs


def _task_names(runs: list[_Run]) -> dict[Path, str]:
    """Name each run's task: its data set, with the training set or the family where the data set has several."""
    trained: dict[tuple[str, str], set[str]] = {}
    families: dict[str, set[str]] = {}
    for run in runs:
        parts = run.parts
        trained.setdefault((run.family, run.dataset), set()).add((parts["trained_on"] or "") if parts else "")
        families.setdefault(run.dataset, set()).add(run.family)
    names = {}
    for run in runs:
        name = run.dataset if len(families[run.dataset]) == 1 else f"{run.family}-{run.dataset}"
        parts = run.parts
        several = len(trained[run.family, run.dataset]) > 1
        names[run.file] = f"{name}-{parts['trained_on']}" if several and parts and parts["trained_on"] else name
    return names


def _content(file: Path) -> Row:
    return json_object(json_value(read_text(file), str(file)), str(file))


def _part(content: Row, split: str, file: Path) -> tuple[Row, str] | None:
    """Return the entry of a split with its place; None if there is none."""
    if content.get(split) is None:
        return None
    place = f"{file}: {split}"
    return json_object(content[split], place), place


def _score(content: Row, split: str, file: Path) -> float | None:
    located = _part(content, split, file)
    return None if located is None else number(located[0], "score", located[1])


def _scores_of_examples(content: Row, split: str, file: Path) -> Array:
    located = _part(content, split, file)
    if located is None:
        raise UserError(f"{file}: no {split!r}, so there is no score of any example.")
    part, place = located
    values = entry(part, "scores_i", place)
    if not isinstance(values, list) or not values:
        raise UserError(f"{place}.scores_i is no list of numbers.")
    numbers = [as_number(value) for value in values]
    if None in numbers:
        wrong = numbers.index(None)
        raise UserError(f"{place}.scores_i[{wrong}] is {values[wrong]!r}; expected a finite number.")
    scores, score = np.asarray(numbers, dtype=np.float64), number(part, "score", place)
    if abs(scores.mean() - score) > _SAME:
        raise UserError(
            f"{place}: score is {score:g}, and the mean of scores_i {scores.mean():g}; a score that is no mean over examples "
            "cannot be compared example by example."
        )
    return scores


def _results_of_tree(path: Path) -> list[dict[str, Any]]:
    runs = _runs(path)
    names, results, files, mismatches = _task_names(runs), [], dict[tuple[Any, ...], Path](), list[str]()
    with Bar("reading", len(runs), unit="runs") as bar:
        for run in runs:
            parts = run.parts
            if parts is None or not SMALLEST_RATE <= float(parts["rate"]) <= LARGEST_NUMBER:
                raise UserError(
                    f"{run.file}: its folder {run.name!r} does not name a learning rate and a seed, as lr1e-04_sd0 does."
                )
            cell = run.model, names[run.file], float(parts["rate"]), int(parts["seed"])
            if cell in files:
                raise UserError(
                    f"{run.file}: a second run of {run.model} on {cell[1]} with this learning rate and seed, after {files[cell]}."
                )
            files[cell] = run.file
            content = _content(run.file)
            splits = {split: _score(content, split, run.file) for split in ("validation", "test")}
            mismatches += [reason for split in splits if (reason := _mismatch(content, split, run.file))]
            _check_seed(int(parts["seed"]), f"{run.file}: the seed in its folder's name")
            for split, score in splits.items():
                _check_score(score, run.family, f"{run.file}: {split}.score")
            if set(splits.values()) == {None}:
                raise UserError(f"{run.file}: neither 'validation' nor 'test' in it.")
            model, task, rate, seed = cell
            results.append(_result(run.key, model, run.family, task, rate, seed, splits) | {"file": str(run.file)})
            bar.update(bar.done + 1)
    if mismatches:
        say(
            f"{len(mismatches)} of the scores are not those of their examples, and count as they are; the first: {mismatches[0]}"
        )
    return results


def _mismatch(content: Row, split: str, file: Path) -> str:
    """Return why a split's score is not the mean of its examples' scores; empty if it is, or if they have none."""
    try:
        if "scores_i" in (_part(content, split, file) or ({}, ""))[0]:
            _scores_of_examples(content, split, file)
    except UserError as error:
        return str(error)
    return ""


def _results_of_table(path: Path) -> list[dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {}
    families: dict[str, dict[str, str]] = {}
    for place, row in read_rows(path):
        for name in COLUMNS:
            entry(row, name, place)
        model, family, dataset = (word(row, name, place) for name in ("model", "family", "dataset"))
        rate, seed = number(row, "learning_rate", place), number(row, "seed", place)
        if rate < SMALLEST_RATE:
            raise UserError(f"{place}: learning_rate is {row['learning_rate']!r}; expected a number above 0.")
        _check_seed(seed, f"{place}: seed")
        scores = {split: _cell(row, f"{split}_score", place) for split in ("validation", "test")}
        for split, score in scores.items():
            _check_score(score, family, f"{place}: {split}_score")
        key = f"{model}/{family}/{dataset}/lr{rate_text(rate)}_sd{int(seed)}"
        if key in results:
            raise UserError(f"{place}: a second row of the run {key}.")
        results[key] = _result(key, model, family, dataset, rate, int(seed), scores) | _cost(row, place)
        families.setdefault(dataset, {})[key] = family
    if not results:
        raise UserError(f"{path}: no rows.")
    for dataset, family_by_run in families.items():
        if len(set(family_by_run.values())) > 1:
            for key, family in family_by_run.items():
                results[key]["task"] = f"{family}-{dataset}"
    return list(results.values())


def _cell(row: Mapping[str, Any], key: str, place: str) -> float | None:
    """Return a score of a CSV file: None if the run has none, NaN if it is not known."""
    if row[key] in ("", None):
        return None
    return math.nan if row[key] == UNREAD else number(row, key, place)


def _cost(row: Mapping[str, Any], place: str) -> Row:
    """Return the `cost` entry of a result for a run of a CSV file; empty if the file doesn't state its time or device."""
    cost: Row = {}
    if row.get("seconds") not in ("", None):
        cost["seconds"] = number(row, "seconds", place)
        if cost["seconds"] <= 0:
            raise UserError(f"{place}: seconds is {row['seconds']!r}; expected a number above 0.")
    if row.get("device") not in ("", None):
        cost["device"] = word(row, "device", place)
    return {"cost": cost} if cost else {}


def _check_score(score: float | None, family: str, place: str) -> None:
    """Raise a `UserError` unless a score is in its metric's range; percentages would be shown a hundred times too large."""
    lowest = -1.0 if family == "SR" else 0.0
    if score is not None and not math.isnan(score) and not lowest <= score <= 1:
        raise UserError(
            f"{place} is {score:g}; expected a number from {lowest:g} to 1. Are these percentages? Divide them by 100."
        )


def _check_seed(seed: float, place: str) -> None:
    if not 0 <= seed < 2**63 or not float(seed).is_integer():
        raise UserError(f"{place} is {seed:g}; expected a whole number from 0 to 2^63 - 1.")


def _result(
    key: str, model: str, family: str, task: str, rate: float, seed: int, scores: Mapping[str, float | None]
) -> dict[str, Any]:
    """Return a run's result in the form of a cell's result; a run without any score diverged, and unknown scores are left out."""
    task_family, metric = FAMILIES.get(family, (family, "score"))
    finite = {split: score for split, score in scores.items() if score is not None and not math.isnan(score)}
    diverged = all(score is None for score in scores.values())
    return {
        "key": key,
        "model": model,
        "task": task,
        "family": task_family,
        "metric": metric,
        "learning_rate": rate,
        "seed": seed,
        "status": "diverged" if diverged else "ok",
        "scores": None if diverged else {split: {metric: score} for split, score in finite.items()},
    }

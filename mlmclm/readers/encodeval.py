"""EncodEval's results: `results/MODEL/FAMILY/DATASET/RUN/results.json`, or a CSV file of their scores.

A file holds `validation` and `test`, each with `score` and `scores_i`, the list of the examples' scores; one of the two may
be missing. RUN is `lr1e-04_sd0`, in retrieval with the training set in front (`msmarco_pairs_lr1e-04_sd0`).
Read from github.com/hgissbkh/EncodEval, the results of arXiv 2507.00994.

The CSV file has a run per row: model, family, dataset, learning_rate, seed, validation_score and test_score. A run without
scores diverged; a test score `unread` is not known. Two more columns may be there: `seconds`, the time that the run took, and
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
from mlmclm.readers.reader import Reader
from mlmclm.readers.rows import Row, an_object, as_number, columns_of, entry, named_place, number, parsed, rows_of, word
from mlmclm.readers.scored_run import ScoredRun
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
"""This project's family and metric for each of EncodEval's. Its F1 are its own: macro-averaged over labels by sentence for
TC, over token positions for QA."""
COLUMNS = ("model", "family", "dataset", "learning_rate", "seed", "validation_score", "test_score")
UNREAD = "unread"
_FILE = "results.json"
_RUN = re.compile(r"(?:(?P<trained_on>.+)_)?lr(?P<rate>\d+(?:\.\d+)?(?:e[+-]?\d+)?)_sd(?P<seed>\d+)")
_SAME = 1e-6
"""Most by which a score may differ from the mean of its `scores_i`."""


@dataclass(frozen=True)
class _Run:
    """One `results.json` and what its path says."""

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
            found = next(path.rglob(_FILE), None)
            return found is not None and _at(found).family in FAMILIES
        if path.name == _FILE:
            return _at(path).family in FAMILIES
        return kind_of(path) in DELIMITERS and set(COLUMNS) <= columns_of(path)

    def runs(self, path: Path, only: Collection[str] | None = None) -> list[ScoredRun]:
        if _is_table(path):
            raise UserError(
                f"{path}: it has scores of runs and none of single examples; compare models with `mlmclm import`."
            )
        chosen = [run for run in _runs(path) if only is None or run.model in only]
        names = _task_names(chosen)
        found = []
        with Bar("reading", len(chosen), unit="runs") as bar:
            for run in chosen:
                content = _content(run.file)
                scores = _scores_of_examples(content, "test", run.file)
                validation = _score(content, "validation", run.file)
                parts, metric = run.parts, FAMILIES.get(run.family, ("", "score"))[1]
                found.append(
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
        return found

    def names(self, path: Path) -> list[str]:
        return list(dict.fromkeys(run.model for run in _runs(path)))

    def results(self, path: Path) -> list[dict[str, Any]]:
        return _results_of_table(path) if _is_table(path) else _results_of_tree(path)

    def test_scores(self, result: Mapping[str, Any]) -> Array | None:
        file = Path(str(result.get("file", "")))
        try:
            return _scores_of_examples(_content(file), "test", file) if file.name == _FILE else None
        except UserError:  # the score is no mean over examples, or there is no score of any example
            return None


def _is_table(path: Path) -> bool:
    return path.is_file() and path.name != _FILE


def _at(file: Path) -> _Run:
    *_, model, family, dataset, name, _ = ("", "", "", "", *named_place(file).parts)
    return _Run(file, model, family, dataset, name)


def _runs(path: Path) -> list[_Run]:
    """Find the runs below a folder, in order."""
    found = [_at(file) for file in ([path] if path.is_file() else files_inside(path, _FILE))]
    if not found:
        raise UserError(f"{path}: no MODEL/FAMILY/DATASET/RUN/{_FILE} in it.")
    return found


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
        own = run.parts
        several = len(trained[run.family, run.dataset]) > 1
        names[run.file] = f"{name}-{own['trained_on']}" if several and own and own["trained_on"] else name
    return names


def _content(file: Path) -> Row:
    return an_object(parsed(read_text(file), str(file)), str(file))


def _part(content: Row, split: str, file: Path) -> tuple[Row, str] | None:
    """Return the entry of a split with its place; None if there is none."""
    if content.get(split) is None:
        return None
    place = f"{file}: {split}"
    return an_object(content[split], place), place


def _score(content: Row, split: str, file: Path) -> float | None:
    found = _part(content, split, file)
    return None if found is None else number(found[0], "score", found[1])


def _scores_of_examples(content: Row, split: str, file: Path) -> Array:
    found = _part(content, split, file)
    if found is None:
        raise UserError(f"{file}: no {split!r}, so there is no score of any example.")
    part, place = found
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
    names, found, files, unlike = _task_names(runs), [], dict[tuple[Any, ...], Path](), list[str]()
    with Bar("reading", len(runs), unit="runs") as bar:
        for run in runs:
            parts = run.parts
            if parts is None or not SMALLEST_RATE <= float(parts["rate"]) <= LARGEST_NUMBER:
                raise UserError(
                    f"{run.file}: its folder {run.name!r} does not name a learning rate and a seed, as lr1e-04_sd0 does."
                )
            place = run.model, names[run.file], float(parts["rate"]), int(parts["seed"])
            if place in files:
                raise UserError(
                    f"{run.file}: a second run of {run.model} on {place[1]} with this learning rate and seed, after {files[place]}."
                )
            files[place] = run.file
            content = _content(run.file)
            splits = {split: _score(content, split, run.file) for split in ("validation", "test")}
            unlike += [said for split in splits if (said := _unlike(content, split, run.file))]
            _check_seed(int(parts["seed"]), f"{run.file}: the seed in its folder's name")
            for split, score in splits.items():
                _check_score(score, run.family, f"{run.file}: {split}.score")
            if set(splits.values()) == {None}:
                raise UserError(f"{run.file}: neither 'validation' nor 'test' in it.")
            model, task, rate, seed = place
            found.append(_result(run.key, model, run.family, task, rate, seed, splits) | {"file": str(run.file)})
            bar.update(bar.done + 1)
    if unlike:
        say(
            f"{len(unlike)} of the scores are not those of their examples, and count as they are; the first: {unlike[0]}"
        )
    return found


def _unlike(content: Row, split: str, file: Path) -> str:
    """Return why the scores of a split's examples are not those that its score is the mean of; empty if they are, or not there."""
    try:
        if "scores_i" in (_part(content, split, file) or ({}, ""))[0]:
            _scores_of_examples(content, split, file)
    except UserError as error:
        return str(error)
    return ""


def _results_of_table(path: Path) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    families: dict[str, dict[str, str]] = {}
    for place, row in rows_of(path):
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
        if key in found:
            raise UserError(f"{place}: a second row of the run {key}.")
        found[key] = _result(key, model, family, dataset, rate, int(seed), scores) | _cost(row, place)
        families.setdefault(dataset, {})[key] = family
    if not found:
        raise UserError(f"{path}: no rows.")
    for dataset, own in families.items():
        if len(set(own.values())) > 1:
            for key, family in own.items():
                found[key]["task"] = f"{family}-{dataset}"
    return list(found.values())


def _cell(row: Mapping[str, Any], key: str, place: str) -> float | None:
    """Return a score of a CSV file: None if the run has none, NaN if it is not known."""
    if row[key] in ("", None):
        return None
    return math.nan if row[key] == UNREAD else number(row, key, place)


def _cost(row: Mapping[str, Any], place: str) -> Row:
    """Return what a run of a CSV file has cost, as a result has it; empty if the file doesn't say it."""
    cost: Row = {}
    if row.get("seconds") not in ("", None):
        cost["seconds"] = number(row, "seconds", place)
        if cost["seconds"] <= 0:
            raise UserError(f"{place}: seconds is {row['seconds']!r}; expected a number above 0.")
    if row.get("device") not in ("", None):
        cost["device"] = word(row, "device", place)
    return {"cost": cost} if cost else {}


def _check_score(score: float | None, family: str, place: str) -> None:
    """Raise a `UserError` unless a score is in its metric's range; percentages would be shown as hundredfold."""
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
    """Return a result as a cell has it; without any score it diverged, and scores that are not known are left out."""
    own, metric = FAMILIES.get(family, (family, "score"))
    known = {split: score for split, score in scores.items() if score is not None and not math.isnan(score)}
    diverged = all(score is None for score in scores.values())
    return {
        "key": key,
        "model": model,
        "task": task,
        "family": own,
        "metric": metric,
        "learning_rate": rate,
        "seed": seed,
        "status": "diverged" if diverged else "ok",
        "scores": None if diverged else {split: {metric: score} for split, score in known.items()},
    }

"""EncodEval's results: `results/MODEL/FAMILY/DATASET/RUN/results.json`, or a CSV file of their scores.

A file holds `validation` and `test`, each with `score` and `scores_i`, the list of the examples' scores; one of the two may
be missing. RUN is `lr1e-04_sd0`, in retrieval with the training set in front (`msmarco_pairs_lr1e-04_sd0`).
Read from github.com/hgissbkh/EncodEval, the results of arXiv 2507.00994.

The CSV file has a run per row: model, family, dataset, learning_rate, seed, validation_score and test_score. A run without
scores diverged; a test score `unread` is not known.
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
from mlmclm.progress import Bar
from mlmclm.readers.reader import Reader
from mlmclm.readers.rows import Row, an_object, as_number, columns_of, entry, number, parsed, rows_of, word
from mlmclm.readers.scored_run import ScoredRun
from mlmclm.results.measures import Array
from mlmclm.storage.data_files import DELIMITERS, kind_of, read_text

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
    """A folder `results`, any folder in it, or a CSV file of scores."""

    name: ClassVar[str] = "encodeval"
    title: ClassVar[str] = "EncodEval's results"
    told_by: ClassVar[str] = "number of examples"

    def recognises(self, path: Path) -> bool:
        if path.is_dir():
            found = next(path.rglob(_FILE), None)
            return found is not None and found.resolve().parent.parent.parent.name in FAMILIES
        return kind_of(path) in DELIMITERS and set(COLUMNS) <= columns_of(path)

    def runs(self, path: Path, only: Collection[str] | None = None) -> list[ScoredRun]:
        if path.is_file():
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
        return _results_of_table(path) if path.is_file() else _results_of_tree(path)

    def test_scores(self, result: Mapping[str, Any]) -> Array | None:
        file = Path(str(result.get("file", "")))
        try:
            return _scores_of_examples(_content(file), "test", file) if file.name == _FILE else None
        except UserError:  # the score is no mean over examples, or there is no score of any example
            return None


def _runs(path: Path) -> list[_Run]:
    """Find the runs below a folder, in order."""
    found = []
    for file in sorted(path.rglob(_FILE)):
        *_, model, family, dataset, name, _ = ("", "", "", "", *file.resolve().parts)
        found.append(_Run(file, model, family, dataset, name))
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
    names, found = _task_names(runs), []
    with Bar("reading", len(runs), unit="runs") as bar:
        for run in runs:
            parts = run.parts
            if parts is None:
                raise UserError(
                    f"{run.file}: its folder {run.name!r} does not name a learning rate and a seed, as lr1e-04_sd0 does."
                )
            content = _content(run.file)
            splits = {split: _score(content, split, run.file) for split in ("validation", "test")}
            if set(splits.values()) == {None}:
                raise UserError(f"{run.file}: neither 'validation' nor 'test' in it.")
            found.append(
                _result(
                    run.key, run.model, run.family, names[run.file], float(parts["rate"]), int(parts["seed"]), splits
                )
                | {"file": str(run.file)}
            )
            bar.update(bar.done + 1)
    return found


def _results_of_table(path: Path) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for place, row in rows_of(path):
        for name in COLUMNS:
            entry(row, name, place)
        model, family, dataset = (word(row, name, place) for name in ("model", "family", "dataset"))
        rate, seed = number(row, "learning_rate", place), number(row, "seed", place)
        if rate <= 0:
            raise UserError(f"{place}: learning_rate is {row['learning_rate']!r}; expected a number above 0.")
        if seed < 0 or not seed.is_integer():
            raise UserError(f"{place}: seed is {row['seed']!r}; expected a whole number from 0 on.")
        scores = {split: _cell(row, f"{split}_score", place) for split in ("validation", "test")}
        key = f"{model}/{family}/{dataset}/lr{rate_text(rate)}_sd{int(seed)}"
        if key in found:
            raise UserError(f"{place}: a second row of the run {key}.")
        found[key] = _result(key, model, family, dataset, rate, int(seed), scores)
    if not found:
        raise UserError(f"{path}: no rows.")
    return list(found.values())


def _cell(row: Mapping[str, Any], key: str, place: str) -> float | None:
    """Return a score of a CSV file: None if the run has none, NaN if it is not known."""
    if row[key] in ("", None):
        return None
    return math.nan if row[key] == UNREAD else number(row, key, place)


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

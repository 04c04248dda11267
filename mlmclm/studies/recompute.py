"""Cells computed again, and compared with the results in a store or a published bundle, neither of which changes."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from mlmclm import versions
from mlmclm.analysis.results import records
from mlmclm.answers.received_record import read_record
from mlmclm.answers.record import STUDY, StudyRecord
from mlmclm.answers.study_results import Results
from mlmclm.corpora.notes import read_remembered
from mlmclm.errors import MlmclmError, UserError
from mlmclm.finetuning.cell import Cell, cell_key
from mlmclm.finetuning.kept import KeptEncoder
from mlmclm.numbers import plural, rate_text
from mlmclm.progress import Bar, say
from mlmclm.results.examples import ExampleSource, KeptExamples, from_parquet
from mlmclm.results.intervals import most_wrong
from mlmclm.storage.files import canonical_json, stable_hash
from mlmclm.storage.place import Place
from mlmclm.studies.study_file import StudyFile, SweepFile, load_file, read_file
from mlmclm.studies.study_sweep import given_model
from mlmclm.sweeps.cells import SweepModel, cell_name, recorded_cell, result_cell
from mlmclm.sweeps.one_cell import make_ready
from mlmclm.sweeps.results_store import EXAMPLES, ResultsStore

SAME_MACHINE = ("backend", "device", "versions")
"""Entries of a result's cost. If they are equal, cells with equal keys give equal bits."""
NOT_COMPARED = ("cost", "model", "setting", "metric", EXAMPLES)
"""Entries of a result that its key does not determine."""
OF_WEIGHTS = ("key", "weights", "start")
"""Entries of a result that differ if its model was pretrained again and got other weights."""
LINKED = ("corpora", "hub", "prepared", "task-data", "tasks", "tuned")
"""Parts of the store that a computation reads."""


@dataclass(frozen=True)
class Recomputed:
    """A cell that was computed again, or could not be."""

    key: str
    name: str
    status: str
    """`equal`, `differs`, `differs elsewhere` (on another backend, device or software), or `not computed`."""
    detail: str = ""


@dataclass(frozen=True)
class FiledResults:
    """Results to compare with: those of a store, or of a published bundle.

    Attributes:
        result: returns the result with a key; None if there is none.
        kept: the source of their test examples.
        models: those of the store, by the hash of their weights.
        others: models by name, which are used for weights that the store lacks.
    """

    result: Callable[[str], Mapping[str, Any] | None]
    kept: ExampleSource
    models: Mapping[str, SweepModel]
    others: Mapping[str, SweepModel] = field(default_factory=dict)

    def find(self, key: str, place: Place) -> tuple[Mapping[str, Any], Cell]:
        """Return the result with a key, and its cell; raise a `UserError` if the result, its model or its task is missing."""
        result = self.result(key)
        if result is None:
            raise UserError(f"there is no result {key}")
        model = self.models.get(result["weights"]) or self.others.get(result["model"])
        if model is None:
            raise UserError(f"the model {result['model']} (weights {result['weights'][:12]}) is not here")
        named = replace(model, name=result["model"])
        return result, recorded_cell(result, named, place.task_dirs, where=f"result {key}")

    def examples(self, result: Mapping[str, Any]) -> KeptExamples | None:
        """Return its test examples; None if there are none."""
        try:
            return self.kept.examples(result)
        except UserError:
            return None


def recompute(count: int, seed: int, place: Place, study: str | None, keys: Collection[str] | None) -> list[Recomputed]:
    """Compute randomly chosen cells again, each in the state of a sweep's worker, and compare each with its result.

    A cell that cannot be computed on this machine is returned too, and another one is chosen in its place.

    Args:
        count: number of cells to compute.
        seed: of the choice.
        study: the file of a sweep whose models may be outside the store; or a name, or None.
        keys: the cells to choose from; None for all of the store's.
    """
    results_store, outcomes, computed = ResultsStore(place.store), list[Recomputed](), 0
    stored_keys = results_store.keys()
    left = sorted(stored_keys if keys is None else stored_keys & set(keys))
    random.Random(seed).shuffle(left)
    filed = FiledResults(results_store.find, results_store, _models(place, study))
    with Bar("computing cells again", min(count, len(left)), unit="cells") as bar:
        while left and computed < count:
            outcomes.append(recomputed(left.pop(0), filed, place))
            computed += outcomes[-1].status != "not computed"
            bar.update(computed, note=outcomes[-1].name)
    return outcomes


def _models(place: Place, study: str | None) -> dict[str, SweepModel]:
    """Return the store's models, and those that a sweep's file names, by the hash of their weights."""
    models = models_in(place.store)
    path = Path(study or "")
    file = load_file(path) if path.is_file() else None
    if isinstance(file, SweepFile):
        for name, source in file.models.items():
            if not source.endswith("/*"):
                model = given_model(file, name, place)
                for weights in model.hashes:
                    models.setdefault(weights, replace(model, weights=weights))
    return models


def models_in(store: Path) -> dict[str, SweepModel]:
    """Return the exported models of a store by the hash of their weights."""
    models = {}
    for folder in sorted(store.glob("states/*/model")):
        for weights in read_remembered(folder.with_name("model.weights.json")):
            models[weights] = SweepModel(folder.parent.name, folder, weights)
    return models


def recomputed(key: str, filed: FiledResults, place: Place) -> Recomputed:
    """Compute a cell again, in the state of a sweep's worker, and compare it with its result."""
    from mlmclm.finetuning.run import keep_encoder, run_cell

    name = key
    try:
        result, cell = filed.find(key, place)
        name = cell_name(cell)
        with _beside(place.store) as folder:
            if cell.start is not None and not (kept := KeptEncoder(folder, cell.start.key)).folder.is_dir():
                source = filed.find(kept.key, place)[1]
                make_ready(source)
                kept.ensure(partial(keep_encoder, source, store=folder, data_root=place.data_root))
            contents = list[bytes]()
            make_ready(cell)
            rerun = run_cell(
                cell, store=folder, data_root=place.data_root, on_examples=lambda _, content: contents.append(content)
            )
            rerun = json.loads(canonical_json(rerun))  # as it would be filed
            examples = examples_again = None
            if contents and (examples := filed.examples(result)) is not None:
                (folder / "again.parquet").write_bytes(contents[0])
                examples_again = from_parquet(folder / "again.parquet", rerun)
    except MlmclmError as error:
        return Recomputed(key, name, "not computed", str(error))
    # A cell of other weights has another key; that alone is no difference between the results.
    difference = describe_difference(
        result, {**rerun, **{name: result.get(name) for name in OF_WEIGHTS}}, examples, examples_again
    )
    unmatched = one_sided(result, rerun, examples, examples_again)
    if not difference:
        return Recomputed(key, name, "equal", unmatched)
    difference = "; ".join(filter(None, (difference, unmatched)))
    elsewhere = other_machine(result["cost"] or {}, rerun["cost"])
    if cell.weights != result["weights"]:
        elsewhere = "; ".join(filter(None, (f"{cell.model} has other weights here", elsewhere)))
    if elsewhere:
        return Recomputed(key, name, "differs elsewhere", f"{difference}; {elsewhere}")
    return Recomputed(key, name, "differs", difference)


@contextmanager
def _beside(store: Path) -> Iterator[Path]:
    """Yield a temporary folder with links to the store's files, so that files are renamed and written in this folder only."""
    with TemporaryDirectory(prefix="mlmclm-recompute-") as name:
        folder = Path(name)
        for part in LINKED:
            (folder / part).mkdir()
            for path in (store / part).glob("*"):
                if part != "tuned":
                    (folder / part / path.name).symlink_to(path.resolve())
                elif path.is_dir():
                    (folder / part / path.name).mkdir()
                    for kept in path.iterdir():
                        (folder / part / path.name / kept.name).symlink_to(kept.resolve())
        yield folder


def describe_difference(
    filed: Mapping[str, Any],
    again: Mapping[str, Any],
    examples: KeptExamples | None,
    examples_again: KeptExamples | None,
) -> str:
    """Describe the difference between two results of a cell and between their examples; empty if there is none.

    Only the entries, scores and columns of examples that both results have are compared; `one_sided` names the others.
    """
    if filed["status"] != again["status"]:
        return f"it was {filed['status']} and is {again['status']} now"
    scores, new_scores = _scores(filed), _scores(again)
    if scores and not scores.keys() & new_scores:
        return "they have no score in common"
    gaps = [abs(scores[key] - new_scores[key]) for key in scores.keys() & new_scores if scores[key] != new_scores[key]]
    if gaps:
        return f"scores differ by up to {max(gaps):.3g}"
    names = [name for name in filed if name in _entries(again) and filed[name] != again[name]]
    if names:
        return f"{', '.join(names)} differ"
    columns, new_columns = _columns(examples), _columns(examples_again)
    differing = [name for name in columns if name in new_columns and not _same(columns[name], new_columns[name])]
    return f"the test examples' {', '.join(differing)} differ" if differing else ""


def one_sided(
    filed: Mapping[str, Any],
    again: Mapping[str, Any],
    examples: KeptExamples | None,
    examples_again: KeptExamples | None,
) -> str:
    """Name the entries, scores and columns of examples that only one of two results has; empty if there are none.

    A later version of the package may add one without changing keys.
    """
    sides = [_entries(result) | {f"{split} {metric}" for split, metric in _scores(result)} for result in (filed, again)]
    if examples is not None and examples_again is not None:
        before = _columns(examples)
        # A bundle has all numbers of its examples, but not all lists.
        now = examples_again.columns.keys() | (examples_again.predictions.keys() & before)
        for side, columns in zip(sides, (before, now), strict=True):
            side |= {f"the examples' {name}" for name in columns}
    parts = {"new": sides[1] - sides[0], "gone": sides[0] - sides[1]} if filed["status"] == again["status"] else {}
    return "; ".join(f"{side}: {', '.join(sorted(names))}" for side, names in parts.items() if names)


def _scores(result: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    scores = (result["scores"] or {}).items()
    return {(split, metric): value for split, metrics in scores for metric, value in metrics.items()}


def _entries(result: Mapping[str, Any]) -> set[str]:
    return result.keys() - {*NOT_COMPARED, *OF_WEIGHTS, "scores"}


def _columns(examples: KeptExamples | None) -> dict[str, np.ndarray[Any, Any]]:
    return {} if examples is None else examples.columns | examples.predictions


def other_machine(filed: Mapping[str, Any], again: Mapping[str, Any]) -> str:
    """Describe how the machine and software of a result differ from this one's; empty if bits must be equal."""
    words = []
    for name in SAME_MACHINE:
        before, now = filed.get(name), again.get(name)
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            changed = [part for part in sorted({*before, *now}) if before.get(part) != now.get(part)]
            before, now = (", ".join(f"{part} {side.get(part, '-')}" for part in changed) for side in (before, now))
        if before != now:
            words.append(f"{name} {now} (it was computed with {before})")
    return "; ".join(words)


def _same(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    def plain(values: Iterable[Any]) -> list[Any]:
        return [value.tolist() if isinstance(value, np.ndarray) else value for value in values]

    if one.dtype == object or other.dtype == object:
        return plain(one) == plain(other)
    return bool(np.array_equal(one, other, equal_nan=one.dtype.kind == "f" and other.dtype.kind == "f"))


@dataclass(frozen=True)
class BundleCheck:
    """The cells of a bundle that are computed again, and the work that this takes.

    Attributes:
        folder: the bundle's.
        rows: their results.
        seed: of the choice of cells.
        keys: the number of cells whose keys match their settings; the keys of all others cannot be computed on this machine.
        pretrained: the models that must be pretrained first, because the store lacks their weights.
        pretraining_hours, cell_hours: hours of one worker, as recorded when these models and cells were first computed.
        noise: the standard deviation over seeds by (model, task), as fractions of 1; NaN where it is not known.
    """

    record: StudyRecord
    folder: Path
    place: Place
    rows: tuple[Mapping[str, Any], ...]
    seed: int
    keys: int
    models: Mapping[str, SweepModel]
    pretrained: tuple[str, ...]
    pretraining_hours: float
    cell_hours: float
    noise: Mapping[tuple[str, str], float]

    def at_most_wrong(self, found: Iterable[Recomputed]) -> float:
        """Return an upper bound on the share of all cells that are wrong, with 95 % confidence.

        A cell that differs elsewhere, or could not be computed, counts as wrong: it confirms nothing.
        """
        total, statuses = len(self.record.rows), [outcome.status for outcome in found]
        return most_wrong(total, len(statuses), sum(status != "equal" for status in statuses)) / total

    def run(self) -> list[Recomputed]:
        """Pretrain what is missing, compute the cells, and compare each with the published result.

        Raises:
            UserError: a setting is wrong, or the corpus is missing.
            EnvironmentFault: the machine failed. What is finished is kept.
        """
        rows = {row["key"]: row for row in self.record.rows}
        filed = FiledResults(rows.get, self.record.kept, self.models, self._made() if self.pretrained else {})
        outcomes = []
        with Bar("computing cells again", len(self.rows), unit="cells") as bar:
            for number, row in enumerate(self.rows, 1):
                outcomes.append(self._with_noise(recomputed(row["key"], filed, self.place), row))
                bar.update(number, note=outcomes[-1].name)
        return outcomes

    def _made(self) -> dict[str, SweepModel]:
        """Pretrain or fetch the models that the store lacks, and return them by name."""
        from mlmclm.studies.study import Study

        file = load_file(self.folder / STUDY)
        if isinstance(file, StudyFile):
            # A name that no other study in the store has, so that no model of theirs is replaced.
            name = f"verified-{stable_hash(self.record.study)[:12]}"
            study = Study(file.model_copy(update={"name": name}), self.place, source=str(self.folder / STUDY)).narrowed(
                self.pretrained
            )
            return {model.name: model for model in study.pretrain()}
        models = {}
        for name in self.pretrained:
            try:
                models[name] = given_model(file, name, self.place)
            except UserError as error:
                say(f"{name} is not here: {error}")
        return models

    def _with_noise(self, outcome: Recomputed, row: Mapping[str, Any]) -> Recomputed:
        """Add the standard deviation over seeds to a difference that another machine or other weights explain."""
        spread = self.noise.get((row["model"], row["task"]), math.nan)
        if outcome.status != "differs elsewhere" or math.isnan(spread):
            return outcome
        return replace(outcome, detail=f"{outcome.detail}; other seeds alone change this score by {spread:.3g} (sd)")


def check_of(folder: str | Path, count: int, seed: int, place: Place) -> BundleCheck:
    """Choose cells of a bundle, and return them with the work that computing them again takes; nothing is computed.

    Args:
        count: number of cells.
        seed: of the choice. Whoever made the bundle must not know it.

    Raises:
        UserError: there is no such bundle, it is damaged or contradicts itself, or a cell's key doesn't belong to its settings.
    """
    results = Results(read_record(Path(folder), read_file))
    record, tasks = results.record, Path(folder) / "tasks"
    if not place.task_dirs and tasks.is_dir():
        place = replace(place, task_dirs=(tasks.resolve(),))
    keys = _keys_made_again(record, Path(folder), place)
    rows = sorted(record.rows, key=lambda row: (row["key"], row["model"]))
    random.Random(seed).shuffle(rows)
    chosen = tuple(rows[:count])
    models = models_in(place.store)
    needed = sorted({row["model"] for row in chosen if row["weights"] not in models})
    stages = [stage for stage in record.states.stages if set(needed) & set(stage.models)]
    return BundleCheck(
        record,
        Path(folder),
        place,
        chosen,
        seed,
        keys,
        models,
        tuple(needed),
        math.fsum(stage.work.seconds * stage.work.workers for stage in stages) / 3600,
        math.fsum((row.get("cost") or {}).get("seconds", 0.0) for row in chosen) / 3600,
        {(row["model"], row["task"]): row["sd_seeds_pooled"] for row in records(results.stability)},
    )


def _keys_made_again(record: StudyRecord, folder: Path, place: Place) -> int:
    """Compute the key of each cell again from its result, and return the number of cells for which this machine can do so.

    Raises:
        UserError: a cell has another key than its result.
    """
    count, wrong = 0, list[Mapping[str, Any]]()
    for row in record.rows:
        try:
            cell = result_cell(row, SweepModel(row["model"], folder, row["weights"]), place.task_dirs)
        except UserError:  # its task, or a registered member, is missing on this machine
            continue
        if row.get("engine") != versions.CELLS or cell.added:
            continue
        count += 1
        if cell_key(cell) != row["key"]:
            wrong.append(row)
    if wrong:
        raise UserError(
            f"{folder}: {plural(len(wrong), 'cell')} of {len(record.rows):,} have keys that don't belong to their settings. First: "
            f"{wrong[0]['key']} (model {wrong[0]['model']}, task {wrong[0]['task']}, learning rate {rate_text(wrong[0]['learning_rate'])})."
        )
    return count

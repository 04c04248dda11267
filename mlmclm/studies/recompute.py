"""Computation of some of a store's cells once more, to compare with what is filed; nothing in the store is changed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from mlmclm.corpora.notes import read_remembered
from mlmclm.errors import MlmclmError, UserError
from mlmclm.finetuning.cell import Cell
from mlmclm.finetuning.kept import KeptEncoder
from mlmclm.progress import Bar
from mlmclm.results.examples import KeptExamples, from_parquet
from mlmclm.storage.checksums import parse_sealed
from mlmclm.storage.files import canonical_json
from mlmclm.studies.one_cell import make_ready
from mlmclm.studies.place import Place
from mlmclm.studies.study_file import SweepFile, load_file
from mlmclm.sweeps.cells import SweepModel, cell_name, recorded_cell
from mlmclm.sweeps.find_model import find_model
from mlmclm.sweeps.results_store import EXAMPLES, ResultsStore

SAME_MACHINE = ("backend", "device", "versions")
"""Entries of a result's cost that are equal where equal keys give equal bits."""
NOT_COMPARED = ("cost", "model", "setting", "metric", EXAMPLES)
"""Entries of a result that its key does not determine."""
OF_WEIGHTS = ("key", "weights", "start")
"""Entries of a result that differ where a model has been pretrained again to other weights."""
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
        result: returns the result with a key; a `UserError` if there is none.
        examples: returns its test examples; None if there are none.
        model: returns the model to compute it with, which may have other weights; a `UserError` if there is none.
    """

    result: Callable[[str], dict[str, Any]]
    examples: Callable[[Mapping[str, Any]], KeptExamples | None]
    model: Callable[[Mapping[str, Any]], SweepModel]


def recompute(count: int, seed: int, place: Place, study: str | None, keys: Collection[str] | None) -> list[Recomputed]:
    """Compute randomly chosen cells again, each in the state of a sweep's worker, and compare each with its result.

    A cell that cannot be computed here is named too, and another one is chosen in its place.

    Args:
        count: number of cells to compute.
        seed: of the choice.
        study: the file of a sweep whose models may be outside the store; or a name, or None.
        keys: the cells to choose from; None for all of the store's.
    """
    there, found, computed = ResultsStore(place.store).keys(), list[Recomputed](), 0
    left = sorted(there if keys is None else there & set(keys))
    random.Random(seed).shuffle(left)
    filed = _of_store(place, study)
    with Bar("computing cells again", min(count, len(left)), unit="cells") as bar:
        while left and computed < count:
            found.append(recomputed(left.pop(0), filed, place))
            computed += found[-1].status != "not computed"
            bar.update(computed, note=found[-1].name)
    return found


def _models(place: Place, study: str | None) -> dict[str, SweepModel]:
    """Return the store's models, and those that a sweep's file names, by the hash of their weights."""
    models = models_in(place.store)
    path = Path(study or "")
    file = load_file(path) if path.is_file() else None
    if isinstance(file, SweepFile):
        for source in file.models.values():
            if not source.endswith("/*"):
                model = find_model(source, place.store, data_root=place.data_root, beside=path.parent)
                for weights in model.hashes:
                    models.setdefault(weights, replace(model, weights=weights))
    return models


def models_in(store: Path) -> dict[str, SweepModel]:
    """Return the exported models of a store by the hash of their weights."""
    found = {}
    for folder in sorted(store.glob("states/*/model")):
        for weights in read_remembered(folder.with_name("model.weights.json")):
            found[weights] = SweepModel(folder.parent.name, folder, weights)
    return found


def _of_store(place: Place, study: str | None) -> FiledResults:
    results_store, models = ResultsStore(place.store), _models(place, study)

    def examples(result: Mapping[str, Any]) -> KeptExamples | None:
        if EXAMPLES not in result:
            return None
        return from_parquet(results_store.examples_path(result["key"]), result, result[EXAMPLES])

    def model(result: Mapping[str, Any]) -> SweepModel:
        if result["weights"] not in models:
            raise UserError(f"the model {result['model']} (weights {result['weights'][:12]}) is not in the store")
        return models[result["weights"]]

    return FiledResults(partial(_filed, results_store), examples, model)


def recomputed(key: str, filed: FiledResults, place: Place) -> Recomputed:
    """Compute a cell again, in the state of a sweep's worker, and compare it with its result."""
    from mlmclm.finetuning.run import keep_encoder, run_cell

    name = key
    try:
        result = filed.result(key)
        cell = _cell(result, filed, place)
        name = cell_name(cell)
        with _beside(place.store) as folder:
            if cell.start is not None and not (kept := KeptEncoder(folder, cell.start.key)).folder.is_dir():
                source = _cell(filed.result(kept.key), filed, place)
                make_ready(source)
                kept.ensure(partial(keep_encoder, source, store=folder, data_root=place.data_root))
            contents = list[bytes]()
            make_ready(cell)
            again = run_cell(
                cell, store=folder, data_root=place.data_root, on_examples=lambda _, content: contents.append(content)
            )
            again = json.loads(canonical_json(again))  # as it would be filed
            examples = examples_again = None
            if contents and (examples := filed.examples(result)) is not None:
                (folder / "again.parquet").write_bytes(contents[0])
                examples_again = from_parquet(folder / "again.parquet", again)
    except MlmclmError as error:
        return Recomputed(key, name, "not computed", str(error))
    # The same cell of other weights has another key, which is no difference of its own.
    wrong = compare(result, {**again, **{name: result.get(name) for name in OF_WEIGHTS}}, examples, examples_again)
    apart = one_sided(result, again, examples, examples_again)
    if not wrong:
        return Recomputed(key, name, "equal", apart)
    wrong = "; ".join(filter(None, (wrong, apart)))
    elsewhere = other_machine(result["cost"] or {}, again["cost"])
    if cell.weights != result["weights"]:
        elsewhere = "; ".join(filter(None, (f"{cell.model} has other weights here", elsewhere)))
    if elsewhere:
        return Recomputed(key, name, "differs elsewhere", f"{wrong}; {elsewhere}")
    return Recomputed(key, name, "differs", wrong)


def _filed(results_store: ResultsStore, key: str) -> dict[str, Any]:
    """Return a result as it is filed, with the checksum of its examples, which `ResultsStore.find` leaves out."""
    path = results_store.path(key)
    try:
        return parse_sealed(path.read_bytes(), path, "")
    except FileNotFoundError as error:
        raise UserError(f"{path}: there is no such result.") from error


def _cell(result: Mapping[str, Any], filed: FiledResults, place: Place) -> Cell:
    model = filed.model(result)
    return recorded_cell(result, replace(model, name=result["model"]), place.task_dirs, where=f"result {result['key']}")


@contextmanager
def _beside(store: Path) -> Iterator[Path]:
    """Yield a temporary folder that reads like the store: what is damaged is renamed there, and what is made stays there."""
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


def compare(
    filed: Mapping[str, Any],
    again: Mapping[str, Any],
    examples: KeptExamples | None,
    examples_again: KeptExamples | None,
) -> str:
    """Describe the difference between two results of a cell and between their examples; empty if there is none.

    Of entries, scores and columns of examples, those are compared that both have; `one_sided` names the others.
    """
    if filed["status"] != again["status"]:
        return f"it was {filed['status']} and is {again['status']} now"
    scores, others = _scores(filed), _scores(again)
    if scores and not scores.keys() & others:
        return "they have no score in common"
    wrong = [abs(scores[each] - others[each]) for each in scores.keys() & others if scores[each] != others[each]]
    if wrong:
        return f"scores differ by up to {max(wrong):.3g}"
    names = [name for name in filed if name in _entries(again) and filed[name] != again[name]]
    if names:
        return f"{', '.join(names)} differ"
    columns, other = _columns(examples), _columns(examples_again)
    apart = [name for name in columns if name in other and not _same(columns[name], other[name])]
    return f"the test examples' {', '.join(apart)} differ" if apart else ""


def one_sided(
    filed: Mapping[str, Any],
    again: Mapping[str, Any],
    examples: KeptExamples | None,
    examples_again: KeptExamples | None,
) -> str:
    """Name the entries, scores and columns of examples that only one of two results has; empty if there are none.

    A version of the package may add one, which changes no key.
    """
    sides = [_entries(each) | {f"{split} {metric}" for split, metric in _scores(each)} for each in (filed, again)]
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
    return {(split, metric): value for split, own in scores for metric, value in own.items()}


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
            changed = [each for each in sorted({*before, *now}) if before.get(each) != now.get(each)]
            before, now = (", ".join(f"{each} {side.get(each, '-')}" for each in changed) for side in (before, now))
        if before != now:
            words.append(f"{name} {now} (it was computed with {before})")
    return "; ".join(words)


def _same(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    def plain(values: Iterable[Any]) -> list[Any]:
        return [value.tolist() if isinstance(value, np.ndarray) else value for value in values]

    if one.dtype == object or other.dtype == object:
        return plain(one) == plain(other)
    return bool(np.array_equal(one, other, equal_nan=one.dtype.kind == "f" and other.dtype.kind == "f"))

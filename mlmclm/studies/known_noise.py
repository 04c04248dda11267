"""Known noise of a study's tasks: stated in its search space, or shown by results in the store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlmclm.answers.outcomes import fold_reader
from mlmclm.errors import UserError
from mlmclm.finetuning.cell import Cell
from mlmclm.numbers import plural
from mlmclm.plans.names import ModelName, parse, replicates_among
from mlmclm.progress import say
from mlmclm.results.metrics import metric_parts
from mlmclm.storage.files import canonical_json, stable_hash
from mlmclm.sweeps.cells import ListedCell
from mlmclm.sweeps.manifest import FILE, read_manifest
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.sweeps.space import Space

if TYPE_CHECKING:
    from mlmclm.analysis.planned_power import TaskNoise


@dataclass(frozen=True)
class KnownNoise:
    """The noise of a task, and where it is from, in words."""

    noise: TaskNoise
    source: str

    def with_pretraining_of(self, other: KnownNoise) -> KnownNoise:
        """Return this noise with that of pretraining as other results show it, if they do."""
        if other.noise.pretraining is None:
            return self
        noise = replace(self.noise, pretraining=other.noise.pretraining, together=other.noise.together)
        return KnownNoise(noise, f"{self.source}, and of pretraining {other.source}")


def stated_noise(space: Space) -> dict[str, KnownNoise]:
    """Return the noise that a search space states, by task."""
    from mlmclm.analysis.planned_power import TaskNoise

    return {
        task: KnownNoise(
            TaskNoise(
                own.seeds / 100,
                own.test_set / 100,
                pretraining=None if own.pretraining is None else own.pretraining / 100,
            ),
            "stated in the search space",
        )
        for task, own in space.noise.items()
    }


def shown_noise(
    results: Sequence[Mapping[str, Any]],
    space: Space,
    results_store: ResultsStore,
    replicate_of: Mapping[str, str] | None = None,
) -> dict[str, TaskNoise]:
    """Return the noise that results show, by task; tasks without any are left out.

    Args:
        replicate_of: as in `analysis.analyse`.
    """
    from mlmclm.analysis.analyse import analyse
    from mlmclm.analysis.planned_power import noise_of

    if not results:
        return {}
    folds = fold_reader(results_store, results)
    return noise_of(analyse(map(dict, results), rule=space.rule, folds=folds, replicate_of=replicate_of or {}))


def own_noise(
    cells: Iterable[Cell], space: Space, store: Path, *, kind: str, replicate_of: Mapping[str, str]
) -> dict[str, KnownNoise]:
    """Return the noise that the results of a study's own cells at listed learning rates show, by task.

    Args:
        kind: the word for the study.
        replicate_of: as in `analysis.analyse`.
    """
    results_store, rates = ResultsStore(store), set(space.learning_rates)
    results = results_store.results(cell for cell in cells if cell.learning_rate in rates)
    return {
        task: KnownNoise(noise, f"{_runs(noise)} of this {kind}")
        for task, noise in shown_noise(results, space, results_store, replicate_of).items()
    }


def earlier_noise(
    tasks: Sequence[str],
    space: Space,
    metrics: Mapping[str, str],
    protocols: Iterable[Mapping[str, Any]],
    store: Path,
    *,
    without: str | None = None,
) -> dict[str, KnownNoise]:
    """Return the noise that results of all of the store's studies show on some tasks.

    Results count if they are at learning rates of the space and of one of these protocols (`Protocol.identity`).

    Args:
        metrics: the main score of each task.
        without: the name of a model that doesn't count, the untrained one.
    """
    results_store, wanted, rates = (
        ResultsStore(store),
        {_settings(each) for each in protocols},
        set(space.learning_rates),
    )
    there: dict[str, list[str]] = {}  # the studies of each cell
    cells: dict[str, str] = {}
    plans: dict[str, tuple[str, ModelName]] = {}  # the first study of each cell and its model's plan
    for name in sorted(path.parent.name for path in store.glob(f"studies/*/{FILE}")):
        for cell in _cells(name, store):
            if cell.task in tasks and cell.learning_rate in rates and cell.model != without:
                cells[cell.key] = cell.task
                there.setdefault(cell.key, []).append(name)
                with suppress(UserError):  # not a name that says how the model was pretrained
                    plans.setdefault(cell.key, (name, parse(cell.model)))
    found = {
        key: {**result, "model": _model(result), "metric": metrics[cells[key]], "setting": ""}
        for key, result in results_store.find_all(cells).items()
        if _settings(result.get("protocol", {})) in wanted and _has(result, metrics[cells[key]])
    }
    # Runs of one study that differ in their weights alone are replicates if their names say so.
    alike: dict[tuple[str, ...], dict[str, ModelName]] = {}
    for key, result in found.items():
        if key in plans:
            study, plan = plans[key]
            alike.setdefault((study, _model({**result, "weights": "", "start": ""})), {})[result["model"]] = plan
    replicate_of = {run: first for own in alike.values() for run, first in replicates_among(own).items()}
    known = {}
    for task, noise in shown_noise(list(found.values()), space, results_store, replicate_of).items():
        names = sorted({name for key in found if cells[key] == task for name in there[key]})
        known[task] = KnownNoise(noise, f"{_runs(noise)} in {', '.join(names)}")
    return known


def _runs(noise: TaskNoise) -> str:
    return f"from {plural(noise.runs, 'run')} of {plural(noise.models, 'model')}"


def _settings(protocol: Mapping[str, Any]) -> str:
    """Return a protocol's settings in one form; `pair_truncation` is recorded only where it changed the examples."""
    return canonical_json({name: value for name, value in protocol.items() if name != "pair_truncation"})


def _model(result: Mapping[str, Any]) -> str:
    """Return a name for the model of a result under which its runs differ in rate and seed alone."""
    return stable_hash([result.get(name) for name in ("weights", "task_data", "start", "protocol", "engine")])


def _has(result: Mapping[str, Any], metric: str) -> bool:
    """Return whether a result has the score, or diverged and has none."""
    return all(name in scores for scores in (result["scores"] or {}).values() for name in metric_parts(metric))


def _cells(name: str, store: Path) -> Sequence[ListedCell]:
    """Return the cells of a study; none if their list is damaged."""
    try:
        return read_manifest(name, store).cells
    except UserError as error:
        say(f"left out of what is known of noise: {error}")
        return ()

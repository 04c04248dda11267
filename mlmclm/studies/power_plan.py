"""The power of a planned study: the smallest differences that its grid can show, computed before any cell runs, from the tasks' noise."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlmclm.answers.outcomes import fold_reader
from mlmclm.errors import UserError
from mlmclm.finetuning.cell import Cell
from mlmclm.numbers import plural
from mlmclm.plans.names import ModelName, parse_name, replicates_among
from mlmclm.progress import say
from mlmclm.reports import text
from mlmclm.results.metrics import metric_parts
from mlmclm.storage.files import canonical_json, stable_hash
from mlmclm.studies.study_sweep import StudySweep
from mlmclm.sweeps.cells import ListedCell, added_rates
from mlmclm.sweeps.manifest import FILE, read_manifest
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.sweeps.space import Space

if TYPE_CHECKING:
    from mlmclm.analysis.analyse import Analysis
    from mlmclm.analysis.planned_power import PlannedPower, TaskNoise

DIFFERENCE = 0.5
"""The difference, in points, for which the plan states the number of seeds that can show it."""


@dataclass(frozen=True)
class PowerPlan:
    """The smallest differences that a planned study can show, the noise that they come from, and the tasks with unknown noise.

    Attributes:
        planned: the differences, and the seeds that they take; None if the noise of no task is known.
        found: whether the study has all its results, so that the smallest differences are those of the report.
        known: the noise of the tasks, with its source.
        tasks: all tasks.
        models, seeds: their numbers.
        unknown_runs: tasks whose noise of pretraining is unknown; if there are any, the differences are those of single
            pretraining runs, although several are planned.
    """

    planned: PlannedPower | None
    known: Mapping[str, KnownNoise]
    tasks: Sequence[str]
    models: int
    seeds: int
    unknown_runs: Sequence[str]
    found: bool = False

    @property
    def unknown(self) -> list[str]:
        """The tasks whose noise is not known."""
        return [task for task in self.tasks if task not in self.known]

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain values; differences and noise are in points."""
        plain: dict[str, Any] = {
            "noise": {task: {**_in_points(known), "source": known.source} for task, known in self.known.items()},
            "noise_unknown": list(self.unknown),
        }
        if self.planned is None:
            return plain
        from mlmclm.analysis.power import POWER

        planned = self.planned
        return plain | {
            "power": POWER,
            "seeds": dict.fromkeys(self.tasks, self.seeds),
            "pretraining_runs": planned.runs,
            "smallest_differences": {name: _number(100 * value) for name, value in planned.smallest.items()},
            "differences": dict.fromkeys(self.known, DIFFERENCE),
            "seeds_needed": dict(planned.needed),
            **({"pretraining_runs_needed": dict(planned.runs_needed)} if planned.runs_needed else {}),
        }

    def lines(self) -> Iterator[str]:
        """Yield the plan in words."""
        for source in dict.fromkeys(known.source for known in self.known.values()):
            tasks = [_noise_text(task, known) for task, known in self.known.items() if known.source == source]
            yield f"noise, {source}: {'; '.join(tasks)}"
        if self.unknown_runs:
            yield (
                f"nothing is known yet of the noise of pretraining on {text.listing(self.unknown_runs, most=len(self.unknown_runs))}, so what "
                "follows is about single pretraining runs: run a small study with replicates first, or state it as `pretraining` under `noise`"
            )
        if self.planned is not None:
            yield from self._power_lines(self.planned)
        if unknown := self.unknown:
            yield (
                f"nothing is known yet of the noise of {text.listing(unknown, most=len(unknown))}: run with {max(3, self.seeds)} seeds first, or "
                "state it under `noise` in the search space"
            )

    def _power_lines(self, planned: PlannedPower) -> Iterator[str]:
        from mlmclm.analysis.comparison import ALL_TASKS
        from mlmclm.analysis.power import MOST, POWER

        power, points = f"{100 * POWER:g} % power", f"{DIFFERENCE:g} points"
        seen = {name: value for name, value in planned.smallest.items() if not math.isnan(value)}
        if not seen:
            yield "with one seed you will see no difference: one seed shows no noise"
        else:
            values = {task: f"{100 * seen[task]:.1f}" for task in self.tasks if task in seen}
            if ALL_TASKS in seen and len(self.tasks) > 1:
                values["the mean over tasks"] = f"{100 * seen[ALL_TASKS]:.1f}"
            runs = f" and {planned.runs} pretraining runs of each model" if planned.runs > 1 else ""
            see = "its results can show" if self.found else "you will see"
            yield f"with {self.seeds} seeds{runs} {see} {_on(values, 'points')} ({power}, Holm's method over {self.models} models)"
        if enough := {task: str(number) for task, number in planned.needed.items() if number is not None}:
            yield f"{points} at {power} takes {_on(enough, 'seeds')}"
        more = {task: planned.runs_needed.get(task) for task, number in planned.needed.items() if number is None}
        if runs_needed := {task: str(number) for task, number in more.items() if number is not None}:
            yield f"{points} at {power} takes {_on(runs_needed, 'pretraining runs of each model')}, with these seeds; more seeds alone are not enough"
        none = [task for task, number in more.items() if number is None]
        if far := [task for task in none if planned.floors[task] <= DIFFERENCE / 100]:
            what = "seeds" if planned.runs == 1 else "pretraining runs of each model"
            yield f"{points} takes over {MOST:,} {what} on {text.listing(far, most=len(far))} ({power})"
        if small := [task for task in none if task not in far]:
            shown = _on({task: f"{100 * planned.floors[task]:.1f}" for task in small}, "points")
            yield f"{points} takes larger test sets: with any number of seeds, these show at best {shown} ({power})"


def power_plan(sweep: StudySweep, cells: Sequence[Cell], *, complete: bool) -> PowerPlan | None:
    """Return the differences that a study's sweep can show; None if it compares fewer than two models.

    Args:
        cells: those of the sweep that can be planned.
        complete: whether these are all cells, and all have results.
    """
    from mlmclm.analysis.planned_power import noise_of, planned_power

    space, models, declared = sweep.space, sweep.compared, sweep.declared()
    if len(models) < 2:
        return None
    spaces = {swept.model.name: swept.space for swept in sweep.models}
    protocols = [
        point.identity()
        for name in models
        for task in space.tasks
        for point in spaces.get(name, space).for_model(name).settings_for(task).values()
    ]
    metrics = {name: task.metric for name, task in declared.items()}
    store, replicate_of = sweep.place.store, sweep.replicate_of
    runs = {*models, *(run for run, first in replicate_of.items() if first in models)}
    results_store, analysis = ResultsStore(store), analysed(sweep, cells) if complete else None
    if analysis is not None:
        measured = noise_of(analysis, runs)
    else:
        listed = (cell for cell in cells if cell.model in runs and cell.learning_rate in space.learning_rates)
        measured = shown_noise(results_store.results(listed), space, results_store, replicate_of)
    known = {task: KnownNoise(noise, f"{_runs(noise)} of this {sweep.file.kind}") for task, noise in measured.items()}
    known |= stated_noise(space)
    number = min(Counter(replicate_of.get(run, run) for run in runs).values())
    with_runs = {task for task, entry in known.items() if number == 1 or entry.noise.pretraining is not None}
    if lacking := [task for task in space.tasks if task not in with_runs]:
        without = None if sweep.file.baseline in models else sweep.file.baseline
        for task, earlier in earlier_noise(lacking, space, metrics, protocols, store, without=without).items():
            known[task] = known[task].with_pretraining_of(earlier) if task in known else earlier
    known = {task: known[task] for task in space.tasks if task in known}
    smallest = {} if analysis is None else {name: gap for name, gap in analysis.smallest.items() if not math.isnan(gap)}
    noise, seeds = {task: entry.noise for task, entry in known.items()}, len(space.seeds)
    unknown_runs = [task for task, task_noise in noise.items() if task_noise.pretraining is None] if number > 1 else []
    planned = None
    if noise:
        several = 1 if unknown_runs else number
        families = {name: task.family for name, task in declared.items()}
        rates = len(space.learning_rates)
        planned = planned_power(noise, families, models, seeds, rates, DIFFERENCE / 100, runs=several)
        if smallest:
            planned = replace(planned, smallest=smallest)
    return PowerPlan(
        planned=planned,
        known=known,
        tasks=space.tasks,
        models=len(models),
        seeds=seeds,
        unknown_runs=unknown_runs,
        found=bool(smallest),
    )


def _in_points(known: KnownNoise) -> dict[str, Any]:
    noise = known.noise
    points = {"seeds": 100 * noise.seeds, "test_set": 100 * noise.test_set}
    points |= {} if noise.pretraining is None else {"pretraining": 100 * noise.pretraining}
    return {name: value for name, value in vars(noise).items() if name != "drawn"} | points


def _noise_text(task: str, known: KnownNoise) -> str:
    parts = [f"{task} {100 * known.noise.seeds:.1f} points a seed"]
    if known.noise.pretraining is not None:
        parts.append(f"{100 * known.noise.pretraining:.1f} a pretraining run")
    if known.noise.test_set:
        parts.append(f"{100 * known.noise.test_set:.1f} by the test set")
    return text.listing(parts)


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _on(values: Mapping[str, str], unit: str) -> str:
    """Return values by task in words, with the unit once: 2.2 points on rte and 0.8 on mnli."""
    parts = [f"{value}{'' if index else f' {unit}'} on {task}" for index, (task, value) in enumerate(values.items())]
    return text.listing(parts, most=len(parts))


@dataclass(frozen=True)
class KnownNoise:
    """The noise of a task, and its source in words."""

    noise: TaskNoise
    source: str

    def with_pretraining_of(self, other: KnownNoise) -> KnownNoise:
        """Return this noise with the noise of pretraining that other results show, if they show any."""
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
                stated.seeds / 100,
                stated.test_set / 100,
                pretraining=None if stated.pretraining is None else stated.pretraining / 100,
            ),
            "stated in the search space",
        )
        for task, stated in space.noise.items()
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


def analysed(sweep: StudySweep, cells: Sequence[Cell]) -> Analysis:
    """Return the analysis of a sweep's results, as its report has it."""
    setting, results_store = sweep.setting(), ResultsStore(sweep.place.store)
    grid = replace(setting.grid, added=added_rates(cells, setting.grid.learning_rates))
    return replace(setting, grid=grid).analyse(results_store.results(cells), results_store)


def earlier_noise(
    tasks: Sequence[str],
    space: Space,
    metrics: Mapping[str, str],
    protocols: Iterable[Mapping[str, Any]],
    store: Path,
    *,
    without: str | None = None,
) -> dict[str, KnownNoise]:
    """Return the noise on some tasks that results of all studies of the store show.

    Only results with a learning rate of the space and one of these protocols (`Protocol.identity`) count.

    Args:
        metrics: the main score of each task.
        without: the name of a model whose results don't count: the untrained baseline.
    """
    results_store, wanted, rates = (
        ResultsStore(store),
        {_settings(protocol) for protocol in protocols},
        set(space.learning_rates),
    )
    studies_of: dict[str, list[str]] = {}  # the studies of each cell
    cells: dict[str, str] = {}
    plans: dict[str, tuple[str, ModelName]] = {}  # the first study of each cell and its model's plan
    for name in sorted(path.parent.name for path in store.glob(f"studies/*/{FILE}")):
        for cell in _cells(name, store):
            if cell.task in tasks and cell.learning_rate in rates and cell.model != without:
                cells[cell.key] = cell.task
                studies_of.setdefault(cell.key, []).append(name)
                with suppress(UserError):  # a name that doesn't say how the model was pretrained
                    plans.setdefault(cell.key, (name, parse_name(cell.model)))
    results = {
        key: {**result, "model": _model(result), "metric": metrics[cells[key]], "setting": ""}
        for key, result in results_store.find_all(cells).items()
        if _settings(result.get("protocol", {})) in wanted and _has(result, metrics[cells[key]])
    }
    # Runs of one study that differ only in their weights are replicates if their names have replicate numbers.
    alike: dict[tuple[str, ...], dict[str, ModelName]] = {}
    for key, result in results.items():
        if key in plans:
            study, plan = plans[key]
            alike.setdefault((study, _model({**result, "weights": "", "start": ""})), {})[result["model"]] = plan
    replicate_of = {run: first for runs in alike.values() for run, first in replicates_among(runs).items()}
    known = {}
    for task, noise in shown_noise(list(results.values()), space, results_store, replicate_of).items():
        names = sorted({name for key in results if cells[key] == task for name in studies_of[key]})
        known[task] = KnownNoise(noise, f"{_runs(noise)} in {', '.join(names)}")
    return known


def _runs(noise: TaskNoise) -> str:
    return f"from {plural(noise.runs, 'run')} of {plural(noise.models, 'model')}"


def _settings(protocol: Mapping[str, Any]) -> str:
    """Return a protocol's settings in one form; `pair_truncation` is recorded only where it changed the examples."""
    return canonical_json({name: value for name, value in protocol.items() if name != "pair_truncation"})


def _model(result: Mapping[str, Any]) -> str:
    """Return a name for a result's model; results with one name differ only in learning rate and seed."""
    return stable_hash([result.get(name) for name in ("weights", "task_data", "start", "protocol", "engine")])


def _has(result: Mapping[str, Any], metric: str) -> bool:
    """Return whether a result has the score, or diverged and has none."""
    return all(name in scores for scores in (result["scores"] or {}).values() for name in metric_parts(metric))


def _cells(name: str, store: Path) -> Sequence[ListedCell]:
    """Return the cells of a study; none if their list is damaged."""
    try:
        return read_manifest(name, store).cells
    except UserError as error:
        say(f"not used to estimate noise: {error}")
        return ()

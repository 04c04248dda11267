"""Differences that the grid of a study will be able to find, said before any cell is run: `--dry-run`'s last lines."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mlmclm.reports import text
from mlmclm.studies.known_noise import KnownNoise, earlier_noise, own_noise, stated_noise
from mlmclm.studies.study_sweep import StudySweep

if TYPE_CHECKING:
    from mlmclm.analysis.planned_power import PlannedPower

DIFFERENCE = 0.5
"""The difference, in points, whose seeds are said where the space names none."""


@dataclass(frozen=True)
class PowerPlan:
    """The differences that a planned study will be able to find, what that is based on, and on which tasks nothing is known.

    Attributes:
        planned: None if the noise of no task is known.
        known: the noise of the tasks, with its source.
        unknown: tasks whose noise is not known.
        least: the seeds to run first where nothing is known.
        unknown_runs: tasks on which the noise of pretraining is not known, so that all is about single pretraining runs although
            several are planned.
    """

    planned: PlannedPower | None
    known: Mapping[str, KnownNoise]
    unknown: Sequence[str]
    models: int
    least: int
    unknown_runs: Sequence[str]

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain values; differences and noise are in points."""
        plain: dict[str, Any] = {
            "noise": {task: {**_in_points(own), "source": own.source} for task, own in self.known.items()},
            "noise_unknown": list(self.unknown),
        }
        if self.planned is None:
            return plain
        own = self.planned
        return plain | {
            "power": own.power,
            "seeds": dict(own.seeds),
            "pretraining_runs": own.runs,
            "smallest_differences": {name: _number(100 * value) for name, value in own.smallest.items()},
            "differences": {task: 100 * own.differences[task] for task in own.noise},
            "seeds_needed": dict(own.needed),
            **({"pretraining_runs_needed": dict(own.runs_needed)} if own.runs_needed else {}),
        }

    def lines(self) -> Iterator[str]:
        """Yield the plan in words."""
        for source in dict.fromkeys(own.source for own in self.known.values()):
            tasks = [_noise_text(task, own) for task, own in self.known.items() if own.source == source]
            yield f"noise, {source}: {'; '.join(tasks)}"
        if self.unknown_runs:
            yield (
                f"nothing is known yet of the noise of pretraining on {text.listing(self.unknown_runs, most=len(self.unknown_runs))}, so what "
                "follows is about single pretraining runs: run a small study with replicates first, or state it as `pretraining` under `noise`"
            )
        if self.planned is not None:
            yield from self._power_lines(self.planned)
        if self.unknown:
            yield (
                f"nothing is known yet of the noise of {text.listing(self.unknown, most=len(self.unknown))}: run with {self.least} seeds first, or state it "
                "under `noise` in the search space"
            )

    def _power_lines(self, own: PlannedPower) -> Iterator[str]:
        from mlmclm.analysis.comparison import ALL_TASKS
        from mlmclm.analysis.power import MOST

        power = f"{100 * own.power:g} % power"
        found = {name: own.smallest[name] for name in (*own.seeds, ALL_TASKS)}
        seen = {name: value for name, value in found.items() if not math.isnan(value)}
        if not seen:
            yield "with one seed you will see no difference: one seed shows no noise"
        else:
            mean = seen.pop(ALL_TASKS, None)
            values = {task: f"{100 * value:.1f}" for task, value in seen.items()}
            values |= {"the mean over tasks": f"{100 * mean:.1f}"} if mean is not None and len(own.seeds) > 1 else {}
            counts = {task: str(number) for task, number in own.seeds.items() if task in seen}
            alike = set(counts.values())
            seeds = f"{alike.pop()} seeds" if len(alike) == 1 else _on(counts, "seeds")
            seeds += f" and {own.runs} pretraining runs of each model" if own.runs > 1 else ""
            yield f"with {seeds} you will see {_on(values, 'points')} ({power}, Holm's method over {self.models} models)"
        for difference in dict.fromkeys(own.differences[task] for task in own.needed):
            tasks = {task: number for task, number in own.needed.items() if own.differences[task] == difference}
            points = f"{100 * difference:g} points"
            if enough := {task: number for task, number in tasks.items() if number is not None}:
                numbers = _on({task: str(number) for task, number in enough.items()}, "seeds")
                yield f"{points} at {power} takes {numbers}"
            more = {task: own.runs_needed.get(task) for task, number in tasks.items() if number is None}
            if runs := {task: str(number) for task, number in more.items() if number is not None}:
                yield f"{points} at {power} takes {_on(runs, 'pretraining runs of each model')}, with these seeds; more seeds alone are not enough"
            none = [task for task, number in more.items() if number is None]
            if far := [task for task in none if own.floors[task] <= difference]:
                what = "seeds" if own.runs == 1 else "pretraining runs of each model"
                yield f"{points} takes over {MOST:,} {what} on {text.listing(far, most=len(far))} ({power})"
            if small := [task for task in none if task not in far]:
                shown = _on({task: f"{100 * own.floors[task]:.1f}" for task in small}, "points")
                yield f"{points} takes larger test sets: with any number of seeds, these show at best {shown} ({power})"


def power_plan(sweep: StudySweep) -> PowerPlan | None:
    """Say what a study's sweep will be able to find; None if it has one model."""
    from mlmclm.analysis.planned_power import planned_power

    space, models, declared = sweep.space, sweep.compared, sweep.declared()
    if len(models) < 2:
        return None
    spaces = {each.model.name: each.space for each in sweep.models}
    protocols = [
        point.identity()
        for name in models
        for task in space.tasks
        for point in spaces.get(name, space).for_model(name).settings_for(task).values()
    ]
    metrics = {name: task.metric for name, task in declared.items()}
    store, replicate_of = sweep.place.store, sweep.replicate_of
    runs = {*models, *(run for run, first in replicate_of.items() if first in models)}
    cells = [cell for cell in sweep.plan().cells if cell.model in runs]
    known = own_noise(cells, space, store, kind=sweep.file.kind, replicate_of=replicate_of) | stated_noise(space)
    number = min(Counter(replicate_of.get(run, run) for run in runs).values())
    of_runs = {task for task, own in known.items() if number == 1 or own.noise.pretraining is not None}
    if lacking := [task for task in space.tasks if task not in of_runs]:
        without = None if sweep.file.baseline in models else sweep.file.baseline
        for task, own in earlier_noise(lacking, space, metrics, protocols, store, without=without).items():
            known[task] = known[task].with_pretraining_of(own) if task in known else own
    known = {task: known[task] for task in space.tasks if task in known}
    noise, rates = {task: own.noise for task, own in known.items()}, len(space.learning_rates)
    differences = dict.fromkeys(space.tasks, DIFFERENCE / 100)
    seeds = dict.fromkeys(space.tasks, len(space.seeds))
    unknown_runs = [task for task, own in noise.items() if own.pretraining is None] if number > 1 else []
    planned = None
    if noise:
        several = 1 if unknown_runs else number
        families = {name: task.family for name, task in declared.items()}
        planned = planned_power(noise, families, models, seeds, rates, differences, runs=several)
    return PowerPlan(
        planned=planned,
        known=known,
        unknown=[task for task in space.tasks if task not in known],
        models=len(models),
        least=max(3, len(space.seeds)),
        unknown_runs=unknown_runs,
    )


def _in_points(own: KnownNoise) -> dict[str, Any]:
    noise = own.noise
    points = {"seeds": 100 * noise.seeds, "test_set": 100 * noise.test_set}
    points |= {} if noise.pretraining is None else {"pretraining": 100 * noise.pretraining}
    return asdict(noise) | points


def _noise_text(task: str, own: KnownNoise) -> str:
    parts = [f"{task} {100 * own.noise.seeds:.1f} points a seed"]
    if own.noise.pretraining is not None:
        parts.append(f"{100 * own.noise.pretraining:.1f} a pretraining run")
    if own.noise.test_set:
        parts.append(f"{100 * own.noise.test_set:.1f} by the test set")
    return text.listing(parts)


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _on(values: Mapping[str, str], unit: str) -> str:
    """Say values by task, with their unit once: 2.2 points on rte and 0.8 on mnli."""
    parts = [f"{value}{'' if place else f' {unit}'} on {task}" for place, (task, value) in enumerate(values.items())]
    return text.listing(parts, most=len(parts))

"""Plans of studies: how much of one the store has, what a run would do now, what pretraining costs, and replications of papers."""

from __future__ import annotations

import html
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlmclm.errors import EnvironmentFault, UserError, unknown
from mlmclm.models.sizes import SIZES, TITLES, Size, parameters
from mlmclm.numbers import rate_text, time_text
from mlmclm.plans.costs import Pricing
from mlmclm.plans.devices import DEFAULT_DEVICE, DEFAULT_UTILISATION, HERE, Device
from mlmclm.plans.names import parse_name
from mlmclm.plans.recipe import Recipe
from mlmclm.plans.stages import Plan, Stage, make_plan
from mlmclm.plans.suite import Suite, find_suite
from mlmclm.progress import say
from mlmclm.reports.charts import Axis, Chart, Stripe, Style
from mlmclm.reports.drawing import LOOKS, Figure
from mlmclm.reports.templating import render
from mlmclm.seeds import Seed, seed_labels, seed_value
from mlmclm.storage.place import REPLICATIONS
from mlmclm.studies.power_plan import PowerPlan, power_plan
from mlmclm.studies.study_file import StudyFile, load_study
from mlmclm.studies.study_record import grid_of_study, since_last
from mlmclm.studies.study_sweep import StudySweep
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.sweeps.zero_shot import evaluations_there, zero_shot_tasks

if TYPE_CHECKING:
    from mlmclm.sweeps.estimate import Range, SweepEstimate

REPLICATED, SCALES = ("study", "ettin"), ("tiny", "small")
"""The papers that packaged studies replicate, and the scales at which they do."""
_LANE_PIXELS = 26
_BAR_PIXELS = 18


@dataclass(frozen=True)
class PlannedStage:
    """A stage of pretraining, and how much of it is still to be trained."""

    title: str
    models: tuple[str, ...]
    steps: int
    steps_to_train: int


@dataclass(frozen=True)
class PlannedSweep:
    """The grid of a study, the number of its cells to compute, and the time and cost of these.

    Attributes:
        added: additions to the grid since the last run under this name.
        lost: settings that it has lost or changed since then.
        cells_waiting: number of cells whose starting weights are not chosen yet.
        cells_to_come: the maximum number of cells that results may add to `cells`, at further learning rates.
        power: the differences that the grid can show; None if it compares no models.
        start_from: task -> task whose best cell its cells start from.
        expected: the time of the `cells_estimated` cells without a result whose models and data exist; None if there
            are none, or no estimate is possible.
        price: of an hour of all workers, in any currency.
        evaluations: number of zero-shot evaluations, if there are any.
    """

    tasks: tuple[str, ...]
    learning_rates: tuple[float, ...]
    seeds: tuple[Seed, ...]
    added: tuple[str, ...]
    lost: tuple[str, ...]
    cells: int
    cells_to_compute: int
    cells_waiting: int = 0
    cells_to_come: int = 0
    start_from: Mapping[str, str] = field(default_factory=dict)
    expected: SweepEstimate | None = None
    cells_estimated: int = 0
    price: float | None = None
    evaluations: int | None = None
    evaluations_to_compute: int = 0
    power: PowerPlan | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        plain: dict[str, Any] = {
            "tasks": self.tasks,
            "learning_rates": self.learning_rates,
            "seeds": [seed_value(seed) for seed in self.seeds],
            "added_since_last_run": self.added,
            "changed_since_last_run": self.lost,
            "cells": self.cells,
            "cells_to_compute": self.cells_to_compute,
        }
        if self.power is not None:
            plain["power"] = self.power.as_dict()
        if self.cells_to_come:
            plain["cells_to_come_at_most"] = self.cells_to_come
        if self.start_from:
            plain |= {"cells_waiting": self.cells_waiting, "start_from": self.start_from}
        if self.expected is not None:
            work, hours = self.expected, self.expected.seconds.times(1 / 3600)
            plain |= {
                "cells_estimated": self.cells_estimated,
                "cells_not_estimated": self.cells_to_compute - self.cells_estimated,
                "trainings": work.trainings,
                "workers": work.workers,
                "device": work.device,
                "hours": asdict(hours),
                **({} if self.price is None else {"cost": asdict(hours.times(self.price))}),
            }
        if self.evaluations is not None:
            plain |= {"evaluations": self.evaluations, "evaluations_to_compute": self.evaluations_to_compute}
        return plain

    def lines(self) -> Iterator[str]:
        """Yield the plan in words."""
        yield f"tasks: {', '.join(self.tasks)}"
        yield f"learning rates: {', '.join(map(rate_text, self.learning_rates))}"
        yield f"seeds: {', '.join(seed_labels(self.seeds))}"
        for line in self.added:
            yield f"since the last run under this name: {line}"
        for line in self.lost:
            yield f"since the last run under this name: {line}; needs another name, or --replace"
        yield f"cells: {self.cells_to_compute:,} of {self.cells:,} to compute"
        if self.cells_to_come:
            yield f"and at most {self.cells_to_come:,} at further learning rates, where the best is the lowest or the highest"
        if self.cells_waiting:
            starts = ", ".join(f"{task} from {source}" for task, source in self.start_from.items())
            yield f"{self.cells_waiting:,} of them wait for the cell with the best validation score to start from ({starts})"
        if self.expected is not None:
            yield from self._expected_lines(self.expected)
        elif not self.cells_estimated and self.cells_to_compute > self.cells_waiting:
            yield "time: unknown, as these cells have no models or no prepared data yet"
        if self.evaluations is not None:
            yield f"zero-shot evaluations: {self.evaluations_to_compute:,} of {self.evaluations:,} to compute"
        if self.power is not None:
            yield from self.power.lines()

    def _expected_lines(self, work: SweepEstimate) -> Iterator[str]:
        def between(span: Range, text: Callable[[float], str]) -> str:
            return f"{text(span.value)} ({text(span.low)} to {text(span.high)})"

        hours = work.seconds.times(1 / 3600)
        if work.trainings < self.cells_estimated:
            shared = self.cells_estimated - work.trainings
            yield f"trainings: {work.trainings:,}; {shared:,} cells share that of another cell"
        yield f"time: {between(hours, time_text)} at {work.workers} cells at once on {work.device}"
        if left := self.cells_to_compute - self.cells_estimated:
            yield f"not in the time: {left:,} cells whose models or data do not exist yet"
        if self.cells_to_come:
            yield f"not in the time: at most {self.cells_to_come:,} cells that results may add"
        if self.price is not None:
            yield f"cost: {between(hours.times(self.price), '{:,.2f}'.format)}"


@dataclass(frozen=True)
class StudyPlan:
    """Work that a run of a study would do now; nothing was computed. `str(plan)` says it in words.

    Attributes:
        kind: `study` if its models are trained, `sweep` if they are given.
        corpus_source: where the text comes from. This and `corpus` are empty if models are given.
        corpus: `prepared` or `to be prepared`.
        initial: size -> the model that models of this size continue from.
        models: given models -> where they come from.
        sweep: None if the study has no search space, or only its pretraining was asked about.
        fault: why the command could not run now, such as a corpus that cannot be looked up without a network.
    """

    kind: str
    name: str
    store: Path
    corpus_source: str = ""
    corpus: str = ""
    initial: Mapping[str, str] = field(default_factory=dict)
    stages: tuple[PlannedStage, ...] = ()
    models: Mapping[str, str] = field(default_factory=dict)
    sweep: PlannedSweep | None = None
    fault: EnvironmentFault | None = None

    @property
    def steps_to_train(self) -> int:
        """The number of optimiser steps that are still to be trained."""
        return sum(stage.steps_to_train for stage in self.stages)

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain values, as `--dry-run --json` prints it."""
        plain: dict[str, Any] = {self.kind: self.name, "store": str(self.store)}
        if self.kind == "sweep":
            plain["models"] = dict(self.models)
        else:
            plain |= {
                "corpus": self.corpus,
                **({"initial": dict(self.initial)} if self.initial else {}),
                "stages": [asdict(stage) for stage in self.stages],
                "steps_to_train": self.steps_to_train,
            }
        return plain | (self.sweep.as_dict() if self.sweep is not None else {})

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _repr_html_(self) -> str:
        """Return the plan as a notebook shows it."""
        return f"<pre>{html.escape(str(self))}</pre>"

    def _lines(self) -> Iterator[str]:
        yield f"{self.kind} {self.name}: nothing is computed now (--dry-run)"
        if self.corpus:
            yield f"corpus {self.corpus_source}: {self.corpus}"
        for size, source in self.initial.items():
            yield f"models {size}: continue from {source}"
        for stage in self.stages:
            left = f"{stage.steps_to_train:,} of {stage.steps:,} steps to train"
            yield f"stage {stage.title}: {left if stage.steps_to_train else 'done'}"
        for name, source in self.models.items():
            yield f"model {name}: {source}"
        if self.sweep is not None:
            yield from self.sweep.lines()


def plan_of_sweep(sweep: StudySweep, *, workers: int | None, price: float | None) -> PlannedSweep:
    """Return the plan of a study's sweep.

    Args:
        sweep: the study's sweep with the models and tasks that exist.
        workers: cells that are computed at once; None for as many as this machine can.
        price: of an hour of all workers, in any currency.
    """
    file, place, space, planned = sweep.file, sweep.place, sweep.space, sweep.plan()
    changed = since_last(place.study_folder(file.name), grid_of_study(sweep))
    missing = ResultsStore(place.store).missing(planned.cells)
    added = [cell for cell in planned.cells if cell.learning_rate not in space.learning_rates]
    total = len(file.models) * space.cells_a_model + len(added)
    to_come = planned.to_come
    if space.learning_rates.most:  # for models not planned yet, the maximum is counted
        unplanned = set(file.models) - {cell.model for cell in planned.cells}
        to_come += len(unplanned) * sum(map(space.cells_added_at_most, space.tasks))
    to_compute = total - len(planned.cells) + len(missing)
    waiting = 0
    if space.start_from:
        # A cell has no key until its start is resolved: it is chosen, or impossible because every candidate diverged.
        unnamed = len(file.models) * sum(map(space.cells_of, space.start_from))
        named = sum(cell.start is not None for cell in planned.cells) - sum(cell.start is not None for cell in added)
        waiting = unnamed - named - sum(planned.blocked.values())
    expected = None
    if missing:
        from mlmclm.sweeps.estimate import estimate_time, places_here

        try:
            workers = workers or places_here(space)
            expected = estimate_time(
                planned.cells, missing, store=place.store, data_root=place.data_root, workers=workers
            )
        except UserError as error:
            say(f"no estimate of the time: {error}")
    zero_shot = zero_shot_tasks(file.zero_shot, file.folder, place)
    evaluations = None if zero_shot is None else len(file.models) * len(zero_shot.tasks)
    done = (
        0 if zero_shot is None else evaluations_there((swept.model for swept in sweep.models), sweep.place, zero_shot)
    )
    return PlannedSweep(
        tasks=space.tasks,
        learning_rates=space.learning_rates,
        seeds=space.seeds,
        added=changed.added,
        lost=changed.lost,
        cells=total,
        cells_to_compute=to_compute,
        cells_waiting=waiting,
        cells_to_come=to_come,
        start_from=space.start_from,
        expected=expected,
        cells_estimated=len(missing),
        price=price,
        evaluations=evaluations,
        evaluations_to_compute=(evaluations or 0) - done,
        power=power_plan(sweep, planned.cells, complete=not to_compute),
    )


@dataclass(frozen=True)
class PricedPlan:
    """A plan, its cost, and the suite whose models it trains, if any."""

    plan: Plan
    pricing: Pricing
    suite: Suite | None

    def as_dict(self) -> dict[str, Any]:
        """Return the plan and its costs as plain values."""
        plan, pricing = self.plan, self.pricing
        cost, alone = pricing.plan(plan), pricing.states(plan.alone)
        return {
            "models": [str(name) for name in plan.models],
            "stages": [self._stage(stage) for stage in plan.tree()],
            "steps": plan.steps,
            "steps_without_sharing": plan.steps_alone,
            "steps_shared": plan.steps_shared,
            "tokens": cost.tokens,
            "tokens_without_sharing": alone.tokens,
            "flops": cost.flops,
            "flops_without_sharing": alone.flops,
            "device_hours": cost.device_hours,
            "device_hours_without_sharing": alone.device_hours,
            "sizes": self.sizes(),
            "utilisation": pricing.utilisation,
            "device": {"name": pricing.device_name, **asdict(pricing.device)},
            **({} if self.suite is None else self.suite.model_dump(mode="json", include={"mixes", "departures"})),
        }

    def _stage(self, stage: Stage) -> dict[str, Any]:
        plan, cost = self.plan, self.pricing.stage(stage)
        return {
            "objective": str(stage.objective),
            "size": stage.end.size,
            "from": stage.start.step,
            "starts_from": str(stage.start),
            "depth": plan.depth(stage),
            "to": stage.end.step,
            "deposits": [state.step for state in stage.states],
            "stretches": [
                {"from": part.start, "to": part.stop, "models": list(part.models)} for part in plan.stretches(stage)
            ],
            "tokens": cost.tokens,
            "flops": cost.flops,
            "device_hours": cost.device_hours,
            "models": list(stage.models),
        }

    def sizes(self) -> dict[str, dict[str, Any]]:
        """Return architecture, vocabulary and parameters of each size of the plan's models, in order."""
        plan, pricing, sizes = self.plan, self.pricing, dict[str, dict[str, Any]]()
        for size in dict.fromkeys(name.size for name in plan.models):
            shape, rows = pricing.sizes[size], pricing.rows(size)
            whose = "its own" if shape.vocabulary is not None else "as given"
            if shape.vocabulary is None and pricing.vocabulary is None:
                whose = f"as published: {TITLES[shape.architecture]}"
            facts = {"architecture": shape.architecture, "vocabulary": rows, "vocabulary_of": whose}
            sizes[size] = {**facts, "parameters": parameters(shape, rows)}
        return sizes


def price_plan(
    names: Sequence[str] = (),
    *,
    suite: str | None = None,
    study: Path | None = None,
    device: str | None = None,
    vocabulary: int | None = None,
    utilisation: float = DEFAULT_UTILISATION,
) -> PricedPlan:
    """Return the plan of models and its costs; a study gives the recipe, and the models unless some are named.

    Args:
        names: model names.
        suite: name or file of a suite, in place of names.
        study: a study file, or the name of a packaged study.
        device: the device whose hours are counted; for the models of a study, by default this machine, measured.
        vocabulary: its size in tokens; by default the study's, else the published models'.
        utilisation: share of the device's peak that is assumed to be reached.

    Raises:
        UserError: a name, the suite or the study is wrong, or there is nothing to plan.
    """
    if names and suite is not None:
        raise UserError("plan: name models or give --suite, not both.")
    file = load_study(study) if study is not None else None
    recipe = file.recipe if file is not None else Recipe()
    sizes = file.sizes if file is not None else tuple(SIZES)
    chosen = find_suite(suite, sizes) if suite is not None else None
    if chosen is not None:
        sources = file.corpora if file is not None else ()
        models = chosen.parsed
        recipe = chosen.recipe_over(recipe, where=f"--suite {suite}: recipe", sources=sources)
    elif names or file is not None:
        models = tuple(parse_name(name, sizes) for name in names or (file.models if file is not None else ()))
    else:
        raise UserError("plan: name at least one model, or give --suite or --study.")
    plan = make_plan(models, recipe)
    if vocabulary is None and file is not None and file.tokenizer is not None:
        vocabulary = file.tokenizer.train_vocab_size
    shapes = _shapes(file, {name.size for name in models}) if file is not None else {}
    device = device or (HERE if file is not None and suite is None else DEFAULT_DEVICE)
    machine = _this_machine(recipe) if device == HERE else None
    return PricedPlan(plan, Pricing(recipe, vocabulary, device, utilisation, {**SIZES, **shapes}, machine), chosen)


def _this_machine(recipe: Recipe) -> Device:
    # Printed before the import, which takes long because it loads torch.
    say("measuring this machine (--device names another)")
    from mlmclm.pretraining.speed import this_machine

    return this_machine(bf16=recipe.precision != "fp32")


def _shapes(file: StudyFile, sizes: set[str]) -> dict[str, Size]:
    """Return the shapes of the models to continue from, read from their configurations alone."""
    sources = {size: source for size, source in file.initial.items() if size in sizes}
    if not sources:
        return {}
    from mlmclm.pretraining.initial import source_sizes

    return source_sizes(sources, beside=file.folder)


def plan_page(plan: Plan, pricing: Pricing) -> str:
    """Return a self-contained HTML page; steps run to the right, and a stage's children are in the lanes below it.

    The number on a bar is the number of models that share its steps, which are trained once; pointing at the bar shows
    their names.
    """
    stages = plan.tree()
    lane = {stage: number for number, stage in enumerate(stages)}
    steps = Axis.numbers([0, *(stage.end.step for stage in stages)], "optimiser steps", tight=True)
    chart = Chart(steps, Axis.names([stage.title for stage in stages]), _LANE_PIXELS * len(stages))
    for stage in stages:
        parent = plan.parent(stage)
        if parent is not None:
            # Connects a stage to its parent at the step at which it branches off.
            chart.upright(stage.start.step, Style("branch"), (lane[parent], lane[stage]))
    objectives = sorted({str(stage.objective) for stage in stages})
    legend = tuple(
        (objective, Style(LOOKS[number % len(LOOKS)], number)) for number, objective in enumerate(objectives)
    )
    for objective, style in legend:
        chart.series(style)
        for stage in stages:
            if str(stage.objective) == objective:
                for part in plan.stretches(stage):
                    words = "\n".join((f"steps {part.start:,} to {part.stop:,}, for", *part.models))
                    shared = str(len(part.models)) if len(part.models) > 1 else ""
                    chart.add(Stripe(part.start, part.stop, lane[stage], _BAR_PIXELS, words, shared))
    cost, alone = pricing.plan(plan), pricing.states(plan.alone)
    subtitle = (
        f"{cost.steps:,} steps, {alone.steps:,} if each model were trained alone; {cost.flops:.3g} FLOPs, {cost.device_hours:,.0f} hours of one "
        f"{pricing.device.title} at {pricing.utilisation:.0%} of its peak"
    )
    title = f"{len(plan.models)} models in {len(stages)} stages"
    alt = "Bars: the stages of the plan against optimiser steps, coloured by objective."
    return render("plan.html.j2", figure=Figure("plan", title, chart, alt, subtitle, legend))


def replication_of(paper: str, scale: str) -> str:
    """Return the name of the packaged study that replicates a paper (`REPLICATED`) at a scale (`SCALES`).

    Raises:
        UserError: there is no such paper or scale.
    """
    if paper not in REPLICATED:
        raise unknown("paper", paper, REPLICATED)
    if scale == "paper":
        suite = "paper" if paper == "study" else paper
        raise UserError(
            f"--scale paper: plans and prices of the papers' own scale are `mlmclm plan --suite {suite} --price HOUR`."
        )
    if scale not in SCALES:
        raise unknown("scale", scale, SCALES, where="--scale")
    return f"replicate-{paper}-{scale}"


def write_replication(name: str, folder: Path) -> list[Path]:
    """Copy a packaged replication to a folder, with the tasks that it names; return the paths, the study's first.

    Raises:
        UserError: a file is there already.
    """
    source = REPLICATIONS / f"{name}.yaml"
    zero_shot = load_study(source).zero_shot
    declared = [REPLICATIONS / task for task in (zero_shot.tasks if zero_shot else ()) if task.endswith(".yaml")]
    tasks = [file for task in declared for file in sorted(task.parent.glob(f"{task.stem}.*"))]
    files = {file: folder / file.relative_to(REPLICATIONS) for file in (source, *tasks)}
    for target in files.values():
        if target.exists():
            raise UserError(f"{target}: it exists and is not overwritten; name another folder.")
    for file, target in files.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    return list(files.values())

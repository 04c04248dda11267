"""Cells as Ray Tune trials, for a `tune.Tuner` with any search algorithm, scheduler and callbacks.

    from ray import tune
    import mlmclm

    space = mlmclm.tune.param_space("quickstart", ["1m-clm-1k", "1m-mlm40-1k"])
    results = tune.Tuner(mlmclm.tune.Finetune, param_space=space).fit()
    results.get_best_result("score", "max")

A trial is a cell (model, task, learning rate, seed), or several that share one training. `Finetune` is also the trainable of `mlmclm sweep`: a result that
the store has is not computed again, and a new one is saved there. With `tune.TuneConfig(reuse_actors=True)`, models and data stay in the processes.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self, Unpack

import numpy as np
from ray import tune

from mlmclm.arguments import StudyFolders, known_arguments
from mlmclm.cluster.placement import (
    SMALLER,
    Resources,
    amounts,
    cell_bundle,
    check_place,
    describe_cluster,
    may_get_places,
)
from mlmclm.configuration import parse_config
from mlmclm.errors import UserError, unknown
from mlmclm.finetuning.cell import Cell, cell_key, training_key
from mlmclm.finetuning.protocol import Protocol, overridden
from mlmclm.member_code import own_code
from mlmclm.numbers import rate_text
from mlmclm.progress import say
from mlmclm.registry import Shipment, shipment
from mlmclm.seeds import Seeds, read_seed, seed_value
from mlmclm.storage.files import stable_hash
from mlmclm.studies.api import sweep
from mlmclm.studies.study_sweep import StudySweep, SweptModel, plan_sweep
from mlmclm.sweeps.cells import seed_label
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.sweeps.space import FIXED
from mlmclm.sweeps.trainable import Finetune
from mlmclm.sweeps.trial import SWEEP, SweepTrial, Training, trainings_of

__all__ = ["Finetune", "param_space", "trial_name"]

AXES = ("model", "task", "learning_rate", "seed")
"""Entries that each trial's config has; all others are settings in place of the protocol's."""


@known_arguments
def param_space(
    space: str | Path | Mapping[str, Any],
    models: Sequence[str] | Mapping[str, str],
    *,
    tasks: Sequence[str] | None = None,
    report_every: int | None = None,
    sampled: bool = False,
    **folders: Unpack[StudyFolders],
) -> dict[str, Any]:
    """Return a search space as `param_space` of a `tune.Tuner`; models are checked and tasks tokenised now.

    It is a dict with the models, tasks, learning rates, seeds and, if the space has a `grid`, its settings. Change an
    entry to search otherwise: `space | {"learning_rate": tune.loguniform(1e-4, 1e-2)}`. An entry with the name of another
    setting of the protocol (`weight_decay`, `epochs`) searches that one too.

    Args:
        space: the search space: a packaged one, such as `quickstart`, a YAML file, or the values of one.
        models: each a folder, a name in a study of the store (NAME, STUDY/NAME, or STUDY/* for all), or a name on the
            Hugging Face Hub; a mapping gives names of your own.
        tasks: names of tasks; None for those of the space.
        report_every: training steps between a trial's reports. By default it reports when the protocol evaluates, or
            after each epoch.
        sampled: for algorithms that draw values, such as Optuna: learning rates log-uniform between the space's lowest
            and highest, and `tune.choice` for all else, in place of the whole grid.
        folders: `StudyFolders`.

    Raises:
        UserError: a model, a task or a setting is wrong, or the tasks have different grids.
    """
    if report_every is not None and (not isinstance(report_every, int) or report_every < 1):
        raise UserError(f"report_every {report_every!r}: a number of steps, from 1 on.")
    swept = sweep(models, tasks, space, **folders).sweep(prepare=True)
    axes_by_task = {task: swept.space.axes_of(task) for task in swept.space.tasks}
    first = axes_by_task[swept.space.tasks[0]]
    differing = [task for task, axes in axes_by_task.items() if axes != first]
    if differing:
        raise UserError(
            f"tasks {swept.space.tasks[0]} and {differing[0]} have different grids: make a param_space for each, with "
            "`tasks`."
        )
    rates, seeds = swept.space.learning_rates, [seed_value(seed) for seed in swept.space.seeds]
    axes: dict[str, Sequence[Any]] = {"model": list(swept.file.models), "task": _tasks(swept), "seed": seeds, **first}
    pick = tune.choice if sampled else tune.grid_search
    entries = {name: pick(list(values)) if len(values) > 1 else values[0] for name, values in axes.items()}
    if len(rates) == 1:
        rate: Any = rates[0]
    else:
        rate = tune.loguniform(min(rates), max(rates)) if sampled else tune.grid_search(list(rates))
    models_and_data = [
        [model.model.weights, {name: task.task_data for name, task in model.tasks.items()}] for model in swept.models
    ]
    where = [str(swept.place.store), report_every, sampled]
    key = stable_hash([axes, rates, models_and_data, swept.space.model_dump(mode="json"), *where])[:12]
    return ParamSpace({**entries, "learning_rate": rate, SWEEP: {key: TunedSweep(shipment(), swept, report_every)}})


class ParamSpace(dict[str, Any]):
    """A search space whose key changes with its entries: a restored experiment would silently have the old values, but Ray refuses another key.

    The same change gives the same key in every process (`member_code`). If no hash can be made of a change, its key is random, so an
    experiment with it cannot be restored.
    """

    def update(self, changes: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Change entries."""
        super().update(changes)
        ((key, swept),) = self[SWEEP].items()
        try:
            code = own_code(dict(changes)).hash
        except ValueError:
            code = uuid.uuid4().hex
        super().__setitem__(SWEEP, {stable_hash([key, code])[:12]: swept})

    def __setitem__(self, name: str, value: Any) -> None:
        self.update({name: value})

    def __or__(self, changes: Mapping[str, Any]) -> ParamSpace:  # type: ignore[override]
        changed = ParamSpace(self)
        changed.update(changes)
        return changed

    __ior__ = __or__  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return ParamSpace, (dict(self),)


def trial_name(trial: Any) -> str:
    """Return the name of a trial as a sweep has it, `1m-clm-1k/sst2/lr1e-3/s0`, for `tune.TuneConfig(trial_name_creator=...)`.

    Other settings in its config come before the seed: `.../lr1e-3/epochs2/s0`. A wrong value raises an error in the trial, not in this
    function. Values of `tune.sample_from`, which are drawn after trials are named, are `sampled`.
    """
    # At this point the config lacks the sweep, which Ray adds later, and has tuples in place of functions.
    config = {
        name: "sampled" if isinstance(value, tuple) else _as_python(value) for name, value in trial.config.items()
    }
    rate: Any = config.get("learning_rate")
    seed: Any = config.get("seed")
    with suppress(TypeError):
        rate = rate_text(rate)
    with suppress(ValueError):
        seed = seed_label(read_seed(seed))
    settings = [f"{name}{value}" for name, value in _settings(config).items()]
    point = ["-".join(settings)] if settings else []
    return "/".join([str(config.get("model")), str(config.get("task")), f"lr{rate}", *point, str(seed)])


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a config that are values of the protocol's settings."""
    return {name: value for name, value in config.items() if name not in (*AXES, SWEEP)}


def _as_python(value: Any) -> Any:
    """Return a value of a config as Python's own; numpy's are common in search spaces."""
    return value.item() if isinstance(value, np.generic) else value


def _tasks(swept: StudySweep) -> list[str]:
    """Return the tasks of a sweep's trials; those that share a training as one, `mnli+mnli_mm`."""
    space = swept.space
    alike = [
        cell
        for cell in swept.plan().cells
        if cell.learning_rate == space.learning_rates[0] and Seeds.of(cell.seed) == Seeds.of(space.seeds[0])
    ]
    shared = [training.task for training in trainings_of({cell_key(cell): cell for cell in alike})]
    # Tasks that start from a best cell that is not known yet have no planned cells.
    planned = {task for group in shared for task in group.split("+")}
    groups = dict.fromkeys([*shared, *(task for task in space.tasks if task not in planned)])
    return sorted(groups, key=lambda group: space.tasks.index(group.partition("+")[0]))


@dataclass(frozen=True, repr=False)
class TunedSweep:
    """The models and tasks that all trials share, ready for fine-tuning, and the members that the driver has registered."""

    registered: Shipment  # first, since the others may need its members when they arrive
    made: StudySweep
    report_every: int | None

    def __deepcopy__(self, memo: Any) -> Self:
        # Tune copies every config several times.
        return self

    def __repr__(self) -> str:
        return f"<sweep in {self.made.place.store}>"

    def bundle(self) -> Resources:
        """Return the resources that a trial reserves: the space's `cpus_per_cell` and `gpus_per_cell`.

        Raises:
            UserError: no node of the cluster can ever offer them.
        """
        return self._bundle

    @cached_property  # Tune asks for each trial, and a look at the cluster takes long
    def _bundle(self) -> Resources:
        from mlmclm.cluster.cluster import cluster_view

        space, cluster = self.made.space, cluster_view()()
        bundle = cell_bundle(space.cpus_per_cell, space.gpus_per_cell, self.made.file.device, cluster)
        if may_get_places(cluster, bundle, 1):  # Tune waits for ever, and says so much later
            say(
                f"waiting for nodes: no node has {amounts(bundle)} for a trial yet: {describe_cluster(cluster)}. {SMALLER}"
            )
        else:
            check_place("A trial", bundle, cluster, remedy=SMALLER)
        return bundle

    def trial(self, config: Mapping[str, Any]) -> SweepTrial:
        """Return the cell of a trial with this config.

        Raises:
            UserError: a value is not allowed, or the cells that choose the starting weights have no results yet.
        """
        for name in (name for name in AXES if name not in config):
            raise UserError(f"{name}: the config needs one; its entries are {', '.join(AXES)} and settings.")
        model, task, rate = self._model(config["model"]), str(config["task"]), _as_python(config["learning_rate"])
        names = task.split("+")
        for name in (name for name in names if name not in model.space.tasks):
            raise unknown("task", name, model.space.tasks, where="task")
        if len({*names}) < len(names):
            raise UserError(f"task {task}: each task may be in it once.")
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < 1:
            raise UserError(f"learning_rate {rate!r}: a learning rate is a number between 0 and 1.")
        try:
            seed = read_seed(_as_python(config["seed"]))
        except ValueError as error:
            raise UserError(f"seed {config['seed']!r}: {error}.") from error
        settings = _settings(config)
        starts = [self._cell(model, name, settings) for name in names]
        place, (first, source) = self.made.place, starts[0]
        cells = [replace(cell, learning_rate=float(rate), seed=seed) for cell, _ in starts]
        if len({training_key(cell) for cell in cells}) > 1:
            raise UserError(f"task {task}: with these settings, these tasks share no training; give one of them.")
        rows = model.tasks[first.task].sizes["train"][0]
        protocol = first.protocol
        every = self.report_every or protocol.evaluate_every or math.ceil(rows / protocol.batch_size)
        filed = {cell_key(cell): cell for cell in ResultsStore(place.store).as_filed(cells)}
        return SweepTrial((Training(filed),), place.store, place.data_root, source=source, every=every, by_itself=True)

    def _cell(self, model: SweptModel, task: str, settings: Mapping[str, Any]) -> tuple[Cell, Cell | None]:
        """Return a cell of a model on a task, at some rate and seed, and the cell that it starts from, if any."""
        source = model.space.start_from.get(task)
        tasks = (task,) if source is None else (source, task)
        starts = {} if source is None else {task: source}
        # With a start, all models are planned, because learning rates are added for all models together.
        narrowed = [
            replace(
                swept,
                space=swept.space.model_copy(update={"tasks": tasks, "start_from": starts}),
                tasks={name: swept.tasks[name] for name in tasks},
            )
            for swept in (self.made.models if source else (model,))
        ]
        planned = plan_sweep(narrowed, self.made.place)
        like = next((cell for cell in planned.cells if (cell.model, cell.task) == (model.model.name, task)), None)
        if like is None:
            whom = "all models" if model.space.learning_rates.most else model.model.name
            raise UserError(
                f"task {task} starts from the model's best {source} cell: fine-tune {whom} on {source} over the "
                "space's learning rates and seeds first."
            )
        for axis in model.space.axes_of(task):
            if axis not in settings:
                raise UserError(f"{axis}: the space's grid has several values of it; the config needs one.")
        for name in (name for name in settings if name in FIXED):
            raise UserError(f"{name}: it cannot be searched, because tasks are tokenised once; set it in the space.")
        protocol = parse_config(Protocol, overridden(like.protocol.model_dump(), settings), where="config")
        start = planned.sources[like.start.key] if like.start else None
        return replace(like, weights=model.model.weights, protocol=protocol, setting=""), start

    def _model(self, name: str) -> SweptModel:
        by_name = {swept.model.name: swept for swept in self.made.models}
        if not isinstance(name, str) or name not in by_name:
            raise unknown("model", name, by_name, where="model")
        return by_name[name]

"""Cells as Ray Tune trials, for a `tune.Tuner` with any search algorithm, scheduler and callbacks.

    from ray import tune
    import mlmclm

    space = mlmclm.tune.param_space("quickstart", ["1m-clm-1k", "1m-mlm40-1k"])
    results = tune.Tuner(mlmclm.tune.Finetune, param_space=space).fit()
    results.get_best_result("score", "max")

A trial is a cell, the same one as in a sweep: with a result in the ledger it ends at once, and a new result is filed
there. A whole grid is computed faster by `mlmclm sweep`, whose workers keep models and data from cell to cell.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from ray import tune

from mlmclm.backends.device_kinds import Device
from mlmclm.cluster.placement import cell_bundle, device_of, no_gpu
from mlmclm.configuration import parse
from mlmclm.errors import EnvironmentFault, UserError, unknown
from mlmclm.finetuning.cell import CELL_THREADS, Cell, cell_key, shapes_of
from mlmclm.finetuning.kept import KeptEncoder
from mlmclm.finetuning.protocol import Protocol, overridden
from mlmclm.results.metrics import value_of
from mlmclm.seeds import read_seed, seed_value
from mlmclm.studies.door import sweep
from mlmclm.studies.place import Place, StudyFolders, known_arguments
from mlmclm.studies.study_sweep import StudySweep, SweptModel, plan_sweep
from mlmclm.sweeps.cells import cell_name
from mlmclm.sweeps.ledger import Ledger
from mlmclm.sweeps.protocols import FIXED

SWEEP = "sweep"
"""Entry of a trial's config that all trials share."""
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
    entry to search otherwise: `| {"learning_rate": tune.loguniform(1e-4, 1e-2)}`. An entry with the name of another
    setting of the protocol (`weight_decay`, `epochs`) searches that one too.

    Args:
        space: the search space: a packaged one, such as `quickstart`, a YAML file, or the values of one.
        models: each a folder, a name in a study of the store (NAME, STUDY/NAME, or STUDY/* for all), or a name on the
            Hugging Face Hub; a mapping gives names of your own.
        tasks: names of tasks; None for those of the space.
        report_every: training steps between a trial's reports. By default it reports when the protocol evaluates, or
            after each epoch.
        sampled: for algorithms that draw values, such as Optuna: learning rates log-uniform between the space's lowest
            and highest, and a choice of all else, in place of the whole grid.
        folders: `StudyFolders`.

    Raises:
        UserError: a model, a task or a setting is wrong, or the tasks have different grids.
    """
    made = sweep(models, tasks, space, **folders).sweep(prepare=True)
    own = {task: made.space.axes_of(task) for task in made.space.tasks}
    first = own[made.space.tasks[0]]
    differing = [task for task, axes in own.items() if axes != first]
    if differing:
        raise UserError(
            f"tasks {made.space.tasks[0]} and {differing[0]} have different grids: make a param_space for each, with "
            "`tasks`."
        )
    rates, seeds = made.space.learning_rates, [seed_value(seed) for seed in made.space.seeds]
    axes: dict[str, Sequence[Any]] = {"model": list(made.file.models), "task": made.space.tasks, "seed": seeds, **first}
    pick = tune.choice if sampled else tune.grid_search
    found = {name: pick(list(values)) if len(values) > 1 else values[0] for name, values in axes.items()}
    if len(rates) == 1:
        rate: Any = rates[0]
    else:
        rate = tune.loguniform(min(rates), max(rates)) if sampled else tune.grid_search(list(rates))
    return {**found, "learning_rate": rate, SWEEP: TunedSweep(made, report_every)}


@dataclass(frozen=True, repr=False)
class TunedSweep:
    """Models and tasks, ready to be fine-tuned, that all trials share."""

    made: StudySweep
    report_every: int | None

    def __repr__(self) -> str:
        return f"<sweep in {self.made.place.store}>"

    def trial(self, config: Mapping[str, Any]) -> TunedCell:
        """Return the cell of a trial with this config.

        Raises:
            UserError: a value is not allowed, or the cells that choose the starting weights have no results yet.
        """
        model = self._model(config["model"])
        task, rate = config["task"], float(config["learning_rate"])
        if task not in model.space.tasks:
            raise unknown("task", task, model.space.tasks, where="task")
        if not 0 < rate < 1:
            raise UserError(f"learning_rate {rate:g}: a learning rate is between 0 and 1.")
        try:
            seed = read_seed(config["seed"])
        except ValueError as error:
            raise UserError(f"seed {config['seed']!r}: {error}.") from error
        source = model.space.start_from.get(task)
        own = (task,) if source is None else (source, task)
        starts = {} if source is None else {task: source}
        # A start is chosen among learning rates that are added for all models together.
        narrowed = [
            replace(
                each,
                space=each.space.model_copy(update={"tasks": own, "start_from": starts}),
                tasks={name: each.tasks[name] for name in own},
            )
            for each in (self.made.models if source else (model,))
        ]
        planned = plan_sweep(narrowed, self.made.place)
        like = next((cell for cell in planned.cells if (cell.model, cell.task) == (model.model.name, task)), None)
        if like is None:
            whom = "all models" if model.space.learning_rates.most else model.model.name
            raise UserError(
                f"task {task} starts from the model's best {source} cell: fine-tune {whom} on {source} over the "
                "space's learning rates and seeds first."
            )
        settings = {name: value for name, value in config.items() if name not in (*AXES, SWEEP)}
        for axis in model.space.axes_of(task):
            if axis not in settings:
                raise UserError(f"{axis}: the space's grid has several values of it; the config needs one.")
        for name in (name for name in settings if name in FIXED):
            raise UserError(f"{name}: it cannot be searched, because tasks are tokenised once; set it in the space.")
        protocol = parse(Protocol, overridden(like.protocol.model_dump(), settings), where="config")
        cell = replace(like, weights=model.model.weights, protocol=protocol, learning_rate=rate, seed=seed, setting="")
        rows = model.tasks[task].sizes["train"][0]
        every = self.report_every or protocol.evaluate_every or math.ceil(rows / protocol.batch_size)
        (cell,) = Ledger(self.made.place.store).as_filed([cell])
        return TunedCell(cell, planned.sources[cell.start.key] if cell.start else None, every)

    def _model(self, name: str) -> SweptModel:
        by_name = {each.model.name: each for each in self.made.models}
        if name not in by_name:
            raise unknown("model", name, by_name, where="model")
        return by_name[name]


@dataclass(frozen=True)
class TunedCell:
    """A trial's cell.

    Attributes:
        source: the cell whose encoder it starts from, if any.
        every: training steps between reports.
    """

    cell: Cell
    source: Cell | None
    every: int

    def report(self, step: int, score: float, validation: Mapping[str, float], **more: Any) -> dict[str, Any]:
        """Return what Tune is told after this training step."""
        return {
            "score": score,
            "metric": self.cell.declared.metric,
            "validation": dict(validation),
            "model": self.cell.model,
            "task": self.cell.task,
            "learning_rate": self.cell.learning_rate,
            "seed": seed_value(self.cell.seed),
            "step": step,
            # Counted from the step: the only report on a recorded result is then as old as if it had been computed now.
            "training_iteration": math.ceil(step / self.every),
            **more,
        }


class Finetune(tune.Trainable):
    """Fine-tunes one cell; its config comes from `param_space`.

    Reports have `score` (the task's main metric on validation, by which to choose), all scores as `validation/NAME`,
    and `step`, of training. The last one has scores as `test/NAME` too, the cell's `key` and `status`, and says whether
    it was `computed` or found in the ledger. A diverged cell's score is NaN.

    A trial that a scheduler stops early leaves no result. One that is paused, or restored, is trained again up to where
    it was. A cell has one learning rate from beginning to end, so a scheduler that changes it (PBT) is an error.
    """

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        """Return the space's `cpus_per_cell` and `gpus_per_cell`; `tune.with_resources` sets others."""
        from mlmclm.cluster.cluster import cluster_view

        made = config[SWEEP].made
        space = made.space
        bundle = cell_bundle(space.cpus_per_cell, space.gpus_per_cell, made.file.device, cluster_view()())
        return tune.PlacementGroupFactory([dict(bundle)])

    def setup(self, config: dict[str, Any]) -> None:
        """Begin nothing yet, so that errors are those of the first step."""
        self._cache: dict[Any, Any] = {}
        self._given, self._reports = 0, self._trial(0)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Begin another trial with the models and data that this process holds."""
        self.cleanup()
        self.config = new_config
        self._given, self._reports = 0, self._trial(0)
        return True

    def step(self) -> dict[str, Any]:
        """Train until the next report."""
        report = next(self._reports)
        self._given += 1
        return report

    def cleanup(self) -> None:
        """Give up a cell that isn't finished, and the lease on it."""
        self._reports.close()

    def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
        """Save how far the trial is; its weights follow from that."""
        return {"config": _plain(self.config), "reports": self._given}

    def load_checkpoint(self, checkpoint: dict[str, Any] | None) -> None:
        """Train again up to where a trial of this config was, with the next step.

        Raises:
            UserError: the checkpoint is another config's.
        """
        if checkpoint is None or checkpoint["config"] != _plain(self.config):
            raise UserError(
                "a cell is trained with one config from beginning to end; use a scheduler that changes none."
            )
        self.cleanup()
        self._given = checkpoint["reports"]
        self._reports = self._trial(self._given)

    def _trial(self, skipped: int) -> Generator[dict[str, Any], None, None]:
        """Yield the reports of the trial, without the first ones; but its last one in any case."""
        trial = self.config[SWEEP].trial(self.config)
        place: Place = self.config[SWEEP].made.place
        cell, ledger = trial.cell, Ledger(place.store)
        key, computed = cell_key(cell), False
        # A sweep, or another trial, may be computing the same cell.
        with ledger.leased(key, cell_name(cell)):
            ledger.file_unfiled([key])
            if ledger.find(key) is None:
                computed = True
                for number, each in enumerate(self._compute(trial, place, ledger)):
                    if "key" in each:
                        ledger.write(each)
                    elif number >= skipped:
                        yield trial.report(each["step"], each["score"], each["validation"])
            result = ledger.filed(key)
        scores = result["scores"] or {}
        validation = scores.get("validation", {})
        score = value_of(validation, result["metric"]) if scores else math.nan
        ended = {"test": scores.get("test", {}), "key": key, "status": result["status"], "computed": computed}
        yield trial.report(result["diverged_step"] or result["steps"], score, validation, **ended, done=True)

    def _compute(self, trial: TunedCell, place: Place, ledger: Ledger) -> Iterator[dict[str, Any]]:
        """Yield what `run_training` does, in the state in which a sweep's worker computes a cell."""
        import torch

        from mlmclm.backends.choice import visible
        from mlmclm.finetuning.run import keep_encoder, run_training
        from mlmclm.models.warm_up import prepare

        device = self._device()
        if not visible(device):
            raise EnvironmentFault(no_gpu(platform.node()))
        torch.set_num_threads(CELL_THREADS)
        prepare(shapes_of([trial.cell]), print, device)
        options: dict[str, Any] = {
            "store": place.store,
            "data_root": place.data_root,
            "cache": self._cache,
            "device": device,
        }
        if trial.source is not None:
            kept = KeptEncoder(place.store, cell_key(trial.source))
            kept.ensure(partial(keep_encoder, trial.source, **options), title=cell_name(trial.source))
        yield from run_training([trial.cell], **options, on_examples=ledger.write_examples, report_every=trial.every)

    def _device(self) -> Device:
        resources = self.trial_resources
        return "cpu" if resources is None else device_of(resources.required_resources)


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a config that are a trial's own."""
    return {name: value for name, value in config.items() if name != SWEEP}

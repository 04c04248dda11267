"""Run of a sweep's missing cells as trials of one Ray Tune experiment.

The results store decides what is missing, so a sweep resumes when it is run again, however it was stopped. Tune's own
experiment state is neither needed nor kept.
"""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import cloudpickle, tune
from ray.tune.experiment import Trial
from ray.tune.progress_reporter import TrialProgressCallback
from ray.tune.schedulers import FIFOScheduler
from ray.tune.search import Searcher

from mlmclm.cluster.placement import SMALLER, amounts, check_place, describe_cluster, device_of
from mlmclm.environment import environment
from mlmclm.errors import EnvironmentFault
from mlmclm.finetuning.cell import Cell, cell_key, shapes_of
from mlmclm.models.warm_up import compile_kernels
from mlmclm.numbers import plural
from mlmclm.progress import say, say_once
from mlmclm.registry import shipment
from mlmclm.storage.leases import SECONDS_BETWEEN_LOOKS
from mlmclm.storage.temporary import swept_folder
from mlmclm.sweeps.cells import cell_name, named_result
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.sweeps.sweep_options import SweepOptions, SweepOutcome
from mlmclm.sweeps.sweep_progress import SweepProgress
from mlmclm.sweeps.sweep_trials import SweepTrials
from mlmclm.sweeps.table import SweepTable
from mlmclm.sweeps.trial import SWEEP

if TYPE_CHECKING:
    from ray.tune import ResultGrid

    from mlmclm.sweeps.sweep_trials import Results

SECONDS_UNTIL_VISIBLE = 120.0
"""How long a result that a trial has filed may stay invisible here: NFS caches names for up to a minute."""
TUNE_ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # per-trial CSV, JSON and TensorBoard files took a third of the time
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C may end the driver at once, since there is no state to save
    "TUNE_FORCE_TRIAL_CLEANUP_S": "10",  # seconds after which an actor that does not stop is killed
    "TUNE_GLOBAL_CHECKPOINT_S": "1000000000",  # seconds: the state grows with the trials and is never read
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",  # `SweepTrials` reports a crash in one line, and the outcome has the traceback
    "TUNE_WARN_THRESHOLD_S": "60",  # by default Tune warns of every step of its loop that takes half a second
    "RAY_AIR_NEW_OUTPUT": "0",  # the newer output engine prints a table at any verbosity
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # workers stay in their working directory
}


def run_sweep(cells: Sequence[Cell], options: SweepOptions) -> SweepOutcome:
    """Compute the cells that have no result yet, in the order in which they are given.

    Cells with equal keys are computed once.

    Returns:
        The results of all cells, new and old, and the cells without one. Errors of cells are there too, not raised; see
        `SweepOutcome.check`.

    Raises:
        UserError: a result file of the results store is damaged, or the cluster can never hold a cell (`placement.check_place`).
        EnvironmentFault: workers don't start, no nodes come, or a filed result doesn't become visible here.
    """
    # A worker need not have the driver's working directory.
    data_root = options.data_root.resolve() if options.data_root else None
    options = replace(options, store=options.store.resolve(), data_root=data_root)
    results_store = options.results_store or ResultsStore(options.store)
    if filed := results_store.file_unfiled():
        say(
            f"now filed at {results_store.folder}: {plural(filed, 'result')} of cells that were computed while it was out of reach"
        )
    # If two models have the same weights, their cells have one key. They are computed once and announced under each name.
    names_of: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        names_of[cell_key(cell)].append(cell)
    results = results_store.find_all(names_of)
    reused = len(results)
    table = SweepTable(cells)

    def announce(key: str, take: Callable[[dict[str, Any]], object]) -> None:
        for cell in names_of[key]:
            result = named_result(results[key], cell)
            take(result)
            if options.on_result is not None:
                options.on_result(result)

    for key in results:
        announce(key, table.add)
    missing = {key: alike[0] for key, alike in names_of.items() if key not in results}
    errors: dict[str, Exception] = {}
    computed, grids = 0, list["ResultGrid"]()
    if missing:
        available = results_store.availability
        progress = SweepProgress(missing.values(), table=table, reused=reused, notice=lambda: available.notice)
        available.on_change = progress.update
        with options.session():

            def on_filed(new: Results) -> None:
                for key, result in new.items():
                    results[key] = result
                    announce(key, progress.result)

            errors, computed, grids = _run_trials(missing, options, results_store, progress, on_filed)
            await_visible([cell for key, cell in missing.items() if key in results], results_store)
    return SweepOutcome(
        results=[named_result(results[key], cell) for cell in cells if (key := cell_key(cell)) in results],
        computed=computed,
        reused=len(results) - computed,
        failed=[(cell, errors[key]) for key, cell in missing.items() if key in errors],
        not_run=[cell for key, cell in missing.items() if key not in errors and key not in results],
        grids=grids,
    )


def _run_trials(
    missing: Mapping[str, Cell],
    options: SweepOptions,
    results_store: ResultsStore,
    progress: SweepProgress,
    on_filed: Callable[[Results], None],
) -> tuple[dict[str, Exception], int, list[ResultGrid]]:
    """Run the missing cells as a Tune experiment, and later those that other processes leased but did not finish.

    Returns:
        The errors of the cells that failed, by key, the number of cells computed here, and the experiments' results.
    """
    # Imported here, so that a run without missing cells doesn't wait for Ray Tune.
    import ray
    from ray import tune

    from mlmclm.cluster.cluster import await_nodes, cluster_view, report_waits
    from mlmclm.cluster.ray_cluster import check_node, computes_here
    from mlmclm.sweeps.run_sweep import CellSearch, SweepCallback, SweepScheduler
    from mlmclm.sweeps.shared_cluster import SharedCluster
    from mlmclm.sweeps.sweep_trials import SweepTrials
    from mlmclm.sweeps.trainable import Finetune
    from mlmclm.sweeps.trial import SweepTrial

    if not ray.is_initialized():
        raise RuntimeError("run_sweep needs a Ray session where cells are missing: pass one as `session`.")
    view = cluster_view()
    await_nodes(view, options.wait_for_nodes, options.bundle)
    resources = options.bundle(view())
    check_place("A cell", resources, view(), remedy=SMALLER)
    # Compile kernels once now, rather than in the workers that will start on this machine.
    if computes_here():
        compile_kernels(shapes_of(missing.values()), say_once, device_of(resources))
    errors, computed, grids = dict[str, Exception](), 0, list["ResultGrid"]()
    failures = defaultdict[tuple[str, ...], list[dict[str, str]]](list)
    left = dict(missing)
    shared = SharedCluster(resources, view)
    with (
        # Tune's storage has to be visible on every node, as the store is; nothing in it outlives the sweep.
        swept_folder(options.store, ".tune-") as storage,
        progress.shown(),
        report_waits("fine-tuning", view, all_of_them=True),
        shared.followed(),
        _unless_set(TUNE_ENVIRONMENT),
        # `SweepTrials` reports errors in one line each; Tune and Train would log their tracebacks as well.
        _level("ray.tune", logging.CRITICAL),
        _level("ray.train", logging.CRITICAL),
    ):
        like = SweepTrial(
            (), options.store, options.data_root, resources=resources, seen=storage, registered=shipment()
        )
        while left:
            check_node()  # compiling may have taken long
            trials = SweepTrials(
                left,
                progress,
                on_filed,
                results_store,
                options,
                like=like,
                shared=shared,
                failures=failures,
            )
            scheduler = SweepScheduler(trials)
            # `SweepTrials` limits how many trials wait for a place, so Tune must not.
            with _unless_set({"TUNE_MAX_PENDING_TRIALS_PG": str(len(left))}):
                tuner = tune.Tuner(
                    options.worker or Finetune,
                    tune_config=tune.TuneConfig(
                        num_samples=-1,  # without limit; the search ends it
                        search_alg=CellSearch(trials),
                        max_concurrent_trials=options.max_concurrent,
                        scheduler=scheduler,
                        reuse_actors=True,
                        trial_name_creator=lambda trial: trial.config[SWEEP].name,
                        trial_dirname_creator=lambda trial: trial.trial_id,
                    ),
                    run_config=tune.RunConfig(
                        name=f"{options.name}-{len(grids) + 1}",
                        storage_path=str(storage),
                        # `SweepTrials` gives a crashed training to a new trial, as often as its class of failure allows.
                        failure_config=tune.FailureConfig(max_failures=0),
                        # Tune would save each trial when it ends; the store has its result.
                        checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                        callbacks=[SweepCallback(trials)],
                        stop=scheduler,
                        verbose=0,
                    ),
                )
                grids.append(tuner.fit())
            if trials.broken is not None:  # raised here, because Tune would wrap an error of its callback
                raise trials.broken
            errors |= trials.errors
            computed += trials.computed
            if trials.fault:
                break
            unstarted = trials.waiting  # cells that the last trials put back as they ended
            if unstarted.keys() == left.keys() and not trials.hands_over:
                raise EnvironmentFault(f"all trials of the sweep ended, but {len(unstarted)} cells are not computed")
            left = unstarted | _left_by_others(trials.taken, results_store, progress, on_filed)
            if left and not shared.has_nodes:
                await_nodes(view, options.wait_for_nodes, lambda _: resources)
                if not shared.has_nodes:
                    raise EnvironmentFault(
                        f"Waited {options.wait_for_nodes:g} s (--wait-for-nodes), and no node has {amounts(resources)} for a cell: "
                        f"{describe_cluster(view())}. All results are kept: run the same command again when the nodes are back."
                    )
    return errors, computed, grids


def await_visible(cells: Sequence[Cell], results_store: ResultsStore) -> None:
    """Wait until the results of cells, which workers have filed, can be seen here too.

    Raises:
        EnvironmentFault: one can still not be seen after `SECONDS_UNTIL_VISIBLE`.
    """
    deadline = time.monotonic() + SECONDS_UNTIL_VISIBLE
    while unseen := results_store.missing(cells):
        if time.monotonic() > deadline:
            raise EnvironmentFault(
                f"{cell_name(unseen[0])}: a worker filed this result {SECONDS_UNTIL_VISIBLE:.0f} s ago, but it isn't visible here "
                f"(key {cell_key(unseen[0])}). Is the store shared by all nodes?"
            )
        time.sleep(SECONDS_BETWEEN_LOOKS)


def _left_by_others(
    taken: Mapping[str, Cell],
    results_store: ResultsStore,
    progress: SweepProgress,
    on_filed: Callable[[Results], None],
) -> dict[str, Cell]:
    """Wait for cells that other processes are computing, and announce their results.

    Returns:
        The cells still without a result, as soon as one of them is no longer leased by any process.
    """
    waiting, free, said = dict(taken), False, False
    while waiting and not free:
        for key, cell in list(waiting.items()):
            # Checked before looking for the result: a result is filed before its lease ends, so none can be missed.
            holder = results_store.leases.holder(results_store.lease(key))
            if results_store.path(key).exists() and (filed := results_store.find_all([key], listed=True)):
                on_filed(filed)
                del waiting[key]
                progress.started(cell, "another process")
                progress.finished(cell, "reused")
            elif holder is None:
                free = True
            elif not said:
                say(f"waiting for cells that {holder} computes, {cell_name(cell)} for one")
                said = True
        if waiting and not free:
            progress.tick()
            time.sleep(SECONDS_BETWEEN_LOOKS)
    return waiting


@contextmanager
def _unless_set(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the block, except those that the user has set."""
    with environment({key: value for key, value in values.items() if key not in os.environ}):
        yield


@contextmanager
def _level(name: str, level: int) -> Iterator[None]:
    """Set a logger's level inside the block."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


class CellSearch(Searcher):
    """Gives Tune the configs of a sweep's trials, in its order.

    Tune pickles all hooks into a state that is never read, so each pickles as empty.
    """

    def __init__(self, trials: SweepTrials) -> None:
        super().__init__()
        self._trials = trials

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def set_search_properties(self, *args: Any, **options: Any) -> bool:
        """Take no notice of metric, mode and `param_space`: configs are given."""
        return True

    def suggest(self, trial_id: str) -> Any:
        """Return the next config; None if there is none now."""
        trial = self._trials.next(trial_id)
        if trial is not None:
            return trial.config
        return Searcher.FINISHED if self._trials.over else None

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        """Do nothing: the callback gets more details."""

    def save(self, checkpoint_path: str) -> None:
        """Save nothing: the store has every result."""

    def restore(self, checkpoint_path: str) -> None:
        """Restore nothing."""


class SweepScheduler(FIFOScheduler, tune.Stopper):
    """Runs trials in their order, withdraws those that wait for a place where there is no room for them any more, and ends the
    experiment once a fault would make every further cell fail.

    Tune gives a free actor to a trial whose own actor is still starting, and removes the starting one. If cells are short, one
    actor would then compute all, and no node that joins would be used. So the actor gets the newest trial, which has asked for none yet.
    """

    def __init__(self, trials: SweepTrials) -> None:
        super().__init__()
        self._trials = trials
        self._new: deque[Trial] = deque()

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        """Give a trial its path now: Tune asks for it at the end, even if the trial was stopped before it started."""
        trial.init_local_path()
        self._new.append(trial)

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        """Return a trial that has asked for no actor yet.

        End trials that hang or take too long, and withdraw the last ones that wait if there are more than `SweepTrials.most`.
        """
        while self._trials.to_end:
            name = self._trials.to_end.pop()
            tune_controller.stop_trial(next(trial for trial in tune_controller.get_trials() if trial.trial_id == name))
        if (excess := self._trials.asked - self._trials.most) > 0:
            pending = [trial for trial in tune_controller.get_trials() if trial.status == Trial.PENDING]
            for trial in pending[-int(excess) :]:
                tune_controller.stop_trial(trial)
        while self._new:
            trial = self._new.popleft()
            if trial.status == Trial.PENDING:
                return trial
        return None

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Stop no trial by its result."""
        return False

    def stop_all(self) -> bool:
        """Return whether to end the experiment."""
        return self._trials.fault

    def on_trial_complete(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> None:
        """Let Tune fail a trial that this sweep has ended: it then kills the actor instead of giving it another trial.

        Raises:
            TimeoutError: this is such a trial.
        """
        if reason := self._trials.reason_to_end(trial.trial_id):
            raise TimeoutError(reason)


class SweepCallback(TrialProgressCallback):
    """Reports to `SweepTrials` what happens to its trials, and calls its `tick` regularly.

    It replaces Tune's own progress callback, which prints a line for each trial that ends, at any verbosity.
    """

    def __init__(self, trials: SweepTrials) -> None:
        super().__init__()
        self._trials = trials

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        self._trials.tick()

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._trials.begun(trial.trial_id)

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        # Tune keeps every report in memory, so the results are taken out of it.
        self._trials.reported(trial.trial_id, {**result, "results": result.pop("results", ())})

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        trial.metric_n_steps.clear()  # Tune keeps all trials; its lists for running means took 30 kB of each
        self._trials.ended(trial.trial_id)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        # Before a trial's first report, `last_result` has what Ray knows of its actor, such as the host.
        self._trials.ended(trial.trial_id, error_of(trial), trial.last_result.get("hostname", ""))

    def log_result(self, *args: Any, **options: Any) -> None:
        """Print nothing."""


def error_of(trial: Any) -> Exception:
    """Return the error that ended a trial.

    Tune's own accessor looks only where the file is put at the end of the experiment.
    """
    path = Path(trial.pickled_error_file or "")
    if path.is_file():
        error = cloudpickle.loads(path.read_bytes())
        if isinstance(error, Exception):
            return error
    text = Path(trial.error_file or "")
    return RuntimeError(text.read_text("utf-8").strip() if text.is_file() else "the worker ended without an error")

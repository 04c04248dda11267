"""Run of a sweep's missing cells as trials of one Ray Tune experiment, layer by layer.

The results store decides what is missing, so a sweep resumes when it is run again, however it was stopped. Tune's own
experiment state is neither needed nor kept. Results decide from which cells others start, and which learning rates a grid
adds to its list, so the sweep is planned again after each round of cells.
"""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from mlmclm.cluster.placement import SMALLER, amounts, check_place, describe_cluster, device_of
from mlmclm.environment import environment
from mlmclm.errors import EnvironmentFault
from mlmclm.finetuning.cell import Cell, cell_key, shapes_of
from mlmclm.finetuning.kept import KeptEncoder
from mlmclm.models.warm_up import compile_kernels
from mlmclm.numbers import plural, rate_text
from mlmclm.progress import say, say_once
from mlmclm.registry import shipment
from mlmclm.storage.leases import SECONDS_BETWEEN_LOOKS
from mlmclm.storage.temporary import swept_folder
from mlmclm.sweeps.cells import cell_name, named_result
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.sweeps.starts import KeptWeights, Planned
from mlmclm.sweeps.sweep_options import SweepOptions, SweepOutcome
from mlmclm.sweeps.sweep_progress import SweepProgress
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
    from mlmclm.sweeps.shared_cluster import SharedCluster
    from mlmclm.sweeps.sweep_trials import SweepTrials
    from mlmclm.sweeps.trainable import Finetune
    from mlmclm.sweeps.trial import SweepTrial
    from mlmclm.sweeps.tune_hooks import CellSearch, SweepCallback, SweepScheduler

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


def run_layers(plan: Callable[[], Planned], options: SweepOptions) -> SweepOutcome:
    """Compute the missing cells of a sweep, layer by layer.

    First come the cells that start from a model, then the encoders that other cells start from and that aren't kept
    yet, then those other cells. While results add learning rates, cells of a layer are planned and computed again.

    Args:
        plan: returns what can be planned from the present results; called again after each layer and round.
        options: those of `run_sweep`, for every layer.
    """
    results_store = ResultsStore(options.store)
    planned = plan()

    def compute(second: bool) -> SweepOutcome:
        """Compute a layer's cells, in rounds, until results add no further ones."""
        nonlocal planned
        outcome, computed = SweepOutcome([]), set[tuple[str, str]]()
        while True:
            cells = [cell for cell in planned.cells if (cell.start is not None) == second]
            new = [cell for cell in cells if _identity(cell) not in computed]
            if not new:
                return outcome
            if computed:
                _say_added(new)
            computed |= set(map(_identity, cells))
            # Cells that have a result need no encoder to start from any more.
            needed = {cell.start.key for cell in results_store.missing(new) if cell.start is not None}
            _keep([planned.sources[key] for key in planned.sources if key in needed], options)
            outcome = _together(outcome, run_sweep(new, options))
            if outcome.not_run:
                return outcome
            # The results of the first layer also decide what the second one starts from.
            if planned.to_come or not second:
                planned = plan()

    for task, count in planned.waiting.items():
        say(f"{plural(count, 'cell')} wait{'s' if count == 1 else ''} for the best {task} cell of their model")
    outcome = compute(second=False)
    if outcome.not_run:  # a fault of the machine, which would hit the second layer too
        return outcome
    for pair, count in planned.blocked.items():
        say(f"left out: {plural(count, 'cell')} with nothing to start from, as every cell of {pair} diverged")
    return _together(outcome, compute(second=True))


def _identity(cell: Cell) -> tuple[str, str]:
    return cell.model, cell_key(cell)


def _say_added(cells: Sequence[Cell]) -> None:
    """Say on which tasks learning rates are added."""
    rates: dict[str, set[float]] = defaultdict(set)
    for cell in cells:
        rates[cell.task].add(cell.learning_rate)
    added = "; ".join(f"{task} {', '.join(map(rate_text, sorted(added_rates)))}" for task, added_rates in rates.items())
    say(
        f"learning rates added for all models, as the best of some is the lowest or the highest: {added} ({plural(len(cells), 'cell')})"
    )


def _keep(sources: Sequence[Cell], options: SweepOptions) -> None:
    """Train these cells again to keep their encoders, unless the encoders are kept already.

    A sweep keeps scores but no weights, and only its results show which encoders are needed.

    Raises:
        MlmclmError: a cell failed, or a kept result cannot be found.
    """
    store = options.store
    for source in sources:
        KeptEncoder(store, cell_key(source)).find()  # sets a damaged one aside
    kept = KeptWeights(store)
    missing = kept.missing(sources)
    if not missing:
        return
    from mlmclm.sweeps.trainable import KeepEncoders

    for cell in missing:
        say(f"{cell_name(cell)} has the best validation score: it is trained again to keep its weights")
    keeping = replace(options, name=f"{options.name}-starts", worker=KeepEncoders, results_store=kept, on_result=None)
    run_sweep(missing, keeping).check()
    for cell in missing:
        key = cell_key(cell)
        again, filed = kept.find(key), ResultsStore(store).find(key)
        if again is None or filed is None:
            raise EnvironmentFault(f"{kept.path(key)}: it was written but cannot be found. Is {store} shared?")
        if again["scores"] != filed["scores"]:
            say(
                f"{cell_name(cell)}: trained again it scored {again['scores']['validation']} on validation, and "
                f"{filed['scores']['validation']} before, on other hardware or with other software; other cells start from "
                "the later one"
            )


def _together(first: SweepOutcome, second: SweepOutcome) -> SweepOutcome:
    return SweepOutcome(*(getattr(first, field.name) + getattr(second, field.name) for field in fields(SweepOutcome)))

"""Sweeps in two layers: cells that start from a model, then cells that start from the best cell of another task.

Results decide from which cells others start, and which learning rates a grid adds to its list, so the sweep is planned
again after each round of cells. For the same reason a sweep resumes when it is run again, wherever it was stopped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import fields, replace

from mlmclm.errors import EnvironmentFault
from mlmclm.finetuning.cell import Cell, cell_key
from mlmclm.finetuning.kept import KeptEncoder
from mlmclm.numbers import plural, rate_text
from mlmclm.progress import say
from mlmclm.sweeps.cells import cell_name
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.sweeps.run_sweep import run_sweep
from mlmclm.sweeps.starts import KeptWeights, Planned
from mlmclm.sweeps.sweep_options import SweepOptions, SweepOutcome


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

"""Sweeps in two layers: cells that start from a model, then cells that start from the best cell of another task.

The cells to start from are chosen from results, so a sweep resumes when it is run again, wherever it was stopped. So are
the learning rates that a grid adds to its list: after each round of cells, the sweep is planned again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from mlmclm.errors import EnvironmentFault
from mlmclm.finetuning.cell import Cell, cell_key
from mlmclm.finetuning.kept import KeptEncoder
from mlmclm.numbers import plural, rate_text
from mlmclm.progress import say
from mlmclm.results.metrics import value_of
from mlmclm.seeds import Seed, Seeds, read_seed
from mlmclm.sweeps.cells import cell_name
from mlmclm.sweeps.ledger import Ledger
from mlmclm.sweeps.outcome import SweepOutcome
from mlmclm.sweeps.run_sweep import run_sweep
from mlmclm.sweeps.starts import KeptWeights, Planned
from mlmclm.sweeps.sweep_options import SweepOptions

Asked = Callable[
    [Mapping[tuple[float, Seed], float | None], Sequence[float], Sequence[Seed]], Iterable[tuple[float, Seed]]
]
"""Function from a group's validation scores so far (None for a lost run), its rates and its seeds, to the (rate, seed)
that it is to compute next; none at the end of the race."""


def run_layers(plan: Callable[[], Planned], options: SweepOptions, race: Asked | None = None) -> SweepOutcome:
    """Compute the missing cells of a sweep, layer by layer.

    First come the cells that start from a model, then the encoders that other cells start from and that aren't kept
    yet, then those other cells. While results add learning rates, cells of a layer are planned and computed again.

    Args:
        plan: returns what can be planned from the present results; called again after each layer and round.
        race: which cells a race between learning rates asks for; None to compute all of them.
        options: those of `run_sweep`, for every layer.
    """
    ledger = Ledger(options.store)
    planned = plan()

    def compute(second: bool) -> SweepOutcome:
        """Compute a layer's cells until the results of its last round ask for no others."""
        nonlocal planned
        outcome, before, raced = SweepOutcome([]), set[tuple[str, str]](), set[tuple[str, str]]()
        rates = set[tuple[str, str, str, float]]()
        while True:
            cells = [cell for cell in planned.cells if (cell.start is not None) == second]
            new = [cell for cell in cells if _place(cell) not in before]
            if not new:
                return outcome
            if before:
                _say_added(new, rates)
            before |= set(map(_place, cells))
            rates |= set(map(_rate, cells))
            # Cells that have a result need no encoder to start from any more.
            needed = {cell.start.key for cell in ledger.missing(new) if cell.start is not None}
            _keep([planned.sources[key] for key in planned.sources if key in needed], options)
            if race is None:
                latest = run_sweep(new, options)
            else:
                latest = _race(cells, race, ledger.results(cells), options, raced)
            outcome = _together(outcome, latest)
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
    for pair, count in planned.stranded.items():
        say(f"left out: {plural(count, 'cell')} with nothing to start from, as every cell of {pair} diverged")
    return _together(outcome, compute(second=True))


def _place(cell: Cell) -> tuple[str, str]:
    return cell.model, cell_key(cell)


def _rate(cell: Cell) -> tuple[str, str, str, float]:
    return cell.model, cell.task, cell.setting, cell.learning_rate


def _say_added(cells: Sequence[Cell], tried: Collection[tuple[str, str, str, float]]) -> None:
    """Say how many cells are added with further seeds, and on which tasks learning rates are.

    Args:
        tried: the rates that had cells before.
    """
    seeds = [cell for cell in cells if _rate(cell) in tried]
    if seeds:
        say(
            f"{plural(len(seeds), 'cell')} added with further seeds, on {', '.join(dict.fromkeys(cell.task for cell in seeds))}"
        )
    cells = [cell for cell in cells if _rate(cell) not in tried]
    if not cells:
        return
    rates: dict[str, set[float]] = defaultdict(set)
    for cell in cells:
        rates[cell.task].add(cell.learning_rate)
    added = "; ".join(f"{task} {', '.join(map(rate_text, sorted(own)))}" for task, own in rates.items())
    say(
        f"learning rates added for all models, as the best of some is the lowest or the highest: {added} ({plural(len(cells), 'cell')})"
    )


def _race(
    cells: Sequence[Cell],
    race: Asked,
    results: Sequence[Mapping[str, Any]],
    options: SweepOptions,
    done: set[tuple[str, str]],
) -> SweepOutcome:
    """Compute the cells that the race asks for, round by round. Its state follows from the results alone.

    Args:
        done: cells that this run has dealt with; those that it deals with here are added.
    """
    scores: dict[tuple[str, str, str], dict[tuple[float, Seed], float | None]] = defaultdict(dict)

    def add(results: Iterable[Mapping[str, Any]]) -> None:
        for result in results:
            place = result["learning_rate"], Seeds.of(read_seed(result["seed"]))
            scores[result["model"], result["task"], result.get("setting", "")][place] = _validation(result)

    add(results)
    groups: dict[tuple[str, str, str], dict[tuple[float, Seeds], Cell]] = {}
    for cell in cells:
        group = groups.setdefault((cell.model, cell.task, cell.setting), {})
        group[cell.learning_rate, Seeds.of(cell.seed)] = cell
    outcome = SweepOutcome([])
    while True:
        wanted = []
        for names, group in groups.items():
            own = scores[names]
            rates, seeds = (list(dict.fromkeys(axis)) for axis in zip(*group, strict=True))
            asked = set(race(own, rates, seeds))
            wanted += [cell for place, cell in group.items() if place in asked or place in own]
        ahead = [cell for cell in wanted if _place(cell) not in done]
        if not ahead:
            there = len(done.intersection(map(_place, cells)))
            cut = len(cells) - there
            say(f"race: {there:,} of {len(cells):,} cells have results, {cut:,} are at learning rates that are cut")
            return outcome
        done |= set(map(_place, ahead))
        latest = run_sweep(ahead, options)
        add(latest.results)
        outcome = _together(outcome, latest)
        if outcome.not_run:
            return outcome
        for cell, _ in latest.failed:  # this race needs the cell's score before it can go on; the others do
            groups.pop((cell.model, cell.task, cell.setting), None)


def _validation(result: Mapping[str, Any]) -> float | None:
    return value_of(result["scores"]["validation"], result["metric"]) if result["status"] == "ok" else None


def _keep(sources: Sequence[Cell], options: SweepOptions) -> None:
    """Train these cells again to keep their encoders, unless these are kept already.

    A sweep keeps scores but no weights, and which encoders are needed is known only after it.

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
    from mlmclm.sweeps.trainable import KeepingWorker

    for cell in missing:
        say(f"{cell_name(cell)} has the best validation score: it is trained again to keep its weights")
    keeping = replace(options, name=f"{options.name}-starts", worker=KeepingWorker, ledger=kept, on_result=None)
    run_sweep(missing, keeping).check()
    for cell in missing:
        key = cell_key(cell)
        again, filed = kept.find(key), Ledger(store).find(key)
        if again is None or filed is None:
            raise EnvironmentFault(f"{kept.path(key)}: it was written but cannot be found. Is {store} shared?")
        if again["scores"] != filed["scores"]:
            say(
                f"{cell_name(cell)}: trained again it scored {again['scores']['validation']} on validation, and "
                f"{filed['scores']['validation']} before, on other hardware or with other software; other cells start from "
                "the later one"
            )


def _together(first: SweepOutcome, second: SweepOutcome) -> SweepOutcome:
    return SweepOutcome(*(getattr(first, each.name) + getattr(second, each.name) for each in fields(SweepOutcome)))

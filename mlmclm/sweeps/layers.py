"""A sweep whose cells may start from the best cell of another task: the other tasks' cells first, then those.

What starts a cell is chosen from results, so a sweep that was stopped anywhere goes on when it is run again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlmclm.errors import EnvironmentFault
from mlmclm.finetuning.cell import Cell, cell_key
from mlmclm.finetuning.kept import kept_folder, set_aside_damaged
from mlmclm.progress import say
from mlmclm.sweeps.cells import cell_name
from mlmclm.sweeps.ledger import Ledger
from mlmclm.sweeps.outcome import SweepOutcome
from mlmclm.sweeps.run_sweep import OnResult, run_sweep
from mlmclm.sweeps.starts import KeptWeights, Planned


def run_layers(
    plan: Callable[[], Planned],
    *,
    store: Path,
    on_result: OnResult | None = None,
    name: str = "sweep",
    **options: Any,
) -> SweepOutcome:
    """Computes the missing cells of a sweep: those that start from a model, then the encoders that others start from and that
    aren't kept yet, then these others.

    Args:
        plan: what can be named from the results that are there now; called again behind the first layer.
        options: of `run_sweep`, for all layers.
    """
    planned = plan()
    for task, count in planned.waiting.items():
        say(f"{count:,} cells wait for the best {task} cell of their model")
    first = [cell for cell in planned.cells if cell.start is None]
    outcome = run_sweep(first, store=store, on_result=on_result, name=name, **options)
    if outcome.not_run:
        return outcome
    planned = plan()
    for pair, count in planned.stranded.items():
        say(f"{count:,} cells have nothing to start from and are left out: every cell of {pair} diverged")
    second = [cell for cell in planned.cells if cell.start is not None]
    if not second:
        return outcome
    needed = {cell.start.key for cell in Ledger(store).missing(second) if cell.start is not None}
    _keep([planned.sources[key] for key in planned.sources if key in needed], store=store, name=name, options=options)
    return _together(outcome, run_sweep(second, store=store, on_result=on_result, name=name, **options))


def _keep(sources: Sequence[Cell], *, store: Path, name: str, options: Mapping[str, Any]) -> None:
    """Trains these cells again to keep their encoders, unless that is done.

    Raises:
        MlmclmError: one failed.
    """
    for source in sources:
        set_aside_damaged(kept_folder(store, cell_key(source)))
    missing = KeptWeights(store).missing(sources)
    if not missing:
        return
    from mlmclm.sweeps.trainable import KeepingWorker

    for cell in missing:
        say(f"{cell_name(cell)} has the best validation score: it is trained again to keep its weights")
    kept = KeptWeights(store)
    run_sweep(
        missing, store=store, name=f"{name}-starts", **{**options, "worker": KeepingWorker, "ledger": kept}
    ).check()
    for cell in missing:
        again, filed = kept.find(cell_key(cell)), Ledger(store).find(cell_key(cell))
        if again is None or filed is None:
            raise EnvironmentFault(f"{kept.path(cell_key(cell))}: written, but not there. Is {store} shared?")
        if again["scores"] != filed["scores"]:
            say(
                f"{cell_name(cell)}: trained again it scored {again['scores']['validation']} on validation, and "
                f"{filed['scores']['validation']} before, on other hardware or with other software; what starts from it now "
                "is the later one"
            )


def _together(first: SweepOutcome, second: SweepOutcome) -> SweepOutcome:
    return SweepOutcome(
        results=first.results + second.results,
        computed=first.computed + second.computed,
        reused=first.reused + second.reused,
        failed=first.failed + second.failed,
        not_run=first.not_run + second.not_run,
    )

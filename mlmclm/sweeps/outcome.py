"""Outcome of a sweep."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.finetuning.cell import Cell
from mlmclm.sweeps.cell_failures import describe_error
from mlmclm.sweeps.cells import cell_name


@dataclass(frozen=True)
class SweepOutcome:
    """Results of a sweep, and the cells that have none.

    `results` are in the order of the cells, without gaps for those that have no result. `computed` counts the cells
    that were computed now, `reused` those that already had a result. `failed` lists the cells that raised, with their
    errors. `not_run` lists those that were never tried, because a fault of the machine would have hit them all. `grids`
    has the ResultGrid of each Ray Tune experiment of this run.
    """

    results: list[dict[str, Any]]
    computed: int = 0
    reused: int = 0
    failed: list[tuple[Cell, Exception]] = field(default_factory=list)
    not_run: list[Cell] = field(default_factory=list)
    grids: list[Any] = field(default_factory=list)

    def check(self) -> None:
        """Raise one error for all failed cells.

        Raises:
            UserError: every failed cell failed because of the user's input.
            EnvironmentFault: some cells failed for another reason.
        """
        total = len(self.failed) + len(self.results) + len(self.not_run)
        if self.not_run and not self.failed:
            raise EnvironmentFault(f"{len(self.not_run)} of {total} cells were not tried; the same command runs them.")
        if not self.failed:
            return
        names = [cell_name(cell) for cell, _ in self.failed]
        listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        first = self.failed[0][1]
        kept = f"{len(self.results)} results are kept; the same command runs the missing cells only."
        skipped = f" {len(self.not_run)} cells were not tried." if self.not_run else ""
        kind = UserError if all(isinstance(error, UserError) for _, error in self.failed) else EnvironmentFault
        raise kind(
            f"{len(names)} of {total} cells failed: {listed}.{skipped} {kept}\nFirst error: {describe_error(first)}"
        ) from first

"""Printing of a study's plan, which dry runs show."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlmclm.cli.output import print_json, show

if TYPE_CHECKING:
    from mlmclm import StudyPlan


def show_plan(plan: StudyPlan, *, as_json: bool) -> None:
    """Print a plan; then raise its fault, if it has one."""
    if as_json:
        print_json(plan.as_dict())
    else:
        show(str(plan))
    if plan.fault is not None:
        raise plan.fault

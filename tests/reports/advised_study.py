"""Studies with costs, and the advice on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from analysis_study import TASKS, synthetic_results

from mlmclm.analysis.analyse import analyse
from mlmclm.reports.advice import Advice, advise
from mlmclm.reports.provenance import asked_for

KINDS = tuple(TASKS)
SECONDS = 90.0


def results(levels: dict[str, float], **more: Any) -> list[dict[str, Any]]:
    rows = synthetic_results(levels, **more)
    for row in rows:
        row["cost"] = {"seconds": SECONDS, "device": "A GPU"}
    return rows


def advised(made: Sequence[dict[str, Any]], command: str = "mlmclm study own.yaml", **more: Any) -> Advice:
    basis = asked_for(command, ("quickstart", "paper")).with_costs(made, test_examples=dict.fromkeys(KINDS, 300))
    return advise(analyse(made, ranges=dict.fromkeys(KINDS, (-9.0, 9.0)), **more), basis)

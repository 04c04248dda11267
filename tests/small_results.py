"""A cell's result, as the ledger holds it."""

from __future__ import annotations

from typing import Any


def make_result(**changes: Any) -> dict[str, Any]:
    """Return a result, with some entries changed."""
    return {
        "schema": 1, "key": "k" * 64, "model": "2m-clm-600", "weights": "w", "task": "sst2",
        "family": "sequence-classification", "task_data": "d", "protocol": {"max_steps": 10, "epochs": None},
        "learning_rate": 1e-3, "seed": 2, "status": "ok", "metric": "accuracy",
        "scores": {"validation": {"accuracy": 0.5}, "test": {"accuracy": 0.6}}, "curve": [[1, 0.7], [10, 0.5]],
        "steps": 10, "examples": 320, "tokens": 900, "parameters": 5, "diverged_step": None,
        "cost": {"seconds": 2.0, "worker": "h/1", "finished": "2026-01-02T03:04:05+00:00"},
        **changes,
    }  # fmt: skip

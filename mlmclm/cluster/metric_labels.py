"""The store and study of a process's live metrics, which Ray's workers inherit in environment variables."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlmclm.environment import environment

VARIABLES = {"store": "MLMCLM_METRICS_STORE", "study": "MLMCLM_METRICS_STUDY"}
"""Label of every live metric -> the environment variable with its value."""


@contextmanager
def metrics_labelled(store: Path, study: str) -> Iterator[None]:
    """Label the live metrics of this process, and of the Ray workers that it starts, for the block."""
    with environment({VARIABLES["store"]: str(store), VARIABLES["study"]: study}):
        yield


def metric_labels() -> dict[str, str]:
    """Return the value of each label; empty where it is unknown, which Prometheus takes for no label."""
    return {label: os.environ.get(name, "") for label, name in VARIABLES.items()}


def label_variables() -> dict[str, str]:
    """Return the environment variables for workers."""
    return {name: os.environ[name] for name in VARIABLES.values() if name in os.environ}

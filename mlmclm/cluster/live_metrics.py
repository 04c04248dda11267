"""Definitions of all live metrics; Ray exports each to Prometheus under its name with the prefix `ray_`.

Labels are few, with closed sets of values (task, status, model, objective). All metrics also have the store and the study
as labels, which Ray's workers inherit in environment variables. A trial or a cell is never a label, because Prometheus keeps a
time series for each combination of values. The dashboards in `dashboards/` query these names, and a test compares dashboards and definitions.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import printable
from typing import TYPE_CHECKING, Literal
from urllib.parse import quote

from mlmclm.environment import environment

if TYPE_CHECKING:
    from ray.util.metrics import Counter, Gauge, Histogram

PREFIX = "ray_"
VARIABLES = {"store": "MLMCLM_METRICS_STORE", "study": "MLMCLM_METRICS_STUDY"}
"""Label of every live metric -> the environment variable with its value."""
SECONDS = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Histogram boundaries for durations, in seconds."""


@dataclass(frozen=True)
class Definition:
    """A metric: its name (without Ray's prefix), kind, description with the unit, and labels beside store and study."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    description: str
    labels: tuple[str, ...]

    @property
    def all_labels(self) -> tuple[str, ...]:
        """All labels. The store and the study have default values."""
        return (*VARIABLES, *self.labels)


_RUN, _TASK = ("model", "objective"), ("task",)

DEFINITIONS: dict[str, Definition] = {
    definition.name: definition
    for definition in (
        Definition("mlmclm_pretraining_loss", "gauge", "Training loss, nats per labelled token.", _RUN),
        Definition("mlmclm_pretraining_validation_loss", "gauge", "Validation loss, nats per labelled token.", _RUN),
        Definition(
            "mlmclm_pretraining_validation_accuracy",
            "gauge",
            "Share of the labelled validation tokens that are the most probable one, from 0 to 1.",
            _RUN,
        ),
        Definition("mlmclm_pretraining_tokens_per_second", "gauge", "Tokens trained on a second, all workers.", _RUN),
        Definition("mlmclm_pretraining_utilisation", "gauge", "Model FLOPs over the measured peak, from 0 to 1.", _RUN),
        Definition(
            "mlmclm_pretraining_published_utilisation",
            "gauge",
            "Model FLOPs over the peak of dense bf16 products by the GPUs' data sheets, from 0 to 1; none if it is unknown.",
            _RUN,
        ),
        Definition("mlmclm_pretraining_memory_bytes", "gauge", "Peak memory of the fullest worker, bytes.", _RUN),
        Definition("mlmclm_pretraining_data_wait", "gauge", "Share of a step waiting for data, from 0 to 1.", _RUN),
        Definition("mlmclm_pretraining_learning_rate", "gauge", "Learning rate of the last step.", _RUN),
        Definition("mlmclm_pretraining_gradient_norm", "gauge", "Gradient norm before clipping, last step.", _RUN),
        Definition("mlmclm_pretraining_step", "gauge", "Steps done.", _RUN),
        Definition("mlmclm_pretraining_tokens_total", "counter", "Tokens trained on by this process.", _RUN),
        Definition(
            "mlmclm_cells_total", "counter", "Cells finished: ok, diverged, failed or reused.", ("status", "task")
        ),
        Definition("mlmclm_cell_retries_total", "counter", "Cells started again after a crash.", _TASK),
        Definition("mlmclm_cell_seconds", "histogram", "Seconds a computed cell took.", _TASK),
        Definition("mlmclm_cells_running", "gauge", "Cells being computed now.", _TASK),
        Definition(
            "mlmclm_study_info",
            "gauge",
            "1; the labels say where else the study is shown.",
            ("mlflow", "dashboard", "report"),
        ),
        Definition("mlmclm_cells_remaining", "gauge", "Cells not finished yet, running ones included.", _TASK),
    )
}


def ascii_label(text: object) -> str:
    """Return a label's value with characters beyond ASCII percent-encoded, since Ray's metrics refuse them."""
    return quote(str(text), safe=printable)


@contextmanager
def metrics_labelled(store: Path, study: str) -> Iterator[None]:
    """Label the live metrics of this process, and of the Ray workers that it starts, for the block."""
    with environment({VARIABLES["store"]: ascii_label(store), VARIABLES["study"]: ascii_label(study)}):
        yield


def label_variables() -> dict[str, str]:
    """Return the environment variables that give workers the labels."""
    return {name: os.environ[name] for name in VARIABLES.values() if name in os.environ}


def show(name: str, value: float, **labels: str) -> None:
    """Add to a counter, set a gauge, or add an observation to a histogram; needs a Ray session.

    Raises:
        KeyError: the metric is not defined.
    """
    metric = _metric(name)
    # Set at every call, because a process can work on one study after another. To Prometheus an empty value is no label.
    metric.set_default_tags({label: os.environ.get(variable, "") for label, variable in VARIABLES.items()})
    act = {"counter": "inc", "gauge": "set", "histogram": "observe"}[DEFINITIONS[name].kind]
    getattr(metric, act)(value, tags=labels)


@cache
def _metric(name: str) -> Counter | Gauge | Histogram:
    # Imported here, so that a sweep without missing cells doesn't wait for Ray.
    from ray.util.metrics import Counter, Gauge, Histogram

    definition = DEFINITIONS[name]
    if definition.kind == "histogram":
        return Histogram(name, definition.description, boundaries=list(SECONDS), tag_keys=definition.all_labels)
    kind = Counter if definition.kind == "counter" else Gauge
    return kind(name, definition.description, tag_keys=definition.all_labels)

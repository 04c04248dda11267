"""The content of an MLflow run as plain values: key, name, parameters, tags, metric points and files."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Status = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]
Point = tuple[str, float, int, int]
"""Name, value, step, and time in milliseconds since 1970."""


@dataclass(frozen=True)
class DataSet:
    """A data set that a run has used, as MLflow shows its inputs.

    `digest` identifies the content, `source` says where MLflow's `source.load()` finds it, and `context` says what it was
    used for.
    """

    name: str
    digest: str
    source: str | Mapping[str, str]
    """A local file or folder, or `path`, `revision` and `config_name` of a data set on the Hub."""
    context: str


@dataclass(frozen=True)
class ModelRecord:
    """A model that a run has trained or chosen, as MLflow lists models; its metrics are those of the run, on the run's data set."""

    name: str
    kind: Literal["pretrained", "fine-tuned"]
    params: Mapping[str, str]
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunRecord:
    """An MLflow run; `key` identifies it, and the other fields are its content.

    `metrics` are all points of an ended run; for a running one, they are added to the points that the run already has.

    `outputs` are the models that the run has trained or chosen, `uses` the names of the pretrained ones from which it started, and
    `experiment` the tags of the experiment. `artifacts` are pairs of a local file and the folder in which the run shows it ("" for the top). Times are in
    milliseconds since 1970. They come from the results, so the same results always give the same record.
    """

    key: str
    name: str
    parent_key: str | None = None
    params: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    metrics: Sequence[Point] = ()
    artifacts: Sequence[tuple[Path, str]] = ()
    inputs: Sequence[DataSet] = ()
    outputs: Sequence[ModelRecord] = ()
    uses: Sequence[str] = ()
    experiment: Mapping[str, str] = field(default_factory=dict)
    status: Status = "FINISHED"
    start_ms: int | None = None
    end_ms: int | None = None

    @property
    def running(self) -> bool:
        """Whether the run has not ended."""
        return self.status == "RUNNING"

    @property
    def kind(self) -> str:
        """The kind of run: pretraining, sweep, model, group (a model on a task), or cell."""
        return self.tags["mlmclm.kind"]

    @property
    def settings(self) -> dict[str, str | float]:
        """Parameters and tags, without MLflow's own tags; parameters that are numbers have type float."""
        tags = {name.removeprefix("mlmclm."): text for name, text in self.tags.items() if name[:7] != "mlflow."}
        return {**tags, **{name: _number(text) for name, text in self.params.items()}}

    def by_step(self) -> dict[int, dict[str, float]]:
        """Return the metrics of each step, in order."""
        values_by_step = defaultdict[int, dict[str, float]](dict)
        for name, value, step, _ in sorted(self.metrics, key=_order):
            values_by_step[step][name] = value
        return values_by_step


def latest(points: Iterable[Point]) -> dict[str, Point]:
    """Return the latest point of each metric by MLflow's order: step, time, value."""
    newest: dict[str, Point] = {}
    for point in points:
        previous = newest.setdefault(point[0], point)
        if _order(point) > _order(previous):
            newest[point[0]] = point
    return newest


def _number(text: str) -> str | float:
    with suppress(ValueError):
        return float(text)
    return text


def _order(point: Point) -> tuple[int, int, float]:
    _, value, step, time = point
    return step, time, 0.0 if math.isnan(value) else value

"""Types of the values in bundles that others wrote: in a cell's result and in bundle.json.

Nothing is converted: a score is a number, and not a text or a truth value that could be taken for one.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Annotated, Any, Literal

import pyarrow as pa
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic.types import FiniteFloat

from mlmclm.analysis.results import ANY_SCORE, Grid
from mlmclm.analysis.selection import RULES
from mlmclm.answers.record import AnalysisSetting
from mlmclm.errors import CONTROLS, UserError, clipped, one_line
from mlmclm.reports.study_facts import StudyFacts
from mlmclm.results.chance import Chance
from mlmclm.results.metrics import metric_parts
from mlmclm.seeds import read_seed
from mlmclm.storage.checksums import unsealed
from mlmclm.storage.received_files import SMALLEST_RATE, plain_json
from mlmclm.tasks.declaration import FAMILIES

UNFIT = (
    LookupError, TypeError, ValueError, AttributeError, ArithmeticError, pa.ArrowException, RecursionError, csv.Error, OSError,
)  # fmt: skip
"""Errors that readers and the score functions of families raise for values of an unexpected type."""
CLOSE = 1e-9
"""Largest allowed difference of a score from the one computed from its examples: another machine may sum in another order."""


def _plain(text: str) -> str:
    if CONTROLS.search(text):
        raise ValueError("it has characters that control a terminal")
    return text


def _a_time(text: str) -> str:
    check_time(datetime.fromisoformat(text).timestamp())
    return text


def check_time(seconds: float) -> None:
    """Raise a `ValueError` unless a time, in seconds since 1970, is a plausible time of a computation (2001 to 2286)."""
    if not 1e9 <= seconds <= 1e10:
        raise ValueError(f"{seconds:g} seconds since 1970 is no time at which it can have been computed")


_Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{8,64}$")]
_Name = Annotated[str, Field(pattern=r"^\w[\w.@+%-]*$", max_length=200)]
"""Names of models, tasks and metrics. They become names of files."""
_Text = Annotated[str, AfterValidator(_plain), Field(max_length=10_000)]
_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Seed = _Count | dict[Literal["head", "order", "dropout"], _Count]
_Seconds = Annotated[FiniteFloat, Field(ge=0, le=1e9)]
_Rate = Annotated[FiniteFloat, Field(ge=SMALLEST_RATE, le=1e6)]
_Scores = dict[_Name, Annotated[FiniteFloat, Field(ge=-1.0, le=1.0)]]


class _Typed(BaseModel):
    """Base class: values must have the declared types, without any conversion; further keys are allowed."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="allow")


class _Cost(_Typed):
    seconds: _Seconds
    worker: _Text
    finished: Annotated[str, AfterValidator(_a_time)]
    backend: _Text = ""
    device: _Text = ""
    commit: _Text = ""
    versions: dict[_Text, _Text | None] = Field(default_factory=dict)


class _Start(_Typed):
    cell: _Hash
    task: _Name


class _Row(_Typed):
    """A cell's result. A diverged one has null for its scores."""

    key: _Hash
    model: _Name
    weights: _Hash
    task: _Name
    family: _Name
    task_data: _Hash
    protocol: dict[_Text, Any]
    learning_rate: _Rate
    seed: _Seed
    start: _Start | None = None
    status: Literal["ok", "diverged"]
    metric: _Text
    setting: _Text = ""
    scores: dict[Literal["validation", "test"], _Scores] | None
    diverged_step: _Count | None = None
    steps: _Count | None = None
    tokens: _Count | None = None
    parameters: _Count | None = None
    cost: _Cost


class ReceivedCell(_Typed):
    key: _Hash
    model: _Name
    task: _Name
    labels: list[_Text] | None
    result: str


class ReceivedGrid(_Typed):
    models: list[_Name]
    tasks: list[_Name]
    learning_rates: list[_Rate]
    seeds: list[_Seed]
    settings: dict[_Name, list[_Text]]
    added: list[tuple[_Name, _Name, _Text, list[_Rate]]]
    grows: bool = False
    race: None = None
    allotted: dict[_Name, None] = {}
    """`race` and `allotted` are not used; the format still has both keys, null and empty in every record."""


class _Chance(_Typed):
    score: Annotated[FiniteFloat, Field(ge=-1.0, le=1.0)]
    how: _Text


class ReceivedAbout(_Typed):
    format: int
    facts: StudyFacts
    grid: ReceivedGrid
    rule: Literal[RULES]  # type: ignore[valid-type]
    baseline: _Name | None
    chances: dict[_Name, _Chance]
    replicate_of: dict[_Name, _Name]


@contextmanager
def naming(where: object) -> Iterator[None]:
    """Turn errors from values that mlmclm would not write into a `UserError` that says where these values are."""
    try:
        yield
    except ValidationError as error:
        wrong = error.errors()[0]
        place = ".".join(map(str, wrong["loc"]))
        message = f"{place}: {wrong['msg']}" if place else wrong["msg"]
        raise UserError(f"{where}: {message} (got {clipped(repr(wrong['input']), 60)}).") from error
    except UNFIT as error:
        reason = f"{type(error).__name__}: {one_line(error, 300)}"
        raise UserError(f"{where}: not as mlmclm writes it ({reason}). Copy or download the bundle again.") from error


def received_row(cell: ReceivedCell) -> dict[str, Any]:
    where = f"result {cell.key} (model {cell.model}, task {cell.task})"
    value = plain_json(cell.result, where)
    try:
        row = unsealed(value)
    except ValueError as error:
        raise UserError(f"{where}: damaged ({error}).") from error
    with naming(where):
        _Row.model_validate(row)
    for name in ("key", "model", "task"):
        if row[name] != getattr(cell, name):
            raise UserError(f"{where}: the result itself says {name} {row[name]}.")
    _check_scores(row, where)
    return row


def _check_scores(row: Mapping[str, Any], where: str) -> None:
    """Check that a cell has scores unless it diverged, and that each is in its metric's range."""
    if (row["scores"] is None) != (row["status"] == "diverged"):
        raise UserError(f"{where}: status {row['status']}, and scores {row['scores']}; a diverged cell alone has none.")
    if len({frozenset(scores) for scores in (row["scores"] or {}).values()}) > 1:
        raise UserError(f"{where}: its splits have scores of different names.")
    family = FAMILIES.find(row["family"])
    for split, scores in (row["scores"] or {}).items():
        for name in metric_parts(row["metric"]):
            if name not in scores:
                raise UserError(f"{where}: scores.{split} has no {name}, a part of the cell's metric.")
        for name, score in scores.items():
            low, high = ANY_SCORE if family is None else family.score_range(name)
            if not low - CLOSE <= score <= high + CLOSE:
                raise UserError(f"{where}: scores.{split}.{name}: {score:g}; allowed: {low:g} to {high:g}.")


def read_setting(about: ReceivedAbout) -> AnalysisSetting:
    """Return how results are analysed; `record.about_value` is the inverse."""
    grid = about.grid
    return AnalysisSetting(
        Grid(
            tuple(grid.models),
            tuple(grid.tasks),
            tuple(grid.learning_rates),
            tuple(map(read_seed, grid.seeds)),
            {task: tuple(settings) for task, settings in grid.settings.items()},
            added={(model, task, setting): tuple(rates) for model, task, setting, rates in grid.added},
            grows=grid.grows,
        ),
        about.rule,
        about.baseline,
        {task: Chance(chance.score, chance.how) for task, chance in about.chances.items()},
        about.replicate_of,
    )

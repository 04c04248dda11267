"""Rehearsal of a family or metric that is not built in: its methods are called once, as in later steps, before any training.

An untrained head predicts the test split from random states in place of an encoder's, which takes little time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from mlmclm.errors import UserError
from mlmclm.results.examples import SPLIT, from_parquet, to_parquet
from mlmclm.results.measures import measure
from mlmclm.results.metrics import metric_parts, value_of
from mlmclm.tasks.declaration import FAMILIES, Task
from mlmclm.tasks.metric import METRICS, metrics_of
from mlmclm.tasks.predictions import predicted, predicts_the_same
from mlmclm.tasks.prepared_task import Examples, PreparedTask

HIDDEN = 8
"""Width of the random states."""
TOKENS_AT_ONCE = 1 << 18
TRAINED = 4
"""Rows of the training batch."""


def needs_rehearsal(task: Task) -> bool:
    """Return whether the family of a task or one of its metrics is not of this package."""
    return not FAMILIES.is_built_in(task.family) or bool(_added(task))


def _added(task: Task) -> list[str]:
    return [name for name in metric_parts(task.metric) if name in metrics_of(task.family)]


def rehearse(task: Task, prepared: PreparedTask) -> None:
    """Call the task's family and metrics once, as cells, reports and files of predictions do.

    Raises:
        UserError: they fail, or return something else than later steps need.
    """
    if not needs_rehearsal(task):
        return
    part = ""
    try:
        for part in _parts(task, prepared):  # noqa: B007  # the message below names the failing part
            pass
    except Exception as error:  # whatever the other code raises
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        whose = " and ".join([FAMILIES.described(task.family), *map(METRICS.described, _added(task))])
        raise UserError(f"task {task.name}, of {whose}: {part}: {reason}") from error


def _parts(task: Task, prepared: PreparedTask) -> Iterator[str]:
    """Do one part after the other; yield the name of each before it begins."""
    yield "head, loss and predictions (`prepared`)"
    examples = _examples(prepared)
    yield f"the scores of `examples`, which has {', '.join(examples)}"
    scores = prepared.scores(examples, task.metric)
    low, high = prepared.kind.score_range(task.metric)
    if not low <= (value := value_of(scores, task.metric)) <= high:
        raise UserError(f"{task.metric} is {value}, and not between {low:g} and {high:g}")
    yield "the columns of `examples` in a file"
    result: dict[str, Any] = {"key": task.name, "model": "", "task": task.name, "family": task.family}
    result["scores"] = {SPLIT: scores}
    with TemporaryDirectory() as name:
        file = Path(name) / "examples.parquet"
        file.write_bytes(to_parquet(result, examples, prepared.label_names))
        kept = from_parquet(file, result)
    if absent := [name for name in prepared.kind.gold_columns if name not in kept.columns]:
        raise UserError(f"there is no {', '.join(absent)}, which `gold_columns` has")
    yield "scores of resampled examples (`measures`)"
    score = measure(task.metric, prepared.kind.measured(kept.columns, len(kept.label_names)))
    weights = np.stack((np.ones(kept.rows), np.arange(kept.rows)))
    if not math.isclose(again := float(score(weights)[0]), value, abs_tol=1e-6):
        raise UserError(f"{task.metric} of examples that count once each is {again}, and `scores` has {value}")
    yield "predictions in files (`shown`)"
    json.dumps(predicted(kept))
    predicts_the_same(kept)
    yield "the level of chance (`blind`)"
    prepared.chance(task.metric)


def _examples(prepared: PreparedTask) -> Examples:
    """Return the test examples with the predictions of a head that has seen one batch and was not trained."""
    import torch

    from mlmclm.backends.packing import Packing

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = prepared.head(HIDDEN, torch.nn.Linear)
        batch = prepared.batch(np.arange(min(TRAINED, prepared.rows["train"])))
        packing = Packing.of([len(ids) for ids in batch.sequences])
        states = torch.randn(packing.padded_tokens, HIDDEN, requires_grad=True)
        torch.autograd.backward(prepared.loss(head, states, packing, batch.targets))
        lengths = prepared.columns[SPLIT]["input_ids"].lengths
        predictions = []
        for rows in np.array_split(np.arange(len(lengths)), math.ceil(lengths.sum() / TOKENS_AT_ONCE)):
            packing = Packing.of(lengths[rows])
            with torch.no_grad():
                states = torch.randn(packing.padded_tokens, HIDDEN)
                predictions += prepared.predict(head, states, packing, SPLIT, rows)
    if len(predictions) != len(lengths):
        raise UserError(f"`predict` gives {len(predictions)} predictions of {len(lengths)} sequences")
    return prepared.examples(SPLIT, predictions)

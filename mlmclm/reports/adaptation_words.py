"""The answer in words whether further pretraining helped: on held-out documents, and on tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mlmclm.reports import text

if TYPE_CHECKING:
    from mlmclm.results.intervals import Estimate


def loss_sentence(before: float, after: Sequence[float], fall: Estimate, documents: int) -> str:
    """Say whether the loss on held-out documents falls.

    Args:
        before: loss of a token of the untouched model, in nats.
        after: that of each run of the training.
        fall: by how much it falls.
        documents: their number.
    """
    mean = math.fsum(after) / len(after)
    runs = "one pretraining run" if len(after) == 1 else f"{len(after)} pretraining runs"
    if math.isnan(fall.low):
        few = text.plural(documents, "held-out document")
        return f"On the text: the loss of a token goes from {before:.3f} to {mean:.3f} nats; whether that is more than chance, {few} can't tell."
    if fall.low > 0:
        verdict = f"the training helped: the loss of a token falls from {before:.3f} to {mean:.3f} nats"
    elif fall.high < 0:
        verdict = f"the training hurt: the loss of a token rises from {before:.3f} to {mean:.3f} nats"
    else:
        verdict = f"the training is not shown to help or hurt: the loss of a token is {before:.3f} nats before and {mean:.3f} after"
    by = (
        f"by {abs(fall.value):.3f} [{min(abs(fall.low), abs(fall.high)):.3f}, {max(abs(fall.low), abs(fall.high)):.3f}]"
    )
    if fall.low <= 0 <= fall.high:
        by = f"a fall of {fall.value:.3f} [{fall.low:.3f}, {fall.high:.3f}]"
    scope = ". The interval doesn't cover how other runs would differ" if len(after) == 1 else ""
    return f"On the text, {verdict}, {by} (95 %, paired over {documents:,} held-out documents; {runs}){scope}."


def task_sentences(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say whether the training helps on each task, and on the mean over tasks.

    Args:
        rows: those of a comparison of the trained model (first) with the untouched one.
    """
    return [_on_task(row) for row in rows]


def _on_task(row: Mapping[str, Any]) -> str:
    where = f"On {row['task']}" if row.get("kind") != "all" else "On the mean over tasks"
    scores = f"{text.points(row['first'])} with it and {text.points(row['second'])} without"
    if math.isnan(row["low"]):
        return f"{where}: {scores}; whether that is more than chance cannot be told."
    by = f"{text.estimate(row['difference'], row['low'], row['high'], sign=True)} points"
    sides = {True: "the training helped", False: "the training hurt"}
    verdict = sides[row["difference"] > 0] if row.get("apart") else "the training is not shown to help or hurt"
    return f"{where}, {verdict}: {scores}, {by}."

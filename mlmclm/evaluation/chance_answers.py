"""Chance levels of lm-evaluation-harness's tasks: what answers without a model score, by the harness's own metrics.

Only shares of right answers to a choice between continuations have one. A perplexity has none, and neither has the
probability of a single continuation, or a text that is generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from lm_eval.api.task import Task

from mlmclm.results.chance import Chance

SHARES = ("acc", "acc_norm", "acc_bytes")
"""Metrics that are the mean of whether each example is answered rightly."""
COUNTED = (*SHARES, "f1", "mcc")
"""Metrics that depend on the chosen options alone."""


def chances_of(task: Task) -> dict[str, Chance]:
    """Return the chance levels of a task's metrics, by the metrics' names; the requests must be built.

    It is the higher one of two: the expected score of a uniform guess among each example's options, and, where all
    examples have the same options, the score of always choosing the best one of them.
    """
    if task.OUTPUT_TYPE != "multiple_choice":
        return {}
    docs = list({each.doc_id: each.doc for each in task.instances}.values())
    options = [list(map(str, task.doc_to_choice(doc))) for doc in docs]
    try:
        scored = [
            [_chosen(task, doc, number, len(own)) for number in range(len(own))]
            for doc, own in zip(docs, options, strict=True)
        ]
    except Exception:  # a task's own function, which expects more of an answer; its levels are then not known
        return {}
    found: dict[str, Chance] = {}
    for metric in (name for name in COUNTED if all(name in choice for own in scored for choice in own)):
        levels = []
        if metric in SHARES:
            expected = fmean(fmean(float(choice[metric]) for choice in own) for own in scored)
            levels.append(Chance(expected, "a guess"))
        if all(own == options[0] for own in options):
            levels += _constant(task, metric, scored, options[0])
        if levels:
            # The first of equal levels is kept: a guess.
            found[metric] = max(levels, key=lambda level: level.score)
    return found


def _constant(
    task: Task, metric: str, scored: Sequence[Sequence[dict[str, Any]]], options: Sequence[str]
) -> list[Chance]:
    """Return the scores of always choosing one option, for each of them; none if the metric refuses such answers."""
    total = task.aggregation()[metric]
    try:
        scores = [float(total([own[number][metric] for own in scored])) for number in range(len(options))]
    except ValueError:  # scikit-learn's F1 of two classes, where an answer is of a third
        return []
    return [Chance(score, f"always {name!r}") for score, name in zip(scores, options, strict=True)]


def _chosen(task: Task, doc: Any, number: int, options: int) -> dict[str, Any]:
    """Return an example's values of the metrics if the option with this number is chosen."""
    results: Sequence[tuple[float, bool]] = [
        (0.0 if each == number else -1.0, each == number) for each in range(options)
    ]
    # For the mutual information, the harness asks for each option without its context too.
    asked = [*results, *[(0.0, False)] * options] if "acc_mutual_info" in task.aggregation() else results
    values: dict[str, Any] = task.process_results(doc, asked)
    return values

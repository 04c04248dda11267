"""Chance levels of lm-evaluation-harness's tasks: scores of answers given without a model, by the harness's own metrics.

Only metrics of a choice between continuations have a chance level. A perplexity, the probability of a single continuation
and generated text have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from lm_eval.api.task import Task

from mlmclm.results.chance import Chance

SHARES = ("acc", "acc_norm", "acc_bytes")
"""Metrics that are the share of examples answered correctly."""
COUNTED = (*SHARES, "f1", "mcc")
"""Metrics that depend on the chosen options alone."""


def chances_of(task: Task) -> dict[str, Chance]:
    """Return the chance levels of a task's metrics, by the metrics' names; the requests must be built.

    A level is the expected score of a uniform guess among each example's options. If all examples have the same options
    and always choosing the best of them scores higher, it is that score.
    """
    if task.OUTPUT_TYPE != "multiple_choice":
        return {}
    docs = list({instance.doc_id: instance.doc for instance in task.instances}.values())
    options = [list(map(str, task.doc_to_choice(doc))) for doc in docs]
    try:
        scored = [
            [_chosen(task, doc, number, len(choices)) for number in range(len(choices))]
            for doc, choices in zip(docs, options, strict=True)
        ]
    except Exception:  # the task's own function needs more than the chosen option: its levels are unknown
        return {}
    chances: dict[str, Chance] = {}
    for metric in (name for name in COUNTED if all(name in choice for row in scored for choice in row)):
        levels = []
        if metric in SHARES:
            expected = fmean(fmean(float(choice[metric]) for choice in row) for row in scored)
            levels.append(Chance(expected, "a guess"))
        if all(choices == options[0] for choices in options):
            levels += _constant(task, metric, scored, options[0])
        if levels:
            # The first of equal levels is kept: a guess.
            chances[metric] = max(levels, key=lambda level: level.score)
    return chances


def _constant(
    task: Task, metric: str, scored: Sequence[Sequence[dict[str, Any]]], options: Sequence[str]
) -> list[Chance]:
    """Return the scores of always choosing one option, for each of them; none if the metric refuses such answers."""
    total = task.aggregation()[metric]
    try:
        scores = [float(total([row[number][metric] for row in scored])) for number in range(len(options))]
    except ValueError:  # scikit-learn's F1 of two classes refuses an answer of a third
        return []
    return [Chance(score, f"always {name!r}") for score, name in zip(scores, options, strict=True)]


def _chosen(task: Task, doc: Any, number: int, options: int) -> dict[str, Any]:
    """Return an example's values of the metrics if the option with this number is chosen."""
    results: Sequence[tuple[float, bool]] = [
        (0.0 if option == number else -1.0, option == number) for option in range(options)
    ]
    # For the mutual information, the harness asks for each option without its context too.
    responses = [*results, *[(0.0, False)] * options] if "acc_mutual_info" in task.aggregation() else results
    values: dict[str, Any] = task.process_results(doc, responses)
    return values

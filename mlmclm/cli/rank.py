"""`mlmclm rank`: rank models by scores of any tool, with the ranks that each may have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument

from mlmclm.cli import options
from mlmclm.cli.output import print_json, show, show_table
from mlmclm.numbers import without_nan


def rank(
    scores: Annotated[list[Path], Argument(metavar="FOLDER|FILE...", help="Scores of models, one or several in each.")],
    task: options.OneTask = None,
    metric: options.Metric = None,
    rule: options.Rule = None,
    reader: options.Reader = None,
    common: options.Common = False,
    as_json: options.Json = False,
) -> None:
    """Ranks models by their means over tasks, with the groups that show no clear difference and the ranks that each model may have.

    A model's best rank is 1 plus the number of models shown to be better, its worst is N minus the number shown to be worse (Holm's method
    over all pairs). All these ranges hold together at 95 %.

    Example: mlmclm rank results/*
    """
    from mlmclm.answers.ranking_of_scores import rank as rank_scores
    from mlmclm.reports import text

    scored = rank_scores(scores, reader=reader, tasks=task or (), metric=metric, rule=rule, common=common)
    ranked = scored.ranking
    if as_json:
        pairs = []
        for first, second, diff, p_holm in ranked.pairs:
            numbers = {"difference": diff.value, "low": diff.low, "high": diff.high, "p": diff.p, "p_holm": p_holm}
            pairs.append({"first": first, "second": second, **without_nan(numbers)})
        facts = {"tasks": scored.tasks, "examples": scored.examples, "unit": scored.unit, "seeds": scored.seeds}
        models = [model._asdict() for model in ranked.models]
        print_json({"models": models, "groups": ranked.groups, "pairs": pairs, **facts, "left_out": scored.left_out})
        return
    scale = 1.0 if max(abs(model.score) for model in ranked.models) <= 1 else 0.01
    rows = [
        [
            str(model.best) if model.best == model.worst else f"{model.best} to {model.worst}",
            model.model,
            text.points(scale * model.score),
            " ".join(chr(ord("a") + index) for index, group in enumerate(ranked.groups) if model.model in group),
        ]
        for model in ranked.models
    ]
    unit = ", points of 100" if scale == 1 else ""
    show_table(["rank", "model", f"mean of {text.plural(len(scored.tasks), 'task')}{unit}", "group"], rows)
    clear = sum(pair.p_holm < 0.05 for pair in ranked.pairs)
    show(
        f"{clear:,} of {text.plural(len(ranked.pairs), 'pair')} differ clearly; models of one letter show no clear difference."
    )
    noise = f"other {scored.unit}s" if scored.seeds[1] == 1 else f"other {scored.unit}s and other seeds"
    show(f"The ranks hold together at 95 % for {noise}; they do not cover how the models were chosen.")
    for name, why in scored.left_out.items():
        show(f"{name} is left out: {why}")

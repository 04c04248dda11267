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

    All ranks hold together at 95 %: 1 and those shown to be better, to N less those shown to be worse, by Holm's method over all pairs.

    Example: mlmclm rank results/*
    """
    from mlmclm.answers.ranking_of_scores import rank as rank_scores
    from mlmclm.reports import text

    found = rank_scores(scores, reader=reader, tasks=task or (), metric=metric, rule=rule, common=common)
    ranked = found.ranking
    if as_json:
        pairs = []
        for first, second, own, p_holm in ranked.pairs:
            numbers = {"difference": own.value, "low": own.low, "high": own.high, "p": own.p, "p_holm": p_holm}
            pairs.append({"first": first, "second": second, **without_nan(numbers)})
        facts = {"tasks": found.tasks, "examples": found.examples, "unit": found.unit, "seeds": found.seeds}
        models = [each._asdict() for each in ranked.models]
        print_json({"models": models, "groups": ranked.groups, "pairs": pairs, **facts, "left_out": found.left_out})
        return
    scale = 1.0 if max(abs(each.score) for each in ranked.models) <= 1 else 0.01
    rows = [
        [
            str(each.best) if each.best == each.worst else f"{each.best} to {each.worst}",
            each.model,
            text.points(scale * each.score),
            " ".join(chr(ord("a") + place) for place, group in enumerate(ranked.groups) if each.model in group),
        ]
        for each in ranked.models
    ]
    unit = ", points of 100" if scale == 1 else ""
    show_table(["rank", "model", f"mean of {text.plural(len(found.tasks), 'task')}{unit}", "group"], rows)
    clear = sum(pair.p_holm < 0.05 for pair in ranked.pairs)
    show(
        f"{clear:,} of {text.plural(len(ranked.pairs), 'pair')} differ clearly; models of one letter show no clear difference."
    )
    noise = f"other {found.unit}s" if found.seeds[1] == 1 else f"other {found.unit}s and other seeds"
    show(f"The ranks hold together at 95 % for {noise}; of how models were chosen they know nothing.")
    for name, why in found.left_out.items():
        show(f"{name} is left out: {why}")

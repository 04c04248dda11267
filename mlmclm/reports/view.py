"""The content of the report page: rows of tables and sentences, which the template lays out and formats with `text`."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from mlmclm.analysis.additions import Tables
from mlmclm.analysis.analyse import Analysis
from mlmclm.analysis.comparison import ALL_TASKS, against, tied
from mlmclm.analysis.results import Record, records
from mlmclm.analysis.selection import best_rates
from mlmclm.numbers import rate_text
from mlmclm.reports import paired_models, text, wording
from mlmclm.reports.advice import advise
from mlmclm.reports.cautions import cautions, limits
from mlmclm.reports.drawing import FIGURES, Figure, ReportInput, Section, draw_all, drawn, needs_legend, styles
from mlmclm.reports.study_facts import MADE, ModelFacts, StudyFacts, TaskFacts
from mlmclm.reports.tested_claims import ClaimVerdict
from mlmclm.reports.trends import plain_names
from mlmclm.results.chance import chance_of
from mlmclm.seeds import seed_labels

EDGES = {"highest": "highest tried", "lowest": "lowest tried", "only": "only one tried"}
EMPTY: dict[str, Any] = {
    **dict.fromkeys(("task", "score", "interval", "plain", "fresh", "rate", "edge", "note"), ""),
    **dict.fromkeys(("best", "tied"), False),
}


def ordered_models(analysis: Analysis, facts: StudyFacts) -> tuple[ModelFacts, ...]:
    """Return the facts of all models that have or should have results, in the facts' order; models without facts come last."""
    wanted = {str(name) for name in analysis.coverage["model"]}
    listed = tuple(model for model in facts.models if model.name in wanted)
    extra = sorted(wanted - {model.name for model in listed})
    return listed + tuple(ModelFacts(name, "external") for name in extra)


def ordered_tasks(analysis: Analysis, facts: StudyFacts) -> tuple[TaskFacts, ...]:
    """Return the facts of all tasks that have or should have results, in the facts' order; tasks without facts come last."""
    wanted = {row["task"]: row for row in records(analysis.best)}
    wanted |= {row["task"]: row for row in records(analysis.best) if row["metric"]}
    listed = tuple(task for task in facts.tasks if task.name in wanted)
    extra = sorted(set(wanted) - {task.name for task in listed})
    return listed + tuple(TaskFacts(name, name, wanted[name]["family"], wanted[name]["metric"]) for name in extra)


def ranked_models(analysis: Analysis, models: Sequence[ModelFacts]) -> tuple[ModelFacts, ...]:
    """Return the models in the order of all tables and figures: from the best mean over tasks on; models without a mean come last."""
    means = {row["model"]: row["mean"] for row in records(analysis.overall) if row["kind"] == "all"}
    # NaN must not take part in comparisons, or the order would be arbitrary.
    scored = [model for model in models if not math.isnan(means.get(model.name, math.nan))]
    scored.sort(key=lambda model: (-means[model.name], model.name))
    return (*scored, *(model for model in models if model not in scored))


def _in_order(facts: StudyFacts, names: Sequence[str]) -> StudyFacts:
    """Return the facts with their models, and these models' zero-shot results, in the order of the names."""
    order = {name: number for number, name in enumerate(names)}
    models = sorted(facts.models, key=lambda model: order[model.name])
    zero_shot = sorted(facts.zero_shot, key=lambda result: order.get(result.model, len(order)))
    return replace(facts, models=tuple(models), zero_shot=tuple(zero_shot))


def report_input(analysis: Analysis, facts: StudyFacts) -> ReportInput:
    """Return the input from which the figures of a study are drawn."""
    listed, tasks = ordered_models(analysis, facts), ordered_tasks(analysis, facts)
    models = ranked_models(analysis, listed)
    order = [model.name for model in models]
    # The facts may have models without results. Styles are assigned to all together, in an order that doesn't depend on
    # scores, so that a model has one look everywhere and keeps it.
    extra = [model for model in facts.models if model not in models]
    looks = styles(
        [model.name for model in (*listed, *extra)],
        analysis.baseline,
        ranked=order,
        kinds={model.name: model.objective for model in (*listed, *extra)},
    )
    facts = _in_order(facts, [*order, *(model.name for model in extra)])
    # Further pretraining runs of a model would have the same words as the model.
    plain = plain_names([model for model in models if model.name in analysis.groups])
    return ReportInput(analysis, facts, models, tasks, looks, plain)


def figures_by_name(analysis: Analysis, facts: StudyFacts) -> dict[str, Figure]:
    """Return all figures by name, each with a legend of its own, since it is shown alone."""
    study = report_input(analysis, facts)
    models = tuple(study.looks.items())
    return {
        figure.id: replace(figure, legend=figure.legend or (models if FIGURES[name].by_model else ()))
        for name, group in drawn(study).items()
        for figure in group
    }


def _sections(study: ReportInput, groups: Mapping[str, Sequence[Figure]]) -> dict[str, list[dict[str, Any]]]:
    """Return the groups of figures by section of the page; a legend that all panels share is shown once, above them."""
    sections: dict[str, list[dict[str, Any]]] = {section: [] for section in get_args(Section)}
    for name, figures in groups.items():
        group, legends = FIGURES[name], {figure.legend for figure in figures}
        shared = legends.pop() if len(legends) == 1 else ()
        panels = [replace(figure, legend=()) for figure in figures] if shared else figures
        models = tuple(study.looks.items()) if needs_legend(study, name, figures) and not (shared or legends) else ()
        sections[group.section].append(
            {"name": name, "title": group.title, "note": group.note}
            | {"legend": shared, "models": models, "figures": panels}
        )
    return sections


def page(analysis: Analysis, facts: StudyFacts, tested: Sequence[ClaimVerdict], statistics: Tables) -> dict[str, Any]:
    """Return everything that the template needs; a pure function of its arguments.

    Args:
        tested: the verdicts on the study's claims (`tested_claims.verdicts_on`).
        statistics: the tables of all statistics.
    """
    study = report_input(analysis, facts)
    models, tasks, paired, facts, looks = study.listed, study.tasks, study.paired, study.facts, study.looks
    order = list(looks)
    advised, grid = advise(analysis, facts.basis), analysis.grid
    groups, without = draw_all(study)
    headline = advised.answer
    verdict = _parts(headline.verdict, order)
    worded = [model for model in models if model.name in study.labels or (model.name, True) in verdict]
    return {
        "text": text,
        "facts": facts,
        "headline": headline,
        "verdict": [(study.plain.get(part, part), name) for part, name in verdict],
        "plain": [(study.plain[model.name], model) for model in worded if model.name in study.plain],
        "baseline_sentence": wording.baseline_sentence(analysis),
        "baseline_mark": _baseline_mark(analysis),
        "open": advised.open,
        "advice": replace(advised, open=()).parts(),
        "noise": " ".join(wording.noise_lines(analysis)),
        "test_set": any(effect.folds is not None for effect in analysis.effects.values()),
        "cautions": cautions(analysis),
        "limits": limits(analysis),
        "tiles": _tiles(analysis, models, tasks),
        "looks": study.every,
        "sections": _sections(study, groups),
        "added": {name: records(table) for name, table in statistics.added.items()},
        "left_out": (*statistics.left_out, *without),
        "overall": _overall(analysis, models),
        "families": _families(analysis, models),
        "tasks": tasks,
        "several": len(tasks) > 1,
        "with_mean": len(tasks) > 1 or any(len(runs) > 1 for runs in analysis.groups.values()),
        "baseline": analysis.baseline,
        "chances": analysis.chances,
        "mean_chance": chance_of(analysis.chances, [task.name for task in tasks]),
        "scores": score_rows(analysis, models, tasks),
        "sensitivity": _sensitivity(analysis, models, tasks),
        "stability": _by_task(records(analysis.stability), models, tasks),
        "components": _components(analysis, models, tasks),
        "claims": _claims(analysis, models),
        "tested": _tested(tested),
        "zero_shot": paired_models.zero_shot_tables(facts),
        "pairs": paired,
        "made": MADE,
        "one_recipe": all(model.kind in ("pretrained", "untrained") for model in facts.models),
        "settings": _settings(facts),
        "rule": analysis.rule,
        "basis": "test" if analysis.rule == "on_test" else "validation",
        "settings_varied": any(analysis.cells["setting"]),
        "confidence": f"{analysis.confidence * 100:g} %",
        "extended": wording.extended(analysis),
        "grid": f"{', '.join(map(rate_text, grid.learning_rates))} × seeds {', '.join(seed_labels(grid.seeds))}",
    }


def _baseline_mark(analysis: Analysis) -> tuple[str, str]:
    """Return the style and the symbol of the sentence on the baseline: by outcome: all models beat it, none does, or anything else."""
    verdicts = set(analysis.claims["verdict"])
    if verdicts == {"holds"}:
        return "yes", "✓"
    if "unknown" in verdicts:
        return "open", "?"
    return ("no", "✗") if verdicts <= {"does not hold", "diverged"} else ("open", "–")


def _parts(sentence: str, names: Sequence[str]) -> list[tuple[str, bool]]:
    """Split the sentence into pieces, each with whether it is a model's name, which must not be broken across lines."""
    # Longest first, as a name can be the prefix of another.
    pattern = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return [(part, part in names) for part in re.split(f"({pattern})", sentence) if part]


def _tiles(analysis: Analysis, models: Sequence[ModelFacts], tasks: Sequence[TaskFacts]) -> list[tuple[str, str, str]]:
    grid = analysis.grid
    missing = f", {analysis.missing:,} missing" if analysis.missing else ""
    added = sum(len(rates) * len(grid.seeds) for rates in grid.added.values())
    missing += f", {added:,} added" if added else ""
    axes = f"{text.plural(len(grid.learning_rates), 'rate')} × {text.plural(len(grid.seeds), 'seed')}{missing}"
    tokens = [model.tokens for model in models if model.tokens]
    kinds = ", ".join(f"{number} {kind}" for kind, number in Counter(model.kind for model in models).items())
    families = text.plural(len({task.family for task in tasks}), "family", "families")
    tiles = [
        (str(len(models)), "model" if len(models) == 1 else "models", kinds),
        (str(len(tasks)), "task" if len(tasks) == 1 else "tasks", families),
        (f"{len(analysis.cells):,}", "fine-tuning runs", axes),
        (f"{analysis.diverged:,}", "diverged", f"{text.percent(analysis.diverged / len(analysis.cells))} of runs"),
    ]
    if tokens:
        tiles.append((text.count(max(tokens)), "tokens seen", "by the longest pretrained model"))
    return tiles


def _overall(analysis: Analysis, models: Sequence[ModelFacts]) -> list[dict[str, Any]]:
    rows = {row["model"]: row for row in records(analysis.overall) if row["kind"] == "all"}
    ranked = [rows[model.name] for model in models if model.name in rows]
    to_best = {row["model_b"]: row for row in against(analysis.comparisons, ranked[0]["model"]) if row["kind"] == "all"}
    top, level = wording.marked(analysis)
    ranks: list[int] = []
    for index, row in enumerate(ranked):
        first = ranked[ranks[-1] - 1] if ranks else row
        # Models whose scores are equal as shown share a rank.
        ranks.append(ranks[-1] if ranks and tied(first["mean"] - row["mean"]) else index + 1)
    return [
        row
        | {
            "rank": text.NONE if math.isnan(row["mean"]) else str(rank),
            # The difference is "best minus this model"; the template shows it as this model's deficit.
            "gap": to_best.get(row["model"]),
            "best": row["model"] in top,
            "tied": row["model"] in level,
        }
        for rank, row in zip(ranks, ranked, strict=True)
    ]


def _families(analysis: Analysis, models: Sequence[ModelFacts]) -> list[Record]:
    rows = [row for row in records(analysis.overall) if row["kind"] == "family"]
    order = {model.name: number for number, model in enumerate(models)}
    return sorted(rows, key=lambda row: (row["scope"], order[row["model"]]))


def _sensitivity(analysis: Analysis, models: Sequence[ModelFacts], tasks: Sequence[TaskFacts]) -> list[dict[str, Any]]:
    curves = {(row["model"], row["task"], row["learning_rate"]): row for row in records(analysis.curves)}
    chosen = {(row["model"], row["task"], row["learning_rate"]) for row in records(analysis.chosen)}
    tables = []
    for task in tasks:
        rates = sorted({rate for _, curve_task, rate in curves if curve_task == task.name})
        rows = []
        for model in models:
            keys = [(model.name, task.name, rate) for rate in rates]
            cells = [{"row": curves.get(key), "chosen": key in chosen} for key in keys]
            rows.append({"model": model.name, "cells": cells})
        if rates:
            tables.append({"task": task, "rates": [rate_text(rate) for rate in rates], "rows": rows})
    return tables


def _by_task(rows: Iterable[Record], models: Sequence[ModelFacts], tasks: Sequence[TaskFacts]) -> list[dict[str, Any]]:
    """Return the rows of each task that has any, in the order of the models."""
    order, by_task = {model.name: number for number, model in enumerate(models)}, dict[str, list[Record]]()
    for row in sorted(rows, key=lambda row: order.get(row["model"], len(order))):
        by_task.setdefault(row["task"], []).append(row)
    return [{"task": task, "rows": by_task[task.name]} for task in tasks if task.name in by_task]


def _components(analysis: Analysis, models: Sequence[ModelFacts], tasks: Sequence[TaskFacts]) -> dict[str, Any]:
    """Return the sources of variance that the study has, in words, and a group of rows for each task."""
    rows: dict[tuple[str, str], Record] = {}
    for row in records(analysis.components):
        of_model = {"task": row["task"], "model": row["model_family"]}
        rows.setdefault((row["task"], row["model_family"]), of_model)[row["source"]] = row
    sources = dict.fromkeys(row["source"] for row in records(analysis.components))
    words = {source: wording.source_words(source) for source in sources}
    return {"sources": words, "groups": _by_task(rows.values(), models, tasks)}


def _claims(analysis: Analysis, models: Sequence[ModelFacts]) -> list[dict[str, Any]]:
    order = {model.name: index for index, model in enumerate(models)}
    rows = sorted(records(analysis.claims), key=lambda row: order[row["model"]])
    return [row | {"reason": wording.claim_reason(row)} for row in rows]


def _tested(verdicts: Sequence[ClaimVerdict]) -> dict[str, list[ClaimVerdict]]:
    """Return the verdicts on claims from files that could be tested, and on those that could not."""
    split: dict[str, list[ClaimVerdict]] = {"found": [], "lacking": []}
    for verdict in verdicts:
        split["lacking" if verdict.verdict == "not tested here" else "found"].append(verdict)
    return split if verdicts else {}


def _settings(facts: StudyFacts) -> list[tuple[str, list[tuple[str, str]]]]:
    blocks = {"Corpus": facts.corpus, "Pretraining recipe": facts.recipe, "Fine-tuning protocol": facts.protocol}
    return [
        (title, [(label.replace("_", " "), text.plain(value)) for label, value in block.items()])
        for title, block in blocks.items()
        if block
    ]


def score_rows(analysis: Analysis, models: Sequence[ModelFacts], tasks: Sequence[TaskFacts]) -> list[dict[str, Any]]:
    """Return a row for each model with a cell for each task and one for the mean over tasks, in words."""
    best = {(row["model"], row["task"]): row for row in records(analysis.best)}
    overall = {row["model"]: row for row in records(analysis.overall) if row["scope"] == ALL_TASKS}
    by_task = {task.name: [row for (_, row_task), row in best.items() if row_task == task.name] for task in tasks}
    winners = {task: wording.winners_of(analysis, task, rows) for task, rows in by_task.items()}
    top, level = wording.marked(analysis)
    rows = []
    for model in models:
        cells = []
        for task in tasks:
            row = best[model.name, task.name]
            winner, rivals = winners[task.name]
            cells.append(
                EMPTY
                | {
                    "task": task.name,
                    "score": text.points(row["score"]),
                    "interval": text.interval(row["score_low"], row["score_high"]),
                    "plain": text.points(row["test_mean"]),
                    "fresh": text.points(row["fresh"]),
                    "rate": best_rates(row),
                    "edge": EDGES.get(row["edge"], ""),
                    "note": "; ".join(filter(None, (_lost(row), row["note"]))),
                    "best": model.name in winner,
                    "tied": model.name in rivals,
                }
            )
        mean = overall.get(model.name)
        if mean is None:  # a further pretraining run, whose scores count in the mean of its model
            first = next(name for name, runs in analysis.groups.items() if model.name in runs)
            cells.append(EMPTY | {"note": f"in the mean of {first}"})
        else:
            cells.append(
                EMPTY
                | {
                    "score": text.points(mean["mean"]),
                    "interval": text.interval(mean["low"], mean["high"]),
                    "note": "" if mean["tasks"] == mean["tasks_scored"] else "not on every task",
                    "best": model.name in top,
                    "tied": model.name in level,
                }
            )
        rows.append({"model": model.name, "cells": cells})
    return rows


def _lost(row: Record) -> str:
    """Say how many seeds a score is based on if other seeds have diverged or are missing; else empty."""
    lost = [f"{row[kind]} {word}" for kind, word in (("diverged", "diverged"), ("missing", "not run")) if row[kind]]
    return f"{text.plural(row['n'], 'seed')}, {', '.join(lost)}" if lost and row["n"] else ""

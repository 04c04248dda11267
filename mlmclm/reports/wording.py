"""The study's findings in sentences: the answer, the check against the baseline, cautions and limits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from mlmclm.analysis.analyse import Analysis
from mlmclm.analysis.comparison import against
from mlmclm.analysis.results import Grid, Record, records
from mlmclm.numbers import rate_text
from mlmclm.reports import text
from mlmclm.seeds import Seeds

STREAM_WORDS = {"head": "the head's initial weights", "order": "the order of the data", "dropout": "dropout"}


@dataclass(frozen=True)
class Headline:
    """The answer to the study's question."""

    clear: bool  # whether one model can be told apart from all others
    verdict: str  # one short sentence
    detail: str  # the numbers behind it, in one or two sentences
    best: str | None  # the model with the highest score; None if no model has a score on every task
    tied: tuple[str, ...] = ()  # not told apart from it: Holm's p at or above 1 - confidence, or no interval


def headline(analysis: Analysis) -> Headline:
    """Say which model is best on the mean over tasks, and whether the interval supports that."""
    rows = [row for row in records(analysis.overall) if row["kind"] == "all"]
    ranked = sorted((row for row in rows if not math.isnan(row["mean"])), key=lambda row: (-row["mean"], row["model"]))
    tasks = text.plural(rows[0]["tasks"], "task")
    scope = f"the mean over {tasks}" if rows[0]["tasks"] > 1 else "the task"
    if not ranked:
        verdict = "No answer yet: no model has a score on every task."
        return Headline(False, verdict, "The tables below show what there is.", None)
    best = ranked[0]
    own = f"{best['model']} scores {_score(best)}"
    if len(ranked) == 1:
        others = "It is the only model" + (" with a score on every task" if len(rows) > 1 else "")
        return Headline(False, f"{own} on {scope}.", f"{others}, so there is nothing to compare.", best["model"])
    rivals = {row["model_b"]: row for row in against(analysis.comparisons, best["model"]) if row["kind"] == "all"}
    # `not p < level` instead of `p >= level`: a NaN, which means that there is no interval, must count as tied.
    tied = tuple(row["model"] for row in ranked[1:] if not rivals[row["model"]]["p_holm"] < 1 - analysis.confidence)
    runner_up = ranked[1]
    gap = rivals[runner_up["model"]]
    measured = text.interval(gap["low"], gap["high"], sign=True) or "(no interval: one seed)"
    numbers = (
        f"It scores {_score(best)}; the next, {runner_up['model']}, scores {_score(runner_up)}: a difference of "
        f"{text.difference(gap['difference'])} points {measured}"
    )
    corrected = f", Holm-corrected p {_p(gap['p_holm'])}" if not math.isnan(gap["p_holm"]) else ""
    if best["model"] == analysis.baseline:
        verdict = f"Nothing beats the baseline: {best['model']} scores highest on {scope}."
    elif not tied:
        verdict = f"Best on {scope}: {best['model']}."
    else:
        others = f"{text.listing(tied, most=3)} {'is' if len(tied) == 1 else 'are'} not told apart from it"
        verdict = f"No clear winner on {scope}: {best['model']} scores highest, but {others}."
    clear = not tied and best["model"] != analysis.baseline
    return Headline(clear, verdict, f"{numbers}{corrected}.", best["model"], tied)


def _score(row: Record) -> str:
    return text.estimate(row["mean"], row["low"], row["high"]).strip()


def _p(value: float) -> str:
    shown = text.probability(value)
    return shown if shown.startswith("<") else f"= {shown}"


def baseline_sentence(analysis: Analysis) -> str:
    """Say whether every model beats the baseline, and which isn't shown to; empty without a baseline."""
    rows = records(analysis.claims)
    if analysis.baseline is None or not rows:
        return ""
    required, tasks = rows[0]["tasks_required"], rows[0]["tasks"]
    rule = "on the mean over tasks" + (f", and on at least {required} of {tasks} tasks" if tasks > 1 else "")
    beaten = "the baseline by more than the interval"
    holding = [row["model"] for row in rows if row["holds"]]
    unknown = [row["model"] for row in rows if row["verdict"] == "unknown"]
    failing = [row for row in rows if not row["holds"] and row["verdict"] != "unknown"]
    if len(holding) == len(rows):
        who = f"All {len(rows)} models beat" if len(rows) > 1 else f"{rows[0]['model']} beats"
        return f"{who} {beaten} {rule}."
    if len(unknown) == len(rows):
        return f"Whether the models beat {beaten}, {rule}, cannot be told yet: scores or intervals are lacking."
    sentences = [f"Not every model is shown to beat {beaten} {rule}."]
    if holding:
        sentences.append(f"It is so for {text.listing(holding)}.")
    if failing:
        reasons = [f"{row['model']} ({claim_reason(row)})" for row in failing]
        sentences.append(f"It is not the case for {text.listing(reasons, most=4)}.")
    if unknown:
        sentences.append(f"It cannot be told yet for {text.listing(unknown)}, as scores or intervals are lacking.")
    return " ".join(sentences)


def claim_reason(row: Record) -> str:
    """Explain the verdict on a model's claim against the baseline, from a row of the claims table."""
    on_tasks = (
        f"ahead on {row['tasks_ahead']} of {row['tasks']} tasks ({row['tasks_clear']} by more than the interval), "
        f"{row['tasks_required']} needed"
    )
    if row["verdict"] == "unknown":
        return "cannot be told, as scores or intervals are lacking"
    if row["holds"]:
        return f"ahead on the mean, and {on_tasks}"
    return f"{'ahead' if row['on_mean'] else 'not clearly ahead'} on the mean, {on_tasks}"


def cautions(analysis: Analysis, titles: Mapping[str, str] | None = None) -> list[str]:
    """List what a reader must know before trusting the tables, most serious first; empty if there is nothing.

    Args:
        titles: display names of tasks if they differ from their names, as in the tables beside these sentences.
    """
    best = [{**row, "task": (titles or {}).get(row["task"], row["task"])} for row in records(analysis.best)]
    notes = []
    if analysis.missing:
        pairs = sum(row["missing"] > 0 for row in records(analysis.coverage))
        expected = int(analysis.coverage["expected"].sum())
        notes.append(
            f"The grid is incomplete: {analysis.missing:,} of {expected:,} cells have no result (in "
            f"{text.plural(pairs, 'model-task pair')}). {_preference(analysis)}"
        )
    if analysis.grid.race is not None:
        notes.append(_raced(analysis, analysis.grid.race))
    if analysis.diverged:
        share = text.percent(analysis.diverged / len(analysis.cells))
        notes.append(
            f"{text.plural(analysis.diverged, 'cell')} of {len(analysis.cells):,} diverged ({share}). {_preference(analysis)}"
        )
    lost = [f"{row['model']} on {row['task']}" for row in best if row["note"] == "every cell diverged"]
    if lost:
        notes.append(f"Every cell diverged for {text.listing(lost)}: there is no score.")
    hurt = [f"{row['model']} on {row['task']}" for row in best if row["n"] and row["diverged"]]
    if hurt:
        where = "at every rate" if analysis.rule == "per_seed" else "even at the chosen rate"
        notes.append(f"Seeds diverged {where} for {text.listing(hurt)}: the mean is over the others.")
    whose = " of a seed" if analysis.rule == "per_seed" else ""
    for edge, further in (("highest", "higher"), ("lowest", "lower")):
        at = [row for row in best if row["edge"] == edge]
        if at:
            notes.append(
                f"The best learning rate{whose} is the {edge} one tried for {_pairs(at, len(best))}: a {further} one may be "
                "better, so these scores may understate the model."
            )
    if any(row["edge"] == "only" for row in best):
        notes.append("Where only one learning rate was tried, the score may be far from what a model can reach.")
    single = sum(row["n"] == 1 for row in best)
    if single:
        notes.append(f"{text.plural(single, 'score')} rest on one seed and have no interval.")
    if analysis.rule == "per_seed":
        notes.append("Every seed chose its own learning rate, which is optimistic: each takes its own luck.")
    if analysis.rule == "on_test":
        notes.append(
            "Learning rates were chosen on the test scores that are reported, which is optimistic: a score is the highest of "
            "several noisy ones."
        )
    return notes


def _raced(analysis: Analysis, error: float) -> str:
    """Say what the race between the learning rates left out."""
    expected = int(analysis.coverage["expected"].sum())
    rows = (row for row in records(analysis.curves) if row["cut"])
    cut = [f"{rate_text(row['learning_rate'])} ({row['model']} on {row['task']})" for row in rows]
    rates = f"Rates cut: {text.listing(cut)}. Cut rates" if cut else "No rate was cut. Cut rates"
    return (
        f"The learning rates were raced, with an error of {text.percent(error)} for each model and task: "
        f"{expected - analysis.cut - analysis.missing:,} of {expected:,} cells were computed. {rates} are in no figure of "
        "stability, and where there are any, sensitivity to the learning rate is not known."
    )


def _preference(analysis: Analysis) -> str:
    """Say how the rule treats lost cells."""
    if analysis.rule == "per_seed":
        return "Each seed chooses among the rates at which it has a score."
    return "A rate that lost seeds is chosen only where no other kept more."


def _pairs(rows: list[Record], total: int) -> str:
    """Name a few (model, task) pairs with their rates, or count many of them by model."""
    if len(rows) <= 4:
        return text.listing([f"{row['model']} on {row['task']} ({row['learning_rates']})" for row in rows])
    each = Counter(row["model"] for row in rows)
    named = text.listing([f"{model} on {text.plural(number, 'task')}" for model, number in each.items()])
    return f"{len(rows)} of {total} model-task pairs ({named}; marked in the table of scores)"


def _noise(grid: Grid) -> str:
    """Say which sources of a cell's randomness the grid's seeds vary, and what that means for an interval."""
    if all(isinstance(seed, int) for seed in grid.seeds):
        return "fine-tuning seeds only"
    seeds = [Seeds.of(seed) for seed in grid.seeds]
    numbers = {name: {getattr(each, name) for each in seeds} for name in STREAM_WORDS}
    varied = [words for name, words in STREAM_WORDS.items() if len(numbers[name]) > 1]
    held = [words for name, words in STREAM_WORDS.items() if len(numbers[name]) == 1]
    noise = f"{text.listing(varied)} only" if varied else "no seed"
    if held:
        noise += f"; {text.listing(held)} {'was' if len(held) == 1 else 'were'} held"
    # A stream with fewer values than there are combinations repeats some of them.
    if any(len(numbers[name]) not in (1, len(seeds)) for name in STREAM_WORDS):
        noise += ". Combinations share seeds, so their scores are not independent and intervals are too narrow"
    return noise


def limits(analysis: Analysis) -> list[str]:
    """List what the intervals never cover, whatever the results."""
    percent = f"{analysis.confidence * 100:g} %"
    return [
        f"The {percent} intervals cover the noise of {_noise(analysis.grid)}.",
        "Each model is one pretraining run: another pretraining seed would move its scores by an unknown amount.",
        "Test sets are finite and shared by all models: their sampling noise is in no interval.",
        "The mean over tasks weighs every task the same, although their metrics differ.",
    ]

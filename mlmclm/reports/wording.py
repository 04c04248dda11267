"""The study's findings in sentences: the answer, the check against the baseline, its noise, and words for its parts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlmclm.analysis.analyse import Analysis
from mlmclm.analysis.comparison import ALL_TASKS, against, low_of_best, tied
from mlmclm.analysis.comparison import clearly_different as clearly_different  # headlines are based on it
from mlmclm.analysis.model_ranks import level_runs
from mlmclm.analysis.power import POWER
from mlmclm.analysis.results import Record, records
from mlmclm.numbers import rate_text
from mlmclm.reports import text
from mlmclm.results.chance import above_chance

STREAM_WORDS = {"head": "the head's initial weights", "order": "the order of the data", "dropout": "dropout"}

SOURCE_WORDS = {
    "rate": "learning rate",
    "seed": "fine-tuning seed",
    "interaction": "streams together",
    "examples": "test examples",
    "replicate": "pretraining seed",
    **STREAM_WORDS,
}


def source_words(source: str) -> str:
    """Return the words for a source of variance (`components`)."""
    return " and ".join(SOURCE_WORDS.get(part, part) for part in source.split("+"))


@dataclass(frozen=True)
class Headline:
    """The answer to the study's question."""

    clear: bool  # whether one model differs clearly from all others
    verdict: str  # one short sentence
    detail: str  # the numbers behind the verdict, in one to three sentences
    best: tuple[str, ...] = ()  # the model with the highest score, or several whose scores are equal as shown
    tied: tuple[str, ...] = ()  # the others that are not clearly different from the best (`clearly_different`)


def level_groups(analysis: Analysis) -> list[list[str]]:
    """Return the groups of models without a clear difference on the mean over tasks, from the best on.

    A group is a longest sequence of neighbours in the order of means in which no two models differ clearly.
    Models without a mean are in no group.
    """
    rows = [row for row in records(analysis.overall) if row["kind"] == "all" and not math.isnan(row["mean"])]
    ranked = [row["model"] for row in sorted(rows, key=lambda row: (-row["mean"], row["model"]))]
    clear = {
        pair
        for row in records(analysis.comparisons)
        if row["kind"] == "all" and clearly_different(row, analysis.confidence)
        for pair in ((row["model_a"], row["model_b"]), (row["model_b"], row["model_a"]))
    }
    return level_runs(ranked, clear)


def headline(analysis: Analysis) -> Headline:
    """Say which model is best on the mean over tasks, and whether the interval supports that."""
    rows = [row for row in records(analysis.overall) if row["kind"] == "all"]
    ranked = sorted((row for row in rows if not math.isnan(row["mean"])), key=lambda row: (-row["mean"], row["model"]))
    scope = f"the mean over {tasks} tasks" if (tasks := rows[0]["tasks"]) > 1 else text.scope(list(analysis.families))
    if not ranked:
        verdict = "No answer yet: no model has a score on every task."
        return Headline(False, verdict, "The tables below show what there is.")
    best, so_far = ranked[0], " so far" if analysis.missing else ""
    name, left = best["model"], unfinished(analysis, named=False)
    if len(ranked) == 1:
        only = "It is the only model" + (" with a score on every task" if len(rows) > 1 else "")
        only += ", so there is nothing to compare."
        verdict = f"{name} scores {_score(best)} on {scope}{so_far}."
        return Headline(False, verdict, _joined(only, left), (name,))
    rivals = {row["model_b"]: row for row in against(analysis.comparisons, name) if row["kind"] == "all"}
    level = [row for row in ranked[1:] if tied(rivals[row["model"]]["difference"])]
    close = [rivals[row["model"]] for row in ranked[1:] if row not in level]
    close = [row for row in close if not clearly_different(row, analysis.confidence)]
    runner_up = ranked[1]
    gap = rivals[runner_up["model"]]
    measured = text.interval(gap["low"], gap["high"], sign=True) or f"({_no_interval(analysis, gap)})"
    corrected = f", Holm-corrected p {_p(gap['p_holm'])}" if not math.isnan(gap["p_holm"]) else ""
    number = 1 + len(level) + len(close)
    best |= {"low": low_of_best(best, number, analysis.confidence)}
    among = f" as the best of {number} without a clear difference" if number > 1 and not math.isnan(best["low"]) else ""
    numbers = (
        f"It scores {_score(best)}{among}; the next, {runner_up['model']}, scores {_score(runner_up)}: a difference of "
        f"{text.difference(gap['difference'])} points {measured}{corrected}."
    )
    top = (name, *(row["model"] for row in level))
    if level:
        verdict = f"Tied on {scope}{so_far}: {text.listing(top, most=3)} score {text.points(best['mean'])}"
        verdict += ", which is not above chance." if all(_at_chance_everywhere(analysis, name) for name in top) else "."
        numbers = f"{_score(best)} and {_score(runner_up)}: a difference of 0.00 points {measured}{corrected}."
    elif name == analysis.baseline:
        opening = "No model is shown to beat" if close else "Nothing beats"
        verdict = f"{opening} the baseline{so_far}: {name} scores highest on {scope}."
    elif _at_chance_everywhere(analysis, name):
        verdict = f"No winner on {scope}{so_far}: {name} scores highest, but {_no_evidence(analysis, name)}."
    elif close:
        verdict = f"No clear winner on {scope}{so_far}: {name} scores highest, but {_why_not(analysis, name, close)}."
    elif analysis.missing:  # a learning rate without a result may be the best
        verdict = f"No winner yet on {scope}: {name} scores highest so far."
    else:
        verdict = f"Best on {scope}: {name}."
    detail = _joined(numbers, _corrected(analysis, gap), _untested(analysis), left)
    clear = not level and not close and name != analysis.baseline and not analysis.missing
    return Headline(clear, verdict, detail, top, tuple(row["model_b"] for row in close))


def marked(analysis: Analysis) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the models that tables mark as best on the mean over tasks, and those marked as not clearly different from it; none if the best is at chance."""
    head = headline(analysis)
    if all(_at_chance_everywhere(analysis, model) for model in head.best):
        return (), ()
    return head.best, head.tied


def winners_of(analysis: Analysis, scope: str, rows: Sequence[Record]) -> tuple[set[str], set[str]]:
    """Return the models with the highest score on a task or family, and those not clearly different from the first of these.

    Both sets are empty if there are fewer than two scores, or the highest score is not above chance.

    Args:
        rows: `model`, `score` and `above_chance` of each model.
    """
    scored = [row for row in rows if not math.isnan(row["score"])]
    # A single score cannot be better than others.
    if len(scored) < 2:
        return set(), set()
    top = min(scored, key=lambda row: (-row["score"], row["model"]))
    if top["above_chance"] == "no":
        return set(), set()
    rivals = against(analysis.comparisons, top["model"])
    rivals = [row for row in rivals if row["scope"] == scope and not math.isnan(row["difference"])]
    level = {row["model_b"] for row in rivals if tied(row["difference"])}
    near = {row["model_b"] for row in rivals if not clearly_different(row, analysis.confidence)}
    return {top["model"], *level}, near - level


def task_verdicts(analysis: Analysis) -> dict[tuple[str, str], str]:
    """Say of every (model, task) with a score how it compares with the other models on that task, in a sentence.

    Several pretraining runs of a model are compared as one.
    """
    by_task: dict[str, list[Record]] = {}
    for row in records(analysis.best):
        effect = analysis.effects.get((row["model"], row["task"]))
        if row["model"] in analysis.groups and effect is not None and not math.isnan(effect.seeds.value):
            by_task.setdefault(row["task"], []).append(row | {"score": effect.seeds.value})
    verdicts: dict[tuple[str, str], str] = {}
    where = "on this task so far" if analysis.missing else "on this task"
    for task, rows in by_task.items():
        winners, rivals = winners_of(analysis, task, rows)
        top = min(rows, key=lambda row: (-row["score"], row["model"]))["model"]
        gaps = {row["model_b"]: row for row in against(analysis.comparisons, top) if row["scope"] == task}
        for model in (row["model"] for row in rows):
            level = sorted((winners | rivals) - {model})
            if len(rows) < 2:
                continue
            if not winners:
                sentence = f"No model is shown to be above chance {where}."
            elif model in winners and not level:
                best = "Highest score" if analysis.missing else "Best"
                sentence = f"{best} of {len(rows)} models {where}."
            elif model in winners:
                sentence = f"Highest score {where}, not clearly above {text.listing(level)}."
            elif model in rivals:
                sentence = f"No clear difference {where} from the best, {top}."
            else:
                gap = gaps[model]
                lead = text.estimate(-gap["difference"], -gap["high"], -gap["low"], sign=True).strip()
                sentence = f"Below the best {where}, {top}: {lead} points."
            verdicts |= {(run, task): sentence for run in analysis.groups[model]}
    return verdicts


def _at_chance_everywhere(analysis: Analysis, model: str) -> bool:
    """Return whether none of a model's scores is above chance."""
    return all(row["above_chance"] == "no" for row in records(analysis.best) if row["model"] == model)


def _no_evidence(analysis: Analysis, model: str) -> str:
    """Return a phrase with a verb that says why no verdict is based on a model's scores."""
    low = [row for row in records(analysis.best) if row["model"] == model and row["above_chance"] == "no"]
    reasons = ["is not above chance"] if any(map(is_low, low)) else []
    # A constant prediction can score above the chance level, as not all constant predictions score the same.
    reasons += ["predicts the same for every example"] if not all(map(is_low, low)) else []
    return " or ".join(reasons)


def is_low(row: Record) -> bool:
    """Return whether a score of the table `best` is not above the chance level, whatever its predictions are."""
    return above_chance(row["score"], row["score_low"], row["chance"]) == "no"


def _why_not(analysis: Analysis, model: str, close: Sequence[Record]) -> str:
    """Say why a model is not clearly different from others: no interval, an interval or p value too wide, or scores at chance."""
    unknown = [row["model_b"] for row in close if math.isnan(row["p_holm"])]
    chance = [row["model_b"] for row in close if row["p_holm"] < 1 - analysis.confidence]
    near = [row["model_b"] for row in close if row["model_b"] not in (*unknown, *chance)]
    reasons = []
    if near:
        reasons.append(
            f"{text.listing(near, most=3)} {'is' if len(near) == 1 else 'are'} not clearly different from it"
        )
    if unknown:
        reasons.append(f"its difference to {text.listing(unknown, most=3)} has no interval")
    if chance:
        reason = _no_evidence(analysis, model) or "is not above chance"
        reasons.append(f"its lead over {text.listing(chance, most=3)} is based on tasks where it {reason}")
    return "; ".join(reasons)


def _no_interval(analysis: Analysis, row: Record) -> str:
    """Say why a difference has no interval."""
    pair = (row["model_a"], row["model_b"])
    if any(score["n"] == 1 for score in records(analysis.best) if score["model"] in pair):
        return "no interval: one seed"
    return "no interval: the seeds give equal scores; their noise is not known"


def _joined(*sentences: str) -> str:
    return " ".join(filter(None, sentences))


def _corrected(analysis: Analysis, row: Record) -> str:
    """Say why a difference is not clear although its interval is above 0: intervals are not corrected for multiple tests. Empty for other differences."""
    if not row["low"] > 0 or math.isnan(row["p_holm"]) or row["p_holm"] < 1 - analysis.confidence:
        return ""
    return "The interval is of this pair alone; p is corrected over all pairs of models and tasks, and the verdict goes by it."


def _untested(analysis: Analysis) -> str:
    """Say how many pairs of models Holm's correction leaves out because they have no interval; empty if it leaves out none or all."""
    rows = [row for row in records(analysis.comparisons) if row["kind"] == "all"]
    tests = rows[0]["tests"] if rows else 0
    if tests in (0, len(rows)):
        return ""
    return f"Holm's correction counts {tests} of {len(rows)} pairs of models, as the others have no interval."


def unfinished(analysis: Analysis, models: Sequence[str] = (), *, named: bool = True) -> str:
    """Say how many cells have no result, so that the choice of rates is not final; empty if there are none.

    Args:
        models: only these; by default all.
        named: whether to say of which model and task.
    """
    missing, expected = (
        sum(row[name] for row in records(analysis.coverage) if row["model"] in (models or analysis.models))
        for name in ("missing", "expected")
    )
    if not missing:
        return ""
    which = f" ({missing_cells(analysis, models)})" if named else ""
    return f"Not final: {missing:,} of {expected:,} cells have no result yet{which}."


def missing_cells(analysis: Analysis, models: Sequence[str] = ()) -> str:
    """Say how many cells of which model and task have no result, the pairs with most missing cells first; empty if there are none.

    Args:
        models: only these; by default all.
    """
    rows = [row for row in records(analysis.coverage) if row["missing"] and row["model"] in (models or analysis.models)]
    rows.sort(key=lambda row: -row["missing"])
    return text.listing([f"{row['missing']:,} of {row['model']} on {row['task']}" for row in rows], most=4)


def _score(row: Record) -> str:
    return text.estimate(row["mean"], row["low"], row["high"]).strip()


def _p(value: float) -> str:
    words = text.probability(value)
    return words if words.startswith("<") else f"= {words}"


def baseline_sentence(analysis: Analysis) -> str:
    """Say whether every model beats the baseline, and which models are not shown to; empty if there is no baseline."""
    rows = records(analysis.claims)
    if analysis.baseline is None or not rows:
        return ""
    final = "Cells that are not run yet may change this." if analysis.missing else ""
    required, tasks = rows[0]["tasks_required"], rows[0]["tasks"]
    beaten = "the baseline by more than the interval" + (" on the mean over tasks" if tasks > 1 else "")
    often = f"on {text.every(tasks, 'task')}" if required == tasks else f"on at least {required} of the {tasks} tasks"
    yet = " yet" if analysis.missing else ""
    holding = [row["model"] for row in rows if row["holds"]]
    unknown = [row["model"] for row in rows if row["verdict"] == "unknown"]
    failing = [row for row in rows if not row["holds"] and row["verdict"] != "unknown"]

    def also(scores: str) -> str:
        return f", and {scores} higher {often}" if tasks > 1 else ""

    if len(unknown) == len(rows):
        whether = f"Whether the models beat {beaten}{also('score')}"
        return _joined(f"{whether}, cannot be told{yet}: scores or intervals are lacking.", final)
    if not holding:
        sentences = [f"No model is shown to beat {beaten}{also('to score')}."]
    elif len(holding) == len(rows) > 1:
        sentences = [f"All {len(rows)} models beat {beaten}{also('each scores')}.{_clear_tasks(rows)}"]
    else:
        beat, score = ("beats", "scores") if len(holding) == 1 else ("beat", "score")
        clear = _clear_tasks([row for row in rows if row["holds"]])
        sentences = [f"{text.listing(holding)} {beat} {beaten}{also(score)}.{clear}"]
    if failing:
        reasons = text.listing([f"{row['model']} ({claim_reason(row)})" for row in failing], most=4)
        sentences.append(f"This isn't shown for {reasons}." if holding else f"Reasons: {reasons}.")
    if unknown:
        sentences.append(f"It cannot be told{yet} for {text.listing(unknown)}, as scores or intervals are lacking.")
    return _joined(*sentences, final)


def _clear_tasks(rows: Sequence[Record]) -> str:
    """Say on how many single tasks models are ahead of the baseline by more than the interval."""
    if rows[0]["tasks"] == 1:
        return ""
    names = [f" ({row['model']})" if len(rows) > 1 else "" for row in rows]
    counts = [f"{row['tasks_clear']} of {row['tasks']}{name}" for row, name in zip(rows, names, strict=True)]
    return f" Task by task, the lead is larger than its interval on {text.listing(counts)}."


def claim_reason(row: Record) -> str:
    """Explain the verdict on a model's claim against the baseline, from a row of the claims table."""
    on_tasks = (
        f"ahead on {row['tasks_ahead']} of {row['tasks']} tasks ({row['tasks_clear']} by more than the interval), "
        f"{row['tasks_required']} needed"
    )
    if row["tasks_at_chance"]:
        on_tasks += f"; higher on {row['tasks_at_chance']} more, but not above chance there"
    if row["verdict"] == "diverged":
        return f"every cell diverged on {row['tasks_diverged']} of {text.plural(row['tasks'], 'task')}"
    if row["verdict"] == "unknown":
        return "cannot be told, as scores or intervals are lacking"
    if row["tasks"] == 1:  # the mean is the score of the only task
        if not row["tasks_ahead"]:
            return "higher, but not above chance" if row["tasks_at_chance"] else "not ahead"
        by = f"ahead by {'more' if row['tasks_clear'] else 'less'} than the interval"
        return f"{by}, but not after the correction" if row["tasks_clear"] and not row["holds"] else by
    if row["holds"]:
        return f"ahead on the mean, and {on_tasks}"
    return f"{'ahead' if row['on_mean'] else 'not clearly ahead'} on the mean, {on_tasks}"


def extended(analysis: Analysis) -> str:
    """Say which learning rates the grid added to its list, and on which tasks; empty if it added none."""
    added = analysis.grid.added
    if not added:
        return ""
    rates = ", ".join(map(rate_text, sorted({rate for listed in added.values() for rate in listed})))
    tasks = text.listing(sorted({task for _, task, _ in added}))
    cells = sum(len(listed) * len(analysis.grid.seeds) for listed in added.values())
    return f"Where the best rate of a model was the lowest or the highest, the next one was added ({rates}; {cells:,} runs on {tasks})."


def pretraining_runs(groups: Mapping[str, Sequence[str]]) -> str:
    """Say how many pretraining runs the models have: one pretraining run, or 1 to 3 pretraining runs."""
    counts = sorted({len(runs) for runs in groups.values()})
    if counts == [1]:
        return "one pretraining run"
    return f"{counts[0]} to {counts[-1]} pretraining runs" if len(counts) > 1 else f"{counts[0]} pretraining runs"


def warnings(analysis: Analysis) -> list[str]:
    """Say where intervals and claims are less certain than they state; empty if there is no such sign."""
    sentences, together, tails, tasks = [], analysis.noise.together, analysis.noise.tails, len(analysis.families)
    if together.fails:
        wider = math.sqrt(1 + (tasks - 1) * together.value)
        sentences.append(
            f"A seed that does well on one task does well on others (correlation {together.value:.2f}, p {together.p:.2g}), though they are not "
            f"known to share a training: intervals of means over {tasks} tasks should be about {wider:.1f} times as wide, so take their claims "
            "with care."
        )
    if tails.fails:
        sentences.append(
            f"Single runs are far from the others more often than with normal noise (excess kurtosis {tails.value:.1f}): intervals may cover "
            "a little less than they are called."
        )
    return sentences


def noise_lines(analysis: Analysis) -> list[str]:
    """Say which true difference the study detects, and whether noise differs between models; empty if the noise is not known."""
    sentences, smallest = [], analysis.smallest.get(ALL_TASKS, math.nan)
    if not math.isnan(smallest):
        sentences.append(detectable_difference(smallest, f" on {text.scope(list(analysis.families))}"))
    if analysis.noise.uneven:
        sentences.append(
            "Some models' noise is larger than that of others, so each model's intervals are based on its own runs."
        )
    return sentences


def detectable_difference(least: float, where: str = "") -> str:
    """Say which true difference is found with the intended power; if it is over 100 points, which is impossible, say that none is."""
    if least > 1:
        return f"No difference{where}, however large, is found with {POWER * 100:g} % power."
    return f"A true difference of {text.points(least)} points{where} is found with {POWER * 100:g} % power."


def chance_unknown(tasks: Sequence[str]) -> str:
    """Say that scores at chance are not recognised on tasks whose chance level is not known; empty if there are none."""
    if not tasks:
        return ""
    return f"The chance level of {text.listing(tasks)} is not known, so scores at chance are not recognised there."

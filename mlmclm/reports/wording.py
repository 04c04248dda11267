"""The study's findings in sentences: the answer, the check against the baseline, cautions and limits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from mlmclm.analysis.analyse import Analysis
from mlmclm.analysis.comparison import against, tied
from mlmclm.analysis.comparison import told_apart as told_apart  # a headline rests on it
from mlmclm.analysis.results import Grid, Record, records
from mlmclm.numbers import rate_text
from mlmclm.reports import text
from mlmclm.reports.unlike_setups import setup_sentences
from mlmclm.results.chance import above_chance
from mlmclm.seeds import Seeds

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

    clear: bool  # whether one model can be told apart from all others
    verdict: str  # one short sentence
    detail: str  # the numbers behind it, in one to three sentences
    best: tuple[str, ...] = ()  # the model with the highest score, or several whose scores are shown as the same
    tied: tuple[str, ...] = ()  # the others that are not told apart from it (`told_apart`)


def level_groups(analysis: Analysis) -> list[list[str]]:
    """Return the groups of models that the data cannot tell apart on the mean over tasks, from the best on.

    A group is a run of neighbours in the order of their means no two of which are told apart, and that is part of no longer run.
    Models without a mean are in none.
    """
    rows = [row for row in records(analysis.overall) if row["kind"] == "all" and not math.isnan(row["mean"])]
    ranked = [row["model"] for row in sorted(rows, key=lambda row: (-row["mean"], row["model"]))]
    apart = {
        frozenset((row["model_a"], row["model_b"]))
        for row in records(analysis.comparisons)
        if row["kind"] == "all" and told_apart(row, analysis.confidence)
    }
    groups: list[list[str]] = []
    start = 0
    for end, model in enumerate(ranked):
        first = next(place for place in range(start, end + 1) if _level(ranked[place:end], model, apart))
        if first > start:
            groups.append(ranked[start:end])
        start = first
    return [group for group in [*groups, ranked[start:]] if len(group) > 1]


def _level(others: Sequence[str], model: str, apart: Set[frozenset[str]]) -> bool:
    return not any(frozenset((other, model)) in apart for other in others)


def headline(analysis: Analysis) -> Headline:
    """Say which model is best on the mean over tasks, and whether the interval supports that."""
    rows = [row for row in records(analysis.overall) if row["kind"] == "all"]
    ranked = sorted((row for row in rows if not math.isnan(row["mean"])), key=lambda row: (-row["mean"], row["model"]))
    scope = f"the mean over {number} tasks" if (number := rows[0]["tasks"]) > 1 else text.scope(list(analysis.families))
    if not ranked:
        verdict = "No answer yet: no model has a score on every task."
        return Headline(False, verdict, "The tables below show what there is.")
    best, so_far = ranked[0], " so far" if analysis.missing else ""
    name, unfinished = best["model"], _unfinished(analysis)
    own = f"{name} scores {_score(best)}"
    if len(ranked) == 1:
        others = "It is the only model" + (" with a score on every task" if len(rows) > 1 else "")
        others += ", so there is nothing to compare."
        return Headline(False, f"{own} on {scope}{so_far}.", " ".join([others, *unfinished]), (name,))
    rivals = {row["model_b"]: row for row in against(analysis.comparisons, name) if row["kind"] == "all"}
    level = [row for row in ranked[1:] if tied(rivals[row["model"]]["difference"])]
    close = [rivals[row["model"]] for row in ranked[1:] if row not in level]
    close = [row for row in close if not told_apart(row, analysis.confidence)]
    runner_up = ranked[1]
    gap = rivals[runner_up["model"]]
    measured = text.interval(gap["low"], gap["high"], sign=True) or f"({_no_interval(analysis, gap)})"
    corrected = f", Holm-corrected p {_p(gap['p_holm'])}" if not math.isnan(gap["p_holm"]) else ""
    numbers = (
        f"It scores {_score(best)}; the next, {runner_up['model']}, scores {_score(runner_up)}: a difference of "
        f"{text.difference(gap['difference'])} points {measured}{corrected}."
    )
    top = (name, *(row["model"] for row in level))
    if level:
        verdict = f"Tied on {scope}{so_far}: {text.listing(top, most=3)} score {text.points(best['mean'])}"
        verdict += ", which is not above chance." if all(_at_chance_everywhere(analysis, each) for each in top) else "."
        numbers = f"{_score(best)} and {_score(runner_up)}: a difference of 0.00 points {measured}{corrected}."
    elif name == analysis.baseline:
        found = "No model is shown to beat" if close else "Nothing beats"
        verdict = f"{found} the baseline{so_far}: {name} scores highest on {scope}."
    elif _at_chance_everywhere(analysis, name):
        verdict = f"No winner on {scope}{so_far}: {name} scores highest, but {_no_evidence(analysis, name)}."
    elif close:
        verdict = f"No clear winner on {scope}{so_far}: {name} scores highest, but {_why_not(analysis, name, close)}."
    elif analysis.missing:  # a learning rate without a result may be the best
        verdict = f"No winner yet on {scope}: {name} scores highest so far."
    else:
        verdict = f"Best on {scope}: {name}."
    detail = " ".join([numbers, *_corrected(analysis, gap), *_untested(analysis), *unfinished])
    clear = not level and not close and name != analysis.baseline and not analysis.missing
    return Headline(clear, verdict, detail, top, tuple(row["model_b"] for row in close))


def _at_chance_everywhere(analysis: Analysis, model: str) -> bool:
    """Return whether none of a model's scores is above chance."""
    return all(row["above_chance"] == "no" for row in records(analysis.best) if row["model"] == model)


def _no_evidence(analysis: Analysis, model: str) -> str:
    """Say of a model why no verdict rests on its scores, in a phrase with a verb."""
    low = [row for row in records(analysis.best) if row["model"] == model and row["above_chance"] == "no"]
    reasons = ["is not above chance"] if any(map(_low, low)) else []
    # A constant prediction can be above the chance level, which is the score of some constant predictions only.
    reasons += ["predicts the same for every example"] if not all(map(_low, low)) else []
    return " or ".join(reasons)


def _low(row: Record) -> bool:
    """Return whether a score of the table `best` is not above the chance level, whatever its predictions are."""
    return above_chance(row["score"], row["score_low"], row["chance"]) == "no"


def _why_not(analysis: Analysis, model: str, close: Sequence[Record]) -> str:
    """Say why a model is not told apart from others: no interval, an interval or p value too wide, or scores at chance."""
    unknown = [row["model_b"] for row in close if math.isnan(row["p_holm"])]
    chance = [row["model_b"] for row in close if row["p_holm"] < 1 - analysis.confidence]
    near = [row["model_b"] for row in close if row["model_b"] not in (*unknown, *chance)]
    reasons = []
    if near:
        reasons.append(f"{text.listing(near, most=3)} {'is' if len(near) == 1 else 'are'} not told apart from it")
    if unknown:
        reasons.append(f"its difference to {text.listing(unknown, most=3)} has no interval")
    if chance:
        why = _no_evidence(analysis, model) or "is not above chance"
        reasons.append(f"its lead over {text.listing(chance, most=3)} rests on tasks where it {why}")
    return "; ".join(reasons)


def _no_interval(analysis: Analysis, row: Record) -> str:
    """Say why a difference has no interval."""
    pair = (row["model_a"], row["model_b"])
    if any(own["n"] == 1 for own in records(analysis.best) if own["model"] in pair):
        return "no interval: one seed"
    return "no interval: the seeds give equal scores; their noise is not known"


def _corrected(analysis: Analysis, row: Record) -> list[str]:
    """Say why a difference whose interval is above 0 is not told from 0, if it is one: intervals are not corrected."""
    if not row["low"] > 0 or math.isnan(row["p_holm"]) or row["p_holm"] < 1 - analysis.confidence:
        return []
    return [
        "The interval is of this pair alone; p is corrected over all pairs of models and tasks, and the verdict goes by it."
    ]


def _untested(analysis: Analysis) -> list[str]:
    """Say how many pairs of models Holm's correction leaves out because they have no interval, if any."""
    rows = [row for row in records(analysis.comparisons) if row["kind"] == "all"]
    tests = rows[0]["tests"] if rows else 0
    if tests in (0, len(rows)):
        return []
    return [f"Holm's correction counts {tests} of {len(rows)} pairs of models, as the others have no interval."]


def _unfinished(analysis: Analysis) -> list[str]:
    """Say that the choice of learning rates is not final, if cells are still to be run."""
    if not analysis.missing:
        return []
    expected = int(analysis.coverage["expected"].sum())
    return [f"Not final: {analysis.missing:,} of {expected:,} cells have no result yet."]


def _score(row: Record) -> str:
    return text.estimate(row["mean"], row["low"], row["high"]).strip()


def _p(value: float) -> str:
    shown = text.probability(value)
    return shown if shown.startswith("<") else f"= {shown}"


def baseline_sentence(analysis: Analysis) -> str:
    """Say whether every model beats the baseline, and which isn't shown to; empty without a baseline."""
    said = _baseline_sentence(analysis)
    return f"{said} Cells that are not run yet may change this." if said and analysis.missing else said


def _baseline_sentence(analysis: Analysis) -> str:
    rows = records(analysis.claims)
    if analysis.baseline is None or not rows:
        return ""
    required, tasks = rows[0]["tasks_required"], rows[0]["tasks"]
    beaten = "the baseline by more than the interval" + (" on the mean over tasks" if tasks > 1 else "")
    often = f"on all {tasks} tasks" if required == tasks else f"on at least {required} of the {tasks} tasks"
    yet = " yet" if analysis.missing else ""
    holding = [row["model"] for row in rows if row["holds"]]
    unknown = [row["model"] for row in rows if row["verdict"] == "unknown"]
    failing = [row for row in rows if not row["holds"] and row["verdict"] != "unknown"]

    def also(scores: str) -> str:
        return f", and {scores} higher {often}" if tasks > 1 else ""

    if len(unknown) == len(rows):
        return f"Whether the models beat {beaten}{also('score')}, cannot be told{yet}: scores or intervals are lacking."
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
    return " ".join(sentences)


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
    if row["tasks"] == 1:  # whose mean is its score
        return on_tasks
    if row["holds"]:
        return f"ahead on the mean, and {on_tasks}"
    return f"{'ahead' if row['on_mean'] else 'not clearly ahead'} on the mean, {on_tasks}"


def cautions(analysis: Analysis) -> list[str]:
    """List what a reader must know before trusting the tables, most serious first; empty if there is nothing."""
    best = records(analysis.best)
    notes = []
    if analysis.missing:
        expected = int(analysis.coverage["expected"].sum())
        notes.append(
            f"The grid is incomplete: {analysis.missing:,} of {expected:,} cells have no result ({missing_cells(analysis)}), so "
            f"their best rates are not final. {_with_gaps(analysis)}"
        )
    notes += setup_sentences(analysis.setups)
    if analysis.grid.race is not None:
        notes.append(_raced(analysis, analysis.grid.race))
    if analysis.diverged:
        share = text.percent(analysis.diverged / len(analysis.cells))
        notes.append(
            f"{text.plural(analysis.diverged, 'cell')} of {len(analysis.cells):,} diverged ({share}). {_preference(analysis)}"
        )
    lost = [f"{row['model']} on {row['task']}" for row in best if row["note"].startswith("every cell diverged")]
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
            added = {pair[:2] for pair in analysis.grid.added}
            extended = all((row["model"], row["task"]) in added for row in at)
            notes.append(
                f"The best learning rate{whose} is the {edge} one tried for {_pairs(at, len(best))}"
                f"{', to which as many were added as the grid allows' if extended else ''}: a {further} one may be better, so these "
                "scores may understate the model."
            )
    if any(row["edge"] == "only" for row in best):
        notes.append("Where only one learning rate was tried, the score may be far from what a model can reach.")
    single = sum(row["n"] == 1 for row in best)
    if single:
        notes.append(
            f"{single:,} scores rest on one seed and have no interval."
            if single > 1
            else "One score rests on one seed and has no interval."
        )
    notes += _failing_with_two_seeds(analysis, best)
    notes += _noiseless(analysis, best)
    notes += _at_chance(analysis, best)
    if analysis.rule == "per_seed":
        notes.append(f"Every seed chose its own learning rate, which is optimistic{_optimism(analysis)}.")
    if analysis.rule == "on_test":
        notes.append(
            f"Learning rates were chosen on the test scores that are reported, which is optimistic{_optimism(analysis)}."
        )
    return notes


def missing_cells(analysis: Analysis, models: Sequence[str] = ()) -> str:
    """Say how many cells of which model and task have no result, those that lack most first; empty if there are none.

    Args:
        models: only these; by default all.
    """
    rows = [row for row in records(analysis.coverage) if row["missing"] and row["model"] in (models or analysis.models)]
    rows.sort(key=lambda row: -row["missing"])
    return text.listing([f"{row['missing']:,} of {row['model']} on {row['task']}" for row in rows], most=4)


def _optimism(analysis: Analysis) -> str:
    """Say by how much the choice flatters the scores, on average."""
    known = [row["optimism"] for row in records(analysis.best) if not math.isnan(row["optimism"])]
    if not known:
        return ""
    return f", by {text.points(math.fsum(known) / len(known))} points on average; scores and intervals are net of it"


def _failing_with_two_seeds(analysis: Analysis, best: Sequence[Record]) -> list[str]:
    """Say where too few seeds hide how often runs fail. The certificate repeats the fitted shares, and cannot see it."""
    failing = {row["task"] for row in records(analysis.stability) if row["failed"]}
    tasks = sorted({row["task"] for row in best if row["n"] == 2} & failing)
    if not tasks:
        return []
    return [
        f"Runs fail on {text.listing(tasks)}, and two seeds cannot show how often: a model that happens to lose none looks safer than it "
        "is. In simulated studies where a fifth of the runs fails, what is called a 95 % interval then covers 89 % of the true scores. "
        "A third seed mends this."
    ]


def _noiseless(analysis: Analysis, best: Sequence[Record]) -> list[str]:
    """Say which scores have no interval because all seeds give the same one."""
    equal = [f"{row['model']} on {row['task']}" for row in best if "equal scores" in row["note"]]
    if not equal:
        return []
    return [
        f"The seeds give equal scores for {text.listing(equal)}; their noise is not known. Such a score has no interval and "
        "no p value."
        + (
            " In a mean over tasks it counts with the mean variance of the other scores, if most of them vary."
            if len(analysis.families) > 1
            else ""
        )
    ]


def _at_chance(analysis: Analysis, best: Sequence[Record]) -> list[str]:
    """Say which models predict the same for every example, and which scores are not above chance."""
    notes = []
    alike = [
        f"{row['model']} on {row['task']}"
        + (f" ({row['constant']} of {row['n']} seeds)" if row["constant"] < row["n"] else "")
        for row in best
        if row["constant"]
    ]
    if alike:
        lead = "No lead of a model whose seeds all do so counts in a verdict."
        notes.append(f"The same prediction for every test example: {text.listing(alike)}. {lead}")
    low = list(filter(_low, best))
    # An untrained baseline is expected at chance; the table of scores marks it there.
    named = [f"{row['model']} on {row['task']}" for row in low if row["model"] != analysis.baseline]
    if named:
        notes.append(f"Not above chance: {text.listing(named)}. No lead of such a score counts in a verdict.")
    return [*notes, *filter(None, [chance_unknown(analysis)])]


def chance_unknown(analysis: Analysis) -> str:
    """Say on which tasks scores at chance cannot be told, as their chance level is not known; empty if there are none."""
    best = records(analysis.best)
    lacking = sorted({row["task"] for row in best if row["n"] and math.isnan(row["chance"])})
    if not lacking:
        return ""
    return f"The chance level of {text.listing(lacking)} is not known, so scores at chance are not recognised there."


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


def extended(analysis: Analysis) -> str:
    """Say which learning rates the grid added to its list, and for how many models and tasks; empty if it added none."""
    added = analysis.grid.added
    if not added:
        return ""
    rates = ", ".join(map(rate_text, sorted({rate for own in added.values() for rate in own})))
    pairs = text.plural(len({group[:2] for group in added}), "model-task pair")
    cells = sum(len(own) * len(analysis.grid.seeds_on(task)) for (_, task, _), own in added.items())
    return f"Where the best rate was the lowest or the highest, the next one was added ({rates}; {cells:,} runs of {pairs})."


def seed_counts(grid: Grid, word: str = "seed") -> str:
    """Say how many seeds the tasks have: 3 seeds, or 3 to 9 seeds."""
    least, most = grid.seed_counts
    return text.plural(most, word) if least == most else f"{least:,} to {text.plural(most, word)}"


def _with_gaps(analysis: Analysis) -> str:
    """Say how the rule treats cells that were not run yet (`results.competing`)."""
    if analysis.rule == "per_seed":
        return "Each seed chooses among the rates at which it has a score."
    return "Until then, rates compete by the mean of the seeds that were run."


def _preference(analysis: Analysis) -> str:
    """Say how the rule treats diverged cells."""
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


def pretraining_runs(groups: Mapping[str, Sequence[str]]) -> str:
    """Say how many pretraining runs the models have: one pretraining run, or 1 to 3 pretraining runs."""
    counts = sorted({len(runs) for runs in groups.values()})
    if counts == [1]:
        return "one pretraining run"
    return f"{counts[0]} to {counts[-1]} pretraining runs" if len(counts) > 1 else f"{counts[0]} pretraining runs"


def limits(analysis: Analysis) -> list[str]:
    """List what the intervals never cover, whatever the results."""
    percent = f"{analysis.confidence * 100:g} %"
    examples = all(own.folds is not None for own in analysis.effects.values())
    return [
        f"The {percent} intervals cover the noise of {_noise(analysis.grid)}{', and of the test sets' if examples else ''}.",
        *(
            (f"Models are compared over {pretraining_runs(analysis.groups)} each, whose noise is in the intervals.",)
            if any(len(runs) > 1 for runs in analysis.groups.values())
            else (
                "Each model is one pretraining run: another pretraining seed would move its scores by an unknown amount.",
            )
        ),
        *(
            ()
            if examples
            else ("Test sets are finite, and where predictions are not known, their noise is in no interval.",)
        ),
        *(
            ("The mean over tasks weighs every task the same, although their metrics differ.",)
            if len(analysis.families) > 1
            else ()
        ),
    ]

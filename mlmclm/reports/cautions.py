"""Cautions that a reader must know before trusting a study's tables, and the limits of its intervals, in sentences."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from mlmclm.analysis.analyse import Analysis
from mlmclm.analysis.results import Grid, Record, records
from mlmclm.analysis.setups import COMPUTED, SetupDifference
from mlmclm.numbers import rate_text
from mlmclm.reports import text
from mlmclm.reports.wording import STREAM_WORDS, chance_unknown, is_low, pretraining_runs, unfinished
from mlmclm.seeds import Seeds

SIDES = 3
"""Maximum number of settings, and of names on a side, that a sentence on unlike setups lists."""


def cautions(analysis: Analysis) -> list[str]:
    """List what a reader must know before trusting the tables, most serious first; empty if there is nothing."""
    best = records(analysis.best)
    notes = []
    if left := unfinished(analysis):
        notes.append(
            f"{left} {_competition(analysis, 'Until then, rates compete by the mean of the seeds that were run.')}"
        )
    notes += setup_sentences(analysis.setups)
    notes += uneven_rates(analysis)
    if analysis.diverged:
        share = text.percent(analysis.diverged / len(analysis.cells))
        how = _competition(analysis, "A rate that lost most of its runs is chosen only where no other kept more.")
        notes.append(f"{text.plural(analysis.diverged, 'cell')} of {len(analysis.cells):,} diverged ({share}). {how}")
    notes += failure_sentences(analysis)
    if lost := _named(row for row in best if row["note"].startswith("every cell diverged")):
        notes.append(f"Every cell diverged for {lost}: there is no score.")
    if hurt := _named(row for row in best if row["n"] and row["diverged"]):
        where = "at every rate" if analysis.rule == "per_seed" else "even at the chosen rate"
        notes.append(f"Seeds diverged {where} for {hurt}: the mean is over the others.")
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
            f"{single:,} scores are based on one seed and have no interval."
            if single > 1
            else "One score is based on one seed and has no interval."
        )
    if equal := _named(row for row in best if "equal scores" in row["note"]):
        mean = " In a mean over tasks it counts with the mean variance of the other scores, if most of them vary."
        notes.append(
            f"The seeds give equal scores for {equal}; their noise is not known. Such a score has no interval and no p value."
            f"{mean if len(analysis.families) > 1 else ''}"
        )
    notes += _at_chance(analysis, best)
    if analysis.rule == "per_seed":
        notes.append(
            f"Every seed chose its own learning rate, and scores are those of the chosen runs{_luck(analysis)}."
        )
    if analysis.rule == "on_test":
        notes.append(
            f"Learning rates were chosen on the test scores that are reported, which is optimistic{_luck(analysis)}."
        )
    return notes


def failure_sentences(analysis: Analysis) -> list[str]:
    """Say how many runs of each model fail, and whether models are shown to differ in that; empty if none fails."""
    rows, counts = records(analysis.failures), dict[str, tuple[int, int]]()
    for row in rows:
        for side in ("a", "b"):
            count = row[f"failed_{side}"], row[f"runs_{side}"]
            counts[row[f"model_{side}"]] = max(counts.get(row[f"model_{side}"], count), count)
    lost = sorted((model for model, (failed, _) in counts.items() if failed), key=lambda model: -counts[model][0])
    if not lost:
        return []
    losses = text.listing([f"{counts[model][0]:,} of {counts[model][1]:,} of {model}" for model in lost], most=4)
    differing = [
        f"{row['model_a']} and {row['model_b']} (exact p {text.probability(row['p_holm'])})"
        for row in rows
        if row["p_holm"] < 1 - analysis.confidence
    ]
    differ = (
        f"It is shown to differ between {text.listing(differing, most=3)}"
        if differing
        else "No two models are shown to differ in that"
    )
    return [f"Scores are of runs that learn. At rates where runs learn, others fail: {losses}. {differ}."]


def uneven_rates(analysis: Analysis) -> list[str]:
    """Say on which tasks the grid has added learning rates to its list for some models only; empty if on none."""
    grid = analysis.grid
    ran = {(row["model"], row["task"]) for row in records(analysis.coverage) if row["present"]}
    points = [(task, setting) for task in sorted(analysis.families) for setting in grid.settings_of(task)]
    tried = {
        (task, setting): {frozenset(grid.added.get((run, task, setting), ())) for run, its in ran if its == task}
        for task, setting in points
    }
    tasks = list(dict.fromkeys(task for (task, _), rates in tried.items() if len(rates) > 1))
    if not tasks:
        return []
    rates = ", ".join(map(rate_text, sorted({*grid.learning_rates}.union(*grid.added.values()))))
    return [
        f"On {text.listing(tasks)}, the grid added learning rates for some models only. A model that was not tried at the rates of "
        f"another may seem worse for it, and no interval covers that: `learning_rates: [{rates}]` tries all models at all of them."
    ]


def _luck(analysis: Analysis) -> str:
    """Say by how much chosen runs score above fresh runs at the same rates, on average."""
    gaps = [row["score"] - row["fresh"] for row in records(analysis.best) if not math.isnan(row["fresh"])]
    if not gaps:
        return ""
    return f"; fresh runs at these rates are expected to score {text.points(math.fsum(gaps) / len(gaps))} points less on average"


def _at_chance(analysis: Analysis, best: Sequence[Record]) -> list[str]:
    """Say which models predict the same for every example, and which scores are not above chance."""
    notes = []
    constant = [
        f"{row['model']} on {row['task']}"
        + (f" ({row['constant']} of {row['n']} seeds)" if row["constant"] < row["n"] else "")
        for row in best
        if row["constant"]
    ]
    if constant:
        lead = "No lead of a model whose seeds all do so counts in a verdict."
        notes.append(f"The same prediction for every test example: {text.listing(constant)}. {lead}")
    # An untrained baseline is expected at chance; the table of scores marks it there.
    if low := _named(row for row in best if is_low(row) and row["model"] != analysis.baseline):
        notes.append(f"Not above chance: {low}. No lead of such a score counts in a verdict.")
    return [*notes, *filter(None, [chance_unknown(without_chance(analysis))])]


def without_chance(analysis: Analysis) -> list[str]:
    """Return the tasks with scores whose chance level is not known."""
    return sorted({row["task"] for row in records(analysis.best) if row["n"] and math.isnan(row["chance"])})


def _named(rows: Iterable[Record]) -> str:
    return text.listing([f"{row['model']} on {row['task']}" for row in rows])


def _competition(analysis: Analysis, otherwise: str) -> str:
    """Say how rates compete if cells have no score (`simulated_choices.competes`): under `per_seed`, within each seed; else `otherwise`."""
    return "Each seed chooses among the rates at which it has a score." if analysis.rule == "per_seed" else otherwise


def _pairs(rows: list[Record], total: int) -> str:
    """Name a few (model, task) pairs with their rates, or count many of them by model."""
    if len(rows) <= 4:
        return text.listing([f"{row['model']} on {row['task']} ({row['learning_rates']})" for row in rows])
    counts = Counter(row["model"] for row in rows)
    named = text.listing([f"{model} on {text.plural(number, 'task')}" for model, number in counts.items()])
    return f"{len(rows)} of {total} model-task pairs ({named}; marked in the table of scores)"


def limits(analysis: Analysis) -> list[str]:
    """List which noise the intervals cover, and which they don't, whatever the results are."""
    percent = f"{analysis.confidence * 100:g} %"
    examples = all(effect.folds is not None for effect in analysis.effects.values())
    tests = ", and of the test sets" if examples else ""
    return [
        f"The {percent} intervals cover the choice of the learning rate, and the noise of {_noise(analysis.grid)}{tests}.",
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


def _noise(grid: Grid) -> str:
    """Say which sources of a cell's randomness the grid's seeds vary, and what that means for an interval."""
    if all(isinstance(seed, int) for seed in grid.seeds):
        return "fine-tuning seeds"
    seeds = [Seeds.of(seed) for seed in grid.seeds]
    numbers = {name: {getattr(seed, name) for seed in seeds} for name in STREAM_WORDS}
    varied = [words for name, words in STREAM_WORDS.items() if len(numbers[name]) > 1]
    held = [words for name, words in STREAM_WORDS.items() if len(numbers[name]) == 1]
    noise = text.listing(varied) if varied else "no seed"
    if held:
        noise += f"; {text.listing(held)} {'was' if len(held) == 1 else 'were'} held"
    # A stream with fewer seeds than there are combinations uses some seeds several times.
    if any(len(numbers[name]) not in (1, len(seeds)) for name in STREAM_WORDS):
        noise += ". Combinations share seeds, so their scores are not independent and intervals are too narrow"
    return noise


def setup_sentences(setups: Sequence[SetupDifference]) -> list[str]:
    """Say what differs: first what the results were computed with, then the protocol; empty if nothing does."""
    differing = [setup for setup in setups if setup.several]
    sentences = [_computed(setup) for setup in differing if setup.what in COMPUTED]
    settings = [setup for setup in differing if setup.what not in COMPUTED]
    if settings:
        named = [f"{setup.what} is {_values(setup)}{_where(setup)}" for setup in settings[:SIDES]]
        if len(settings) > SIDES:
            named.append(f"and {text.plural(len(settings) - SIDES, 'more setting')}")
        sentences.append(
            f"Fine-tuning differs: {'; '.join(named)}. A difference of these scores is partly one of the settings."
        )
    return [*sentences, *_recorded_for_some(setups)]


def _recorded_for_some(setups: Sequence[SetupDifference]) -> list[str]:
    """Say which settings are recorded in the results of some sides only."""
    sides: dict[tuple[str, ...], dict[str, None]] = {}
    for setup in setups:
        if not setup.several:
            sides.setdefault(tuple(side for side, texts in setup.values.items() if texts), {})[setup.what] = None
    return [
        f"Recorded for {text.listing(recorded, most=SIDES)} only: {text.listing(list(names))}. The others may differ in "
        f"{'it' if len(names) == 1 else 'these'}."
        for recorded, names in sides.items()
    ]


def _computed(setup: SetupDifference) -> str:
    if setup.apart:
        note = "A difference of these scores is partly one of these."
        return f"Not computed alike: the {setup.what} is {_values(setup)}{_where(setup)}. {note}"
    values = text.listing(next(iter(setup.values.values())))
    return f"Cells were computed with several {setup.what}s ({values}){_where(setup)}; scores can differ a little between them."


def _values(setup: SetupDifference) -> str:
    """Return each value with the sides that have it."""
    sides: dict[tuple[str, ...], list[str]] = {}
    for side, values in setup.values.items():
        sides.setdefault(values, []).append(side)
    return ", ".join(
        f"{' or '.join(values) or 'not recorded'} for {text.listing(names, most=SIDES)}"
        for values, names in sides.items()
    )


def _where(setup: SetupDifference) -> str:
    return f" on {text.listing(setup.tasks, most=SIDES)}"

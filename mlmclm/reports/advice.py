"""Advice from a study, in sentences: which model and learning rate, how sure, what it is based on, and what would settle the rest."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import harmonic_mean
from typing import NamedTuple

from mlmclm.analysis.analyse import Analysis
from mlmclm.analysis.comparison import against, holm_level
from mlmclm.analysis.contrasts import mean_difference
from mlmclm.analysis.power import MOST, POWER, Obstacle, examples_for, runs_or_obstacle, seeds_or_obstacle
from mlmclm.analysis.results import Record, records
from mlmclm.numbers import rate_text
from mlmclm.reports import text
from mlmclm.reports.cautions import failure_sentences, setup_sentences, uneven_rates
from mlmclm.reports.provenance import NO_BASIS, Basis
from mlmclm.reports.wording import (
    Headline,
    clearly_different,
    headline,
    level_groups,
    missing_cells,
    noise_lines,
    pretraining_runs,
    warnings,
    winners_of,
)

NEAREST = 3
"""Maximum number of models for which the advice says what would show a difference from the best."""
MOST_LISTED = 60
"""Maximum number of seeds that are written out as a list for the study's file."""
SEEDS_ALONE = "More fine-tuning seeds alone would not: the noise of pretraining is too large."
TIMES_UNKNOWN = "How long cells take is not known, as the results have no times."
AFFORDABLE = 3
"""Seeds that the advice proposes to a study with one seed."""
SURE = 0.95
"""Minimum share of studies with other seeds that choose the same learning rate, for the choice to count as sure."""
FEW_GROUPS = 3
"""Maximum number of groups of models that are named; more groups overlap too much to read."""


@dataclass(frozen=True)
class Advice:
    """The answer of a study, and its details: groups, families, learning rates, basis and open questions, in plain sentences."""

    answer: Headline
    groups: tuple[str, ...]
    families: tuple[str, ...]
    rates: tuple[str, ...]
    rests_on: tuple[str, ...]
    open: tuple[str, ...]

    def parts(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return the details of the answer, by title; parts without sentences are left out."""
        parts = (
            ("Groups", self.groups),
            ("By kind of task", self.families),
            ("Learning rate", self.rates),
            ("Based on", self.rests_on),
            ("Open", self.open),
        )
        return [(title, sentences) for title, sentences in parts if sentences]

    def lines(self) -> list[str]:
        """Return the advice as lines of text."""
        parts = [f"{title}: {' '.join(sentences)}" for title, sentences in self.parts()]
        return [self.answer.verdict, self.answer.detail, *parts]


def advise(analysis: Analysis, basis: Basis = NO_BASIS) -> Advice:
    """Return advice from the results of a study; it names no winner that they don't show.

    Args:
        basis: what the results have cost, what they are based on, and how to ask for more, as far as known.
    """
    answer = headline(analysis)
    detail = " ".join([answer.detail, *warnings(analysis)])
    return Advice(
        answer=replace(answer, detail=detail),
        groups=tuple(_groups(analysis, answer)),
        families=tuple(_families(analysis)),
        rates=tuple(_rates(analysis, answer)),
        rests_on=tuple(_rests_on(analysis, basis)),
        open=tuple(_open(analysis, answer, basis)),
    )


def _groups(analysis: Analysis, answer: Headline) -> list[str]:
    """Say between which models there is no clear difference; empty if there are fewer than two."""
    ranked = [row for row in records(analysis.overall) if row["kind"] == "all" and not math.isnan(row["mean"])]
    if len(ranked) < 2:
        return []
    scope = text.scope(list(analysis.families))
    pairs = [row for row in records(analysis.comparisons) if row["kind"] == "all" and not math.isnan(row["difference"])]
    level = {
        frozenset((row["model_a"], row["model_b"])) for row in pairs if not clearly_different(row, analysis.confidence)
    }
    if not level:
        return [f"every two of the {len(ranked)} models differ clearly on {scope}."]
    if len(level) == len(pairs):
        return [f"no two of the {len(ranked)} models differ clearly on {scope}."]
    groups = level_groups(analysis)
    # Groups are neighbours in the ranking, so they miss a pair if a noisy model is not clearly different from one further away.
    within = {frozenset(pair) for group in groups for pair in itertools.combinations(group, 2)}
    if len(groups) <= FEW_GROUPS and level == within:
        named = "; ".join(text.listing(group, most=4) for group in groups)
        return [f"no clear difference on {scope}: {named}."]
    counted = f"{len(pairs) - len(level):,} of the {len(pairs):,} pairs of models differ clearly on {scope}"
    # These can be more models than the best's group, as a noisy model far behind may not be clearly different from the best either.
    best, *others = (*answer.best, *answer.tied)
    return [f"{counted}. Not clearly different from {best}: {text.listing(others) or 'none'}."]


def _families(analysis: Analysis) -> list[str]:
    """Name the best model of each family of tasks in which it differs clearly from all others; then name the other families."""
    families = analysis.families
    if analysis.missing:  # no winner is named before the grid is finished (`wording.headline`)
        return []
    sentences, level, chance = [], [], []
    for family in sorted(set(families.values())):
        tasks = [task for task, task_family in families.items() if task_family == family]
        if len(tasks) == len(families):
            return []
        scope, rows = _scores(analysis, family, tasks)
        name = text.family(family) + (f" ({tasks[0]})" if len(tasks) == 1 else "")
        if len(rows) < 2:
            continue
        best, near = winners_of(analysis, scope, rows)
        if not best:
            chance.append(name)
        elif len(best) == 1 and not near:
            (top,) = best
            rivals = (
                row for row in against(analysis.comparisons, top) if row["scope"] == scope and row["kind"] != "all"
            )
            gap = min((row for row in rivals if row["difference"] > 0), key=lambda row: row["difference"])
            lead = text.estimate(gap["difference"], gap["low"], gap["high"], sign=True)
            sentences.append(f"{name}: {top}, {lead} points to the next.")
        else:
            level.append(name)
    if level:
        sentences.append(f"{'The' if sentences else 'the'} results don't suffice for {text.listing(level)}.")
    if chance:
        sentences.append(f"{'No' if sentences else 'no'} score is above chance on {text.listing(chance)}.")
    return sentences


def _scores(analysis: Analysis, family: str, tasks: Sequence[str]) -> tuple[str, list[Record]]:
    """Return the scope of a family of tasks (the task if there is one, else the family), and each model's `score` and `above_chance`."""
    if len(tasks) == 1:
        at_chance = {
            row["model"] for row in records(analysis.best) if row["task"] == tasks[0] and row["above_chance"] == "no"
        }
        scores: list[Record] = [
            {
                "model": model,
                "score": analysis.effects[model, tasks[0]].seeds.value,
                "above_chance": "no" if at_chance.intersection(runs) else "",
            }
            for model, runs in analysis.groups.items()
            if (model, tasks[0]) in analysis.effects
        ]
        return tasks[0], [row for row in scores if not math.isnan(row["score"])]
    rows = [row for row in records(analysis.overall) if (row["kind"], row["scope"]) == ("family", family)]
    return family, [row | {"score": row["mean"]} for row in rows if not math.isnan(row["mean"])]


def _rates(analysis: Analysis, answer: Headline) -> list[str]:
    """Say which learning rates the best model needs where it is above chance, and how sure the choice is.

    Each pretraining run of a model chooses its rate. If there are several runs, all their rates are named, without a probability.
    """
    name = answer.best[0] if answer.best else ""
    runs = analysis.groups.get(name, [])
    rows = [
        row
        for row in records(analysis.best)
        if row["model"] in runs and row["learning_rates"] and row["above_chance"] != "no"
    ]
    bands = {(row["model"], row["task"]): row for row in records(analysis.stability)}
    sentences = []
    for task in dict.fromkeys(row["task"] for row in rows):
        task_rows = [row for row in rows if row["task"] == task]
        if len(runs) > 1:
            by_run = {row["model"]: _chosen(row) for row in task_rows}
            same = len(by_run) == len(runs) and len(set(by_run.values())) == 1
            rates = [_chosen(task_rows[0])] if same else [f"{rate} for {run}" for run, rate in by_run.items()]
            sentences.append(f"{text.listing(rates)} on {task}{' in each pretraining run' if same else ''}.")
            continue
        (row,) = task_rows
        band = bands.get((name, task))
        if band is None or math.isnan(band["share_level"]):
            sentences.append(f"{_chosen(row)} on {task}.")
            continue
        sentences.append(f"{_chosen(row)} on {task} ({_choice(row, band, analysis)}).")
    return [f"for {name}, {sentences[0]}", *sentences[1:]] if sentences else []


def _chosen(row: Record) -> str:
    """Return the best learning rates of a row of `best`, with the setting where the grid has several."""
    return f"{row['learning_rates']}{' with ' if row['setting'] else ''}{row['setting']}"


def _choice(row: Record, band: Record, analysis: Analysis) -> str:
    """Say how surely a learning rate is chosen, and whether test scores show it to be better than the others.

    The first part gives the share of studies with other seeds that choose this rate and setting (`best.p_chosen`), by validation
    scores except under `on_test`. The second part is from a test between the rates of the best setting: with few runs it may show no
    difference, however often a rate is chosen. It is left out if the grid has added rates to its list, which `sensitivity` ignores.

    Args:
        row, band: rows of the tables `best` and `stability`.
    """
    pair = row["model"], row["task"]
    low, high, tried = band["level_low"], band["level_high"], len(analysis.runs[pair].rates)
    level, sure = round(band["share_level"] * tried), row["p_chosen"] >= SURE
    point = "at this setting, " if row["setting"] else ""
    choice = "this setting and rate" if point else "it"
    often = f"other seeds would choose {choice} in {text.percent(row['p_chosen'])} of cases"
    if analysis.grid.added.get((*pair, row["setting"])):
        return often  # the test covers only the listed rates
    if level > 1:
        number = text.every(tried, "rate") if level == tried else f"{level} of {tried} rates"
        ties = f"{point}{number}, from {rate_text(low)} to {rate_text(high)}, are not clearly different from the best"
        return f"{often}, yet it is not shown to be better: on test scores, {ties}" if sure else f"{often}: {ties}"
    if math.isnan(row["learning_rate"]) or row["learning_rate"] != low:
        return f"{often}; {point}test scores show {rate_text(low)} to be better"
    better = f"{point}test scores show it to be better than all others"
    if sure:
        return f"{often}; {better}"
    on = "" if analysis.rule == "on_test" else " on validation scores"
    return f"{often}{on}, although {better}"


def _rests_on(analysis: Analysis, basis: Basis) -> list[str]:
    """Say what the answer is based on."""
    seeds = text.plural(len(analysis.grid.seeds), "fine-tuning seed")
    tasks = text.plural(len(analysis.families), "task")
    sizes = sorted({basis.test_examples[task] for task in analysis.families if task in basis.test_examples})
    between = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}" if sizes else ""
    examples = f" of {between} test examples" if between else ""
    models = text.plural(len(analysis.groups), "model")
    sentences = [f"{models}, {pretraining_runs(analysis.groups)} each; {seeds} at each rate; {tasks}{examples}."]
    if any(effect.folds is None for effect in analysis.effects.values()):
        sentences[0] += " Where test predictions are not kept, the noise of the test set is in no interval."
    return [
        *setup_sentences(analysis.setups),
        *sentences,
        *uneven_rates(analysis),
        *failure_sentences(analysis),
        *noise_lines(analysis),
    ]


def _open(analysis: Analysis, answer: Headline, basis: Basis) -> list[str]:
    """Say what would settle the open questions, and what that takes: cells, hours and the command."""
    unknown = () if basis.seconds else (TIMES_UNKNOWN,)
    if analysis.missing:
        lacking = {(row["model"], row["task"]): row["missing"] for row in records(analysis.coverage)}
        # Results of another tool have no command: only their owner can run what is missing.
        then = f"run `{basis.command_now}` again" if basis.command_now else "then read the results again"
        return [
            f"{text.plural(analysis.missing, 'cell')} {'is' if analysis.missing == 1 else 'are'} still to be run "
            f"({missing_cells(analysis)}){basis.cost(lacking)}; {then}.",
            *unknown,
        ]
    if not answer.best or answer.clear:
        return []
    notes, wanted = [], []
    for rival in answer.best[1:]:
        notes.append(
            f"{answer.best[0]} and {rival} differ by less than is shown: the seeds that would tell which is better are not worth it."
        )
    rows = {row["model_b"]: row for row in against(analysis.comparisons, answer.best[0]) if row["kind"] == "all"}
    chance = [rival for rival in answer.tied if abs(rows[rival]["difference"]) < rows[rival]["error"]]
    if chance:
        lowest = text.probability(min(rows[rival]["p"] for rival in chance))
        leads = f"The leads over {text.listing(chance)}" if len(chance) > 1 else f"The lead over {chance[0]}"
        p = f"p {lowest} or more" if len(chance) > 1 else f"p {lowest}"
        notes.append(f"{leads} may well be chance, within one standard error ({p}): no reason for more runs.")
    tied = [rival for rival in answer.tied if rival not in chance]
    for rival in tied[:NEAREST]:
        sentence, more = _settled(analysis, answer.best[0], rows[rival], basis)
        notes.append(sentence)
        wanted += [] if more is None else [more]
    repeated = [index for index, sentence in enumerate(notes) if sentence.endswith(f" {SEEDS_ALONE}")]
    if len(repeated) > 1:
        for index in repeated:
            notes[index] = notes[index].removesuffix(f" {SEEDS_ALONE}")
        notes.append("More fine-tuning seeds alone would settle none of these: the noise of pretraining is too large.")
    if len(tied) > NEAREST:
        notes.append(
            f"{text.plural(len(tied) - NEAREST, 'more model')} further behind are not clearly different from it either."
        )
    return [*notes, *instructions(analysis, wanted, basis), *(unknown if wanted else ())]


MOST_TIMES = 100
"""Largest growth factor of the test sets that the advice mentions."""


class More(NamedTuple):
    """The total number of seeds at each rate, or of pretraining runs of each model, that the advice asks for."""

    number: int
    runs: bool = False

    def cells(self, analysis: Analysis) -> dict[tuple[str, str], int]:
        """Return the number of cells by (model, task) that are added, also at the rates that the grid has added to its list."""
        grid = analysis.grid

        def rates(model: str, task: str) -> int:
            return sum(len(grid.rates_of(model, task, point)) for point in grid.settings_of(task))

        if self.runs:
            return {
                (model, task): max(0, self.number - len(members)) * len(grid.seeds) * rates(members[0], task)
                for model, members in analysis.groups.items()
                for task in grid.tasks
            }
        more = max(0, self.number - len(grid.seeds))
        return {(model, task): more * rates(model, task) for model in grid.models for task in grid.tasks}


def _settled(analysis: Analysis, best: str, row: Record, basis: Basis) -> tuple[str, More | None]:
    """Say what would show a difference from the best model, or why more seeds and runs would not; return also what to ask for.

    Args:
        row: the comparison of the best model (`model_a`) with the other.
    """
    tasks, now, rival = sorted(analysis.families), len(analysis.grid.seeds), row["model_b"]
    contrast = mean_difference(analysis.effects, (best, rival), tasks)
    gap = row["difference"]
    lead = f"{text.difference(gap)} points to {rival}"
    if row["p_holm"] < 1 - analysis.confidence:
        return f"More seeds would not settle {lead}: the lead is based on tasks where it is not above chance.", None
    level = holm_level("all", analysis.families, len(analysis.groups), analysis.confidence)
    needed = seeds_or_obstacle(gap, [contrast], now, level)
    if needed == "test sets":
        times = math.ceil(examples_for(gap, contrast, level))
        larger = (
            f"At least {times:,} times as many test examples, or more tasks, would"
            if times <= MOST_TIMES
            else "More tasks may"
        )
        return f"No number of seeds would show {lead}: the test sets are too small for it. {larger}.", None
    if contrast.pooled:
        runs = harmonic_mean([len(analysis.groups[model]) for model in (best, rival)])
        wanted = runs_or_obstacle(gap, [contrast], runs, level)
        return _settled_by_runs(analysis, lead, needed if contrast.within else "noise", wanted, basis)
    if isinstance(needed, int):
        # A study that already has enough seeds for this power can miss the difference, so ask for at least one seed more.
        seeds = max(needed, now + 1)
        cost = _cost(analysis, More(seeds).cells(analysis), basis)
        sentence = f"If {lead} are true, {seeds:,} seeds a rate find them with {POWER * 100:g} % power: {cost}."
        return sentence, More(seeds)
    if needed == "noise":
        if now > 1:
            return (
                f"{lead}: the noise of seeds is not known, as seeds give equal scores; more seeds may show it.",
                More(now + 1),
            )
        cost = _cost(analysis, More(AFFORDABLE).cells(analysis), basis)
        reason = "one seed shows no noise, so no difference can be shown"
        return f"{lead}: {reason}; {AFFORDABLE} seeds: {cost}.", More(AFFORDABLE)
    return f"Over {MOST:,} seeds a rate would be needed to show {lead}: it is too small.", None


def _settled_by_runs(
    analysis: Analysis, lead: str, seeds: int | Obstacle, runs: int | Obstacle, basis: Basis
) -> tuple[str, More | None]:
    """Say how many pretraining runs of each model would show a lead, and whether more seeds alone would; return also what to ask for."""
    notes = []
    options: list[tuple[int, More]] = []
    if isinstance(runs, int):
        wanted = max(runs, 1 + min(map(len, analysis.groups.values())))
        cells = More(wanted, runs=True).cells(analysis)
        rounds = sum(max(0, wanted - len(members)) for members in analysis.groups.values()) / len(analysis.groups)
        notes.append(
            f"If {lead} are true, {wanted:,} pretraining runs of each model find them with {POWER * 100:g} % power: "
            f"{_cost(analysis, cells, basis)}, and their pretraining{basis.pretraining_cost(rounds)}."
        )
        options.append((sum(cells.values()), More(wanted, runs=True)))
    else:
        notes.append(f"Over {MOST:,} pretraining runs of each model would be needed to show {lead}: it is too small.")
    if isinstance(seeds, int):
        number = max(seeds, len(analysis.grid.seeds) + 1)
        cells = More(number).cells(analysis)
        notes.append(f"With the present runs, {number:,} seeds a rate are enough: {_cost(analysis, cells, basis)}.")
        options.append((sum(cells.values()), More(number)))
    elif seeds == "noise":
        notes.append("Whether more fine-tuning seeds alone would is not known, as the noise of seeds is not.")
    else:
        notes.append(SEEDS_ALONE)
    return " ".join(notes), min(options)[1] if options else None


def _cost(analysis: Analysis, cells: Mapping[tuple[str, str], int], basis: Basis) -> str:
    """Say what more cells cost: their number over all models, and the time, estimated from the recorded cost of existing cells."""
    return f"{sum(cells.values()):,} more cells of {text.every(len(analysis.groups), 'model')}{basis.cost(cells)}"


def instructions(analysis: Analysis, wanted: Sequence[More], basis: Basis) -> list[str]:
    """Say how to ask for the wanted numbers of seeds and of pretraining runs, smallest first; empty if this is not known."""
    seeds, runs = (sorted({more.number for more in wanted if more.runs == kind}) for kind in (False, True))
    sentences = []
    if lines := _seed_lines(analysis, seeds, basis):
        sentences.append(_edit(f"{seeds[0]:,} seeds", seeds, lines, basis))
    lines = [f"`replicates: {number}`" for number in runs]
    if runs and not basis.pretraining:
        where = f"{lines[0]} belongs into the file of the study that trains the models"
        sentences.append(f"To have {runs[0]:,} pretraining runs of each model, {where}{_for_others(runs, lines)}.")
    elif runs and basis.setting:
        sentences.append(_edit(f"{runs[0]:,} pretraining runs of each model", runs, lines, basis))
    return sentences


def _seed_lines(analysis: Analysis, numbers: Sequence[int], basis: Basis) -> list[str]:
    """Return for each number of seeds the line of a study's file that asks for it; empty if a seed is not a plain number."""
    seeds = [seed for seed in analysis.grid.seeds if isinstance(seed, int)]
    if not basis.setting or len(seeds) < len(analysis.grid.seeds):
        return []
    unused = (number for number in itertools.count() if number not in seeds)
    listed = [*seeds, *itertools.islice(unused, max(0, max(numbers, default=0) - len(seeds)))]
    return [
        f"`seeds: [{', '.join(map(str, listed[:number]))}]`"
        if number <= MOST_LISTED
        else f"`seeds: [{', '.join(map(str, listed[:3]))}, ...]` with {number:,} numbers"
        for number in numbers
    ]


def _edit(what: str, numbers: Sequence[int], lines: Sequence[str], basis: Basis) -> str:
    """Say how to write the first line into the study's file, and which line to write instead for each other number."""
    before = f"run `{basis.preparation}`, " if basis.preparation else ""
    edit = f"{before}write {lines[0]} into {basis.setting}, and run `{basis.command}`"
    return f"To have {what}, {edit}{_for_others(numbers, lines)}; {basis.again}."


def _for_others(numbers: Sequence[int], lines: Sequence[str]) -> str:
    return "".join(f"; for {number:,}, {line}" for number, line in list(zip(numbers, lines, strict=True))[1:])

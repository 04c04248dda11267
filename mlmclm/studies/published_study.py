"""A published study: a bundle, or several that are parts of one study, looked at like a study of the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from mlmclm.analysis.results import Grid
from mlmclm.errors import UserError, unknown
from mlmclm.numbers import plural
from mlmclm.progress import say
from mlmclm.reports.basis import basis_of
from mlmclm.reports.provenance import ComputedWork, cell_work, provenance
from mlmclm.reports.study_facts import StudyFacts
from mlmclm.studies.bundle import STUDY, AnalysisSetting, Bundle, ComputedStates
from mlmclm.studies.claim_files import claims_of
from mlmclm.studies.received_bundle import read_bundle
from mlmclm.studies.study_answers import StudyAnswers, analyse_results
from mlmclm.studies.study_file import AnyFile, StudyFile, load_file, named_models

if TYPE_CHECKING:
    from mlmclm.analysis.analyse import Analysis
    from mlmclm.reports.advice import Advice

MAY_DIFFER = ("name", "models", "replicates", "baseline", "per_model", "tasks", "card")
"""Keys of the study's file in which the parts of one study may differ."""


class PublishedStudy:
    """A study of which there is a bundle alone: what it shows can be looked at, and nothing is computed.

    Attributes:
        bundle: the bundle, or those of several parts as one.
        folder: the folder of the bundle, or of the first part.
    """

    def __init__(self, bundle: Bundle, folder: Path) -> None:
        self.bundle, self.folder = bundle, folder

    def __repr__(self) -> str:
        return f"<published study {self.bundle.name!r}: {len(self.bundle.rows):,} cells, in {self.folder}>"

    @property
    def name(self) -> str:
        """The study's name."""
        return self.bundle.name

    @property
    def file(self) -> AnyFile:
        """The study's file, as the bundle has it."""
        return load_file(self.folder / STUDY)

    @property
    def results(self) -> PublishedResults:
        """The results."""
        return self.results_by(None)

    def results_by(self, rule: str | None) -> PublishedResults:
        """Return the results, with the best learning rates chosen by a rule; None for the study's own."""
        from mlmclm.analysis.selection import check_rule

        setting = self.bundle.setting
        chosen = setting if rule is None else replace(setting, rule=check_rule(rule))
        return PublishedResults(self, chosen)

    def report(self, *, rule: str | None = None, to: str | Path | None = None, track: bool = False) -> PublishedResults:
        """Write tables and report to a folder; without one, nothing is written."""
        if track:
            raise UserError(f"{self.folder}: a published study has no runs to write to MLflow; leave out --export.")
        found = self.results_by(rule)
        return found if to is None else found.write(Path(to))


@dataclass(eq=False, repr=False)
class PublishedResults(StudyAnswers):
    """The results of a published study, and what follows from them: the same as from the store that they came from."""

    study: PublishedStudy
    setting: AnalysisSetting

    def __post_init__(self) -> None:
        self.rows = list(self.study.bundle.rows)

    def __repr__(self) -> str:
        return f"<results of the published study {self.name!r}: {len(self.rows):,} cells>"

    @property
    def name(self) -> str:
        """The study's name."""
        return self.study.name

    @property
    def runs(self) -> str:
        """Nothing has the runs."""
        return ""

    @property
    def kept(self) -> Bundle:
        """The bundle, which has the outcome of each test example."""
        return self.study.bundle

    @cached_property
    def analysis(self) -> Analysis:
        """All tables, as the report shows them."""
        setting = self.setting
        return analyse_results(
            self.rows,
            setting.baseline,
            self.kept,
            grid=setting.grid,
            rule=setting.rule,
            chances=setting.chances,
            replicate_of=setting.replicate_of,
        )

    @cached_property
    def facts(self) -> StudyFacts:
        """The facts that the report shows beside the results."""
        facts, states = self.study.bundle.facts, self.study.bundle.states
        examples = dict[str, int]()
        for row in self.rows:
            if row["task"] not in examples and row["status"] == "ok":
                try:
                    examples[row["task"]] = self.kept.examples(row).rows
                except UserError:  # another cell of the task may have them
                    continue
        works = {row["key"]: cell_work(row) for row in self.rows}
        return replace(
            facts,
            protocol={**facts.protocol, "rule": self.setting.rule},
            basis=replace(
                basis_of(self.rows, facts.command, test_examples=examples, pretraining=self._pretrained_once),
                setting=f"{STUDY} of a copy of this bundle",
                again="a store that lacks this study's models and cells computes them too",
            ),
            claims=claims_of(self.study.file),
            provenance=provenance(
                [stage.work for stage in states.stages],
                list(works.values()),
                corpus=states.corpus,
                tasks=states.task_data,
            ),
        )

    @property
    def _pretrained_once(self) -> list[ComputedWork]:
        """How the stages of first replicates were computed."""
        stages, further = self.study.bundle.states.stages, self.setting.replicate_of
        return [stage.work for stage in stages if any(model not in further for model in stage.models)]

    @cached_property
    def advice(self) -> Advice:
        """Advice from the results: the answer, how sure it is, what it rests on, and what would settle the rest."""
        from mlmclm.reports.advice import advise

        return advise(self.analysis, self.facts.basis)

    def model_of(self, name: str, *, where: str) -> str:
        """Return a model's name, also given with shares; if there is no such model, the `UserError` starts with `where`."""
        file, models = self.study.file, self.setting.grid.models
        spelled = file.spelled(name) if isinstance(file, StudyFile) else name
        if spelled not in models:
            raise unknown("model", name, models, where=where)
        return spelled

    def remedy(self, where: str) -> str:
        """Say what computes missing cells, in a sentence."""
        return f"`mlmclm {self.study.file.kind} {self.study.folder / STUDY}` computes what is missing."

    def write(self, folder: Path) -> PublishedResults:
        """Write the tables and the report to a folder."""
        from mlmclm.reports.write_report import write_report

        self.report = write_report(self.analysis, self.facts, folder)["report"]
        return self


def published(*folders: str | Path) -> PublishedStudy:
    """Return the published study of a bundle, or of several that are parts of one study.

    Raises:
        UserError: a bundle is missing or damaged, or the bundles are not of one study.
    """
    paths = [Path(folder) for folder in folders]
    bundles = [read_bundle(path) for path in paths]
    return PublishedStudy(
        bundles[0] if len(bundles) == 1 else joined(dict(zip(map(str, paths), bundles, strict=True))), paths[0]
    )


def joined(parts: Mapping[str, Bundle]) -> Bundle:
    """Return several bundles as one: parts of one study, computed apart, in which models may overlap.

    A model that several parts have with equal weights has the cells of all. If its weights differ, because each part has
    pretrained it, the first part's cells alone are taken, and this is said; so it is of a cell that two parts have computed to
    different scores.

    Args:
        parts: the bundles, by what messages call them.

    Raises:
        UserError: the parts differ in their recipe, corpus, data or search space.
    """
    where, first = next(iter(parts.items()))
    for name, other in parts.items():
        _check_alike(where, first, name, other)
    owners: dict[str, tuple[str, str]] = {}
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    outcomes: dict[str, dict[str, pa.Table]] = {}
    labels: Mapping[str, tuple[str, ...]] = {}
    for name, part in parts.items():
        elsewhere = [
            model for model, own in part.states.weights.items() if owners.setdefault(model, (own, name))[0] != own
        ]
        unlike = 0
        for model in elsewhere:
            say(f"{model}: {name} has other weights of it than {owners[model][1]}, which alone counts")
        for row in part.rows:
            if row["model"] in elsewhere:
                continue
            there = rows.setdefault((row["model"], row["key"]), row)
            unlike += there["scores"] != row["scores"]
            if there is row and (table := part.outcome(row)) is not None:
                outcomes.setdefault(row["task"], {}).setdefault(row["key"], table)
        if unlike:
            say(
                f"{name}: {plural(unlike, 'cell')} that an earlier part has too with slightly other scores; those of the earlier part count"
            )
        labels = {**part.labels, **labels}
    bundles = list(parts.values())
    setting = first.setting
    weights = {model: own for model, (own, _) in owners.items()}
    stages = {(stage.key, stage.work.began): stage for part in bundles for stage in part.states.stages}
    models = {model.name: model for part in reversed(bundles) for model in part.facts.models}
    tasks = {task.name: task for part in reversed(bundles) for task in part.facts.tasks}
    grid = _grid([part.setting.grid for part in bundles])
    study = {**first.study, "models": _joined_models([part.study["models"] for part in bundles])}
    if "tasks" in study:
        study["tasks"] = list(grid.tasks)
    return Bundle(
        study=study,
        files={name: content for part in reversed(bundles) for name, content in part.files.items()},
        facts=replace(
            first.facts,
            models=tuple(models[name] for name in grid.models),
            tasks=tuple(tasks[name] for name in grid.tasks),
            learning_rates=grid.learning_rates,
            seeds=grid.seeds,
            zero_shot=tuple(
                {(each.model, each.task): each for part in reversed(bundles) for each in part.facts.zero_shot}.values()
            ),
        ),
        setting=AnalysisSetting(
            grid,
            setting.rule,
            next((part.setting.baseline for part in bundles if part.setting.baseline is not None), None),
            {task: level for part in reversed(bundles) for task, level in part.setting.chances.items()},
            {
                run: model
                for part in bundles
                for run, model in part.setting.replicate_of.items()
                if model in grid.models
            },
        ),
        states=ComputedStates(
            first.states.corpus,
            first.states.tokenizer,
            first.states.shared,
            weights,
            {task: data for part in reversed(bundles) for task, data in part.states.task_data.items()},
            tuple(stages.values()),
        ),
        rows=list(rows.values()),
        outcomes={
            task: pa.concat_tables(own.values(), promote_options="permissive").combine_chunks()
            for task, own in outcomes.items()
        },
        labels={key: labels[key] for _, key in rows if key in labels},
    )


def _check_alike(where: str, first: Bundle, name: str, other: Bundle) -> None:
    """Raise a `UserError` that says in what two bundles differ if they are not parts of one study."""
    differing = [
        f"{key}: {ours!r} and {theirs!r}"
        for key in dict.fromkeys((*first.study, *other.study))
        if key not in MAY_DIFFER and (ours := first.study.get(key)) != (theirs := other.study.get(key))
    ]
    if first.states.shared != other.states.shared:
        differing.append(f"corpus, tokenizer or recipe: {first.states.shared} and {other.states.shared}")
    ours, theirs = first.states.task_data, other.states.task_data
    differing += [
        f"data of task {task}: {ours[task]} and {theirs[task]}"
        for task in ours
        if theirs.get(task, ours[task]) != ours[task]
    ]
    if differing:
        raise UserError(
            f"{where} and {name} are not parts of one study. They differ in {'; '.join(differing)}. Analyse each by itself."
        )


def _joined_models(given: Sequence[Any]) -> Any:
    """Return the models of several files: names, or a mapping of names to sources."""
    if any(isinstance(each, Mapping) for each in given):
        named = [each if isinstance(each, Mapping) else named_models(each) for each in given]
        return {name: source for each in reversed(named) for name, source in each.items()}
    return list(dict.fromkeys(name for each in given for name in each))


def _grid(grids: Sequence[Grid]) -> Grid:
    """Return the grid of all parts: what is missing of it counts as missing."""
    allotted = {task: seeds for grid in reversed(grids) for task, seeds in grid.allotted.items()}
    # Each part has added rates for its own models together, so one that several parts have was tried at those of all.
    added: dict[tuple[str, str, str], dict[float, None]] = {}
    for grid in grids:
        for place, rates in grid.added.items():
            added.setdefault(place, {}).update(dict.fromkeys(rates))
    return Grid(
        tuple(dict.fromkeys(model for grid in grids for model in grid.models)),
        tuple(dict.fromkeys(task for grid in grids for task in grid.tasks)),
        tuple(dict.fromkeys(rate for grid in grids for rate in grid.learning_rates)),
        tuple(dict.fromkeys(seed for grid in grids for seed in grid.seeds)),
        {task: own for grid in reversed(grids) for task, own in grid.settings.items()},
        added={place: tuple(rates) for place, rates in added.items()},
        grows=any(grid.grows for grid in grids),
        allotted=allotted,
    )

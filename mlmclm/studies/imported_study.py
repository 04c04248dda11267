"""A study that another tool has run: its results, read and analysed like those of one's own."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args

from mlmclm.analysis.analyse import Analysis, analyse
from mlmclm.analysis.effects import fold_scores
from mlmclm.analysis.pairs import mean_over_seeds
from mlmclm.analysis.stated_claims import Verdict, stated_claim
from mlmclm.errors import UserError, unknown
from mlmclm.numbers import rate_text
from mlmclm.plans.names import ModelName, parse, replicates_among
from mlmclm.readers.reader import Reader, reader_of
from mlmclm.reports.advice import Advice, advise
from mlmclm.reports.basis import Basis, basis_of
from mlmclm.reports.study_facts import ModelFacts, StudyFacts, TaskFacts
from mlmclm.reports.tested_claims import claim_frame, verdicts_on
from mlmclm.reports.write_report import write_report
from mlmclm.results.chance import Chances, stated_chances
from mlmclm.results.measures import Array, WeightedMean
from mlmclm.storage.files import canonical_json, check_folder, write_atomic
from mlmclm.studies.claim_files import read_claims
from mlmclm.studies.place import known_arguments
from mlmclm.studies.report_facts import named_facts

if TYPE_CHECKING:
    import pandas as pd

Split = Literal["test", "validation"]
RESULTS = "results.jsonl"


@dataclass(frozen=True, eq=False, repr=False)
class ImportedStudy:
    """The results of a study that another tool has run, at least one, and what follows from them.

    Attributes:
        results: as `analysis.analyse.analyse` takes them.
        reader: the one that has read them.
        rule: how learning rates are chosen.
        baseline: the model that the others are compared with.
        split: the scores that are analysed; learning rates are chosen on validation in any case.
        chances: the chance levels that are stated, by task.
    """

    name: str
    results: Sequence[dict[str, Any]]
    reader: Reader
    command: str
    rule: str = "mean"
    baseline: str | None = None
    split: Split = "test"
    chances: Chances = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<imported study {self.name!r}: {len(self.results):,} results>"

    @cached_property
    def analysis(self) -> Analysis:
        """All tables."""
        ranges = {each["task"]: (0.0, 1.0) for each in self.results if each["metric"] != "spearman"}
        own = [_of_split(result, self.split) for result in self.results]
        plans = {model: plan for each in own if (plan := _plan(model := each["model"])) is not None}
        return analyse(
            own,
            self.baseline,
            rule=self.rule,
            ranges=ranges,
            chances=self.chances,
            folds=self._folds,
            replicate_of=replicates_among(plans),
        )

    @cached_property
    def basis(self) -> Basis:
        """The time of the runs and the number of test examples, as far as the files have them."""
        examples = dict[str, int]()
        for result in self.results if self.split == "test" else ():
            if result["task"] not in examples and (scores := self.reader.test_scores(result)) is not None:
                examples[result["task"]] = len(scores)
        return basis_of(self.results, test_examples=examples)

    @cached_property
    def advice(self) -> Advice:
        """Advice from the results: the answer, how sure it is, what it rests on, and what would settle the rest."""
        return advise(self.analysis, self.basis)

    @cached_property
    def facts(self) -> StudyFacts:
        """Facts of the models and tasks: their names."""
        tasks = {each["task"]: each for each in self.results}
        grid = self.analysis.grid
        return StudyFacts(
            name=self.name,
            command=self.command,
            models=tuple(map(_model_facts, self.analysis.models)),
            tasks=tuple(TaskFacts(name, name, each["family"], each["metric"]) for name, each in sorted(tasks.items())),
            learning_rates=grid.learning_rates,
            seeds=grid.seeds,
            baseline=self.baseline,
            protocol={"rule": self.rule, "scores": self.split},
            basis=self.basis,
            claims=read_claims(),
        )

    def claims(self, *files: str | Path) -> pd.DataFrame:
        """Test claims, by default all packaged ones; as `StudyResults.claims`."""
        wanted = read_claims(files) if files else self.facts.claims
        return claim_frame(verdicts_on(wanted, self.analysis, self.facts))

    def verdict(self, claim: str) -> Verdict:
        """Return whether the results show a claim (`analysis.stated_claims`)."""
        return stated_claim(claim, self.analysis)

    def write(self, folder: Path) -> Path:
        """Write the results, the tables and the report to a folder; return the report's path."""
        lines = "".join(f"{canonical_json(result)}\n" for result in self.results)
        write_atomic(check_folder(folder) / RESULTS, lines)
        return write_report(self.analysis, self.facts, folder)["report"]

    def _folds(self, rows: Sequence[Mapping[str, Any]]) -> Array | None:
        """Return the scores at the chosen learning rates without one fold of the test examples after the other, if known."""
        own = {result["key"]: result for result in self.results} if self.split == "test" else {}
        scores = [self.reader.test_scores(own[row["key"]]) for row in rows if row["key"] in own]
        known = [each for each in scores if each is not None]
        if not known or len(known) < len(rows) or len({len(each) for each in known}) > 1:
            return None
        return fold_scores(mean_over_seeds([WeightedMean(each) for each in known]), len(known[0]))


@known_arguments
def import_results(
    reader: str,
    path: str | Path,
    *,
    rule: str = "mean",
    baseline: str | None = None,
    split: str = "test",
    absent: str = "missing",
    models: Collection[str] = (),
    tasks: Collection[str] = (),
    learning_rates: Collection[float] = (),
    chances: Mapping[str, float] = MappingProxyType({}),
    name: str | None = None,
) -> ImportedStudy:
    """Read the results of a study that another tool has run.

    Args:
        reader: the format, one of `mlmclm.readers` that has a grid of learning rates and seeds, such as `encodeval`.
        path: a folder or file in this format.
        rule: how the best learning rate is chosen: `mean`, `per_seed` or `on_test`.
        baseline: the model that the others are compared with.
        split: `test`, or `validation` to analyse these scores in the place of test scores.
        absent: what a run that the grid lacks is: `missing`, or `diverged`, as in the published study.
        models: only these; empty for all.
        tasks: only these; empty for all.
        learning_rates: only these; empty for all.
        chances: by task, the score that it gives without a model.
        name: of the study in its report; by default that of the path.

    Raises:
        UserError: a name is unknown, or the files are malformed.
    """
    for kind, value, allowed in (
        ("split", split, get_args(Split)),
        ("kind of absent run", absent, ("missing", "diverged")),
    ):
        if value not in allowed:
            raise unknown(kind, value, allowed)
    place = Path(path)
    known = reader_of(place, reader)
    found = known.results(place)
    if absent == "diverged":
        found += list(_absent(found))
    for key, wanted in (("model", models), ("task", tasks), ("learning_rate", learning_rates)):
        there = dict.fromkeys(result[key] for result in found)
        for each in wanted:
            if each not in there:
                raise unknown(key.replace("_", " "), each, sorted(there), where=str(path))
        found = [result for result in found if not wanted or result[key] in wanted]
    if not found:
        raise UserError(f"{path}: no run of these models on these tasks at these learning rates.")
    for task, level in chances.items():
        if not -1 <= level <= 1:
            raise UserError(
                f"chance level of {task}: {level:g}; scores are fractions of 1, so expected is a number up to 1."
            )
    levels = stated_chances(chances, {result["task"] for result in found})
    whole = place.resolve()
    given: dict[str, Collection[str | None]] = {
        "--rule": [rule],
        "--baseline": [baseline],
        "--split": [split],
        "--absent": [absent],
        "--model": models,
        "--task": tasks,
        "--lr": [rate_text(rate) for rate in learning_rates],
        "--chance": [f"{task}={level:g}" for task, level in chances.items()],
    }
    options = [shlex.join((option, value)) for option, values in given.items() for value in values if value is not None]
    return ImportedStudy(
        name or (whole.stem if whole.is_file() else whole.name),
        found,
        known,
        " ".join(["mlmclm import", reader, shlex.quote(str(path)), *options]),
        rule,
        baseline,
        "validation" if split == "validation" else "test",
        levels,
    )


def _model_facts(model: str) -> ModelFacts:
    """Return what a model's name says of its pretraining, if it is a name as of the models that are trained here."""
    plan = _plan(model)
    return ModelFacts(model, "external", **({} if plan is None else named_facts(plan)))


def _plan(model: str) -> ModelName | None:
    """Return the plan that a model's name states; None if it is no name as of the models that are trained here."""
    with suppress(UserError):
        return parse(model)
    return None


def _of_split(result: dict[str, Any], split: Split) -> dict[str, Any]:
    """Return a result whose test scores are those of a split."""
    if split == "test" or result["status"] == "diverged":
        return result
    known = result["scores"].get(split)
    return {**result, "scores": {"validation": known, "test": known}}


def _absent(results: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a diverged result for every run that a grid lacks: each rate and seed of a task, for its models with any run."""
    grids: dict[str, set[tuple[float, int]]] = {}
    there: dict[tuple[str, str], set[tuple[float, int]]] = {}
    for result in results:
        cell = result["learning_rate"], result["seed"]
        grids.setdefault(result["task"], set()).add(cell)
        there.setdefault((result["model"], result["task"]), set()).add(cell)
    kinds = {result["task"]: (result["family"], result["metric"]) for result in results}
    for (model, task), own in sorted(there.items()):
        for rate, seed in sorted(grids[task] - own):
            yield {
                "key": f"{model}/{task}/lr{rate_text(rate)}_sd{seed} (absent)",
                "model": model,
                "task": task,
                "family": kinds[task][0],
                "metric": kinds[task][1],
                "learning_rate": rate,
                "seed": seed,
                "status": "diverged",
                "scores": None,
            }

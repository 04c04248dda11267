"""Computation of some of a published study's cells once more, to compare with what is published."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlmclm import versions
from mlmclm.analysis.results import records
from mlmclm.answers.record import STUDY, StudyRecord
from mlmclm.errors import UserError
from mlmclm.finetuning.cell import cell_key
from mlmclm.numbers import plural, rate_text
from mlmclm.progress import Bar, say
from mlmclm.results.examples import KeptExamples
from mlmclm.results.intervals import most_wrong
from mlmclm.storage.files import stable_hash
from mlmclm.studies.api import published
from mlmclm.studies.place import Place
from mlmclm.studies.recompute import FiledResults, Recomputed, models_in, recomputed
from mlmclm.studies.study_file import StudyFile, load_file
from mlmclm.sweeps.cells import SweepModel, result_cell
from mlmclm.sweeps.find_model import find_model


@dataclass(frozen=True)
class BundleCheck:
    """The cells of a bundle that are computed again, and what that takes.

    Attributes:
        folder: the bundle's.
        rows: their results.
        seed: of the choice of cells.
        keys: the number of all cells whose keys are those of what the cells say; the others' cannot be made again here.
        pretrained: the models that must be pretrained first, because the store lacks their weights.
        pretraining_hours, cell_hours: of one worker, as recorded where they were computed.
        noise: the standard deviation over seeds by (model, task), as fractions of 1; NaN where it is not known.
    """

    record: StudyRecord
    folder: Path
    place: Place
    rows: tuple[Mapping[str, Any], ...]
    seed: int
    keys: int
    models: Mapping[str, SweepModel]
    pretrained: tuple[str, ...]
    pretraining_hours: float
    cell_hours: float
    noise: Mapping[tuple[str, str], float]

    def at_most_wrong(self, found: Iterable[Recomputed]) -> float:
        """Return the share of all cells of which at most so many are wrong, with 95 % confidence.

        A cell that differs elsewhere, or could not be computed, counts as wrong: it confirms nothing.
        """
        total, statuses = len(self.record.rows), [each.status for each in found]
        return most_wrong(total, len(statuses), sum(status != "equal" for status in statuses)) / total

    def run(self) -> list[Recomputed]:
        """Pretrain what is missing, compute the cells, and compare each with the published result.

        Raises:
            UserError: a setting is wrong, or the corpus is not there.
            EnvironmentFault: the machine failed. What is finished is kept.
        """
        by_name = self._made() if self.pretrained else {}
        rows = {row["key"]: row for row in self.record.rows}
        kept = self.record.kept

        def result(key: str) -> dict[str, Any]:
            if key not in rows:
                raise UserError(f"{self.folder}: the bundle has no result {key}.")
            return dict(rows[key])

        def examples(result: Mapping[str, Any]) -> KeptExamples | None:
            try:
                return kept.examples(result)
            except UserError:
                return None

        def model(result: Mapping[str, Any]) -> SweepModel:
            found = self.models.get(result["weights"]) or by_name.get(result["model"])
            if found is None:
                raise UserError(f"the model {result['model']} (weights {result['weights'][:12]}) is not here")
            return found

        found, filed = [], FiledResults(result, examples, model)
        with Bar("computing cells again", len(self.rows), unit="cells") as bar:
            for number, row in enumerate(self.rows, 1):
                found.append(self._with_noise(recomputed(row["key"], filed, self.place), row))
                bar.update(number, note=found[-1].name)
        return found

    def _made(self) -> dict[str, SweepModel]:
        """Pretrain or fetch the models that the store lacks, and return them by name."""
        from mlmclm.studies.trained_study import TrainedStudy

        file = load_file(self.folder / STUDY)
        if isinstance(file, StudyFile):
            # Under a name that no study of the store's own has, so that none of its models is replaced.
            name = f"verified-{stable_hash(self.record.study)[:12]}"
            made = TrainedStudy(
                file.model_copy(update={"name": name}), self.place, source=str(self.folder / STUDY)
            ).narrowed(self.pretrained)
            return {model.name: model for model in made.pretrain()}
        found = {}
        for name in self.pretrained:
            try:
                model = find_model(
                    file.models[name], self.place.store, data_root=self.place.data_root, beside=self.folder
                )
            except UserError as error:
                say(f"{name} is not here: {error}")
                continue
            found[name] = replace(model, name=name)
        return found

    def _with_noise(self, found: Recomputed, row: Mapping[str, Any]) -> Recomputed:
        """Add how much other seeds change the score to a difference that another machine or other weights explain."""
        spread = self.noise.get((row["model"], row["task"]), math.nan)
        if found.status != "differs elsewhere" or math.isnan(spread):
            return found
        return replace(found, detail=f"{found.detail}; other seeds alone change this score by {spread:.3g} (sd)")


def check_of(folder: str | Path, count: int, seed: int, place: Place) -> BundleCheck:
    """Choose cells of a bundle, and say what computing them again takes; nothing is computed.

    Args:
        count: number of cells.
        seed: of the choice. Whoever made the bundle must not know it.

    Raises:
        UserError: there is no such bundle, it is damaged or contradicts itself, or a cell's key is not that of what it says.
    """
    results = published(folder)
    record, tasks = results.record, Path(folder) / "tasks"
    if not place.task_dirs and tasks.is_dir():
        place = replace(place, task_dirs=(tasks.resolve(),))
    keys = _keys_made_again(record, Path(folder), place)
    rows = sorted(record.rows, key=lambda row: (row["key"], row["model"]))
    random.Random(seed).shuffle(rows)
    chosen = tuple(rows[:count])
    models = models_in(place.store)
    needed = sorted({row["model"] for row in chosen if row["weights"] not in models})
    stages = [stage for stage in record.states.stages if set(needed) & set(stage.models)]
    return BundleCheck(
        record,
        Path(folder),
        place,
        chosen,
        seed,
        keys,
        models,
        tuple(needed),
        math.fsum(stage.work.seconds * stage.work.workers for stage in stages) / 3600,
        math.fsum((row.get("cost") or {}).get("seconds", 0.0) for row in chosen) / 3600,
        {(row["model"], row["task"]): row["sd_seeds_pooled"] for row in records(results.stability)},
    )


def _keys_made_again(record: StudyRecord, folder: Path, place: Place) -> int:
    """Make the key of each cell again from what its result says, and return for how many this is possible here.

    Raises:
        UserError: a key is another one.
    """
    made, wrong = 0, list[Mapping[str, Any]]()
    for row in record.rows:
        try:
            cell = result_cell(row, SweepModel(row["model"], folder, row["weights"]), place.task_dirs)
        except UserError:  # a task, or a member of a kind, that is not here
            continue
        if row.get("engine") != versions.CELLS or cell.added:
            continue
        made += 1
        if cell_key(cell) != row["key"]:
            wrong.append(row)
    if wrong:
        raise UserError(
            f"{folder}: {plural(len(wrong), 'cell')} of {len(record.rows):,} have keys that don't belong to their settings. First: "
            f"{wrong[0]['key']} (model {wrong[0]['model']}, task {wrong[0]['task']}, learning rate {rate_text(wrong[0]['learning_rate'])})."
        )
    return made

"""A model trained further on a user's text, beside the untouched one, with the answer whether it helped."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import yaml

from mlmclm.errors import UserError, for_each
from mlmclm.models.folder import context_of
from mlmclm.models.sources import local_folder
from mlmclm.objectives.objective import parse_objective
from mlmclm.plans.names import parse as parse_name
from mlmclm.progress import Bar
from mlmclm.reports.adaptation_words import loss_sentence, task_sentences
from mlmclm.results.document_losses import DocumentLosses, loss_difference
from mlmclm.storage.files import write_atomic
from mlmclm.studies.adaptation import (
    Schedule,
    TextSize,
    measure_text,
    own_objective,
    schedule,
    short_name,
    study_values,
)
from mlmclm.studies.data_file import FileTask, read_task
from mlmclm.studies.place import Place, StudyFolders, command_of, place_of
from mlmclm.studies.prepare import find_prepared
from mlmclm.studies.small_grid import SEEDS, GridModel, GridTask, grid_for
from mlmclm.studies.study_file import StudyFile, read_file
from mlmclm.studies.study_plan import StudyPlan
from mlmclm.studies.study_results import StudyResults
from mlmclm.studies.trained_study import TrainedStudy
from mlmclm.studies.try_models import option_words
from mlmclm.sweeps.cluster_terms import ClusterTerms
from mlmclm.sweeps.find_model import find_model
from mlmclm.tasks.declared_tasks import get_task
from mlmclm.tasks.inference import Wishes
from mlmclm.tasks.load import load_task

if TYPE_CHECKING:
    from mlmclm.results.intervals import Estimate


@dataclass(frozen=True, eq=False)
class AdaptationResults:
    """Whether further pretraining on one's own text helped.

    Attributes:
        before: loss of a token of the held-out documents under the training's objective, of the untouched model.
        after: that of each run of the training.
        fall: by how much the loss falls, paired over documents, with its interval.
        documents: the number of these documents.
        models: the trained models' folders by name.
        results: of the fine-tuning, if there are tasks.
        answers: the answers in words: on the text, and on each task.
    """

    before: float
    after: tuple[float, ...]
    fall: Estimate
    documents: int
    models: Mapping[str, Path]
    results: StudyResults | None
    answers: tuple[str, ...]


class Adaptation:
    """Continued pretraining of a model on one's own text, beside the untouched one.

    Attributes:
        study: the study that does it, which has the untouched model as its baseline.
        facts: what was chosen, by title.
        data: the tasks that were made from files.
    """

    def __init__(self, study: TrainedStudy, facts: Mapping[str, str], data: tuple[FileTask, ...]) -> None:
        self.study, self.facts, self.data = study, facts, data

    @property
    def control(self) -> str:
        """Name of the untouched model."""
        return str(self.study.file.baseline)

    @property
    def trained(self) -> list[str]:
        """Names of the trained models, one a run."""
        return [name for name in self.study.file.models if name != self.control]

    def plan(self, *, workers: int | None = None, price: float | None = None) -> StudyPlan:
        """Return what would be computed; arguments as of `Study.plan`."""
        if self.study.file.space is None:
            return self.study.plan_pretraining()
        return self.study.plan(workers=workers, price=price)

    def run(
        self, *, replace: bool = False, ray: str | None = None, terms: ClusterTerms | None = None
    ) -> AdaptationResults:
        """Compute what is missing, and compare the trained model with the untouched one; arguments as of `Study.run`."""
        results = None
        if self.study.file.space is None:
            self.study.pretrain(ray=ray, terms=terms)
        else:
            results = self.study.run(replace=replace, ray=ray, terms=terms)
        losses = self._losses()
        before, after = losses[self.control], [losses[name] for name in self.trained]
        fall = loss_difference(before, after)
        folders = {name: self.study.folder / "models" / name for name in self.trained}
        answers = [loss_sentence(before.loss, [each.loss for each in after], fall, len(before.tokens))]
        if results is not None:
            told = results.compare(self.trained[0], self.control)
            answers += task_sentences([*told.rows, *(row for row in told.over if row["kind"] == "all")])
        found = tuple(each.loss for each in after)
        return AdaptationResults(before.loss, found, fall, len(before.tokens), folders, results, tuple(answers))

    def write(self, folder: str | Path) -> list[Path]:
        """Write the study as files to go on from: `study.yaml`, and of data files `tasks/` and `data/`.

        Raises:
            UserError: one of the files exists.
        """
        path = Path(folder) / "study.yaml"
        if path.exists():
            raise UserError(f"--write {folder}: {path} exists and is not overwritten; name another folder.")
        for each in self.data:
            each.write(Path(folder))
        values = self.study.file.model_dump(mode="json", exclude_defaults=True)
        places = [(values["initial"], name) for name in values["initial"]] + [(values["corpus"], "source")]
        for holder, key in places:
            found = local_folder(holder[key], self.study.place.data_root)
            holder[key] = holder[key] if found is None else str(found.absolute())
        write_atomic(path, yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
        return [path]

    def _losses(self) -> dict[str, DocumentLosses]:
        from mlmclm.pretraining.held_out import document_losses

        file = self.study.file
        prepared = find_prepared(file, self.study.place)
        assert prepared is not None
        (blocks,) = (source.validation for source in prepared.corpus.sources.values())
        objective = parse_name(self.trained[0], file.sizes).phases[-1].objective
        names = [self.control, *self.trained]
        each = min(file.recipe.evaluation_blocks, len(blocks))
        with Bar("held-out documents", each * len(names), unit="blocks") as bar:

            def losses(number: int, name: str) -> DocumentLosses:
                folder = self.study.folder / "models" / name
                observe = lambda done: bar.update(number * each + done)  # noqa: E731
                return document_losses(
                    folder, blocks, file.recipe, objective, prepared.corpus.tokenizer, observe=observe
                )

            return {name: losses(number, name) for number, name in enumerate(names)}


def adapt(
    model: str | Path,
    text: str | Path,
    *,
    tasks: str | Path | Sequence[str | Path] = (),
    objective: str | None = None,
    steps: int | None = None,
    learning_rate: float | None = None,
    replicates: int = 1,
    text_column: str = "text",
    space: str | Path | Mapping[str, Any] | None = None,
    seeds: int | None = None,
    name: str | None = None,
    **folders: Unpack[StudyFolders],
) -> Adaptation:
    """Return the continued pretraining of a model on a text, beside the untouched one; `run` computes it.

    Args:
        model: a folder, the name of a model in a study of the store, or a name on the Hugging Face Hub (OWNER/NAME[@REVISION]).
        text: a folder or file of text, as `corpus.source` in a study.
        tasks: tasks on which both are fine-tuned, by name or by a data file as in `try_models`. Without any, the models are
            compared by their loss on held-out documents alone.
        objective: the objective, such as `mlm15` or `clm`; by default that of the model's kind.
        steps: steps of training; by default up to three passes over the text, and at most 2,000 steps.
        learning_rate: the peak rate; by default a low one by the model's size.
        replicates: runs of the training, which differ in their seeds.
        text_column: the column of text, in files that have columns.
        space: the search space of the tasks in place of a small one that is made for the model: a name, a file, or values.
        seeds: fine-tuning seeds at each learning rate; 3 by default.
        name: of the study; by default `adapt-` and the model's name.
        folders: `StudyFolders`.

    Raises:
        UserError: there is no such model, text or task, or an argument is wrong.
    """
    place = place_of(**folders)
    found = find_model(str(model), place.store, data_root=place.data_root)
    # A study names models of the store by their folders.
    source = str(found.folder) if found.folder.is_relative_to(place.store) else str(model)
    chosen = objective or own_objective(found.folder)
    parse_objective(chosen, where="--objective")
    for option, value, least in (("--steps", steps, 1), ("--replicates", replicates, 1), ("--seeds", seeds, 1)):
        if value is not None and value < least:
            raise UserError(f"{option} {value}: allowed are numbers from {least} on.")
    if learning_rate is not None and not 0 < learning_rate < 1:
        raise UserError(f"--lr {learning_rate:g}: allowed are rates between 0 and 1.")
    size = measure_text(str(text), text_column, found.folder, place)
    planned = schedule(size.tokens, context_of(found.folder), steps)
    short = short_name(found.name)
    values = study_values(
        name or f"adapt-{short}", (short, source), found.folder, str(text), text_column, size, planned, chosen,
        learning_rate=learning_rate, replicates=replicates,
    )  # fmt: skip
    listed = _listed(tasks)
    if not listed and (space is not None or seeds is not None):
        raise UserError("--space and --seeds are of fine-tuning: give a --task too.")
    if space is not None and seeds is not None:
        raise UserError("--seeds: the search space has its own; leave one of them out.")
    grids, data = _tasks(listed, place)
    place = replace(place, task_dirs=(*place.task_dirs, *(each.keep(place.store) for each in data)))
    if grids:
        made = grid_for(grids, [GridModel.of(found.folder)], seeds=seeds or SEEDS) if space is None else space
        values |= {
            "space": dict(made) if isinstance(made, Mapping) else str(made),
            "tasks": [each.name for each in grids],
        }
    file = read_file(values, where="options")
    assert isinstance(file, StudyFile)
    options: dict[str, Any] = {
        "--text": str(text),
        "--task": listed,
        "--objective": objective,
        "--steps": steps,
        "--lr": learning_rate,
    }
    options |= {
        "--replicates": replicates if replicates > 1 else None,
        "--text-column": text_column if text_column != "text" else None,
    }
    options |= {"--space": None if isinstance(space, Mapping) else space, "--seeds": seeds, "--name": name}
    words = [str(model), *option_words(options)]
    command = command_of("adapt", *(shlex.quote(word) for word in words), **folders)
    study = TrainedStudy(file, place, source=file.name, command=command)
    return Adaptation(study, _facts(file, size, planned, chosen), data)


def _listed(tasks: str | Path | Sequence[str | Path]) -> list[str]:
    return [str(tasks)] if isinstance(tasks, str | Path) else list(map(str, tasks))


def _tasks(listed: Sequence[str], place: Place) -> tuple[list[GridTask], tuple[FileTask, ...]]:
    """Return the tasks' training rows, and the tasks that were made from files."""
    made: dict[str, FileTask] = {
        each: read_task(each, Wishes()) for each in listed if Path(each).suffix and Path(each).is_file()
    }

    def one(each: str) -> GridTask:
        if each in made:
            return GridTask(made[each].name, made[each].tables["train"])
        return GridTask(
            each, load_task(get_task(each, place.task_dirs), store=place.store, data_root=place.data_root).train
        )

    return for_each(listed, one), tuple(made.values())


def _facts(file: StudyFile, size: TextSize, planned: Schedule, objective: str) -> dict[str, str]:
    recipe, corpus = file.recipe, file.corpus
    assert corpus is not None
    unit = "paragraphs" if size.by_paragraph else "documents"
    held = "its own validation files" if size.own_validation else f"{corpus.validation_fraction:.1%} of them"
    passes = f"{planned.steps:,} steps of {planned.batch} x {planned.block_length} tokens, {planned.epochs:.1f} passes over the text"
    runs = "one pretraining run" if file.replicates == 1 else f"{file.replicates} pretraining runs"
    return {
        "text": f"{size.documents:,} {unit}, about {size.tokens:,} tokens; held out: {held}",
        "objective": parse_objective(objective, where="--objective").words,
        "training": f"{passes}; {runs}",
        "learning rate": f"{recipe.peak_learning_rate:g} at its peak",
        "untouched control": str(file.baseline),
        "trained": ", ".join(name for name in file.models if name != file.baseline),
    }

"""The rows and tokens that each step of a study's pretraining sees, which the recipe's seed decides."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from mlmclm.errors import UserError
from mlmclm.plans.names import ModelName
from mlmclm.plans.segments import revision_steps
from mlmclm.plans.stages import history
from mlmclm.pretraining.seen import FORMATS, TrainingBatch, export, export_data_set, training_batches
from mlmclm.studies.prepare import PreparedStudy, prepare_study
from mlmclm.studies.study import Study


@dataclass(frozen=True)
class SeenData:
    """Batches of a study, in order.

    Attributes:
        steps: counted from 0.
        longest: the model whose steps these are, or the longest of the study.
    """

    prepared: PreparedStudy
    steps: range
    longest: ModelName
    batches: Iterable[TrainingBatch]

    def export(self, to: Path) -> tuple[int, int]:
        """Write a file (.parquet or .jsonl), or a folder that `datasets` reads; return the numbers of rows and tokens."""
        counts, recipe = Counter[str](), self.prepared.study.recipe
        if to.suffix:
            export(_counted(self.batches, counts), to)
        else:
            revisions = revision_steps(history(self.longest, recipe).segments, recipe)
            bounds = revisions or range(0, self.steps.stop, recipe.checkpoint_every)
            export_data_set(_counted(self.batches, counts), self.steps, bounds, to)
        return counts["rows"], counts["tokens"]


def seen_data(
    trained: Study,
    *,
    steps: str | None = None,
    model: str | None = None,
    labels: bool = False,
    to: Path | None = None,
) -> SeenData:
    """Return the batches of a study's steps; its corpus is prepared first.

    Args:
        steps: `a:b`, from step a up to but not including b; None for all steps, which needs a folder as `to`.
        model: return this model's inputs, masked; None for the unmasked tokens of the blocks.
        labels: whether to return the labels too.
        to: the file or folder to export to, if any; a folder gets unmasked tokens.

    Raises:
        UserError: the arguments don't go together, or a step is beyond the model's last.
    """
    study = trained.trained_file
    model = study.model_of(model, where=trained.source) if model is not None else None
    if labels and model is None:
        raise UserError("--labels: labels belong to an objective; name a model of the study with --model.")
    as_folder = to is not None and not to.suffix
    if to is not None and not as_folder and to.suffix not in FORMATS:
        raise UserError(
            f"--export {to}: the end of the name sets the format; allowed: {', '.join(FORMATS)}, or none for a folder."
        )
    if steps is None and not as_folder:
        raise UserError("--steps is missing: give a:b, such as 0:10.")
    if as_folder and labels:
        raise UserError("--labels: a folder gets the tokens before anything is hidden; export to a file to get labels.")
    if model is None and study.recipe.has_phases:
        raise UserError("--model: the study's recipe has phases, in which models may differ; name one of them.")
    longest = max((name for name in study.parsed if model in (None, str(name))), key=lambda name: name.steps)
    wanted = _range(steps, longest.steps, model)
    prepared = prepare_study(study, trained.place)
    corpus, name = prepared.corpus, next((name for name in study.parsed if str(name) == model), None)
    stream = training_batches(
        corpus.train, study.recipe, wanted, model=name, tokenizer=corpus.tokenizer, masked=not as_folder
    )
    batches = stream if labels else (replace(batch, labels=None) for batch in stream)
    return SeenData(prepared, wanted, longest, batches)


def _range(text: str | None, last: int, model: str | None) -> range:
    """Parse `--steps`; None means all steps.

    Args:
        last: steps of the model, or of the longest one of the study.

    Raises:
        UserError: the range is malformed, or goes beyond the model's last step.
    """
    if text is None and not last:
        which = "--model: an untrained model" if model is not None else "a study of untrained models only"
        raise UserError(f"{which} sees no data; name a model that is trained.")
    text = f"0:{last}" if text is None else text
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise UserError(f"--steps {text!r}: expected a:b with a < b, such as 0:10.")
    if int(match[2]) > last:
        whose = f"model {model!r} takes" if model is not None else "the longest model of the study takes"
        raise UserError(f"--steps {text!r}: {whose} {last:,} steps; allowed: within 0:{last}.")
    return range(int(match[1]), int(match[2]))


def _counted(batches: Iterable[TrainingBatch], counts: Counter[str]) -> Iterator[TrainingBatch]:
    """Yield the batches, and count their rows and tokens."""
    for batch in batches:
        counts.update(rows=len(batch.blocks), tokens=int(batch.lengths.sum()))
        yield batch

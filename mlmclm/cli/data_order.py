"""`mlmclm data order`: show which rows and tokens each step saw."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from mlmclm.cli import options
from mlmclm.cli.output import print_json, show
from mlmclm.errors import UserError
from mlmclm.progress import spoken

if TYPE_CHECKING:
    from mlmclm.pretraining.seen import Seen
    from mlmclm.studies.prepared_study import PreparedStudy

_SHOWN_TOKENS = 32


def order(
    file: options.Study,
    steps: Annotated[
        str | None, Option(help="a:b, from step a up to but not including b, counted from 0; all with --export FOLDER.")
    ] = None,
    model: Annotated[str | None, Option(help="Show the tokens as this model was given them, masked.")] = None,
    labels: Annotated[bool, Option("--labels", help="Show the labels too; needs --model.")] = False,
    to: Annotated[
        Path | None, Option("--export", help="Write a .parquet or .jsonl file, or a folder, instead of printing.")
    ] = None,
    store: options.Store = options.DEFAULT_STORE,
    data: options.Data = None,
    as_json: options.Json = False,
) -> None:
    """Prints or exports exactly which rows and tokens each step saw: step, row of the global batch, block of the corpus, input_ids.

    Nothing is recorded while training: order and masks are functions of the recipe's seed and the step, so this works
    before and after training. Without `--model` the tokens are those of the blocks, the same for all models of the study. Step s is the one
    whose loss the metrics give as step s + 1. `--json` prints one object a row, and with `--export` one about the file.

    `--export` with a folder's name makes a data set that `datasets.load_dataset(FOLDER)` reads: rows of `input_ids`, before anything is
    hidden, and `step`, in a Parquet file for each interval between revisions (`recipe.revisions_every`), else `checkpoint_every`.

    Example: mlmclm data order examples/quickstart.yaml --steps 0:100 --export order.parquet
    """
    from mlmclm.plans.legs import revision_steps
    from mlmclm.plans.stages import history
    from mlmclm.pretraining.seen import FORMATS, export, export_data_set, seen
    from mlmclm.studies.prepare import prepare
    from mlmclm.studies.study_file import load_study

    study = load_study(file)
    model = study.model_of(model, where=str(file)) if model is not None else None
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
    prepared = prepare(study, options.place(store, data))
    corpus, name = prepared.corpus, next((name for name in study.parsed if str(name) == model), None)
    given = seen(corpus.train, study.recipe, wanted, model=name, tokenizer=corpus.tokenizer, masked=not as_folder)
    batches = given if labels else (replace(batch, labels=None) for batch in given)
    spoken()  # from here on there is output, so the line about slow start-up is no longer due
    if to is not None:
        counts: Counter[str] = Counter()
        if as_folder:
            revisions = revision_steps(history(longest, study.recipe).legs, study.recipe)
            bounds = revisions or range(0, wanted.stop, study.recipe.checkpoint_every)
            export_data_set(_counted(batches, counts), wanted, bounds, to)
        else:
            export(_counted(batches, counts), to)
        rows, tokens = counts["rows"], counts["tokens"]
        if as_json:
            print_json({"path": str(to), "steps": [wanted.start, wanted.stop], "rows": rows, "tokens": tokens})
        else:
            show(f"{to}: {rows:,} rows, {tokens:,} tokens")
    elif as_json:
        for batch in batches:
            for record in batch.records():
                typer.echo(json.dumps(record))
    else:
        _print(prepared, batches)


def _range(text: str | None, last: int, model: str | None) -> range:
    """Parse `--steps`; None stands for all.

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


def _counted(batches: Iterator[Seen], counts: Counter[str]) -> Iterator[Seen]:
    """Yield the batches, and count their rows and tokens."""
    for batch in batches:
        counts.update(rows=len(batch.blocks), tokens=int(batch.lengths.sum()))
        yield batch


def _print(prepared: PreparedStudy, batches: Iterator[Seen]) -> None:
    """Print one line per row: its step, row and block, its first token ids, and their text."""
    from mlmclm.corpora.tokenizer import load_text_tokenizer

    tokenizer = load_text_tokenizer(prepared.corpus.tokenizer)
    for batch in batches:
        for row, (block, length) in enumerate(zip(batch.blocks.tolist(), batch.lengths.tolist(), strict=True)):
            input_ids = batch.input_ids[row, :length].tolist()
            text = " ".join(tokenizer.decode(input_ids[:_SHOWN_TOKENS], skip_special_tokens=False).split())
            cut = " ..." if len(input_ids) > _SHOWN_TOKENS else ""
            ids = " ".join(map(str, input_ids[:_SHOWN_TOKENS]))
            typer.echo(f"step {batch.step} row {row} block {block}: {ids}{cut} | {text}{cut}")

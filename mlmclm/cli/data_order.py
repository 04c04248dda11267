"""`mlmclm data order`: show which rows and tokens each step saw."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from mlmclm.cli import options
from mlmclm.cli.output import print_json, show
from mlmclm.progress import spoken

if TYPE_CHECKING:
    from mlmclm.pretraining.seen import TrainingBatch
    from mlmclm.studies.prepare import PreparedStudy

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
    from mlmclm.studies.api import trained_study
    from mlmclm.studies.seen_data import seen_data

    study = trained_study(file, store=store, data=data)
    seen = seen_data(study, steps=steps, model=model, labels=labels, to=to)
    spoken()  # output follows, so the line about slow start-up is not needed any more
    if to is not None:
        rows, tokens = seen.export(to)
        if as_json:
            print_json({"path": str(to), "steps": [seen.steps.start, seen.steps.stop], "rows": rows, "tokens": tokens})
        else:
            show(f"{to}: {rows:,} rows, {tokens:,} tokens")
    elif as_json:
        for batch in seen.batches:
            for record in batch.records():
                typer.echo(json.dumps(record))
    else:
        _print(seen.prepared, seen.batches)


def _print(prepared: PreparedStudy, batches: Iterable[TrainingBatch]) -> None:
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

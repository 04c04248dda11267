"""`mlmclm data`: prepare and describe the corpus and the tasks of a study, and show which rows and tokens each step saw."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column
from typer import Option

from mlmclm.arguments import SECONDS_FOR_NODES
from mlmclm.cli import options
from mlmclm.cli.default_command import DefaultCommand
from mlmclm.cli.output import print_json, show, show_table
from mlmclm.progress import spoken
from mlmclm.storage.files import read_json

if TYPE_CHECKING:
    from mlmclm.pretraining.seen import TrainingBatch
    from mlmclm.studies.prepare import PreparedStudy

verbs = typer.Typer(
    cls=DefaultCommand,
    help="The corpus and the tasks of a study: `data FILE` prepares and describes them.",
    rich_markup_mode="markdown",
)


@verbs.command()
def prepare(
    file: options.Study,
    store: options.Store = options.DEFAULT_STORE,
    data: options.Data = None,
    task_dir: options.TaskDir = None,
    ray: options.Ray = None,
    wait_for_nodes: options.WaitForNodes = SECONDS_FOR_NODES,
    as_json: options.Json = False,
) -> None:
    """Prepares a study's corpus, tokenizer and tasks, and says what is in them. A study without a space has no tasks.

    Everything is checked here before anything is trained: missing columns, empty splits, labels out of range, sequences
    that are too long. The corpus is tokenised by this machine's processors, or by Ray Data where there is a Ray cluster
    (`--ray`, a Ray job, RAY_ADDRESS) or the study says `corpus.workers: ray`. An interrupted run resumes after the last
    finished shard, and lost shards are made again.

    Example: mlmclm data examples/quickstart.yaml
    """
    from mlmclm.corpora.prepared_corpus import describe_corpus
    from mlmclm.studies.api import study as open_study

    study = open_study(file, store=store, data=data, task_dirs=task_dir)
    prepared, tasks = study.prepare(ray=ray, wait_for_nodes=wait_for_nodes)
    corpora = {name: describe_corpus(source) for name, source in prepared.corpus.sources.items()}
    described = {
        name: {
            "family": task.family,
            "rows": read_json(task.folder / "meta.json")["rows"],
            "labels": list(task.label_names),
            "fingerprint": task.task_data,
        }
        for name, task in tasks.items()
    }
    if as_json:
        print_json({**({"corpus": corpora[""]} if "" in corpora else {"corpora": corpora}), "tasks": described})
        return
    for name, corpus_facts in corpora.items():
        _show_corpus(name, corpus_facts)
    if study.file.space is None:
        show("no tasks are prepared: the study names no search space")
        return
    rows = [
        (
            name,
            task["family"],
            ", ".join(f"{part} {count:,}" for part, count in task["rows"].items()),
            ", ".join(task["labels"]),
        )
        for name, task in described.items()
    ]
    show_table(("task", "family", Column("rows"), Column("labels")), rows, drop=("family",))


def _show_corpus(name: str, described: dict[str, Any]) -> None:
    """Print what `describe_corpus` says of a corpus, and the beginnings of its example blocks."""
    facts: list[tuple[str, str]] = []
    for key, value in described.items():
        if isinstance(value, dict):
            facts.append((key, ", ".join(f"{count:,} {part}" for part, count in value.items())))
        elif value is not None and not isinstance(value, list):
            facts.append((key.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value)))
    show_table((f"corpus {name}".rstrip(), Column(described["source"])), facts)
    if described.get("examples"):
        show("How its first packed sequences begin:")
    for text in described.get("examples", []):
        show(" ".join(str(text).split())[:160], style="dim")


_SHOWN_TOKENS = 32


@verbs.command()
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
    from mlmclm.studies.api import study as open_study
    from mlmclm.studies.prepare import seen_data

    study = open_study(file, store=store, data=data)
    seen = seen_data(
        study.trained_file, study.place, source=study.source, steps=steps, model=model, labels=labels, to=to
    )
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

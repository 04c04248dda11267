"""`mlmclm tasks`: list the tasks, or show one as a model would be given it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column
from typer import Argument, Option

from mlmclm.cli import options
from mlmclm.cli.output import print_json, show, show_table
from mlmclm.errors import UserError
from mlmclm.progress import say

_SHOWN = 400


verbs = typer.Typer(help="All tasks; `tasks check NAME` reads one and shows it.", rich_markup_mode="markdown")


@verbs.callback(invoke_without_command=True)
def tasks(context: typer.Context, task_dir: options.TaskDir = None, as_json: options.Json = False) -> None:
    """Lists the tasks: the packaged ones, those of installed packages, and those of your own folders.

    Example: mlmclm tasks --task-dir my_tasks
    """
    from mlmclm.tasks.declared_tasks import broken_files, find_tasks

    if context.invoked_subcommand is not None:
        # An option before the subcommand belongs to the group and would be ignored silently.
        for option, name in (("task_dir", "--task-dir"), ("as_json", "--json")):
            source = context.get_parameter_source(option)
            if source is not None and source.name == "COMMANDLINE":
                raise UserError(f"tasks: give {name} after `{context.invoked_subcommand}`.")
        return
    declared = [
        {
            "name": task.name,
            "family": task.family,
            "metric": task.metric,
            "source": "/".join(part for part in (task.source, task.config_name, task.data_dir) if part),
            "revision": task.revision,
            "licence": task.licence,
            "title": task.title,
        }
        for task in find_tasks(task_dir or ()).values()
    ]
    broken = broken_files(task_dir or ())
    if as_json:
        print_json({"tasks": declared, "broken": [{"file": str(bad.file), "reason": bad.reason} for bad in broken]})
        return
    for bad in broken:
        say(f"left out: {bad.reason}")
    rows = [[str(task[key]) for key in ("name", "family", "metric", "source", "licence")] for task in declared]
    columns = ("task", "family", "metric", Column("source", overflow="fold"), Column("licence"))
    show_table(columns, rows, drop=("licence", "source"))


@verbs.command()
def check(
    name: Annotated[str, Argument(help="The task, such as sst2.")],
    tokenizer: Annotated[Path | None, Option(help="Folder of a Hugging Face tokenizer.")] = None,
    model: Annotated[Path | None, Option(help="Folder of a Hugging Face model, whose tokenizer is used.")] = None,
    data: options.Data = None,
    task_dir: options.TaskDir = None,
    store: options.Store = options.DEFAULT_STORE,
    max_length: Annotated[
        int | None, Option(min=8, help="Tokens of the longest sequence; 512, or fewer if the model's are.")
    ] = None,
    examples: Annotated[int, Option(min=0, help="How many training examples to show.")] = 3,
    as_json: options.Json = False,
) -> None:
    """Reads and checks a task's data, and shows it as a model would be given it.

    Shows a few training examples as decoded tokens, how often each label occurs, and, over up to 10,000 sequences of each split, quantiles
    of their lengths in tokens and the share that `--max-length` cuts (or, in question answering, divides into windows); for pairs also the
    share that loses all of one text. For answers and tagged words, it also counts how many can be recovered from the correct tokens: no
    model can get the others right. The store is used for the generated pydocs tasks, and to record the fingerprint of data that follow a
    branch of the Hub.

    Example: mlmclm tasks check sst2 --model store/studies/quickstart/models/1m-mlm40-1k --data ~/datasets
    """
    from mlmclm.tasks.look import check_task

    preview = check_task(
        name,
        tokenizer=tokenizer,
        model=model,
        max_length=max_length,
        examples=examples,
        store=store,
        data=data,
        task_dirs=task_dir,
    )
    task = preview.task
    if as_json:
        print_json({**asdict(preview), "task": task.name})
        return
    show(f"{task.name}: {task.title} ({task.family}, {task.metric})")
    show(", ".join(f"{split} {rows:,}" for split, rows in preview.rows.items()))
    for example in preview.examples:
        show()
        for part, value in example.items():
            words = " ".join(f"{token}/{tag}" for token, tag in value) if part == "tags" else str(value)
            shown = words if len(words) <= _SHOWN else f"{words[:_SHOWN]} ..."
            show(f"{part}: {shown}")
    show()
    for split, counts in preview.labels.items():
        shares = (f"{label} {count:{',g' if isinstance(count, float) else ','}}" for label, count in counts.items())
        show(f"{split}: {', '.join(shares)}")
    for split, gold in preview.regained.items():
        show(f"{split}: the correct tokens give back {gold['regained']:,} of {gold['of']:,} {task.kind.gold_words}")
    if preview.lengths:
        first = next(iter(preview.lengths.values()))
        cut = task.kind.overlong_words
        rows = []
        for split, lengths in preview.lengths.items():
            quantiles = (f"{tokens:,}" for tokens in lengths.quantiles.values())
            rows.append([split, f"{lengths.sequences:,}", *quantiles, f"{lengths.truncated:.1%}"])
        show_table(("tokens", "of", *first.quantiles, f"{cut} at {preview.max_length}"), rows)
        for split, lengths in preview.lengths.items():
            if lengths.lost is not None:
                lost = ", ".join(f"{share:.1%} with pair_truncation {cut}" for cut, share in lengths.lost.items())
                show(f"{split}: pairs that lose all of one text: {lost}")

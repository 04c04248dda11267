"""`mlmclm data`: prepare and describe the corpus and the tasks of a study."""

from __future__ import annotations

from typing import Any

import typer
from rich.table import Column

from mlmclm.arguments import SECONDS_FOR_NODES
from mlmclm.cli import options
from mlmclm.cli.data_order import order
from mlmclm.cli.default_command import DefaultCommand
from mlmclm.cli.output import print_json, show, show_table
from mlmclm.storage.files import read_json

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
    from mlmclm.studies.api import trained_study

    study = trained_study(file, store=store, data=data, task_dirs=task_dir)
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


verbs.command()(order)


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

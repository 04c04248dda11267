"""`mlmclm store`: what the store has, from what it was made, whether it is intact, and the disk that it takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column
from typer import Argument, Option

from mlmclm.cli import options
from mlmclm.cli.bundle import show_recomputed
from mlmclm.cli.output import flat, print_json, show, show_table
from mlmclm.errors import UserError
from mlmclm.numbers import plural
from mlmclm.progress import Bar

if TYPE_CHECKING:
    from mlmclm.studies.artifacts import Contents, Verified
    from mlmclm.studies.recompute import Recomputed

verbs = typer.Typer(
    help="The store: its `studies`, `why` something is there, `verify` everything, its `size`, and `prune` what is not used.",
    rich_markup_mode="markdown",
)


@verbs.command()
def studies(store: options.Store = options.DEFAULT_STORE, as_json: options.Json = False) -> None:
    """Lists the studies and sweeps of a store, whose names `report`, `compare` and `sweep status` take.

    Example: mlmclm store studies
    """
    from mlmclm.studies.study_record import known_studies

    summaries = known_studies(store.resolve())
    if as_json:
        print_json([asdict(study) for study in summaries])
    elif not summaries:
        show(f"{store.resolve()}: no study or sweep was run there yet")
    else:
        rows = [
            (
                study.name,
                study.kind,
                (study.run or "–").replace("T", " ").removesuffix("+00:00"),
                f"{study.models:,}",
                f"{study.tasks:,}",
                f"{study.done:,} of {study.cells:,}",
            )
            for study in summaries
        ]
        show_table(("name", "kind", "last run (UTC)", "models", "tasks", "cells done"), rows, drop=("kind", "tasks"))


@verbs.command()
def why(
    artifact: Annotated[
        str, Argument(metavar="KEY|PATH", help="A key or its first digits, or a file or folder in the store.")
    ],
    store: options.Store = options.DEFAULT_STORE,
    as_json: options.Json = False,
) -> None:
    """Says what a state, model, corpus, result or any other artifact was made from, what made it, and what was made from it.

    A change of a setting under "in the key" gives another key, so the artifact is made anew. Changes of the other settings do not.

    Examples:

    mlmclm store why 22f78e384cd6

    mlmclm store why mlmclm-store/studies/quickstart/models/1m-mlm40-1k
    """
    from mlmclm.studies.artifacts import Contents, artifact_size

    contents = Contents(store.resolve())
    target = contents.find(artifact)
    origin, damage = contents.origin(target), target.damage(read=False)
    needs, users = contents.needs(target), contents.users[target]
    studies = [study for study, artifacts in contents.studies.items() if target in artifacts]
    if as_json:
        lists = {"made_of": needs, "used_by": users}
        related = {name: [{"kind": item.kind, "key": item.key} for item in linked] for name, linked in lists.items()}
        facts = {"in_key": dict(origin.facts), "not_in_key": dict(origin.free), "made_by": dict(origin.made_by)}
        print_json(
            {
                "kind": target.kind,
                "key": target.key,
                "bytes": artifact_size(target),
                "damage": damage,
                **facts,
                **related,
                "studies": studies,
            }
        )
        return
    show(f"{target.kind}: {target.key}, {artifact_size(target) / 2**20:,.1f} MiB, {damage or 'there'}")
    _facts("in the key: a change makes it anew", origin.facts)
    _facts("not in the key", origin.free)
    _facts("made by", origin.made_by)
    for title, linked in (("made of", needs), ("used by", users)):
        kinds = dict.fromkeys(item.kind for item in linked)
        for kind in kinds:
            keys = [item.key[:16] for item in linked if item.kind == kind]
            more = f" and {len(keys) - 5:,} more" if len(keys) > 5 else ""
            show(f"{title} {kind}: {', '.join(keys[:5])}{more}")
    show(f"studies that use it: {', '.join(studies) or 'none'}")


def _facts(title: str, facts: Mapping[str, Any]) -> None:
    if facts:
        show_table((title, Column("value")), list(flat(facts)))


@verbs.command()
def verify(
    study: Annotated[
        str | None,
        Argument(
            metavar="[NAME|FILE]",
            help="Only this study or sweep, by its name or its file, and what all studies share; by default all of the store.",
        ),
    ] = None,
    store: options.Store = options.DEFAULT_STORE,
    recompute: Annotated[
        int, Option(min=0, metavar="N", help="Also compute N randomly chosen cells again and compare their results.")
    ] = 0,
    seed: Annotated[int, Option(help="Seed of the choice of cells.")] = 0,
    data: options.Data = None,
    task_dir: options.TaskDir = None,
    as_json: options.Json = False,
) -> None:
    """Reads everything in the store that has a checksum, names what is damaged, and says what makes it again.

    Nothing is changed: commands set damaged files aside when they need them. The exit code is 1 if something is damaged.

    Cells that are computed again run in a temporary folder. Where backend, device and software are those of the result, it must be equal
    to the last bit, with every test example; elsewhere a difference is reported and is no damage.

    Examples:

    mlmclm store verify

    mlmclm store verify quickstart --recompute 3
    """
    from mlmclm.storage.place import open_place
    from mlmclm.studies.artifacts import pieces_of
    from mlmclm.studies.artifacts import verify as verify_all
    from mlmclm.studies.recompute import recompute as compute_again
    from mlmclm.studies.study_record import name_of
    from mlmclm.sweeps.results_store import StoredResult

    place = open_place(store=store, data=data, task_dirs=task_dir)
    contents, name = _contents(place.store), None if study is None else name_of(study)
    verified = verify_all(pieces_of(contents, name))
    artifacts = contents.all if name is None else contents.of_study(name)
    cells = {artifact.key for artifact in artifacts if type(artifact) is StoredResult}
    recomputed = compute_again(recompute, seed, place, study, cells) if recompute else []
    if as_json:
        print_json({"kinds": [asdict(row) for row in verified], "recomputed": [asdict(row) for row in recomputed]})
    else:
        _show(verified, recomputed)
    if any(row.damaged for row in verified) or any(row.status == "differs" for row in recomputed):
        raise typer.Exit(1)


def _show(verified: Sequence[Verified], recomputed: Sequence[Recomputed]) -> None:
    from mlmclm.studies.artifacts import UNCOVERED

    show_table(
        ("kind", "files", "MiB", "damaged"),
        [
            (row.kind, f"{row.files:,}", _mib(row.bytes), f"{len(row.damaged):,}")
            for row in verified
        ],
    )  # fmt: skip
    for row in verified:
        for damage in row.damaged:
            show(f"{damage.path}: {damage.reason}. To make it again: {damage.again}.")
    if recomputed:
        show_recomputed(recomputed)
    files, damaged = sum(row.files for row in verified), sum(len(row.damaged) for row in verified)
    show(f"{plural(files, 'file')}: {f'{damaged:,} damaged' if damaged else 'all are intact'}")
    show(f"not covered, as they have no checksum: {', '.join(UNCOVERED)}", style="dim")


@verbs.command()
def size(store: options.Store = options.DEFAULT_STORE, as_json: options.Json = False) -> None:
    """Says how much disk each study takes, by kind of file: files that only it uses, and files that it shares with other studies.

    A file with several names, such as a model that is linked into its study's folder, is counted once.

    Example: mlmclm store size
    """
    from mlmclm.studies.artifacts import disk_by_study

    usage = disk_by_study(_contents(store.resolve()))
    if as_json:
        print_json([asdict(row) for row in usage])
        return
    rows = [(row.study or "(no study)", row.kind, _mib(row.own), _mib(row.shared)) for row in usage]
    show_table(("study", "kind", "own MiB", "shared MiB"), rows)


@verbs.command()
def prune(
    study: Annotated[
        str | None,
        Argument(metavar="[NAME]", help="The study or sweep to delete; by default what no study uses any more."),
    ] = None,
    store: options.Store = options.DEFAULT_STORE,
    results: Annotated[
        bool,
        Option(
            "--results",
            help="Also delete what took the longest to make: results of cells and evaluations, kept texts, and without a name "
            "the states that no study uses.",
        ),
    ] = False,
    yes: Annotated[bool, Option("--yes", help="Delete; otherwise only say what would be deleted.")] = False,
    as_json: options.Json = False,
) -> None:
    """Deletes artifacts (corpora, states, models, tokenised tasks) that no study uses, or those of one study alone, with its folder.

    Artifacts that another study uses stay, and so do MLflow's runs and the files of a store at an address (s3://...). Without --yes nothing
    is deleted. It is refused while a process works on the store, or if it isn't known which artifacts another study uses.

    Examples:

    mlmclm store prune

    mlmclm store prune quickstart --yes
    """
    from mlmclm.studies.artifacts import artifact_size, only_of, prune_all

    contents = _contents(store.resolve())
    unused = only_of(contents, study, results=results)
    sizes = {artifact: artifact_size(artifact) for artifact in unused}
    if yes:
        with Bar("deleting", len(unused), unit="artifacts") as bar:
            for done, artifact in enumerate(prune_all(contents, unused, study)):
                bar.update(done, note=artifact.kind)
    if as_json:
        artifacts = [{"kind": artifact.kind, "key": artifact.key, "bytes": sizes[artifact]} for artifact in unused]
        print_json({"deleted": yes, "artifacts": artifacts})
        return
    sizes_by_kind: dict[str, list[int]] = defaultdict(list)
    for artifact in unused:
        sizes_by_kind[artifact.kind].append(sizes[artifact])
    rows = [(kind, f"{len(kind_sizes):,}", _mib(sum(kind_sizes))) for kind, kind_sizes in sizes_by_kind.items()]
    show_table(("kind", "number", "MiB"), rows)
    if unused or study is not None:
        show("These are deleted." if yes else "Nothing is deleted. Give --yes to delete these.")
    else:
        show("There is nothing to delete.")


def _contents(store: Path) -> Contents:
    from mlmclm.studies.artifacts import Contents

    if not store.is_dir():
        raise UserError(f"--store {store}: no such folder.")
    return Contents(store)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f}"

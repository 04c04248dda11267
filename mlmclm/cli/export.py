"""`mlmclm export`: export any state in a store as a Hugging Face folder, and upload it to the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlmclm.cli import options


def register(app: typer.Typer) -> None:
    """Register the command."""
    app.command("export")(export)


def export(
    source: Annotated[Path, typer.Argument(help="A study file (YAML), or a store's folder.")],
    model: Annotated[str, typer.Argument(help="A model's name, such as 2m-clm-150-mlm40-600.")],
    to: Annotated[Path, typer.Option("--to", help="Folder to write, which must not be there yet.")],
    step: Annotated[
        int | None, typer.Option("--step", min=1, help="Optimiser steps; by default the furthest there is.")
    ] = None,
    push_to_hub: Annotated[
        str | None,
        typer.Option(
            "--push-to-hub",
            metavar="REPO",
            help="Also upload the folder to this repository of the Hugging Face Hub, made private where it is new.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write the folder, say what would be uploaded, and upload nothing.")
    ] = False,
    store: options.Store = options.DEFAULT_STORE,
    data: options.Data = None,
    as_json: options.Json = False,
) -> None:
    """Writes a model as a Hugging Face folder: an encoder and, after a causal step, a decoder.

    Any state that was left behind can be exported, and the latest checkpoint of a stage that isn't finished.

    Example: mlmclm export examples/quickstart.yaml 1m-clm-1k --step 500 --to exported
    """
    from mlmclm.cli.output import print_json, show
    from mlmclm.errors import UserError
    from mlmclm.plans.names import parse
    from mlmclm.progress import say
    from mlmclm.study.exports import export_state, find_state, sizes_in
    from mlmclm.study.prepare import find_prepared
    from mlmclm.study.study_file import load_study

    if dry_run and push_to_hub is None:
        raise UserError("--dry-run says what --push-to-hub would upload; name a repository with it.")
    if push_to_hub is not None:
        from mlmclm.models.hub import check_access, check_repository

        # Checked first, so that a wrong name or missing access fails before the folder is written.
        check_repository(push_to_hub)
        if not dry_run:
            check_access()
    place = options.place(source if source.is_dir() else store, data)
    study = None if source.is_dir() else load_study(source)
    name = parse(model, sizes_in(place.store) if study is None else study.sizes)
    if not name.phases:
        raise UserError(f"model {model!r}: an untrained model has no state; `mlmclm pretrain` exports it.")
    fingerprint = initial = None
    if study is not None:
        prepared = find_prepared(study, place)
        if prepared is None:
            raise UserError(
                f"{place.store}: study {study.name!r} has nothing there yet; run `mlmclm pretrain {source}` first."
            )
        fingerprint = prepared.fingerprint
        initial = prepared.initial[name.size].key if name.size in prepared.initial else None
    found = find_state(place.store, name, step=step, fingerprint=fingerprint, initial=initial)
    if step is None and found.state.step < name.steps:
        say(f"{name} has come to step {found.state.step:,} of {name.steps:,}; that is exported.")
    export_state(found, place.store, to)
    uploaded = _push(to, push_to_hub, str(found.name), dry_run=dry_run) if push_to_hub is not None else None
    if not as_json:
        show(f"{found.name} (from {found.folder}): {to}")
        if uploaded is not None and uploaded["commit"] is not None:
            show(f"uploaded: {uploaded['commit']}")
    else:
        print_json({"model": str(found.name), "step": found.state.step, "folder": str(to), "hub": uploaded})


def _push(folder: Path, repository: str, name: str, *, dry_run: bool) -> dict[str, object]:
    from mlmclm.models.hub import files_to_upload, push
    from mlmclm.progress import say

    files = files_to_upload(folder)
    verb = "would upload" if dry_run else "uploading"
    say(f"{verb} to {repository} on the Hugging Face Hub (made private where it is new), as one commit:")
    for path, size in files.items():
        say(f"  {path} ({size:,} bytes)")
    say(f"  {len(files)} files, {sum(files.values()):,} bytes; a file of the same name there is replaced, others stay")
    address = None if dry_run else push(folder, repository, f"{name}, exported by mlmclm")
    return {"repository": repository, "files": files, "commit": address}

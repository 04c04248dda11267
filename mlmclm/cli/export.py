"""`mlmclm export`: export any state of a study as a Hugging Face folder, or a model's revisions as a repository."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from mlmclm.cli import options
from mlmclm.cli.output import print_json, show
from mlmclm.errors import UserError


def export(
    source: Annotated[
        str,
        Argument(metavar="NAME|FILE", help="The name of a study in the store, or its file (YAML)."),
    ],
    model: Annotated[str, Argument(help="A model's name, such as 2m-clm-150-mlm40-600.")],
    to: Annotated[Path, Option(help="Folder to write. It must not exist yet, except with --revisions.")],
    step: Annotated[int | None, Option(min=1, help="Optimiser steps; by default the model's last.")] = None,
    revisions: Annotated[
        bool,
        Option(
            "--revisions",
            help="Write every revision that the recipe's `revisions_every` kept, as a repository in the layout of the Hub's cache.",
        ),
    ] = False,
    repository: Annotated[
        str | None, Option(metavar="OWNER/NAME", help="With --revisions: the repository's name (mlmclm/MODEL).")
    ] = None,
    task: Annotated[
        str | None,
        Option(
            help="A retrieval task of the study or sweep: write the best fine-tuned encoder on it, for sentence-transformers."
        ),
    ] = None,
    push_to_hub: Annotated[
        str | None,
        Option(
            metavar="REPO",
            help="Also upload the folder, or each revision with its tag, to this repository of the Hugging Face Hub, created as "
            "private if it doesn't exist. After a causal step it gets the decoder, and REPO-encoder the encoder.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Write the folder, say what would be uploaded, and upload nothing.")
    ] = False,
    store: options.Store = options.DEFAULT_STORE,
    data: options.Data = None,
    task_dir: options.TaskDir = None,
    as_json: options.Json = False,
) -> None:
    """Writes a model as a Hugging Face folder: an encoder and, after a causal step, a decoder.

    By default, this is the end of its training. With --step, any of its states in the store can be exported, and the latest
    checkpoints of an unfinished stage.

    Example: mlmclm export quickstart 1m-clm-1k --step 500 --to exported

    With --revisions, transformers loads each of them without a network:
    from_pretrained("mlmclm/1m-clm-1k", revision="step500", cache_dir="exported"). With --push-to-hub too, the Hub gets the
    tags that it lacks.

    With --task, the model's best cell on a retrieval task is trained again: the best learning rate, and of its seeds the one
    with the best validation score. SentenceTransformer("exported") then gives its vectors.
    """
    from mlmclm.finetuning.cell import cell_key
    from mlmclm.studies import api
    from mlmclm.studies.exports import check_hub, export_model, export_revisions
    from mlmclm.sweeps.cells import cell_name

    if dry_run and push_to_hub is None:
        raise UserError("--dry-run says what --push-to-hub would upload; name a repository with it.")
    opened = api.open(store, data=data, task_dirs=task_dir).study(source)
    if task is not None:
        if revisions or step is not None or push_to_hub is not None or repository is not None:
            raise UserError(
                "--task writes a fine-tuned encoder; leave out --revisions, --repository, --step and --push-to-hub."
            )
        cell, scores = opened.export_best(model, task, to)
        if as_json:
            facts = {"model": cell.model, "task": task, "cell": cell_key(cell), "folder": str(to)}
            print_json({**facts, "scores": scores})
            return
        scores_text = ", ".join(f"{split} {100 * values[cell.declared.metric]:.2f}" for split, values in scores.items())
        show(f"{cell_name(cell)} ({cell.declared.metric} in points of 100: {scores_text}): {to}")
        return
    if revisions and step is not None:
        raise UserError("--revisions writes all steps to a folder; leave out --step.")
    if revisions and push_to_hub is not None and repository not in (None, push_to_hub):
        raise UserError(
            f"--repository {repository}: --push-to-hub {push_to_hub} names the repository already; leave one of them out."
        )
    if repository is not None and not revisions:
        raise UserError("--repository names the repository of --revisions; give that too.")
    check_hub(push_to_hub, dry_run=dry_run)
    file, place, named = opened.trained_file, opened.place, opened.source
    if revisions:
        model, exported, pushed = export_revisions(
            file, place, model, to, repository, push_to_hub, source=named, dry_run=dry_run
        )
        if as_json:
            print_json({"model": model, "folder": str(to), **asdict(exported), "hub": pushed})
            return
        for name in exported.repositories:
            show(f"{name} in {to}: main, {', '.join(exported.tags)}")
        written = len(exported.written)
        show(f"{written} written, {len(exported.tags) - written} already there")
        for name, tags in pushed.items():
            show(f"{'would be uploaded' if dry_run else 'uploaded'} to {name}: {', '.join(tags) or 'nothing new'}")
        return
    located, uploaded = export_model(file, place, model, to, step, push_to_hub, source=named, dry_run=dry_run)
    if as_json:
        print_json({"model": str(located.name), "step": located.state.step, "folder": str(to), "hub": uploaded})
        return
    show(f"{located.name} (from {located.folder}): {to}")
    for upload in uploaded:
        if upload["commit"] is not None:
            show(f"uploaded: {upload['commit']}")

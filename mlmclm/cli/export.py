"""`mlmclm export`: export any state in a store as a Hugging Face folder, or a model's revisions as a repository."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from mlmclm.cli import options
from mlmclm.cli.output import print_json, show
from mlmclm.cli.results_of import results_of
from mlmclm.errors import UserError
from mlmclm.models.hub_cache import CachedRepository, repositories_of
from mlmclm.progress import Bar, say

if TYPE_CHECKING:
    from mlmclm.studies.export_revisions import Exported
    from mlmclm.studies.place import Place


def export(
    source: Annotated[Path, Argument(help="A study file (YAML), or a store's folder.")],
    model: Annotated[str, Argument(help="A model's name, such as 2m-clm-150-mlm40-600.")],
    to: Annotated[Path, Option(help="Folder to write. It must not exist yet, except with --revisions.")],
    step: Annotated[int | None, Option(min=1, help="Optimiser steps; by default the furthest there is.")] = None,
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

    Any state in the store can be exported, and the latest checkpoint of an unfinished stage.

    Example: mlmclm export examples/quickstart.yaml 1m-clm-1k --step 500 --to exported

    With --revisions, transformers loads each of them without a network:
    from_pretrained("mlmclm/1m-clm-1k", revision="step500", cache_dir="exported"). With --push-to-hub too, the Hub gets the
    tags that it lacks.

    With --task, the model's best cell on a retrieval task is trained again: the best learning rate, and of its seeds the one
    with the best validation score. SentenceTransformer("exported") then gives its vectors.
    """

    from mlmclm.plans.legs import revision_steps
    from mlmclm.plans.names import parse
    from mlmclm.plans.stages import history
    from mlmclm.studies.export_revisions import export_revisions, say_missing
    from mlmclm.studies.exports import export_state, find_state, sizes_in
    from mlmclm.studies.facts import reported_scores, study_card
    from mlmclm.studies.opened import find_models
    from mlmclm.studies.prepare import find_prepared
    from mlmclm.studies.study_file import load_study

    if dry_run and push_to_hub is None:
        raise UserError("--dry-run says what --push-to-hub would upload; name a repository with it.")
    if task is not None:
        if revisions or step is not None or push_to_hub is not None or repository is not None:
            raise UserError(
                "--task writes a fine-tuned encoder; leave out --revisions, --repository, --step and --push-to-hub."
            )
        _fine_tuned(source, model, task, to, options.place(store, data, task_dir), as_json=as_json)
        return
    if revisions and step is not None:
        raise UserError("--revisions writes all steps to a folder; leave out --step.")
    if revisions and push_to_hub is not None and repository not in (None, push_to_hub):
        raise UserError(
            f"--repository {repository}: --push-to-hub {push_to_hub} names the repository already; leave one of them out."
        )
    if repository is not None and not revisions:
        raise UserError("--repository names the repository of --revisions; give that too.")
    if push_to_hub is not None:
        from mlmclm.models.hub import check_access, check_repository

        # Checked first, so that a wrong name or missing access fails before the folder is written.
        check_repository(push_to_hub)
        if not dry_run:
            check_access()
    place = options.place(source if source.is_dir() else store, data)
    study = None if source.is_dir() else load_study(source)
    if revisions and study is not None:
        model = study.model_of(model, where=str(source))
    name = parse(model, sizes_in(place.store) if study is None else study.sizes)
    if not name.phases:
        raise UserError(f"model {model!r}: an untrained model has no state; `mlmclm pretrain` exports it.")
    of = prepared = None
    if study is not None:
        prepared = find_prepared(study, place)
        if prepared is None:
            raise UserError(
                f"{place.store}: study {study.name!r} has nothing there yet; run `mlmclm pretrain {source}` first."
            )
        initial = prepared.initial[name.size].key if name.size in prepared.initial else None
        of = history(name, study.recipe, initial, prepared.plan.targets[0].sources), prepared.fingerprint
    if revisions:
        step = name.steps  # a model that is still trained has no `main` yet
    found = find_state(place.store, name, step=step, of=of)
    if push_to_hub is not None:
        last = found.name.last_objective
        for each in repositories_of(push_to_hub, decoder=last is not None and last.causal):
            check_repository(each)
    about: dict[str, Any] = {} if study is None else study_card(study, name)
    if revisions:
        steps = revision_steps(found.state.legs, found.recipe if study is None else study.recipe)
        made = export_revisions(found, place.store, to, push_to_hub or repository or f"mlmclm/{name}", steps, about)
        say_missing(made.missing, str(found.name), "STUDY.yaml" if study is None else source)
        pushed = _push_revisions(made, to, str(name), dry_run=dry_run) if push_to_hub is not None else {}
        if as_json:
            print_json({"model": str(name), "folder": str(to), **asdict(made), "hub": pushed})
            return
        for each in made.repositories:
            show(f"{each} in {to}: main, {', '.join(made.tags)}")
        show(f"{len(made.written)} written, {len(made.tags) - len(made.written)} already there")
        for each, tags in pushed.items():
            show(f"{'would be uploaded' if dry_run else 'uploaded'} to {each}: {', '.join(tags) or 'nothing new'}")
        return
    if step is None and found.state.step < name.steps:
        say(f"{name} is at step {found.state.step:,} of {name.steps:,}; this state is exported.")
    if prepared is not None:
        exported = find_models(prepared).get(str(found.name))
        # The model's own folder is in that of its last state; another step has no scores.
        if exported is not None and exported.folder.resolve().parent == found.folder.resolve():
            about["scores"] = reported_scores(place, place.study_folder(prepared.study), exported)
    export_state(found, place.store, to, about, push_to_hub)
    uploaded = _push(to, push_to_hub, str(found.name), dry_run=dry_run) if push_to_hub is not None else []
    if as_json:
        print_json({"model": str(found.name), "step": found.state.step, "folder": str(to), "hub": uploaded})
        return
    show(f"{found.name} (from {found.folder}): {to}")
    for upload in uploaded:
        if upload["commit"] is not None:
            show(f"uploaded: {upload['commit']}")


def _fine_tuned(source: Path, model: str, task: str, to: Path, place: Place, *, as_json: bool) -> None:
    from mlmclm.cli.one_cell import keep_start, make_ready, steps_bar
    from mlmclm.finetuning.cell import cell_key
    from mlmclm.finetuning.sentence_encoder import check_target, export_sentence_encoder
    from mlmclm.sweeps.cells import cell_name

    if source.is_dir():
        raise UserError(f"{source}: --task needs the file of the study or sweep, which says what is best.")
    found = results_of(str(source), place, None)
    place = found.place
    cell = found.best_cell(model, task)
    check_target(cell, to)
    if cell.start is not None:
        start = next(each for each in found.cells if cell_key(each) == cell.start.key)
        keep_start(start, place)
    make_ready(cell)
    with steps_bar(f"{cell_name(cell)}, trained again") as on_step:
        result = export_sentence_encoder(cell, to, store=place.store, data_root=place.data_root, on_step=on_step)
    kept = next(each["scores"] for each in found.results if each["key"] == cell_key(cell))
    if kept != result["scores"]:
        say(
            f"{cell_name(cell)}: trained again, it does not score exactly as before; another machine or version computed "
            f"the {found.verb}. Before: {kept}"
        )
    if as_json:
        made = {"model": cell.model, "task": task, "cell": cell_key(cell), "folder": str(to)}
        print_json({**made, "scores": result["scores"]})
        return
    scores = ", ".join(f"{split} {values[cell.declared.metric]:.4f}" for split, values in result["scores"].items())
    show(f"{cell_name(cell)} ({cell.declared.metric}: {scores}): {to}")


def _push_revisions(made: Exported, cache: Path, name: str, *, dry_run: bool) -> dict[str, list[str]]:
    """Upload the revisions in a cache; return the tags that were uploaded by repository (of a dry run, all)."""
    from mlmclm.models.hub import files_to_upload, push_revisions

    pushed = {}
    for repository in made.repositories:
        cached = CachedRepository(cache, repository)
        folders = {tag: folder for tag in made.tags if (folder := cached.snapshot(tag)) is not None}
        size = sum(sum(files_to_upload(folder).values()) for folder in folders.values())
        say(
            f"{'would upload' if dry_run else 'uploading'} to {repository} on the Hugging Face Hub (created as private if it doesn't exist): "
            f"{len(folders)} revisions, {size:,} bytes, but for those that are there"
        )
        if dry_run:
            pushed[repository] = list(folders)
            continue
        with Bar(f"uploading {repository}", len(folders), unit="revisions") as bar:
            pushed[repository] = push_revisions(
                folders, repository, f"{name}, exported by mlmclm", lambda tag, done: bar.update(done, note=tag)
            )
            bar.update(len(folders))
    return pushed


def _push(folder: Path, repository: str, name: str, *, dry_run: bool) -> list[dict[str, object]]:
    """Upload an exported folder, and its `decoder/` to a repository of its own; return what went where."""
    from mlmclm.models.hub import files_to_upload, push

    decoder = folder / "decoder"
    parts = [decoder, folder] if decoder.is_dir() else [folder]
    pushed: list[dict[str, object]] = []
    for each, part in zip(repositories_of(repository, decoder=len(parts) == 2), parts, strict=True):
        files = files_to_upload(part)
        verb = "would upload" if dry_run else "uploading"
        say(f"{verb} to {each} on the Hugging Face Hub (created as private if it doesn't exist), as one commit:")
        for path, size in files.items():
            say(f"  {path} ({size:,} bytes)")
        say(
            f"  {len(files)} files, {sum(files.values()):,} bytes; a file of the same name there is replaced, others stay"
        )
        address = None if dry_run else push(part, each, f"{name}, exported by mlmclm")
        pushed.append({"repository": each, "files": files, "commit": address})
    return pushed

"""Pretraining states in the store, and the metrics of their training.

    states/KEY/    state.safetensors or its parts, step.json (see `checkpoints`); for a named model also `model/` (Hugging Face)
                   state.json       how it was made, and the state that it was trained from
                   metrics.jsonl    one line per step since that state
                   checksums.json   size and SHA-256 of each of these files, written last

    revisions/KEY/    the same without moments and metrics, for steps at which no model ends (`recipe.revisions_every`)

A checkpoint of a running stage is a folder with the same files: `runs/KEY/ray_train/ATTEMPT/checkpoint_TIME/`. If
the store has an address, the latest one is also there: `runs/KEY/checkpoint_STEP/`.

This module does not need torch, so a finished study is recognised almost instantly.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlmclm.configuration import Role
from mlmclm.corpora.prepared_corpus import StoredCorpus
from mlmclm.errors import UserError
from mlmclm.plans.recipe import Recipe
from mlmclm.plans.stages import Stage
from mlmclm.pretraining.initial import StoredInitial
from mlmclm.pretraining.parts import part_paths
from mlmclm.storage.addresses import address_of, discard, fetch_folder, names_at, send
from mlmclm.storage.artifact import Artifact, FolderArtifact, Origin
from mlmclm.storage.checksums import CHECKSUMS, Piece
from mlmclm.storage.checksums import damage as damage
from mlmclm.storage.files import read_json, whole_folder


class StoredState(FolderArtifact):
    """The state of a training in the store."""

    kind = part = "states"
    again = "`mlmclm pretrain` on its study sets it aside and trains it again"
    remade = "trained again"

    def files(self) -> Iterator[Piece]:
        """Yield the state's files; none if the folder holds only an untrained model, which has no training state."""
        if (self.folder / CHECKSUMS).is_file() or any(path.is_file() for path in part_paths(self.folder)):
            yield from super().files()

    def origin(self) -> Origin:
        """Read what the state was trained from: its history, the recipe, the corpus, and the state or model that it began with."""
        saved = read_json(self.folder / "state.json") if (self.folder / "state.json").is_file() else {}
        if "recipe" not in saved:
            return Origin()
        recipe = saved["recipe"]
        counting = {name for role in (Role.WEIGHTS, Role.TOKENS, Role.SHAPE) for name in Recipe.fields_with(role)}
        facts = {name: value for name, value in recipe.items() if name in counting}
        seeds = {"seeds": saved["seeds"]} if "seeds" in saved else {}
        needs: list[Artifact] = [StoredCorpus(self.store, saved["corpus"])]
        needs += [StoredState(self.store, saved["parent"])] if saved.get("parent") else []
        needs += [StoredInitial(self.store, saved["initial"])] if saved.get("initial") else []
        return Origin(
            {"size": saved["size"], "history": saved["legs"], "shared": saved["fingerprint"], **facts, **seeds},
            {name: value for name, value in recipe.items() if name not in facts},
            saved.get("system", {}),
            tuple(needs),
        )


class StoredRevision(FolderArtifact):
    """The weights of a step at which no model ends, in the store."""

    kind = part = "revisions"
    again = "`mlmclm pretrain` on its study, after it is deleted"

    def origin(self) -> Origin:
        """Read what it was trained from, as far as it is recorded."""
        saved = read_json(self.folder / "state.json")
        facts = {"size": saved.get("size"), "shared": saved.get("fingerprint"), "step": saved.get("step")}
        return Origin(facts, needs=(StoredCorpus(self.store, str(saved.get("corpus"))),))


def state_folder(store: Path, key: str) -> Path:
    """Return the folder of the state with this key, whether it exists or not."""
    return StoredState(store, key).folder


def weights_folder(store: Path, key: str) -> Path | None:
    """Return the folder of the state or revision with this key if its files have their full sizes, else None."""
    places = (StoredState(store, key), StoredRevision(store, key))
    return next((place.folder for place in places if place.damage(read=False) is None), None)


def exists(store: Path, key: str) -> bool:
    """Return whether the state exists and all files have their full size. `damage` can also verify checksums."""
    return StoredState(store, key).damage(read=False) is None


def stages_left(stage: Stage, store: Path, fingerprint: str) -> tuple[Stage, ...]:
    """Return what is still to be trained of a stage, as stages, given the states in the store (`Stage.left`)."""
    return stage.left(lambda state: exists(store, state.key(fingerprint)))


def link(source: Path, target: Path) -> None:
    """Hard-link the files of an intact state into another folder."""
    with whole_folder(target) as folder:
        # The checksums list what belongs to a state, which excludes files that were added later.
        for name in (*read_json(source / CHECKSUMS), CHECKSUMS):
            os.link(source / name, folder / name)


def checkpoints(run_folder: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of a run's checkpoints, latest step first. The step is -1 if it cannot be read."""
    folders = []
    for folder in run_folder.glob("ray_train/*/checkpoint_[0-9]*"):
        try:
            step = int(read_json(folder / "step.json")["step"])
        except (UserError, KeyError, TypeError, ValueError):
            step = -1
        folders.append((step, folder))
    return sorted(folders, reverse=True)


def sent_as(run_folder: Path, step: int) -> Path:
    """Return the path in the store under which a run's checkpoint is sent to the store's address."""
    return run_folder / f"checkpoint_{step:09d}"


def drop_earlier(run_folder: Path, step: int) -> None:
    """If the store has an address, delete a run's checkpoints of earlier steps at that address and on this machine."""
    if address_of(run_folder) is not None:
        for earlier in _sent(run_folder):
            if step_of(earlier) < step:
                discard(earlier)
        for other_step, earlier in checkpoints(run_folder):
            if other_step < step:
                shutil.rmtree(earlier, ignore_errors=True)


def bring_checkpoint(run_folder: Path) -> None:
    """Fetch the latest checkpoint at the store's address, unless this machine has a later one."""
    latest = max(_sent(run_folder), key=step_of, default=None)
    latest_here = max((step for step, _ in checkpoints(run_folder)), default=-1)
    if latest is not None and step_of(latest) > latest_here:
        fetch_folder(run_folder / "ray_train" / "sent" / latest.name, of=latest)


def send_start(run_folder: Path, folder: Path) -> Path:
    """Send the state that a stage starts from to the store's address, unless it is there; return its path in the store."""
    place = folder
    if folder.is_relative_to(run_folder / "ray_train"):
        place = sent_as(run_folder, read_json(folder / "step.json")["step"])
    # The machine that wrote it may have failed before sending it.
    if address_of(place) is not None:
        send(folder, (*read_json(folder / CHECKSUMS), CHECKSUMS), to=place)
    return place


def bring_start(run_folder: Path, folder: Path, *, of: Path) -> None:
    """Fetch what `send_start` has sent and delete the run's other checkpoints, unless this machine has it; verify it.

    Raises:
        UserError: if this machine's copy is damaged.
    """
    if address_of(folder) is None:
        return
    if not (folder / CHECKSUMS).is_file():
        for _, outdated in checkpoints(run_folder):
            shutil.rmtree(outdated, ignore_errors=True)
        fetch_folder(folder, of=of)
    reason = damage(folder)
    if reason is not None:
        raise UserError(
            f"{folder} on {platform.node()}: {reason}. Delete this folder there and run the same command again."
        )


def end_run(run_folder: Path) -> None:
    """Delete what a run has written, here and at the store's address."""
    discard(run_folder)
    shutil.rmtree(run_folder, ignore_errors=True)


def step_of(sent: Path) -> int:
    """Return the step in the name of a checkpoint at the store's address."""
    return int(sent.name.rpartition("_")[2])


def _sent(run_folder: Path) -> list[Path]:
    return [path for path in names_at(run_folder) if path.name.startswith("checkpoint_")]


def prune_checkpoints(run_folder: Path, keep: int) -> None:
    """Delete what earlier attempts at a run left, except the `keep` latest intact checkpoints.

    Call this only while the run is not active.
    """
    kept = [folder for _, folder in checkpoints(run_folder) if damage(folder, read=False) is None][:keep]
    for attempt in run_folder.glob("ray_train/*"):
        for folder in attempt.glob("*"):
            if folder.is_dir() and folder not in kept:
                shutil.rmtree(folder, ignore_errors=True)
        if not any(folder.parent == attempt for folder in kept):
            shutil.rmtree(attempt, ignore_errors=True)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the records of a metrics file, without a last line that a crash cut short.

    Raises:
        UserError: if any other line is damaged.
    """
    if not path.is_file():
        return []
    records = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if line.endswith(b"\n"):  # else it is being written, or was when its writer died
            try:
                record = json.loads(line)
                records.append({**record, "step": int(record["step"])})
            except (ValueError, TypeError, KeyError) as error:
                raise UserError(
                    f"{path}: line {number} is damaged ({error}). Delete this file and run the same command again."
                ) from error
    return records


def read_description(folder: Path) -> dict[str, Any]:
    """Read how a state or checkpoint was made (`state.json`), after verifying that file and the metrics.

    Raises:
        UserError: if the checksum of either file differs.
    """
    reason = damage(folder, names=("state.json", "metrics.jsonl"))
    if reason is not None:
        raise UserError(
            f"{folder}: {reason}. Put back a copy of the file; or delete this folder and run `mlmclm pretrain` on the study, which "
            "trains the state again."
        )
    return read_json(folder / "state.json")


def curve(store: Path, key: str) -> list[dict[str, Any]]:
    """Return all metrics from initialisation to a state, through the states that it was trained from."""
    return folder_curve(store, StoredState(store, key).brought().folder)


def folder_curve(store: Path, folder: Path) -> list[dict[str, Any]]:
    """Return the `curve` of the state or checkpoint in a folder."""
    description = read_description(folder)
    before = curve(store, description["parent"]) if description.get("parent") else []
    reached = max((record["step"] for record in before), default=0)
    records = read_metrics(folder / "metrics.jsonl")
    return before + [record for record in records if record["step"] > reached]

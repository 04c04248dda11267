"""A pretraining state on disk: fp32 weights and Adam's moments under their Hugging Face names.

    state.safetensors    weights `w/NAME`, first moments `m/NAME`, second moments `v/NAME`, callbacks' tensors `c/CALLBACK/NAME`;
                         a large state is split into parts, `state-00001-of-00004.safetensors` and so on (`parts`)
    step.json            the number of optimiser steps taken
    callbacks.json       the callbacks' other values, by callback and name; only if a callback has a state

A checkpoint of a running stage and a state in the store have the same files (`states` lists the other files beside
them). The format does not depend on the number of workers or the ZeRO stage: any of them can load it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.models.stored_tensors import StoredTensors
from mlmclm.pretraining import states
from mlmclm.pretraining.parts import part_names, part_paths
from mlmclm.pretraining.peers import ALONE, FINISHED, FOLDER, Peers, sent_by
from mlmclm.storage.addresses import address_of, complete_upload, upload
from mlmclm.storage.checksums import CHECKSUMS, set_aside, sums_of
from mlmclm.storage.files import disk_faults, finish_folder, read_json, temporary_folder, write_json

WEIGHTS, FIRST, SECOND, CALLBACKS = "w/", "m/", "v/", "c/"
SEEN_WITHIN = 90.0
"""Seconds within which a shared folder shows what another machine has created in it: NFS caches folders for up to a minute."""


@dataclass(frozen=True)
class TrainingState:
    """Everything the next step depends on, except its batch and learning rate, which are functions of the step."""

    step: int
    weights: Mapping[str, Tensor]
    first: Mapping[str, Tensor]
    """Adam's running mean of the gradients, by parameter name; empty before the first step."""
    second: Mapping[str, Tensor]
    """Adam's running mean of the squared gradients, in the same form."""
    callbacks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """States of the callbacks that have one (`Callback.state_dict`), by the callback's name."""
    parts: Sequence[Sequence[str]] = ()
    """Names of the tensors in each part, if there are several. A worker that trains has the tensors of its own parts only."""


def write_tensors(folder: Path, state: TrainingState) -> list[str]:
    """Write the tensors of a state and `step.json` into an existing folder; return the names of the files."""
    names = write_parts(folder, state)
    plain = {
        callback: {name: value for name, value in values.items() if not isinstance(value, Tensor)}
        for callback, values in state.callbacks.items()
    }
    if plain:
        write_json(folder / "callbacks.json", plain)
        names.append("callbacks.json")
    write_json(folder / "step.json", {"step": state.step})
    return [*names, "step.json"]


def write_parts(folder: Path, state: TrainingState) -> list[str]:
    """Write those parts of a state whose tensors this worker has; return the names of the files."""
    kinds = {WEIGHTS: state.weights, FIRST: state.first, SECOND: state.second}
    tensors = {f"{prefix}{name}": tensor for prefix, kind in kinds.items() for name, tensor in kind.items()}
    # Only rank 0 has the callbacks' tensors. They go into the first part, which rank 0 writes.
    more = {
        f"{CALLBACKS}{callback}/{name}": value.detach().cpu()
        for callback, values in state.callbacks.items()
        for name, value in values.items()
        if isinstance(value, Tensor)
    }
    parts = state.parts or [list(tensors)]
    written = []
    for file, names in zip(part_names(len(parts)), parts, strict=True):
        part = {name: tensors[name] for name in names if name in tensors}
        if part:
            assert len(part) == len(names) or len(parts) == 1, f"tensors of {file} are missing"
            save_file({name: tensor.contiguous() for name, tensor in (part | more).items()}, str(folder / file))
            written.append(file)
            more = {}
    return written


def read_tensors(folder: Path) -> TrainingState:
    """Open a state that `write_tensors` wrote. Each tensor is read when it is accessed.

    Raises:
        UserError: if the folder does not hold a complete state.
    """
    paths = part_paths(folder)
    try:
        weights, first, second, kept = (StoredTensors(paths, prefix) for prefix in (WEIGHTS, FIRST, SECOND, CALLBACKS))
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{folder}: not a complete pretraining state ({error}). Delete {folder} and run again."
        ) from error
    file = folder / "callbacks.json"
    callbacks: dict[str, dict[str, Any]] = read_json(file) if file.is_file() else {}
    for name, tensor in kept.items():
        callback, _, key = name.partition("/")
        callbacks[callback][key] = tensor
    return TrainingState(int(read_json(folder / "step.json")["step"]), weights, first, second, callbacks)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read only the weights, by Hugging Face name.

    Raises:
        UserError: if the folder is incomplete or its checksums differ.
    """
    damage = states.damage(folder)
    if damage is not None:
        raise UserError(f"{folder}: {damage}. Delete this folder and run `mlmclm pretrain` again to rebuild it.")
    return dict(StoredTensors(part_paths(folder), WEIGHTS))


def write_folder(
    target: Path,
    state: TrainingState,
    description: dict[str, Any],
    metrics: Iterable[dict[str, Any]],
    *,
    to: Path | None = None,
    peers: Peers = ALONE,
) -> None:
    """Write a state's folder and its checksums atomically, and send it to the store's address.

    If the other workers do not see this machine's folders, the state is at the address only.

    Args:
        to: the path in the store under which it is sent; by default `target`.
        peers: the workers that have the state's tensors; all but rank 0 call `write_share`.
    """
    to = to or target
    # If this worker fails, the others get the error before the folder that they write to is deleted.
    with temporary_folder(target) as folder, peers.passing_on():
        peers.tell(FOLDER, {"path": str(folder)})
        with disk_faults(target):
            names = write_tensors(folder, state)
            (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in metrics), encoding="utf-8")
            write_json(folder / "state.json", {**description, "step": state.step})
            local = sums_of(folder, [*names, "metrics.jsonl", "state.json"])
        shares = [peers.told(str(rank)) for rank in range(1, peers.world)]
        files = {name: entry for sums in (local, *(share["files"] for share in shares)) for name, entry in sums.items()}
        if missing := set(part_names(len(state.parts) or 1)) - files.keys():
            raise EnvironmentFault(f"{target}: no worker has written {', '.join(sorted(missing))}.")
        with disk_faults(target):
            write_json(folder / CHECKSUMS, files)
            local |= sums_of(folder, [CHECKSUMS])
            # Finish the folder before sending it: if all workers see it, the state is safe here when the store's address is down.
            complete = all(share["here"] for share in shares) and finish_folder(folder, target)
        # If another process has finished `target` first, send ours: its checksums differ, because metrics contain times.
        place = target if complete else folder
        peers.tell(FINISHED, {"path": str(place)})
        upload(place, local, to)
        for rank in range(1, peers.world):
            peers.told(sent_by(rank))
        complete_upload(files | local, to)


def writers(state: TrainingState, title: str, rank: int, world: int) -> Peers:
    """Return the workers that write a state together: rank 0 alone if it is one file."""
    return Peers(title, rank, world if len(state.parts) > 1 else 1)


def write_share(target: Path, state: TrainingState, peers: Peers, *, to: Path | None = None) -> None:
    """Write this worker's parts of a state into the folder that rank 0 writes (`write_folder`), and send them.

    Raises:
        EnvironmentFault: this machine does not see that folder, and the store has no address; or a worker failed.
    """
    to = to or target
    path = peers.told(FOLDER).get("path")
    if path is None:  # the store has the state
        return
    try:
        common = Path(path)
        needed = bool(state.weights or state.first or state.second) and address_of(to) is None
        # The folder's name is random, so if it exists on this machine, it is the one that rank 0 has made.
        visible = _is_seen(common, peers, SEEN_WITHIN if needed else 0.0)
        if needed and not visible:
            raise EnvironmentFault(
                f"{common} of worker 0 is not seen here. Put the store into a folder that all nodes share, or at an address."
            )
        with nullcontext(common) if visible else temporary_folder(target) as folder:
            with disk_faults(target):
                files = sums_of(folder, write_parts(folder, state))
            peers.tell(str(peers.rank), {"here": visible or not files, "files": files})
            finished = Path(peers.told(FINISHED)["path"])
            if visible and address_of(to) is not None:
                _is_seen(finished, peers, SEEN_WITHIN)
            upload(finished if visible else folder, files, to)
    except Exception:
        peers.told(FOLDER)  # raises rank 0's error, if the folder is missing because of it
        raise
    peers.tell(sent_by(peers.rank), {})


def _is_seen(folder: Path, peers: Peers, seconds: float) -> bool:
    """Return whether rank 0's folder becomes visible on this machine within `seconds`; raise rank 0's error if it fails first."""
    deadline = time.monotonic() + seconds
    while not (seen := folder.is_dir()) and time.monotonic() < deadline:
        peers.told(FOLDER)
        time.sleep(0.5)
    return seen


def deposit(
    store: Path,
    key: str,
    state: TrainingState,
    description: dict[str, Any],
    metrics: Iterable[dict[str, Any]],
    peers: Peers = ALONE,
) -> Path:
    """Put a state into the store and return its folder. An intact folder stays as it is; a damaged one is set aside and replaced."""
    folder = states.state_folder(store, key)
    if not states.exists(store, key):
        if folder.is_dir():
            set_aside(folder)
        write_folder(folder, state, {**description, "key": key}, metrics, peers=peers)
    return folder


def fresh(weights: dict[str, Tensor]) -> TrainingState:
    """Return the state before the first step, in fp32 and without moments."""
    return TrainingState(0, {name: tensor.detach().to(torch.float32) for name, tensor in weights.items()}, {}, {})

"""One stage as a Ray Train run: start it, follow its metrics, and resume where a killed run stopped."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlmclm.backends.device_kinds import Device
from mlmclm.cluster.placement import worker_bundle
from mlmclm.cluster.ray_cluster import START_LIMIT, check_node, computes_here
from mlmclm.corpora.mixed_blocks import in_turns, rows_of_length
from mlmclm.corpora.order import block_numbers
from mlmclm.errors import EnvironmentFault, MlmclmError
from mlmclm.launches import stage_errors
from mlmclm.launches.worker_entry import run_in_worker
from mlmclm.models.warm_up import compile_kernels
from mlmclm.plans.recipe import Recipe
from mlmclm.plans.stages import Stage, State
from mlmclm.pretraining import states
from mlmclm.pretraining.initial import StoredInitial, shape
from mlmclm.pretraining.job import StageJob
from mlmclm.progress import repeated, say, say_once
from mlmclm.registry import shipment
from mlmclm.storage.addresses import address_of, leases_of
from mlmclm.storage.files import read_json, stable_hash, write_json

if TYPE_CHECKING:
    from mlmclm.corpora.mixed_corpus import PreparedSources
    from mlmclm.corpora.prepared_corpus import PreparedCorpus

SECONDS_BETWEEN_RESIZES = 60.0
"""Seconds between Ray Train's checks whether a stage that runs with fewer than `workers` can have more, at the cost of a restart."""
ELASTIC_START_LIMIT = 60.0
"""Ray Train's limit (`START_LIMIT`), in seconds, for the start of all workers of a stage with `fewest_workers`."""

Observer = Callable[[list[dict[str, Any]]], None]
"""Function that receives the records of metrics that a running stage has written since the last call."""


def stage_leases(stage: Stage, store: Path, fingerprint: str) -> tuple[str, ...]:
    """Return the names of the leases to hold while training a stage: of its runs' folders, and of each missing state.

    Stages of two studies can share runs and states. If no state is missing, no lease is needed.
    """
    left = states.stages_left(stage, store, fingerprint)
    runs = (f"runs-{part.end.key(fingerprint)}" for part in left)
    return (*runs, *(f"states-{state.key(fingerprint)}" for part in left for state in part.states))


def run_stage(
    stage: Stage,
    *,
    store: Path,
    corpus: PreparedCorpus | PreparedSources,
    recipe: Recipe,
    fingerprint: str,
    device: Device,
    initial: StoredInitial | None = None,
    observer: Observer | None = None,
) -> None:
    """Train the missing states of a stage. Wait for those that another process is training.

    Needs a Ray session. The workers inherit its runtime environment.

    Args:
        fingerprint: `plans.stages.study_fingerprint` of the recipe and the corpus.
        device: device of each worker (`placement.choose_device`). Ray Train waits until the cluster has one for each.

    Raises:
        UserError: if a loss or gradient is not finite, the recipe asks for something the workers cannot do, or the
            files of `initial` are damaged.
        EnvironmentFault: if the workers fail more often than the recipe allows, or a worker runs out of memory or disk.
    """

    def waiting(holder: str) -> None:
        say(f"{stage.title}: waiting for {holder}, which trains it")

    with leases_of(store).wait(lambda: stage_leases(stage, store, fingerprint), waiting):
        # Check again now that the leases are held: the process that held them before may have trained some or all of the stage.
        parts = states.stages_left(stage, store, fingerprint)
        if parts and initial is not None:
            initial.check()
        for part in parts:
            folder = store / "runs" / part.end.key(fingerprint)
            resolved = part.end.resolved(recipe)
            train, validation = (
                rows_of_length(blocks, resolved.block_length, resolved.rows, corpus.tokenizer, resolved.mix)
                for blocks in (corpus.train, corpus.validation)
            )
            job = StageJob(
                stage=part,
                shape=shape(part.end.size, initial),
                store=store.resolve(),
                run_folder=folder.resolve(),
                corpus=corpus.key,
                train=train,
                validation=in_turns(validation, resolved.mix),
                tokenizer=corpus.tokenizer,
                whole_recipe=recipe,
                fingerprint=fingerprint,
                device=device,
                registered=shipment(),
            )
            _fit_in_memory(job, folder, observer)
            missing = [
                state for remaining in states.stages_left(part, store, fingerprint) for state in remaining.states
            ]
            if missing:
                raise EnvironmentFault(
                    f"pretraining stage {part.title!r} ended without {', '.join(map(str, missing))}; see the worker logs."
                )
            # All states of the run are in the store now, so its checkpoints are not needed any more.
            states.end_run(folder)


def _fit_in_memory(job: StageJob, folder: Path, observer: Observer | None) -> None:
    """Run a stage's workers until it ends, with as many sequences at once as fit into the memory of a GPU.

    If a worker runs out of that memory, all restart from the last checkpoint with a smaller micro-batch. The others could not
    go on without it: under ZeRO they wait in a collective for the one that ran out. The store remembers the size
    that fitted. An interrupted stage goes on with it, and similar stages begin with it.
    """
    if not _searches(job.recipe, job.device):
        return _fit(job, folder, observer)
    note = job.store / "fitting" / f"{_fitting_key(job)}.json"
    rows = len(job.samples(job.stage.start.step))  # of the next batch, the smallest; each micro-batch needs one
    if note.is_file() and job.recipe.batch // (noted := read_json(note)["micro_batch"]) <= rows:
        job = replace(job, fitting=noted)
    while True:
        try:
            return _fit(job, folder, observer)
        except stage_errors.DeviceMemoryFault:
            fewer = job.recipe.fewer_at_once(rows)
            if fewer is None:
                raise
            before = job.recipe.sequences_at_once(job.recipe.workers)
            say(f"{job.stage.title}: {before} sequences at once don't fit into a worker's GPU; it goes on with {fewer}")
            write_json(note, {"micro_batch": fewer})
            job = replace(job, fitting=fewer)


def _searches(recipe: Recipe, device: Device) -> bool:
    """Return whether the micro-batch is found by trying: it is not given, and the device has its own memory.

    Such a device refuses what doesn't fit. If the host's memory runs out, the kernel kills a process.
    """
    from mlmclm.backends.choice import backend_of

    return recipe.micro_batch is None and recipe.micro_batch_tokens is None and not backend_of(device).in_host_memory


def _fitting_key(job: StageJob) -> str:
    """Return a key of everything that decides how many sequences fit; stages that agree in it share the key."""
    recipe = job.recipe.model_dump(mode="json", exclude={"seed", "pretraining_seeds"})
    shape = asdict(job.shape)
    return stable_hash({"shape": shape, "recipe": recipe, "causal": job.stage.objective.causal, "device": job.device})


def _fit(job: StageJob, folder: Path, observer: Observer | None) -> None:
    """Run a stage's workers until it ends; raise an error that explains it if the stage ends early."""
    # Importing these takes long, and a study without missing states needs none of them.
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig

    from mlmclm.backends.choice import backend_of
    from mlmclm.launches.live_files import receive_live_files
    from mlmclm.launches.rendezvous import Trainer, closed_torch_config

    title, recipe, device = job.stage.title, job.recipe, job.device
    backend = backend_of(device)  # refuses an unknown name here, before workers start
    if computes_here():
        # Compile kernels before the workers start: otherwise all of them wait, and only the driver can tell the user why.
        compile_kernels([job.model_shape()], say_once, device)
        say_once(f"pretraining computes with the backend {backend.described(recipe.precision)}")
    # An earlier run that diverged may have left this file, which would be taken for this run's.
    job.stop_path.unlink(missing_ok=True)
    states.prune_checkpoints(folder, recipe.keep_checkpoints)
    if recipe.fewest_workers is not None:
        # A node that has just been lost still counts, so Ray Train may wait for a worker on it. After this limit it counts nodes again.
        os.environ[START_LIMIT] = str(ELASTIC_START_LIMIT)
    settings: dict[str, Any] = {"job": job, "link": None}
    trainer = Trainer(
        run_in_worker,
        train_loop_config=settings,
        torch_config=closed_torch_config(backend.process_group, folder / "rendezvous"),
        scaling_config=ScalingConfig(
            num_workers=recipe.workers if recipe.fewest_workers is None else (recipe.fewest_workers, recipe.workers),
            elastic_resize_monitor_interval_s=SECONDS_BETWEEN_RESIZES,
            use_gpu=device == "cuda",
            resources_per_worker=dict(worker_bundle(device)),
        ),
        run_config=RunConfig(
            name=_attempt(folder, title),
            storage_path=str((folder / "ray_train").resolve()),
            failure_config=FailureConfig(max_failures=recipe.max_failures),
            # Ray Train deletes checkpoints where its controller runs. With a store at an address, they are on the workers'
            # machines, which delete a checkpoint once they have uploaded the next one.
            checkpoint_config=CheckpointConfig(
                num_to_keep=None if address_of(folder) is not None else recipe.keep_checkpoints
            ),
            callbacks=[_stop_at_final_failures()],
        ),
    )  # fmt: skip
    check_node()  # compiling may have taken long
    try:
        with _followed(job.metrics_path, observer), receive_live_files(job) as settings["link"]:
            trainer.fit()
    except MlmclmError:
        raise
    except Exception as error:
        # Ray Train wraps what workers raised in errors of its own; find the one that the user can act on.
        raise stage_errors.explain(error, title=title, folder=folder, recipe=recipe) from error
    finally:
        if job.notes_path.is_file():
            for line in job.notes_path.read_text(encoding="utf-8").splitlines():
                say_once(line)
            job.notes_path.unlink()
    if job.stop_path.is_file():
        stopped = read_json(job.stop_path)
        # Batches are functions of the step, so the one at which the stage diverged can be found afterwards.
        blocks = block_numbers(job.train, job.samples(stopped["step"] - 1), recipe.seeds.order).tolist()
        raise stage_errors.not_finite(stopped, blocks, title=title, folder=folder, recipe=recipe)


def _stop_at_final_failures() -> Any:
    """Return a Ray Train callback that ends the run at once at a failure that a restart would only repeat."""
    from ray.train import UserCallback

    class Stop(UserCallback):
        def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
            failure = stage_errors.final(worker_exceptions)
            # An error raised here fails the controller and thus the run, whatever restarts `max_failures` allows.
            if failure is not None:
                raise failure

    return Stop()


def set_aside_damaged(stages: Sequence[Stage], store: Path, fingerprint: str) -> None:
    """Rename damaged states, so that they are trained again, and tell the user which.

    For all states only file sizes are checked. Checksums are checked for those that a stage is about to start from.
    """
    # Last stages first: once a stage's start is set aside, the earlier stage that trains it has a missing state.
    for stage in reversed(stages):
        for state in stage.states:
            _set_aside(state, store, fingerprint, read=False)
        # If a start is damaged, the state before it becomes the start and needs the same check.
        while any(
            part.start.segments and _set_aside(part.start, store, fingerprint, read=True)
            for part in states.stages_left(stage, store, fingerprint)
        ):
            pass


def _set_aside(state: State, store: Path, fingerprint: str, *, read: bool) -> bool:
    """Set a damaged state aside, and return whether it was damaged; a state that a later stage starts from may not exist yet."""
    stored = states.StoredState(store, state.key(fingerprint))
    return stored.folder.is_dir() and not stored.find(read=read, title=f"{stored.folder} ({state})")


def _attempt(folder: Path, title: str) -> str:
    """Return a run name that no earlier attempt at this stage has.

    Under a known name Ray Train would restore that run's list of checkpoints. It does not write this list atomically,
    and fails if one of the checkpoints is gone. `states.checkpoints` finds them instead.
    """
    before = [path.name.rpartition("-")[2] for path in (folder / "ray_train").glob("*")]
    number = 1 + max((int(tail) for tail in before if tail.isdigit()), default=0)
    return f"{title.replace(' ', '-')}-{number}"


@contextmanager
def _followed(path: Path, observer: Observer | None) -> Iterator[None]:
    """Pass new records of a metrics file to `observer` twice a second while the body runs, and once more at its end."""
    if observer is None:
        yield
        return
    seen = 0

    def look() -> None:
        nonlocal seen
        records = states.read_metrics(path)
        if len(records) < seen:  # a restart dropped the lines after its checkpoint
            seen = 0
        if len(records) > seen:
            observer(records[seen:])
            seen = len(records)

    try:
        with repeated(look, seconds=0.5, name="mlmclm-follow"):
            yield
    finally:
        look()

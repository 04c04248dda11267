"""A worker of one stage: load a state, train with one objective, and deposit states along the way.

Read top to bottom. The result does not depend on interruptions: batches, masks and learning rates are functions of the
step, and training resumes from the last intact state.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as distributed
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from mlmclm.backends.choice import agree_on_backend, device_of_workers
from mlmclm.backends.determinism import deterministic
from mlmclm.backends.transfer import pinned
from mlmclm.corpora.blocks import Blocks
from mlmclm.corpora.chunks import Chunks, without_filling
from mlmclm.corpora.mixed_blocks import InTurns, is_elsewhere, stored
from mlmclm.corpora.order import step_tokens
from mlmclm.corpora.read_ahead import STEPS_AHEAD, ReadAhead
from mlmclm.corpora.tokenizer import vocabulary
from mlmclm.errors import UserError
from mlmclm.models.architectures import weights_of
from mlmclm.models.build import PretrainingModel, build_model, hollow
from mlmclm.models.given import begin
from mlmclm.models.warm_up import compile_kernels
from mlmclm.plans.recipe import Recipe
from mlmclm.pretraining import checkpoints, states
from mlmclm.pretraining.callbacks.callback import Callback, KeyedStage, RunningStage, added_kinds, callbacks_of
from mlmclm.pretraining.checkpoints import TrainingState
from mlmclm.pretraining.collator import Collator, separator
from mlmclm.pretraining.engine import Engine
from mlmclm.pretraining.initial import StoredInitial, first_config
from mlmclm.pretraining.job import StageJob
from mlmclm.pretraining.launcher import Launcher
from mlmclm.pretraining.partitioning import partitioning_of
from mlmclm.pretraining.step_meter import StepMeter
from mlmclm.storage.addresses import fetched
from mlmclm.storage.checksums import CHECKSUMS, checked, damage, write_checksums
from mlmclm.storage.files import whole_folder, write_atomic
from mlmclm.storage.unchanged import Unchanged

FLUSH_EVERY = 10
"""Steps between readings of the metrics. Each reading costs an all-reduce and makes the host wait for the accelerator."""
PREPARED_AHEAD = 2
"""Number of steps whose batches are prepared in advance while a device with memory of its own computes."""
VALIDATION_STEP = 2**31
"""Step number that determines the masks of validation blocks. No training step reaches it."""


def train_stage(job: StageJob, launcher: Launcher) -> None:
    """Run one worker's whole share of a stage; collective."""
    with deterministic(job.recipe.deterministic, "recipe"):
        _train_stage(job, launcher)


def _train_stage(job: StageJob, launcher: Launcher) -> None:
    recipe = job.recipe
    fetched(job.tokenizer, CHECKSUMS)
    tokenizer = Unchanged(job.tokenizer, holds=lambda: damage(job.tokenizer) is None)
    checked(job.tokenizer, None, "Run `mlmclm data` on the study: it makes the tokenizer again.")
    # Kernels are compiled once per machine. Do it before anything is timed.
    device = device_of_workers()
    compile_kernels([job.model_shape()], job.note, device)
    agree_on_backend(device)
    partitioning = partitioning_of(recipe)
    model, state, begun = _begin(job, launcher, divided=partitioning.divides_weights)
    pretraining_model = PretrainingModel(
        model,
        precision=recipe.precision,
        activation_checkpointing=recipe.activation_checkpointing,
        compiled=recipe.compile,
    )
    end = separator(recipe, job.tokenizer)
    since, limit = job.moments_since, job.part_bytes
    engine = Engine(pretraining_model, recipe, partitioning, state, end, moments_since=since, part_bytes=limit)
    if begun is not None:
        begun.check()
    stage = RunningStage(job, engine, launcher, start=0 if state is None else state.step)
    stage.callbacks = callbacks_of(stage)

    def check_inputs() -> None:
        tokenizer.check()
        for part in (*stored(job.train), *stored(job.validation)):
            part.check_unchanged()

    stage.check_inputs = check_inputs
    for name, callback in stage.callbacks.items():
        if state is not None and name in state.callbacks:
            callback.load_state_dict(state.callbacks[name])
    training_loop(stage, StepMeter(job, engine, model.config.vocab_size), list(stage.callbacks.values()))


def training_loop(stage: RunningStage, meter: StepMeter, callbacks: Sequence[Callback]) -> None:
    """Run the training loop of a stage and its callbacks; collective."""
    job, engine, recipe, last = stage.job, stage.engine, stage.job.recipe, stage.job.stage.end.step
    objective = job.stage.objective
    label = Collator(objective, vocabulary(job.tokenizer), recipe.corruption, recipe.seeds.masks, engine.separator)
    ahead = STEPS_AHEAD if is_elsewhere(job.train) else 0
    if engine.backend.in_host_memory:
        # The CPU itself trains, so a thread that prepares batches would slow it, unless that thread only waits for a store.
        with ReadAhead(partial(_tokens, job, engine), last=last, ahead=ahead) as tokens:
            _train(stage, meter, callbacks, label, lambda step: _micro_batches(job, engine, label, step, tokens(step)))
    else:
        prepare = partial(_pinned_batches, job, engine, label)
        with ReadAhead(prepare, last=last, ahead=max(ahead, PREPARED_AHEAD)) as batches:
            _train(stage, meter, callbacks, label, batches)


def _train(
    stage: RunningStage,
    meter: StepMeter,
    callbacks: Sequence[Callback],
    label: Collator,
    batches_of: Callable[[int], list[tuple[Tensor, Tensor]]],
) -> None:
    job, engine, recipe = stage.job, stage.engine, stage.job.recipe
    objective, last = job.stage.objective, job.stage.end.step
    added = added_kinds(job)
    # `asked` is the same on all workers, since reading the metrics is collective.
    asked = any(kind.needs_each_step() for kind in added.values()) or any(callback.asks for callback in callbacks)
    changing = [callback for callback in callbacks if isinstance(callback.stage, KeyedStage)]
    others = [callback for callback in callbacks if callback not in changing]
    for callback in callbacks:
        callback.on_start()
    for step in range(stage.start, last):
        done = step + 1  # batches and masks count steps from 0; rates, metrics and states count those that are done
        for callback in callbacks:
            callback.on_step_begin(done)
        waited = time.perf_counter()
        batches = batches_of(step)
        waited = time.perf_counter() - waited
        outcome = engine.step(batches, objective, rate=job.learning_rate(done))
        meter.add(done, outcome, batches, waited)
        # Read the metrics before a state is written, so that no state is written after a loss that is not finite.
        if asked or done % FLUSH_EVERY == 0 or job.keeps(done) or done in job.revision_steps:
            metrics = meter.take()
            stage.latest = metrics[-1]
            for callback in callbacks:
                callback.on_metrics(metrics if callback in others else [row.reproduced() for row in metrics])
            meter.resume()  # callbacks and validation must not count as time of the next step
        if not stage.stopped:
            for callback in changing:
                callback.on_step_end(done)
        if not stage.stopped and (done % recipe.evaluate_every == 0 or done == last):
            held_out = _validation_batches(job.validation, recipe, engine, label)
            evaluation = engine.evaluate(held_out, causal=objective.causal)
            # The validation at the end of a stage is not for `changing` callbacks: stages of other studies end at other steps.
            for callback in callbacks if done % recipe.evaluate_every == 0 else others:
                callback.on_validation(done, evaluation.loss, evaluation.accuracy)
            meter.resume()
        # Stop before `on_step_end`, which would write the state. All workers stop here at the same step.
        if stage.stopped:
            break
        if job.keeps(done) or done in job.revision_steps:
            stage.check_inputs()
        for callback in others:
            callback.on_step_end(done)
    for callback in callbacks:
        callback.on_end()


def first_model(job: StageJob) -> PreTrainedModel:
    """Return the model before its first step, in fp32 on the CPU."""
    config, initial = _beginning(job)
    if initial is not None:
        files = Unchanged(initial.folder, holds=lambda: initial.damage() is None)
        initial.check()
        model = begin(config, initial.weights())
        files.check()
        return model
    return build_model(config, job.recipe.seeds.weights)


def hollow_model(job: StageJob) -> PreTrainedModel:
    """Return `first_model` without weights (`build.hollow`)."""
    config, initial = _beginning(job)
    return hollow(config) if initial is None else begin(config, None)


def write_beginning(job: StageJob, folder: Path) -> None:
    """Write the state before the first step, replacing what an earlier attempt left."""
    shutil.rmtree(folder, ignore_errors=True)
    with whole_folder(folder) as temporary:
        checkpoints.write_tensors(temporary, checkpoints.fresh(weights_of(first_model(job))))
        write_checksums(temporary)


def _beginning(job: StageJob) -> tuple[PreTrainedConfig, StoredInitial | None]:
    end = job.stage.end
    initial = None if end.initial is None else StoredInitial(job.store, end.initial).opened()
    return first_config(end.size, initial, job.tokenizer, job.recipe), initial


def _begin(
    job: StageJob, launcher: Launcher, *, divided: bool
) -> tuple[PreTrainedModel, TrainingState | None, Unchanged | None]:
    """Return the model and the latest intact state that the stage can resume from, with its files; collective.

    The state is None if the stage starts at the model's own initial weights.

    Args:
        divided: whether the workers partition the weights (ZeRO 3), so that none of them should hold all. The model
            then has no weights, and a separate process writes a stage's initial weights.
    """
    # Rank 0 chooses for all: if each worker looked for itself, they could see different states of a shared file system.
    chosen = sent = None
    if distributed.get_rank() == 0:
        chosen = _latest_folder(job)
        if chosen is None and divided:
            chosen = job.run_folder / "beginning"
            launcher.apart(write_beginning, job, chosen)
        sent = None if chosen is None else states.send_start(job.run_folder, chosen)
    chosen, sent = launcher.agreed((chosen, sent))
    if chosen is not None and distributed.get_rank() > 0:
        states.bring_start(job.run_folder, chosen, of=sent)
    # Random weights would only be overwritten by those of a state.
    model = hollow_model(job) if divided or chosen is not None else first_model(job)
    if chosen is None:
        return model, None, None
    files = Unchanged(chosen, holds=lambda: states.damage(chosen) is None)
    return model, checkpoints.read_tensors(chosen), files


def _latest_folder(job: StageJob) -> Path | None:
    """Return the folder of the latest intact state: a checkpoint, a deposit, or the stage's starting state.

    Returns None if the stage starts from the initialisation. Damaged folders are reported to the user.

    Raises:
        UserError: if the state that the stage starts from is damaged.
    """
    states.bring_checkpoint(job.run_folder)
    deposited = [(step, states.StoredState(job.store, key).brought().folder) for step, key in job.deposits.items()]
    absent = [step for step, folder in deposited if states.damage(folder, read=False) is not None]
    # A checkpoint beyond an absent deposit is useless. An earlier plan without this state may have left one.
    end = min(absent, default=job.stage.end.step + 1)
    folders = sorted(states.checkpoints(job.run_folder) + deposited, reverse=True)
    for folder in (folder for step, folder in folders if job.stage.start.step < step < end):
        damage = states.damage(folder)
        if damage is None:
            # The run's own log has no checksum and may have lines of later steps. Go on from the copy in the state.
            write_atomic(job.metrics_path, (folder / "metrics.jsonl").read_bytes())
            return folder
        job.note(f"{folder} is skipped: {damage}. Training resumes from the latest intact one before it.")
    if job.start_key is None:
        return None
    stored = states.StoredState(job.store, job.start_key)
    start, damage = stored.folder, stored.damage()
    if damage is not None:
        raise UserError(f"{start}: {damage}. Run the same command again to train it anew.")
    return start


def _share(job: StageJob, engine: Engine, step: int) -> NDArray[np.int64]:
    """Return which rows of a step's global batch are this worker's, int64 [share]."""
    return np.array_split(np.arange(len(job.samples(step))), engine.world)[engine.rank]


def _tokens(job: StageJob, engine: Engine, step: int) -> NDArray[np.int64]:
    """Read this worker's share of a step's global batch, int64 [share, length]."""
    return step_tokens(job.train, job.samples(step), job.recipe.seeds.order, _share(job, engine, step))[1]


def _micro_batches(
    job: StageJob, engine: Engine, label: Collator, step: int, tokens: NDArray[np.int64]
) -> list[tuple[Tensor, Tensor]]:
    """Return this worker's share of a step's global batch as (input_ids, labels), see `_tensors`, given its `_tokens`.

    While the batch still grows, micro-batches are smaller, not fewer: their number is part of DeepSpeed's configuration.
    """
    # The batch and its masks are defined for the global batch, so any number of workers trains on the same data.
    input_ids, labels = label(tokens, rows=_share(job, engine, step), step=step)  # [share, length]
    parts = (np.array_split(rows, engine.accumulation) for rows in (input_ids, labels))
    return [_tensors(ids, targets, job.recipe, label) for ids, targets in zip(*parts, strict=True)]


def _pinned_batches(job: StageJob, engine: Engine, label: Collator, step: int) -> list[tuple[Tensor, Tensor]]:
    """Return `_micro_batches` in memory from which the device copies while the host goes on."""
    batches = _micro_batches(job, engine, label, step, _tokens(job, engine, step))
    return [(pinned(input_ids, engine.device), pinned(labels, engine.device)) for input_ids, labels in batches]


def _tensors(
    input_ids: NDArray[np.int64], labels: NDArray[np.int64], recipe: Recipe, label: Collator
) -> tuple[Tensor, Tensor]:
    """Return a micro-batch as tensors, [micro, length] each; for chunks, the tokens without padding, [1, tokens] each."""
    if recipe.rows == "chunks":
        assert label.separator is not None
        input_ids, labels = without_filling(input_ids, labels, label.separator)
    return torch.from_numpy(input_ids), torch.from_numpy(labels)


def _validation_batches(
    blocks: Blocks | Chunks | InTurns, recipe: Recipe, engine: Engine, label: Collator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this worker's share of the validation blocks as (input_ids, labels), see `_tensors`.

    If the blocks do not divide evenly, unlabelled rows fill up the share.
    """
    count = min(recipe.evaluation_blocks, len(blocks))
    # Every worker needs the same number of batches, because evaluation is collective.
    share = -(-count // engine.world)
    for start in range(0, share, engine.micro):
        rows = np.arange(start, min(start + engine.micro, share)) * engine.world + engine.rank
        input_ids, labels = label(blocks.take(np.minimum(rows, count - 1)), rows=rows, step=VALIDATION_STEP)
        labels[rows >= count] = -100
        yield _tensors(input_ids, labels, recipe, label)

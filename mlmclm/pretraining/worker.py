"""A worker of one stage: from a state, through the steps of one objective, leaving states behind.

Read top to bottom. Nothing here depends on when or how often it was interrupted: batches, masks and learning rates are functions
of the step, and the state taken up is the last one that is whole.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import ray.train
import torch
import torch.distributed as distributed
from ray.train.collective import broadcast_from_rank_zero
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from mlmclm.corpora.blocks import Blocks
from mlmclm.corpora.order import step_tokens
from mlmclm.corpora.tokenizer import vocabulary
from mlmclm.errors import UserError
from mlmclm.models.architectures import weights_of
from mlmclm.models.build import PretrainingModel, build, hollow, load_prepared_tokenizer, model_config
from mlmclm.models.given import begin, read_written, written_config
from mlmclm.models.warm_up import prepare
from mlmclm.plans.recipe import Recipe
from mlmclm.pretraining import checkpoints, states
from mlmclm.pretraining.callbacks.callback import Callback, RunningStage, callbacks_of
from mlmclm.pretraining.checkpoints import TrainingState
from mlmclm.pretraining.engine import Engine, effective_stage
from mlmclm.pretraining.initial import open_initial
from mlmclm.pretraining.job import StageJob
from mlmclm.pretraining.labelling import Labelling, separator
from mlmclm.pretraining.step_metrics import StepMeter
from mlmclm.storage.files import whole_folder, write_atomic

FLUSH_EVERY = 10
"""Steps between two looks at the losses: each is an all-reduce and, on an accelerator, a wait."""
VALIDATION_STEP = 2**31
"""The step whose masks the validation blocks get; no training step reaches it."""


def train_stage(job: StageJob) -> None:
    """One worker's whole part of a stage; every worker of the group calls it."""
    recipe = job.recipe
    if distributed.get_backend() == "gloo":
        prepare([job.model_shape()], job.note)
    model, state = _begin(job, divided=effective_stage(recipe, distributed.get_world_size()) == 3)
    pretraining_model = PretrainingModel(
        model,
        precision=recipe.precision,
        activation_checkpointing=recipe.activation_checkpointing,
        compiled=recipe.compile,
    )
    engine = Engine(pretraining_model, recipe, state, separator(recipe, Path(job.tokenizer)))
    stage = RunningStage(job, engine, start=0 if state is None else state.step)
    callbacks = callbacks_of(stage)
    train(stage, StepMeter(job, engine, model.config.vocab_size), callbacks)


def train(stage: RunningStage, meter: StepMeter, callbacks: Sequence[Callback]) -> None:
    """Takes the steps of a stage and tells the callbacks of each; collective."""
    job, engine, recipe = stage.job, stage.engine, stage.job.recipe
    label = Labelling(job.objective, vocabulary(Path(job.tokenizer)), recipe.corruption, recipe.seed, engine.separator)
    for callback in callbacks:
        callback.on_start()
    for step in range(stage.start, job.last):
        done = step + 1
        waited = time.perf_counter()
        batches = _micro_batches(job.train, recipe, engine, label, step)
        waited = time.perf_counter() - waited
        outcome = engine.step(batches, job.objective, rate=job.learning_rate(done))
        meter.add(done, outcome, batches, waited)
        # A state is kept only once the losses that led to it are known to be finite.
        if done % FLUSH_EVERY == 0 or job.keeps(done):
            metrics = meter.take()
            for callback in callbacks:
                callback.on_metrics(metrics)
            meter.resume()
        if not stage.stopped and (done % recipe.evaluate_every == 0 or done == job.last):
            held_out = _validation_batches(job.validation, recipe, engine, label)
            found = engine.evaluate(held_out, causal=job.objective.causal)
            for callback in callbacks:
                callback.on_validation(done, found.loss, found.accuracy)
            meter.resume()
        if stage.stopped:
            break
        for callback in callbacks:
            callback.on_step_end(done)
    for callback in callbacks:
        callback.on_end()


def first_model(job: StageJob) -> PreTrainedModel:
    """The model before its first step, fp32, on the CPU."""
    if job.initial is not None:
        return begin(*read_written(open_initial(Path(job.store), job.initial).folder))
    return build(_random_config(job), job.recipe.seed)


def hollow_model(job: StageJob) -> PreTrainedModel:
    """`first_model` without weights (`build.hollow`)."""
    if job.initial is not None:
        return begin(written_config(open_initial(Path(job.store), job.initial).folder), None)
    return hollow(_random_config(job))


def write_beginning(job: StageJob, folder: Path) -> None:
    """Writes the state before the first step, in place of what an earlier attempt left."""
    shutil.rmtree(folder, ignore_errors=True)
    with whole_folder(folder) as temporary:
        checkpoints.write_tensors(temporary, checkpoints.fresh(weights_of(first_model(job))))


def _random_config(job: StageJob) -> PreTrainedConfig:
    return model_config(job.size, load_prepared_tokenizer(Path(job.tokenizer)), job.recipe.block_length)


def _begin(job: StageJob, *, divided: bool) -> tuple[PreTrainedModel, TrainingState | None]:
    """The model and the furthest whole state that the stage can go on from, None if that is the model itself; rank 0 chooses
    for all.

    Args:
        divided: the workers share the weights out (ZeRO 3), so none of them should hold all: the model is hollow, and a process
            that is none of the workers writes the weights that a stage begins with.
    """
    chosen = None
    if distributed.get_rank() == 0:
        chosen = _latest_folder(job)
        if chosen is None and divided:
            chosen = str(Path(job.run_folder) / "beginning")
            write = ray.remote(num_cpus=0, max_calls=1)(write_beginning)
            ray.get(write.remote(job, Path(chosen)))
    chosen = broadcast_from_rank_zero(chosen)
    model = hollow_model(job) if divided or chosen is not None else first_model(job)
    return model, None if chosen is None else checkpoints.read_tensors(Path(chosen))


def _latest_folder(job: StageJob) -> str | None:
    """The furthest whole one of this run's checkpoints, its deposits, and the state that it starts from; None for the
    initialisation. What isn't whole is noted.

    Raises:
        UserError: the state that the stage starts from isn't whole.
    """
    store, end = Path(job.store), job.next_deposit()
    found = states.checkpoints(Path(job.run_folder))
    found += [(step, states.state_folder(store, key)) for step, key in job.deposits if states.exists(store, key)]
    for _, folder in sorted((item for item in found if job.start < item[0] < end), reverse=True):
        damage = states.damage(folder)
        if damage is None:
            # The run's own file has no checksum, and lines of steps behind this one.
            write_atomic(job.metrics_path, (folder / "metrics.jsonl").read_bytes())
            return str(folder)
        job.note(f"{folder} is not used: {damage}; the furthest whole one before it is.")
    if job.start_key is None:
        return None
    start = states.state_folder(store, job.start_key)
    damage = states.damage(start)
    if damage is not None:
        raise UserError(f"{start}: {damage}. Run the same command again: it is trained anew.")
    return str(start)


def _micro_batches(
    blocks: Blocks, recipe: Recipe, engine: Engine, label: Labelling, step: int
) -> list[tuple[Tensor, Tensor]]:
    """This worker's part of the global batch of a step, as (input_ids, labels) of [micro, length] each."""
    share = recipe.batch // engine.world
    mine = np.arange(engine.rank * share, (engine.rank + 1) * share)  # rows of the global batch
    _, tokens = step_tokens(blocks, recipe.batch, recipe.seed, step, mine)
    input_ids, labels = label(tokens, rows=mine, step=step)  # [share, length]
    return [
        (torch.from_numpy(input_ids[i : i + engine.micro]), torch.from_numpy(labels[i : i + engine.micro]))
        for i in range(0, share, engine.micro)
    ]


def _validation_batches(
    blocks: Blocks, recipe: Recipe, engine: Engine, label: Labelling
) -> Iterator[tuple[Tensor, Tensor]]:
    """This worker's part of the validation blocks; a worker that has fewer gets unlabelled rows in their place."""
    count = min(recipe.evaluation_blocks, len(blocks))
    share = -(-count // engine.world)
    for start in range(0, share, engine.micro):
        rows = np.arange(start, min(start + engine.micro, share)) * engine.world + engine.rank
        input_ids, labels = label(blocks.take(np.minimum(rows, count - 1)), rows=rows, step=VALIDATION_STEP)
        labels[rows >= count] = -100
        yield torch.from_numpy(input_ids), torch.from_numpy(labels)

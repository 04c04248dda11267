"""What each Ray Train worker does for one stage: from a state, through the steps of one objective, leaving states behind.

Read top to bottom. Nothing here depends on when or how often it was interrupted: batches, masks and learning rates are functions
of the step, and the state taken up is the last one that is whole.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ray.train
import torch
import torch.distributed as distributed
from torch import Tensor

from mlmclm.corpora.blocks import Blocks
from mlmclm.corpora.order import step_tokens
from mlmclm.corpora.tokenizer import vocabulary
from mlmclm.files import write_json
from mlmclm.models.build import PretrainingModel, build, load_tokenizer, model_config
from mlmclm.pretraining import checkpoints, states
from mlmclm.pretraining.checkpoints import TrainingState
from mlmclm.pretraining.engine import Engine
from mlmclm.pretraining.job import StageJob
from mlmclm.pretraining.objectives import Labelling
from mlmclm.studies.recipe import Recipe
from mlmclm.tracking import metrics as exported
from mlmclm.tracking.system import system_facts

FLUSH_EVERY = 10
"""Steps between two looks at the losses: each is an all-reduce and, on an accelerator, a wait."""
VALIDATION_STEP = 2**31
"""The step whose masks the validation blocks get; no training step reaches it."""


def train_stage(job: StageJob) -> None:
    """One worker's whole part of a stage; every worker of the group calls it."""
    recipe = job.recipe
    tokenizer = load_tokenizer(Path(job.tokenizer))
    model = build(model_config(job.size, tokenizer, recipe.block_length), recipe.seed)
    state = _latest_state(job, model.state_dict())
    engine = Engine(PretrainingModel(model, precision=recipe.precision), recipe, state)
    objective = job.legs[-1].objective
    label = Labelling(objective, vocabulary(Path(job.tokenizer)), recipe.corruption, recipe.seed)
    log = _Log(job, engine, state.step)
    last = job.deposits[-1][0]
    deposits = dict(job.deposits)
    for step in range(state.step, last):
        waited = time.perf_counter()
        batches = _micro_batches(job.train, recipe, engine, label, step)
        waited = time.perf_counter() - waited
        rate = next(leg for leg in job.legs if leg.start <= step < leg.stop).rate(step, recipe)
        total, labelled, tokens, norm = engine.step(batches, causal=objective.causal, rate=rate)
        done = step + 1
        log.add(done, total, labelled, tokens, norm, rate, waited)
        if done % FLUSH_EVERY == 0 or done in deposits or done == last or done % recipe.checkpoint_every == 0:
            stopped = log.flush()
            if stopped is not None:
                return
        if done % recipe.evaluate_every == 0 or done == last:
            loss = engine.evaluate(_validation_batches(job.validation, recipe, engine, label), causal=objective.causal)
            log.validation(done, loss)
        if done in deposits or done % recipe.checkpoint_every == 0:
            _save(job, engine, done, deposits.get(done))


def _latest_state(job: StageJob, initial: dict[str, Tensor]) -> TrainingState:
    """The furthest of: the last checkpoint of this run, the state that the stage starts from, the initialisation."""
    start = checkpoints.fresh(initial)
    if job.start_key is not None:
        start = checkpoints.read_tensors(states.state_folder(Path(job.store), job.start_key))
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            saved = checkpoints.read_tensors(Path(folder))
        if start.step < saved.step < job.next_deposit():
            return saved
    return start


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


def _save(job: StageJob, engine: Engine, step: int, key: str | None) -> None:
    """Reports a checkpoint to Ray Train and, where the plan wants this state, deposits it in the store."""
    state = engine.state(step)
    if engine.rank != 0:
        ray.train.report({"step": step})
        return
    if key is not None:
        description = {
            "size": job.size,
            "legs": [[str(leg.objective), leg.start, min(leg.stop, step), leg.origin, leg.decay_end] for leg in job.legs if leg.start < step],
            "parent": job.start_key,
            "fingerprint": job.fingerprint,
            "recipe": job.recipe.model_dump(mode="json"),
            "corpus": job.corpus,
            "system": {**system_facts(), "workers": engine.world, "device": str(engine.device)},
        }  # fmt: skip
        lines = job.metrics_path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = (line for line in lines if json.loads(line)["step"] <= step)
        checkpoints.deposit(Path(job.store), key, state, description, kept)
    with tempfile.TemporaryDirectory(prefix="mlmclm-checkpoint-") as folder:
        checkpoints.write_tensors(Path(folder), state)
        ray.train.report({"step": step}, checkpoint=ray.train.Checkpoint.from_directory(folder))


class _Log:
    """Collects each step's numbers and, every few steps, writes them as lines and exports them as metrics."""

    def __init__(self, job: StageJob, engine: Engine, start: int) -> None:
        self.job, self.engine = job, engine
        self.waiting: list[tuple[int, Tensor, Tensor, int, float, float, float]] = []
        self.since = time.perf_counter()
        self.labels = {"model": job.model, "objective": str(job.legs[-1].objective)}
        if engine.rank == 0:
            known = [record for record in states.read_metrics(job.metrics_path) if record["step"] <= start]
            job.metrics_path.parent.mkdir(parents=True, exist_ok=True)
            job.metrics_path.write_text("".join(f"{json.dumps(record)}\n" for record in known), encoding="utf-8")

    def add(
        self, step: int, total: Tensor, labelled: Tensor, tokens: int, norm: float, rate: float, waited: float
    ) -> None:
        """Notes one step; nothing is exchanged yet."""
        self.waiting.append((step, total, labelled, tokens, norm, rate, waited))

    def flush(self) -> int | None:
        """Sums the noted losses over the workers and writes them; returns the step at which loss or gradient stopped being finite."""
        if not self.waiting:
            return None
        totals = torch.stack([total for _, total, *_ in self.waiting]).double()
        distributed.all_reduce(totals)
        losses = (totals / torch.stack([labelled for _, _, labelled, *_ in self.waiting]).to(totals)).tolist()
        seconds = time.perf_counter() - self.since
        rate = sum(tokens for _, _, _, tokens, *_ in self.waiting) * self.engine.world / seconds
        # DeepSpeed says -1 for the norm of a gradient that isn't finite.
        whole = [np.isfinite(loss) and 0 <= entry[4] < np.inf for entry, loss in zip(self.waiting, losses, strict=True)]
        stopped = None if all(whole) else self.waiting[whole.index(False)][0]
        if self.engine.rank == 0:
            waited = sum(entry[6] for entry in self.waiting) / seconds
            for (step, _, labelled, _, norm, learning_rate, _), loss in zip(self.waiting, losses, strict=True):
                if stopped is not None and step >= stopped:
                    what = "gradient" if np.isfinite(loss) else "loss"
                    write_json(self.job.stop_path, {"step": stopped, "what": what, "learning_rate": learning_rate})
                    break
                self._write(
                    step=step, loss=loss, learning_rate=learning_rate, gradient_norm=norm, labelled=int(labelled),
                    tokens_per_second=rate, data_wait=waited, time=time.time(),
                )  # fmt: skip
            self._export(losses[-1], rate)
        self.waiting.clear()
        self.since = time.perf_counter()
        return stopped

    def validation(self, step: int, loss: float) -> None:
        """Writes a validation loss."""
        if self.engine.rank == 0:
            self._write(step=step, validation_loss=loss, time=time.time())
            exported.gauge("mlmclm_pretraining_validation_loss").set(loss, tags=self.labels)
        self.since = time.perf_counter()

    def _write(self, **record: Any) -> None:
        with self.job.metrics_path.open("a", encoding="utf-8") as handle:
            handle.write(f"{json.dumps(record)}\n")

    def _export(self, loss: float, rate: float) -> None:
        step, *_, norm, learning_rate, _ = self.waiting[-1]
        tokens = sum(entry[3] for entry in self.waiting) * self.engine.world
        exported.gauge("mlmclm_pretraining_loss").set(loss, tags=self.labels)
        exported.gauge("mlmclm_pretraining_step").set(step, tags=self.labels)
        exported.gauge("mlmclm_pretraining_tokens_per_second").set(rate, tags=self.labels)
        exported.gauge("mlmclm_pretraining_learning_rate").set(learning_rate, tags=self.labels)
        exported.gauge("mlmclm_pretraining_gradient_norm").set(norm, tags=self.labels)
        exported.counter("mlmclm_pretraining_tokens_total").inc(tokens, tags=self.labels)

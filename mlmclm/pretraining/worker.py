"""What each Ray Train worker does for one stage: from a state, through the steps of one objective, leaving states behind.

Read top to bottom. Nothing here depends on when or how often it was interrupted: batches, masks and learning rates are functions
of the step, and the state taken up is the last one that is whole.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray.train
import torch
import torch.distributed as distributed
from numpy.typing import NDArray
from ray.train import CheckpointUploadMode
from ray.train.collective import broadcast_from_rank_zero
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from mlmclm.corpora.blocks import Blocks
from mlmclm.corpora.order import step_tokens
from mlmclm.corpora.segments import document_lengths
from mlmclm.corpora.tokenizer import vocabulary
from mlmclm.errors import UserError
from mlmclm.models.architectures import weights_of
from mlmclm.models.build import PretrainingModel, build, hollow, load_prepared_tokenizer, model_config
from mlmclm.models.given import begin, read_written, written_config
from mlmclm.models.sizes import training_flops
from mlmclm.models.warm_up import prepare
from mlmclm.plans.recipe import Recipe
from mlmclm.pretraining import checkpoints, states
from mlmclm.pretraining.checkpoints import TrainingState
from mlmclm.pretraining.engine import Engine, Evaluation, effective_stage
from mlmclm.pretraining.failures import VALIDATION_LOSS
from mlmclm.pretraining.initial import open_initial
from mlmclm.pretraining.job import StageJob
from mlmclm.pretraining.labelling import Labelling, separator
from mlmclm.pretraining.speed import matrix_peak
from mlmclm.storage.files import whole_folder, write_atomic, write_json
from mlmclm.tracking import metrics as exported
from mlmclm.tracking.system import system_facts

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
    end = separator(recipe, Path(job.tokenizer))
    engine = Engine(pretraining_model, recipe, state, end)
    start = 0 if state is None else state.step
    objective = job.legs[-1].objective
    label = Labelling(objective, vocabulary(Path(job.tokenizer)), recipe.corruption, recipe.seed, end)
    log = _Log(job, engine, start, model.config.vocab_size)
    writer = _Writer(job, engine)
    last = job.deposits[-1][0]
    deposits = dict(job.deposits)
    for step in range(start, last):
        waited = time.perf_counter()
        batches = _micro_batches(job.train, recipe, engine, label, step)
        waited = time.perf_counter() - waited
        rate = next(leg for leg in job.legs if leg.start <= step < leg.stop).rate(step, recipe)
        total, labelled, tokens, norm = engine.step(batches, objective, rate=rate)
        done = step + 1
        log.add(done, total, labelled, tokens, norm, rate, waited)
        if end is not None:
            log.documents += [document_lengths(input_ids.numpy(), end) for input_ids, _ in batches]
        if done % FLUSH_EVERY == 0 or done in deposits or done == last or done % recipe.checkpoint_every == 0:
            stopped = log.flush()
            if stopped is not None:
                writer.wait()
                return
        if done % recipe.evaluate_every == 0 or done == last:
            validation = _validation_batches(job.validation, recipe, engine, label)
            if not log.validation(done, engine.evaluate(validation, causal=objective.causal), rate):
                writer.wait()
                return
        if done in deposits or done % recipe.checkpoint_every == 0:
            writer.write(done, deposits.get(done))
    writer.wait()


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


class _Writer:
    """Writes states while training goes on, one at a time, and reports each to Ray Train when it is whole.

    A write that fails ends the run: Ray Train raises its error, and so does the next `write` or `wait`.
    """

    def __init__(self, job: StageJob, engine: Engine) -> None:
        self.job, self.engine = job, engine
        self.writing: Future[None] | None = None

    def wait(self) -> None:
        """Until what is being written is whole."""
        if self.writing is not None:
            self.writing.result()
            self.writing = None

    def write(self, step: int, key: str | None) -> None:
        """Copies the state to the host's memory and begins to write it; collective.

        Args:
            key: where the plan wants this state, its key: it is deposited in the store too, before it is reported.
        """
        self.wait()
        state = self.engine.state(step)
        if state is None:
            ray.train.report({"step": step}, checkpoint_upload_mode=CheckpointUploadMode.ASYNC)
            return
        description = _description(self.job, self.engine, step)
        folder = Path(ray.train.get_context().get_storage().experiment_fs_path)
        writing: Future[None] = Future()

        def put(_: ray.train.Checkpoint, name: str) -> ray.train.Checkpoint:
            try:
                rows = [row for row in states.read_metrics(self.job.metrics_path) if row["step"] <= step]
                if key is None:
                    checkpoints.write_folder(folder / name, state, description, rows)
                else:
                    states.link(checkpoints.deposit(Path(self.job.store), key, state, description, rows), folder / name)
            except BaseException as error:
                writing.set_exception(error)
                raise
            writing.set_result(None)
            return ray.train.Checkpoint.from_directory(folder / name)

        self.writing = writing
        ray.train.report(
            {"step": step},
            checkpoint=ray.train.Checkpoint.from_directory(folder),  # where `put` makes the real one
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
            checkpoint_upload_fn=put,
            delete_local_checkpoint_after_upload=False,
        )


def _description(job: StageJob, engine: Engine, step: int) -> dict[str, Any]:
    """What a state was made of (`state.json`)."""
    return {
        "size": job.size,
        "legs": [[str(leg.objective), leg.start, min(leg.stop, step), leg.origin, leg.decay_end] for leg in job.legs if leg.start < step],
        "parent": job.start_key,
        **({} if job.initial is None else {"initial": job.initial}),
        "fingerprint": job.fingerprint,
        "recipe": job.recipe.model_dump(mode="json"),
        "corpus": job.corpus,
        "system": {**system_facts(), "workers": engine.world, "device": str(engine.device), "backend": engine.backend.name},
    }  # fmt: skip


class _Step(NamedTuple):
    """What is noted of a step, before anything is exchanged."""

    step: int
    loss: Tensor
    """Of this worker's labelled tokens, summed."""
    labelled: Tensor
    """Of all workers."""
    tokens: int
    """Of this worker."""
    norm: float
    rate: float
    waited: float
    """Seconds for the batch."""
    step_seconds: float
    """From the end of the step before; looking at losses and validating are not in it, the copy of a state to be written is."""


class _Log:
    """Collects each step's numbers and, every few steps, writes them as lines and exports them as metrics."""

    def __init__(self, job: StageJob, engine: Engine, start: int, vocabulary: int) -> None:
        self.job, self.engine, self.vocabulary = job, engine, vocabulary
        self.waiting: list[_Step] = []
        self.documents: list[NDArray[np.int64]] = []
        """Lengths of this worker's documents in the noted steps, where documents are isolated."""
        self.ended = time.perf_counter()
        self.labels = {"model": job.model, "objective": str(job.legs[-1].objective)}
        peak = torch.tensor(matrix_peak(engine.device, bf16=job.recipe.precision != "fp32"), device=engine.device)
        distributed.all_reduce(peak)
        self.peak = float(peak)  # FLOP/s of all workers
        if engine.rank == 0:
            known = [record for record in states.read_metrics(job.metrics_path) if record["step"] <= start]
            job.metrics_path.parent.mkdir(parents=True, exist_ok=True)
            job.metrics_path.write_text("".join(f"{json.dumps(record)}\n" for record in known), encoding="utf-8")

    def add(
        self, step: int, total: Tensor, labelled: Tensor, tokens: int, norm: float, rate: float, waited: float
    ) -> None:
        """Notes one step; nothing is exchanged yet."""
        now = time.perf_counter()
        self.waiting.append(_Step(step, total, labelled, tokens, norm, rate, waited, now - self.ended))
        self.ended = now

    def flush(self) -> int | None:
        """Sums the noted losses over the workers and writes them; returns the step at which loss or gradient stopped being finite."""
        if not self.waiting:
            return None
        totals = torch.stack([noted.loss for noted in self.waiting]).double()
        distributed.all_reduce(totals)
        losses = (totals / torch.stack([noted.labelled for noted in self.waiting]).to(totals)).tolist()
        memory = torch.tensor(self.engine.backend.peak_memory(), device=self.engine.device)
        distributed.all_reduce(memory, distributed.ReduceOp.MAX)
        seconds = sum(noted.step_seconds for noted in self.waiting) + time.perf_counter() - self.ended
        rate = sum(noted.tokens for noted in self.waiting) * self.engine.world / seconds
        utilisation = self._flops() / seconds / self.peak
        # DeepSpeed says -1 for the norm of a gradient that isn't finite.
        whole = [
            np.isfinite(loss) and 0 <= noted.norm < np.inf for noted, loss in zip(self.waiting, losses, strict=True)
        ]
        stopped = None if all(whole) else self.waiting[whole.index(False)].step
        if self.engine.rank == 0:
            waited = sum(noted.waited for noted in self.waiting) / seconds
            for noted, loss in zip(self.waiting, losses, strict=True):
                if stopped is not None and noted.step >= stopped:
                    what = "gradient" if np.isfinite(loss) else "loss"
                    write_json(self.job.stop_path, {"step": stopped, "what": what, "learning_rate": noted.rate})
                    break
                self._write(
                    step=noted.step, loss=loss, learning_rate=noted.rate, gradient_norm=noted.norm, labelled=int(noted.labelled),
                    step_seconds=noted.step_seconds, tokens_per_second=rate, utilisation=utilisation, memory=int(memory), data_wait=waited,
                    time=time.time(),
                )  # fmt: skip
            self._export(losses[-1], rate)
            exported.gauge("mlmclm_pretraining_utilisation").set(utilisation, tags=self.labels)
            exported.gauge("mlmclm_pretraining_memory_bytes").set(int(memory), tags=self.labels)
            exported.gauge("mlmclm_pretraining_data_wait").set(waited, tags=self.labels)
        self.waiting.clear()
        self.documents.clear()
        self.ended = time.perf_counter()
        return stopped

    def validation(self, step: int, found: Evaluation, rate: float) -> bool:
        """Writes loss and accuracy on the validation blocks; returns whether the loss is finite, the same on all workers."""
        finite = bool(np.isfinite(found.loss))
        if self.engine.rank == 0 and not finite:
            write_json(self.job.stop_path, {"step": step, "what": VALIDATION_LOSS, "learning_rate": rate})
        elif self.engine.rank == 0:
            self._write(
                step=step, validation_loss=found.loss, validation_perplexity=float(np.exp(found.loss)),
                validation_accuracy=found.accuracy, time=time.time(),
            )  # fmt: skip
            exported.gauge("mlmclm_pretraining_validation_loss").set(found.loss, tags=self.labels)
            exported.gauge("mlmclm_pretraining_validation_accuracy").set(found.accuracy, tags=self.labels)
        self.ended = time.perf_counter()
        return finite

    def _flops(self) -> int:
        """The model's, of the noted steps on all workers."""
        return training_flops(
            self.job.shape,
            tokens=sum(noted.tokens for noted in self.waiting) * self.engine.world,
            labelled=sum(int(noted.labelled) for noted in self.waiting),
            length=self.job.recipe.block_length,
            vocabulary=self.vocabulary,
            causal=self.job.legs[-1].objective.causal,
            documents=np.concatenate(self.documents) if self.documents else None,
        )

    def _write(self, **record: Any) -> None:
        with self.job.metrics_path.open("a", encoding="utf-8") as handle:
            handle.write(f"{json.dumps(record)}\n")

    def _export(self, loss: float, rate: float) -> None:
        last = self.waiting[-1]
        tokens = sum(noted.tokens for noted in self.waiting) * self.engine.world
        exported.gauge("mlmclm_pretraining_loss").set(loss, tags=self.labels)
        exported.gauge("mlmclm_pretraining_step").set(last.step, tags=self.labels)
        exported.gauge("mlmclm_pretraining_tokens_per_second").set(rate, tags=self.labels)
        exported.gauge("mlmclm_pretraining_learning_rate").set(last.rate, tags=self.labels)
        exported.gauge("mlmclm_pretraining_gradient_norm").set(last.norm, tags=self.labels)
        exported.counter("mlmclm_pretraining_tokens_total").inc(tokens, tags=self.labels)

"""Computation of one cell of a sweep: model, task, learning rate and seed in, scores out. Nothing here uses Ray."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from mlmclm import versions
from mlmclm.backends.choice import backend_of, best_device
from mlmclm.backends.determinism import deterministic
from mlmclm.backends.device_kinds import Device
from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.finetuning.batching import stream
from mlmclm.finetuning.cell import Cell, cell_key
from mlmclm.finetuning.kept import load_kept, write_kept
from mlmclm.finetuning.loop import Trained, evaluate_splits, fine_tune
from mlmclm.models.folder import check_length, load_encoder, weights_hashes
from mlmclm.results.examples import SPLIT, to_parquet
from mlmclm.seeds import Seed, Seeds, seed_value
from mlmclm.storage.addresses import fetched
from mlmclm.storage.checksums import damage
from mlmclm.storage.unchanged import Unchanged
from mlmclm.system import provenance
from mlmclm.tasks.prepare_task import find_or_prepare
from mlmclm.tasks.prepared_task import Linear, PreparedTask

MODELS_KEPT = 2
"""Number of base models that a worker keeps in memory."""


def streams_of(seed: Seed) -> dict[str, int]:
    """Return the 63-bit seed of each random stream of a cell; each depends only on its own number in `seed`."""
    return {name: stream(number, name) for name, number in asdict(Seeds.of(seed)).items()}


def fresh_layers(generator: torch.Generator, deviation: float = 0.02) -> Linear:
    """Return a factory of linear layers with weights from N(0, deviation) and zero bias, drawn one after the other."""

    def linear(inputs: int, outputs: int) -> nn.Linear:
        # On the meta device the constructor's own initialisation draws nothing from torch's global generator.
        with torch.device("meta"):
            layer = nn.Linear(inputs, outputs)
        layer.to_empty(device="cpu")
        with torch.no_grad():
            layer.weight.normal_(0.0, deviation, generator=generator)
            layer.bias.zero_()
        return layer

    return linear


def run_cell(cell: Cell, **options: Any) -> dict[str, Any]:
    """Fine-tune and evaluate one cell and return its result; for the options and errors see `run_training`."""
    (result,) = run_training([cell], **options)
    return result


def run_training(
    cells: Sequence[Cell],
    *,
    store: Path,
    data_root: Path | None,
    cache: dict[Any, Any] | None = None,
    on_step: Callable[[int, int, float], None] | None = None,
    on_end: Callable[[nn.Module, dict[str, Any]], None] | None = None,
    on_examples: Callable[[dict[str, Any], bytes], None] | None = None,
    device: Device | None = None,
    report_every: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Fine-tune once for cells that share a training, and evaluate each; the results come one by one.

    A result is the same in a fresh process and in a reused one, whatever other cells share its training, except for
    `cost`, which records time, machine and software. It does depend on the number of torch threads, which
    determines the order of summation. Torch's global random state is left unchanged.

    Args:
        cells: cells of equal `training_key`.
        cache: dictionary that a worker keeps between cells; it holds base weights and opened data.
        on_step: called with step (from 1), number of steps, and loss.
        on_end: called with the fine-tuned encoder and each result.
        on_examples: called with the result and the Parquet file of its examples (`examples.to_parquet`), unless the
            cell diverged.
        device: None for the GPU if torch sees one, else the CPU.
        report_every: steps between reports during training (`loop.fine_tune`); None for none.

    Yields:
        Reports, if there are any. Then the cells' results, as JSON objects with a `key`, each before the next cell is
        evaluated. The cost of start-up and training is divided equally among them.

    Raises:
        UserError: the model folder, the data or a length does not match the cell, or files have changed meanwhile.
    """
    began = time.perf_counter()
    cache = {} if cache is None else cache
    torch.set_flush_denormal(True)  # arithmetic on denormal numbers is many times slower on the CPU
    chosen = torch.device(device or best_device())
    fetched(cells[0].model_folder, "config.json")
    cell, tasks = cells[0], [_task(member, store, data_root, cache) for member in cells]
    task = tasks[0]
    streams = streams_of(cell.seed)
    backend = backend_of(chosen)
    with deterministic(cell.protocol.deterministic, "protocol"), backend.fork_rng():
        # Only dropout draws from the global generator; the head and the order of examples have generators of their own.
        torch.manual_seed(streams["dropout"])
        encoder = copy.deepcopy(_base(cell, cache))
        if cell.start is not None:
            load_kept(encoder, store, cell.start.key)
        # Initialise the head as transformers does for a model with this configuration.
        deviation = getattr(encoder.config, "initializer_range", 0.02)
        generator = torch.Generator().manual_seed(streams["head"])
        head = task.head(encoder.config.hidden_size, fresh_layers(generator, deviation))
        # Converted only after the head was drawn in fp32 on the CPU, so that every precision and device starts from the same draw.
        if cell.protocol.precision == "bf16":
            encoder, head = encoder.to(torch.bfloat16), head.to(torch.bfloat16)
        encoder, head = encoder.to(chosen), head.to(chosen)
        started = time.perf_counter()
        trained = yield from fine_tune(
            encoder,
            head,
            task,
            cell.protocol,
            learning_rate=cell.learning_rate,
            order=streams["order"],
            metric=cell.declared.metric,
            on_step=on_step,
            report_every=report_every,
        )
        ended = time.perf_counter()
        planned = cell.protocol.steps(task.rows["train"])
        if trained.steps == planned and not math.isclose(trained.peak_learning_rate, cell.learning_rate):
            raise RuntimeError(f"trained at {trained.peak_learning_rate}, but the cell says {cell.learning_rate}")
        parameters = sum(p.numel() for module in (encoder, head) for p in module.parameters())
        shared = {"start_up": (started - began) / len(cells), "train": (ended - started) / len(cells)}
        for member, task in zip(cells, tasks, strict=True):
            began = time.perf_counter()
            examples = None
            if trained.diverged_step is None:
                examples = evaluate_splits(encoder, head, task, member.protocol, ("validation", "test"))
            scores = None
            if examples is not None:
                scores = {split: task.scores(rows, member.declared.metric) for split, rows in examples.items()}
            spent = time.perf_counter() - began
            _check_files([member, cell], store, cache)
            result = _result(member, trained, scores, streams) | {
                "parameters": parameters,
                "cost": {
                    "seconds": sum(shared.values()) + spent,
                    **shared,
                    "evaluate": spent,
                    **({"cells_of_training": len(cells)} if len(cells) > 1 else {}),
                    **provenance(backend.title(), backend.described(cell.protocol.precision)),
                },
            }
            if on_examples is not None and examples is not None:
                on_examples(result, to_parquet(result, examples[SPLIT] | task.groups, task.label_names))
            if on_end is not None:
                on_end(encoder, result)
            yield result


def _result(cell: Cell, trained: Trained, scores: dict[str, Any] | None, streams: dict[str, int]) -> dict[str, Any]:
    """Return a cell's result without its cost."""
    task = cell.declared
    return {
        "schema": versions.RESULTS,
        "key": cell_key(cell),
        "model": cell.model,
        "weights": cell.weights,
        "task": cell.task,
        "family": task.family,
        "task_data": cell.task_data,
        "protocol": cell.identity(),
        "learning_rate": float(cell.learning_rate),
        "seed": seed_value(cell.seed),
        "streams": streams,
        **({"start": {"cell": cell.start.key, "task": cell.start.task}} if cell.start else {}),
        "engine": versions.CELLS,
        "status": "ok" if scores is not None else "diverged",
        "metric": task.metric,
        "scores": scores,
        # If every loss was finite but a prediction is not, the last step counts as the one that diverged.
        "diverged_step": (trained.diverged_step or trained.steps) if scores is None else None,
        "peak_learning_rate": trained.peak_learning_rate,
        "curve": trained.curve,
        **({"evaluations": trained.best.evaluations, "best_step": trained.best.step} if trained.best else {}),
        "steps": trained.steps,
        "examples": trained.steps * cell.protocol.batch_size,
        "tokens": trained.tokens,
    }


def keep_encoder(cell: Cell, folder: Path, **options: Any) -> None:
    """Compute a cell and write its encoder and its result into a folder, for `KeptEncoder.ensure`.

    The options are those of `run_cell`.

    Raises:
        EnvironmentFault: the cell diverged, although its earlier run did not.
    """
    result = run_cell(cell, on_end=partial(write_kept, folder), **options)
    if result["status"] != "ok":
        raise EnvironmentFault(
            f"the cell {cell_key(cell)} ended well before and diverged now, at step {result['diverged_step']}: this "
            "machine computes something else than the one before, or is broken."
        )


def _task(cell: Cell, store: Path, data_root: Path | None, cache: dict[Any, Any]) -> PreparedTask:
    """Return the cell's task, tokenised and opened, from the cache where possible."""
    key = _task_key(cell, store)
    if key not in cache:
        if cell.protocol.length_share is not None:
            raise UserError("length_share is not resolved: make the cell with `protocol.at_context(context)`.")
        check_length(cell.model_folder, cell.protocol.max_length)
        prepared = find_or_prepare(cell.declared, cell.task_data, cell.model_folder, cell.protocol, store, data_root)
        cache["files", key] = Unchanged(prepared.folder, holds=lambda: damage(prepared.folder) is None)
        cache[key] = prepared
    task: PreparedTask = cache[key]
    return task


def _task_key(cell: Cell, store: Path) -> tuple[Any, ...]:
    return "task", str(store), cell.task, cell.task_data, cell.weights, cell.protocol


def _check_files(cells: Sequence[Cell], store: Path, cache: dict[Any, Any]) -> None:
    """Raise a `UserError` if the tokens or the weights of cells are not what they were when they were hashed.

    Both are memory-mapped, so a change of the files reaches a process that has opened them.
    """
    for cell in cells:
        for key in (_task_key(cell, store), ("model", cell.weights)):
            cache["files", key].check()


def _base(cell: Cell, cache: dict[Any, Any]) -> PreTrainedModel:
    """Return the cached base model. The caller must train a copy."""
    key = ("model", cell.weights)
    if key not in cache:
        # Evict the models loaded first before loading another, so that there are never more than MODELS_KEPT in memory.
        kept = [name for name in cache if name[0] == "model"]
        for name in kept[: len(kept) - MODELS_KEPT + 1]:
            del cache[name]
        folder = cell.model_folder
        files = Unchanged(folder, holds=lambda: cell.weights in weights_hashes(folder))
        hashes = weights_hashes(folder)
        if cell.weights not in hashes:
            raise UserError(
                f"{folder}: the model {cell.model} has changed since this sweep was planned (its hash is "
                f"{hashes[0][:12]}, planned {cell.weights[:12]}). Start the sweep again: it plans with what is there now."
            )
        cache[key], cache["files", key] = load_encoder(folder), files
    model: PreTrainedModel = cache[key]
    return model

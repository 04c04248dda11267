"""Losses of training with a bf16 residual stream beside an fp32 one:  python -m benchmarks.residual_stream --store FOLDER

A small model learns the pydocs corpus three times from the same weights on the same batches: all in fp32; with bf16
products (the recipe's default); and with these and a bf16 residual stream, forward and backward. Weights, their gradients,
the optimiser, norms' statistics, the rotary embedding's angles and the loss are fp32 in all three. The layers are
transformers' and torch's, on the CPU: a stream in bf16 is the layers' input, rounded; autocast does the rest, as the CUDA
backend does. FOLDER keeps the corpus and finished runs, so that a command that was stopped goes on.
"""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from torch import Tensor

from benchmarks.results import machine, write_section
from mlmclm.backends.choice import backend_of
from mlmclm.backends.device_kinds import BACKEND
from mlmclm.corpora.corpus_config import CorpusConfig, TokenizerConfig
from mlmclm.corpora.prepare_corpus import prepare_corpus
from mlmclm.corpora.prepared_corpus import PreparedCorpus
from mlmclm.corpora.tokenizer import vocabulary
from mlmclm.models.architectures import FRESH, layers_of
from mlmclm.models.build import PretrainingModel, build, load_prepared_tokenizer
from mlmclm.models.sizes import Size
from mlmclm.objectives.corruption import Corruption
from mlmclm.objectives.objective import Draw, parse_objective
from mlmclm.schedules.decay import learning_rate

SIZE = Size(layers=4, hidden=64, intermediate=192, heads=2, key_value_heads=2, initial_deviation=0.079)
"""A stream is rounded twice a layer."""
LENGTH, BATCH = 64, 8
VOCABULARY = 2048
PEAK = 2e-3
VALIDATION = 256
"""Blocks of a validation."""
STREAMS = {"bf16 products": "bf16-autocast", "bf16 stream": "bf16-autocast", "fp32": "fp32"}
"""Ways to train, and their precisions."""


def model_of(way: str, corpus: PreparedCorpus, seed: int) -> PretrainingModel:
    """Return a fresh model that computes in a way of `STREAMS`."""
    config = FRESH[SIZE.architecture](SIZE, load_prepared_tokenizer(corpus.tokenizer), LENGTH)
    model = PretrainingModel(build(config, seed), precision=STREAMS[way])
    if way == "bf16 stream":
        # Not the embedding's output, of whose dtype transformers makes the rotary embedding's angles.
        layers_of(model.model.base_model)[0].register_forward_pre_hook(
            lambda _, given: (given[0].bfloat16(), *given[1:])
        )
    return model


def train(way: str, objective_name: str, seed: int, corpus: PreparedCorpus, steps: int) -> dict[int, float]:
    """Return the validation losses, in nats a label, after each quarter of the steps."""
    objective, words = parse_objective(objective_name, where="objective"), vocabulary(corpus.tokenizer)
    model = model_of(way, corpus, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)

    def loss(tokens: np.ndarray, step: int) -> Tensor:
        ids, labels = objective.label(tokens, Draw(np.arange(len(tokens)), step, seed, words, Corruption()))
        summed: Tensor = model(torch.from_numpy(ids), torch.from_numpy(labels), objective.causal)
        return summed / int((labels != -100).sum())

    order = np.random.default_rng(seed).permutation(len(corpus.train))
    validation = corpus.validation.take(np.arange(min(VALIDATION, len(corpus.validation))))
    found = {}
    for step in range(steps):
        rate = learning_rate(step, peak=PEAK, warmup=steps // 20, origin=0, decay=steps // 5, decay_end=steps)
        optimizer.param_groups[0]["lr"] = rate
        loss(corpus.train.take(order[(step * BATCH + np.arange(BATCH)) % len(order)]), step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % (steps // 4) == 0:
            with torch.no_grad():
                found[step + 1] = float(loss(validation, steps))
    return found


def main(
    store: Annotated[Path, typer.Option(help="Folder for the corpus and finished runs.")],
    steps: Annotated[int, typer.Option(help="A multiple of 4.")] = 2000,
    seeds: Annotated[int, typer.Option(min=1, help="Weights, batches and masks each.")] = 2,
    objective_names: Annotated[
        str, typer.Option("--objectives", help="Objectives, separated by commas.")
    ] = "clm,mlm40",
    write: Annotated[bool, typer.Option("--write", help="Write the table to benchmarks/RESULTS.md.")] = False,
) -> None:
    """Train for each objective with each seed in each way."""
    objectives = objective_names.split(",")
    os.environ[BACKEND] = "reference"
    assert backend_of("cpu").has_bf16(), "this processor multiplies bf16 in fp32, which would be another comparison"
    corpus = prepare_corpus(
        CorpusConfig(source="pydocs"), TokenizerConfig(train_vocab_size=VOCABULARY), block_length=LENGTH, store=store
    )
    losses: dict[tuple[str, int, str], dict[int, float]] = {}
    for seed in range(seeds):
        for objective in objectives:
            for way in STREAMS:
                file = store / f"{objective}-{seed}-{way.replace(' ', '-')}-{steps}.json"
                if not file.is_file():
                    file.write_text(json.dumps(train(way, objective, seed, corpus, steps)), encoding="utf-8")
                losses[objective, seed, way] = {int(step): loss for step, loss in json.loads(file.read_text()).items()}
                print(objective, seed, way, losses[objective, seed, way], flush=True)
    lines = [
        f"Command: `python -m benchmarks.residual_stream --store FOLDER --steps {steps} --seeds {seeds} --objectives {objective_names}`.",
        f"Machine: {machine()}.",
        f"{SIZE.layers} layers x {SIZE.hidden}, vocabulary {VOCABULARY:,}, {BATCH} x {LENGTH} tokens a step, corpus pydocs. Validation loss in nats a",
        "label; the same weights, batches and masks in all columns. Nothing of it has run on a GPU.",
        "",
        f"| objective | seed | step | {' | '.join(STREAMS)} | stream less products |",
        "|---|---|---|" + "---|" * (len(STREAMS) + 1),
    ]
    for objective in objectives:
        for seed in range(seeds):
            for step in losses[objective, seed, "fp32"]:
                row = [losses[objective, seed, way][step] for way in STREAMS]
                cells = " | ".join(f"{each:.4f}" for each in row)
                lines.append(f"| {objective} | {seed} | {step:,} | {cells} | {row[1] - row[0]:+.4f} |")
    last = [
        [losses[objective, seed, way][steps] for way in STREAMS] for objective in objectives for seed in range(seeds)
    ]
    lines += [
        "",
        f"After {steps:,} steps, mean over objectives and seeds: bf16 products less fp32 {statistics.mean(row[0] - row[2] for row in last):+.4f}, "
        f"bf16 stream less bf16 products {statistics.mean(row[1] - row[0] for row in last):+.4f}.",
    ]
    if write:
        write_section("Loss with a bf16 residual stream", lines)
    else:
        print("\n".join(lines))


if __name__ == "__main__":
    typer.run(main)

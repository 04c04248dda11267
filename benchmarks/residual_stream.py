"""Losses of training with a bf16 residual stream beside an fp32 one:  python -m benchmarks.residual_stream --store FOLDER

A model learns the pydocs corpus from the same weights on the same batches in each way: all in fp32; with bf16 products (the
recipe's default, `bf16-autocast`); and with these and a bf16 residual stream, forward and backward (`bf16-residual`). Weights,
their gradients, the optimiser, norms' statistics, the rotary embedding's angles and the loss are fp32 in all three. On the CPU
the layers are transformers' and torch's; on a GPU they are the backend's. FOLDER keeps the corpus and finished runs, so that a
command that was stopped goes on.
"""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path
from typing import Annotated, NamedTuple

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
from mlmclm.models.architectures import FRESH
from mlmclm.models.build import PretrainingModel, build_model, load_prepared_tokenizer
from mlmclm.models.sizes import SIZES, Size
from mlmclm.objectives.corruption import Corruption
from mlmclm.objectives.objective import Masking, parse_objective
from mlmclm.results.intervals import student
from mlmclm.schedules.decay import learning_rate

SIZE = Size(layers=4, hidden=64, intermediate=192, heads=2, key_value_heads=2, initial_deviation=0.079)
"""The default size. Four layers round the residual stream eight times."""
VOCABULARY = 2048
POINTS = 8
"""Points of a curve."""
VALIDATION = 256
"""Blocks of a validation."""
STREAMS = {"bf16 products": "bf16-autocast", "bf16 stream": "bf16-residual", "fp32": "fp32"}
"""Ways to train, and their precisions."""


class Setting(NamedTuple):
    """Model, batches and steps."""

    size: str
    """A name of `mlmclm.models.sizes`; empty for `SIZE`."""
    length: int
    batch: int
    steps: int
    peak: float
    """Peak learning rate."""

    @property
    def shape(self) -> Size:
        return SIZES[self.size] if self.size else SIZE


def train(way: str, objective_name: str, seed: int, corpus: PreparedCorpus, setting: Setting) -> dict[int, float]:
    """Return the validation losses, in nats a label, after each of `POINTS` parts of the steps."""
    objective, words = parse_objective(objective_name, where="objective"), vocabulary(corpus.tokenizer)
    config = FRESH[setting.shape.architecture](setting.shape, load_prepared_tokenizer(corpus.tokenizer), setting.length)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = PretrainingModel(build_model(config, seed).to(device), precision=STREAMS[way])
    steps, batch, peak = setting.steps, setting.batch, setting.peak
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)

    def loss(tokens: np.ndarray, step: int) -> Tensor:
        ids, labels = objective.label(tokens, Masking(np.arange(len(tokens)), step, seed, words, Corruption()))
        inputs = (torch.from_numpy(array).to(device) for array in (ids, labels))
        where = torch.from_numpy(np.flatnonzero(labels != -100)).to(device)
        summed: Tensor = model(*inputs, objective.causal, where=where)
        return summed / len(where)

    def validate() -> float:
        with torch.no_grad():
            parts = [validation[start : start + batch] for start in range(0, len(validation), batch)]
            return statistics.fmean(float(loss(part, steps + number)) for number, part in enumerate(parts))

    order = np.random.default_rng(seed).permutation(len(corpus.train))
    validation = corpus.validation.take(np.arange(min(VALIDATION, len(corpus.validation))))
    losses = {}
    for step in range(steps):
        rate = learning_rate(step, peak=peak, warmup=steps // 20, origin=0, decay=steps // 5, decay_end=steps)
        optimizer.param_groups[0]["lr"] = rate
        loss(corpus.train.take(order[(step * batch + np.arange(batch)) % len(order)]), step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % (steps // POINTS) == 0:
            losses[step + 1] = validate()
            print(way, objective_name, seed, step + 1, losses[step + 1], flush=True)
    return losses


def main(
    store: Annotated[Path, typer.Option(help="Folder for the corpus and finished runs.")],
    steps: Annotated[int, typer.Option(help=f"A multiple of {POINTS}.")] = 2000,
    seeds: Annotated[int, typer.Option(min=1, help="Weights, batches and masks each.")] = 2,
    objective_names: Annotated[
        str, typer.Option("--objectives", help="Objectives, separated by commas.")
    ] = "clm,mlm40",
    ways: Annotated[str, typer.Option(help=f"{', '.join(STREAMS)}, separated by commas.")] = ",".join(STREAMS),
    size: Annotated[str, typer.Option(help="A name of mlmclm.models.sizes; by default a small one.")] = "",
    length: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 64,
    batch: Annotated[int, typer.Option(help="Sequences of a step.")] = 8,
    peak: Annotated[float, typer.Option(help="Peak learning rate.")] = 2e-3,
    write: Annotated[bool, typer.Option("--write", help="Write the table to benchmarks/RESULTS.md.")] = False,
) -> None:
    """Train for each objective with each seed in each way."""
    objectives, chosen, setting = objective_names.split(","), ways.split(","), Setting(size, length, batch, steps, peak)
    if set(chosen) - set(STREAMS) or not {"bf16 products", "bf16 stream"} <= set(chosen):
        raise typer.BadParameter(f"--ways: bf16 products, bf16 stream, and perhaps fp32; not {ways}")
    backend = backend_of("cuda" if torch.cuda.is_available() else "cpu")
    if backend.device == "cpu":
        os.environ[BACKEND] = "reference"
        assert backend.has_bf16(), "this processor multiplies bf16 in fp32, which would be another comparison"
    corpus = prepare_corpus(
        CorpusConfig(source="pydocs"), TokenizerConfig(train_vocab_size=VOCABULARY), block_length=length, store=store
    )
    losses: dict[tuple[str, int, str], dict[int, float]] = {}
    for seed in range(seeds):
        for objective in objectives:
            for way in chosen:
                name = "-".join([backend.device, objective, str(seed), way.replace(" ", "-"), *map(str, setting)])
                file = store / f"{name}.json"
                if not file.is_file():
                    file.write_text(json.dumps(train(way, objective, seed, corpus, setting)), encoding="utf-8")
                losses[objective, seed, way] = {int(step): loss for step, loss in json.loads(file.read_text()).items()}
    shape = setting.shape
    lines = [
        f"Command: `python -m benchmarks.residual_stream --store FOLDER --steps {steps} --seeds {seeds} --objectives {objective_names}"
        f' --ways "{ways}"'
        + (f" --size {size}" if size else "")
        + f" --length {length} --batch {batch} --peak {peak:g}`.",
        f"Machine: {machine() if backend.device == 'cpu' else f'{backend.title()}, torch {torch.__version__}'}.",
        f"{shape.layers} layers x {shape.hidden}, vocabulary {VOCABULARY:,}, {batch} x {length} tokens a step, corpus pydocs. Validation loss in nats a",
        "label; the same weights, batches and masks in all columns.",
        "",
        f"| objective | step | {' | '.join(chosen)} | stream less products | sd over seeds |",
        "|---|---|" + "---|" * (len(chosen) + 2),
    ]
    for objective in objectives:
        for step in losses[objective, 0, chosen[0]]:
            by_way = {way: [losses[objective, seed, way][step] for seed in range(seeds)] for way in chosen}
            gaps = [two - one for one, two in zip(by_way["bf16 products"], by_way["bf16 stream"], strict=True)]
            cells = " | ".join(f"{statistics.fmean(by_seed):.4f}" for by_seed in by_way.values())
            spread = f"{statistics.stdev(by_way['bf16 products']):.4f}" if seeds > 1 else ""
            gap = student(gaps)
            interval = f" [{gap.low:+.4f}, {gap.high:+.4f}]" if seeds > 1 else ""
            lines.append(f"| {objective} | {step:,} | {cells} | {gap.value:+.4f}{interval} | {spread} |")
    if write:
        write_section(f"Loss with a bf16 residual stream{', on a GPU' if backend.device == 'cuda' else ''}", lines)
    else:
        print("\n".join(lines))


if __name__ == "__main__":
    typer.run(main)

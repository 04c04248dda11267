"""The first thing to run on a GPU: are the results right, and how fast are the backends and their peers?

    python -m benchmarks.gpu --data FOLDER              all parts, on the GPU if there is one
    python -m benchmarks.gpu pretraining --size 210m    one part; each is meant to take less than eight minutes

    pretraining, finetuning      every backend of the device beside `reference`: losses, gradients and tokens a second
    steps                        training steps beside Hugging Face's Trainer (`benchmarks.utilisation`)
    study                        a small study in two stores: are states, scores and tables the same bits? (`benchmarks.gpu_study`)
    fitting                      the search for the micro-batch that fits into the GPU's memory
    sweep, actors, processes     cells an hour beside Trainer, in Ray actors and in a process each (`benchmarks.cells`)

All backends are compared with `reference` in fp32, and so is `reference` in bf16: a backend is right if it is no further away than that.
Weights and tokens are random, except those of cells: FOLDER is that of `benchmarks.cells`, which keeps what is measured, so that an
interrupted part goes on. On a CPU cells are a trial of a few steps. A part writes its table to `benchmarks/RESULTS.md` with --write.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks import cells, gpu_study, utilisation
from benchmarks.pretraining import VOCABULARY
from benchmarks.results import write_section
from mlmclm.backends.choice import autocast, backend_of, backends_of
from mlmclm.backends.device_kinds import BACKEND
from mlmclm.backends.packing import Packing
from mlmclm.models.attention import use_attention
from mlmclm.models.build import PretrainingModel, build_model, model_config
from mlmclm.models.encoder import encode, pool

WARM, TIMED = 3, 10
"""Steps that don't count, and those that do."""
CELLS = ("sweep", "actors", "processes")
PARTS = ("pretraining", "finetuning", "steps", "study", "fitting", *CELLS)
AT_ONCE = 4
"""Cells that share the GPU."""


class Work(NamedTuple):
    """A forward and backward step of a model."""

    title: str
    model: nn.Module
    loss: Callable[[bool], Tensor]
    """The loss, with products in bf16 or not."""
    tokens: int


@contextmanager
def chosen(name: str) -> Iterator[None]:
    """Let this process compute with a backend inside the block."""
    before = os.environ.get(BACKEND)
    os.environ[BACKEND] = name
    try:
        yield
    finally:
        os.environ.pop(BACKEND)
        if before is not None:
            os.environ[BACKEND] = before


def random_model(size: str, length: int) -> PreTrainedModel:
    """A model of a named size with random weights, the same at each call."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<mask>", *(f"w{number}" for number in range(VOCABULARY - 4))]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "<pad>")),
        pad_token="<pad>", bos_token="<s>", eos_token="</s>", mask_token="<mask>",
    )  # fmt: skip
    return build_model(model_config(size, tokenizer, length), 0)


def pretraining(size: str, length: int, batch: int, device: torch.device) -> Iterator[Work]:
    """Blocks of one length, masked and causal."""
    ids = torch.randint(4, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1)).to(device)
    hidden = torch.rand(batch, length, generator=torch.Generator().manual_seed(2)).to(device) < 0.4
    for title, labels, causal in (("mlm40", torch.where(hidden, ids, -100), False), ("clm", ids, True)):
        # One model for each precision, since `PretrainingModel` changes the model that it gets.
        ways = {
            bf16: PretrainingModel(random_model(size, length).to(device), precision="bf16-autocast" if bf16 else "fp32")
            for bf16 in (True, False)
        }

        def loss(
            bf16: bool, labels: Tensor = labels, causal: bool = causal, ways: dict[bool, PretrainingModel] = ways
        ) -> Tensor:
            return ways[bf16](ids, labels, causal) / int((labels != -100).sum())

        yield Work(title, nn.ModuleList(ways.values()), loss, ids.numel())


def finetuning(size: str, length: int, batch: int, device: torch.device) -> Iterator[Work]:
    """Packed sequences of 8 to `length` tokens, with a classifier on their mean."""
    lengths = torch.randint(8, length + 1, (batch,), generator=torch.Generator().manual_seed(3)).tolist()
    model = random_model(size, length).base_model.to(device)
    use_attention(model)
    head = nn.Linear(model.config.hidden_size, 3).to(device)
    packing = Packing.of(lengths, device)
    ids = torch.randint(4, VOCABULARY, (1, packing.padded_tokens), generator=torch.Generator().manual_seed(4)).to(
        device
    )
    for title, causal in (("packed, both directions", False), ("packed, causal", True)):

        def loss(bf16: bool, causal: bool = causal) -> Tensor:
            with autocast(device, bf16):
                hidden = encode(model, ids, packing, causal=causal)
                return head(pool(hidden, packing, "mean")).float().square().mean()

        yield Work(title, model, loss, packing.tokens)


def gradients(work: Work, *, bf16: bool) -> tuple[float, Tensor]:
    """The loss of a step and all its gradients as one vector, float64 on the CPU."""
    work.model.zero_grad()
    loss = work.loss(bf16)
    loss.backward()
    parts = [p.grad.double().cpu().flatten() for p in work.model.parameters() if p.grad is not None]
    return float(loss), torch.cat(parts)


def speed(work: Work, device: torch.device) -> float:
    """Tokens a second in bf16, by the median step."""
    seconds = []
    for step in range(WARM + TIMED):
        work.model.zero_grad()
        backend_of(device).synchronize()
        started = time.perf_counter()
        work.loss(True).backward()
        backend_of(device).synchronize()
        if step >= WARM:
            seconds.append(time.perf_counter() - started)
    return work.tokens / statistics.median(seconds)


def rows(work: Work, device: torch.device) -> Iterator[str]:
    """Lines of the table, a backend and precision each."""
    with chosen("reference"):
        exact_loss, exact = gradients(work, bf16=False)
    for name in backends_of(device):
        with chosen(name):
            rate = speed(work, device)
            by_precision = {}
            for bf16 in (False, True):
                loss, vector = gradients(work, bf16=bf16)
                by_precision[bf16] = abs(loss / exact_loss - 1), float((vector - exact).norm() / exact.norm())
        distances = " | ".join(f"{loss:.1e} | {gradient:.1e}" for loss, gradient in by_precision.values())
        yield f"| {work.title} | {name} | {distances} | {rate:,.0f} |"


def compare(part: str, size: str, length: int, batch: int, write: bool) -> None:
    """Compares the backends of this machine's GPU, or of its CPU where there is none."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    size, length, batch = (
        size or ("210m" if gpu else "18m"),
        length or (1024 if gpu else 256),
        batch or (16 if gpu else 8),
    )
    works = {"pretraining": pretraining, "finetuning": finetuning}[part](size, length, batch, device)
    head = [
        f"`python -m benchmarks.gpu {part}` on {backend_of(device).title()}, torch {torch.__version__}: {size}, {batch} sequences of up to "
        f"{length} tokens, forward and backward. Relative distance of the loss and of all gradients from `reference` in fp32.",
        "",
        "| work | backend | fp32: loss | gradients | bf16: loss | gradients | tokens/s (bf16) |",
        "|---|---|---|---|---|---|---|",
    ]
    lines = head + [row for work in works for row in rows(work, device)]
    print("\n".join(lines), flush=True)
    if write:
        write_section(f"Backends: {part}", lines)


def steps(size: str, length: int, batch: int, write: bool) -> None:
    """Times whole steps, ours and Trainer's."""
    gpu = torch.cuda.is_available()
    utilisation.main(
        [size or ("610m" if gpu else "1m")], ["blocks", "trainer"], "joined", length=length or (2048 if gpu else 128),
        sequences=batch or (16 if gpu else 2), write=write,
    )  # fmt: skip


def main(
    parts: Annotated[list[str] | None, typer.Argument(help=f"{', '.join(PARTS)}; cells' only with --data.")] = None,
    size: Annotated[
        str, typer.Option(help="A name of mlmclm.models.sizes; 210m on a GPU (steps: 610m), small on a CPU.")
    ] = "",
    length: Annotated[int, typer.Option(help="Tokens of a sequence, at most; not of cells.")] = 0,
    batch: Annotated[int, typer.Option(help="Sequences of a step, or of a micro-batch of `steps`; not of cells.")] = 0,
    data: Annotated[Path | None, typer.Option(help="Folder with enwiki2015/, sst2/ and conll2003/, for cells.")] = None,
    write: Annotated[bool, typer.Option("--write", help="Write the tables to benchmarks/RESULTS.md.")] = False,
) -> None:
    """Runs the parts one after the other."""
    chosen = parts or [part for part in PARTS if data or part not in CELLS]
    if wrong := set(chosen) - set(PARTS):
        raise typer.BadParameter(f"no {', '.join(sorted(wrong))}; there are {', '.join(PARTS)}")
    gpu = torch.cuda.is_available()
    title = f"{backend_of('cuda' if gpu else 'cpu').title()}, torch {torch.__version__}"
    for part in chosen:
        if part == "steps":
            steps(size, length, batch, write)
        elif part == "study":
            gpu_study.twice(title, write)
        elif part == "fitting":
            gpu_study.fitting(title, size or ("610m" if gpu else "1m"), write, gpu=gpu)
        elif part not in CELLS:
            compare(part, size, length, batch, write)
        elif data is None:
            raise typer.BadParameter(f"{part} needs --data")
        else:
            of_cells = size or ("210m" if gpu else cells.SIZE)
            share, store = 1 / AT_ONCE if gpu else 0.0, Path(f"store-cells-{of_cells}")
            cells.main(data, part, trial=not gpu, store=store, size=of_cells, gpu_share=share, write=write)


if __name__ == "__main__":
    typer.run(main)

"""Training steps on a GPU beside Hugging Face's Trainer, and the share of the GPU's peak that they reach.

    python -m benchmarks.utilisation --size 610m            on a GPU; with --write, into benchmarks/RESULTS.md

A step is that of one worker: micro-batches of blocks of 2,048 tokens forward and backward, clipping and AdamW, with fp32 weights, in
bf16 autocast and with a bf16 residual stream as well. `blocks` are the backend's kernels, `compiled` torch.compile of transformers'
layers, `Trainer` stock transformers. Weights and tokens are random: speed does not depend on them. Model FLOPs are divided by the
published peak of dense bf16 products, as in `benchmarks.roofline`.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor
from transformers import PreTrainedConfig

from benchmarks.results import write_section
from benchmarks.traffic import LABELLED, configuration
from mlmclm.backends.choice import backend_of
from mlmclm.backends.optimizers.optimizer import OPTIMIZERS, Hyperparameters
from mlmclm.backends.packing import Packing
from mlmclm.models.architectures import ARCHITECTURES
from mlmclm.models.build import PretrainingModel
from mlmclm.models.sizes import PUBLISHED_VOCABULARY, SIZES, training_flops
from mlmclm.plans.devices import published_device

WARM, TIMED = 2, 4
"""Steps that don't count, and those that do."""
DOCUMENTS = 4
"""Documents of a block where they are isolated."""
WAYS = ("blocks", "compiled", "trainer")


class Setting(NamedTuple):
    """Model, objective and portions of a measured step."""

    size: str
    causal: bool
    isolated: bool
    length: int
    sequences: int
    """Number of sequences in a micro-batch."""
    micro_batches: int
    precision: str = "bf16-autocast"
    """Precision of `blocks` and `compiled`, as `Recipe.precision` names it."""

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.micro_batches * self.sequences * self.length

    @property
    def configuration(self) -> PreTrainedConfig:
        """The size with its published vocabulary."""
        return configuration(SIZES[self.size], SIZES[self.size].layers, self.length)


def steps(run: Callable[[], None], device: torch.device) -> list[float]:
    """Return the seconds of the steps after warm-up; the host waits for the device before and after each."""
    taken = []
    for number in range(WARM + TIMED):
        backend_of(device).synchronize()
        started = time.perf_counter()
        run()
        backend_of(device).synchronize()
        if number >= WARM:
            taken.append(time.perf_counter() - started)
    return taken


def ours(setting: Setting, device: torch.device, *, compiled: bool) -> list[float]:
    """Seconds of this project's steps, without DeepSpeed."""
    with device:
        network = ARCHITECTURES[SIZES[setting.size].architecture].model(setting.configuration)
    model = PretrainingModel(network, precision=setting.precision, compiled=compiled)
    settings = Hyperparameters(0.9, 0.95, 1e-8, 0.1, 1e-4)
    optimiser = backend_of(device).optimizer(OPTIMIZERS["adamw"], model.parameters(), settings)
    shape = setting.sequences, setting.length
    ids = torch.randint(4, network.config.vocab_size, shape, device=device)
    hidden = torch.rand(shape, device=device) < (1.0 if setting.causal else LABELLED)
    labels = torch.where(hidden, ids, -100)
    where = hidden.flatten().nonzero().flatten()
    packing = None
    if setting.isolated:
        packing = Packing.of([setting.length // DOCUMENTS] * (DOCUMENTS * setting.sequences), device, fine=True)

    def run() -> None:
        for _ in range(setting.micro_batches):
            loss: Tensor = model(ids, labels, setting.causal, packing, where=where)
            (loss / (len(where) * setting.micro_batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()

    return steps(run, device)


def trainer(setting: Setting, device: torch.device) -> list[float]:
    """Seconds of the steps of Hugging Face's Trainer with torch's attention, its optimiser fused."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    config = setting.configuration
    kind: Any = ARCHITECTURES[SIZES[setting.size].architecture].model
    if setting.causal:  # EuroBERT's layers are Llama's
        config, kind = LlamaConfig(**{**config.to_dict(), "model_type": "llama"}), LlamaForCausalLM
    with device:
        model = kind(config)
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range((WARM + TIMED) * setting.micro_batches * setting.sequences):
        ids = torch.randint(4, config.vocab_size, (setting.length,), generator=generator)
        hidden = torch.rand(setting.length, generator=generator) < (1.0 if setting.causal else LABELLED)
        rows.append({"input_ids": ids, "labels": torch.where(hidden, ids, -100)})
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            backend_of(device).synchronize()
            times.append(time.perf_counter())

    with tempfile.TemporaryDirectory(prefix="mlmclm-benchmark-") as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=setting.sequences, gradient_accumulation_steps=setting.micro_batches,
            max_steps=WARM + TIMED, bf16=True, use_cpu=device.type == "cpu", report_to=[], save_strategy="no",
            logging_steps=10**6, adam_beta2=0.95, weight_decay=0.1, disable_tqdm=True, optim="adamw_torch_fused",
        )  # fmt: skip
        Trainer(model, arguments, train_dataset=rows, callbacks=[Clock()]).train()
    return [after - before for before, after in zip(times[WARM - 1 :], times[WARM:], strict=False)]


def measured(setting: Setting, way: str, device: torch.device) -> tuple[Setting, list[float], int]:
    """Return setting, seconds of steps, and peak memory; halve the micro-batch, and double their number, until it fits into memory."""
    while True:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        torch.compiler.reset()
        try:
            taken = trainer(setting, device) if way == "trainer" else ours(setting, device, compiled=way == "compiled")
            return setting, taken, backend_of(device).peak_memory()
        except torch.OutOfMemoryError:
            if setting.sequences == 1:
                raise
            setting = setting._replace(sequences=setting.sequences // 2, micro_batches=2 * setting.micro_batches)


def rows(setting: Setting, ways: list[str], device: torch.device) -> Iterator[str]:
    """Lines of the table, one for each way."""
    shape = SIZES[setting.size]
    labelled = setting.tokens if setting.causal else round(LABELLED * setting.tokens)
    flops = training_flops(
        shape, tokens=setting.tokens, labelled=labelled, length=setting.length // (DOCUMENTS if setting.isolated else 1),
        vocabulary=PUBLISHED_VOCABULARY[shape.architecture], causal=setting.causal,
    )  # fmt: skip
    gpu = published_device(backend_of(device).title())
    for way in ways:
        if way == "trainer" and (setting.isolated or (setting.causal and shape.architecture == "modernbert")):
            continue  # it isolates no documents, and transformers' ModernBERT is no causal model
        if way == "trainer" and setting.precision != "bf16-autocast":
            continue  # Trainer's residual stream is fp32
        taken, times, memory = measured(setting, way, device)
        second = statistics.median(times)
        yield (
            f"| {setting.size} | {'isolated' if setting.isolated else 'joined'} | {'CLM' if setting.causal else 'MLM 40 %'} | {way} "
            f"| {setting.precision} | {taken.sequences} | {setting.tokens / second:,.0f} | {f'{flops / second / gpu.peak:.1%}' if gpu else ''} "
            f"| {memory / 2**30:.1f} | {(max(times) - min(times)) / second:.1%} |"
        )


def main(
    size: Annotated[list[str], typer.Option(help="Names of mlmclm.models.sizes.")],
    way: Annotated[list[str] | None, typer.Option(help=", ".join(WAYS))] = None,
    documents: Annotated[str, typer.Option(help="joined, isolated, or both with a comma between.")] = "joined,isolated",
    objectives: Annotated[str, typer.Option(help="mlm40, clm, or both with a comma between.")] = "mlm40,clm",
    length: Annotated[int, typer.Option(help="Tokens of a block.")] = 2048,
    sequences: Annotated[
        int, typer.Option(help="Blocks of a micro-batch; halved where they don't fit into memory.")
    ] = 16,
    micro_batches: Annotated[int, typer.Option(help="Micro-batches of a step.")] = 4,
    precisions: Annotated[
        str, typer.Option(help="bf16-autocast, bf16-residual, or both with a comma between; not Trainer's.")
    ] = "bf16-autocast,bf16-residual",
    write: Annotated[bool, typer.Option("--write", help="Write the table to benchmarks/RESULTS.md.")] = False,
) -> None:
    """Time steps of this project and of its peer on this machine's GPU, or on its CPU where there is none."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lines = [
        f"`python -m benchmarks.utilisation {' '.join(f'--size {name}' for name in size)}` on {backend_of(device).title()}, torch {torch.__version__}. "
        f"Blocks of {length:,} tokens, {micro_batches} micro-batches of {sequences} (halved where memory doesn't hold them), AdamW; medians of {TIMED} steps.",
        "",
        "| size | documents | objective | by | precision | blocks at once | tokens/s | of the published peak | GiB | spread |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines[2:]), flush=True)
    for name in size:
        for kind, objective, precision in product(documents.split(","), objectives.split(","), precisions.split(",")):
            setting = Setting(name, objective == "clm", kind == "isolated", length, sequences, micro_batches, precision)
            for row in rows(setting, way or list(WAYS), device):
                lines.append(row)
                print(row, flush=True)
    if write:
        write_section("Utilisation of a GPU", lines)


if __name__ == "__main__":
    typer.run(main)

"""Pretraining beside Hugging Face's Trainer, in one run:  python -m benchmarks.pretraining

One model (8 layers x 512, vocabulary 32,768), 16 blocks of 512 tokens a step, bf16 autocast, two cores. Four ways to train it, each
in processes of its own, one after the other: Trainer with two threads; a bare loop of this project's model in one one-thread
process on half the batch; the same through Ray Train and DeepSpeed with one worker; and with two workers on the whole batch (ZeRO 1,
which on one machine's CPUs divides in common memory). All processes have the same environment, with the allocator's settings of
`mlmclm.cluster.worker_environment.worker_environment`, but for the number of threads.
Tokens are random: speed does not depend on them. Each way gives the seconds of its steps after the first ones. All ways are run once,
then all again, ROUNDS times: the speed of a shared machine drifts, so what is compared is compared within a round. Two figures of a
round: of its median step, and of the mean of its steps, in which is also what other tenants of the machine take now and then.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.profiles import ATTENTION, LOGITS, LOOPS, WEIGHTS, own_ranges
from benchmarks.results import machine, matrix_peak, write_section
from mlmclm.cluster.worker_environment import worker_environment
from mlmclm.corpora.blocks import Blocks, Shard
from mlmclm.corpora.prepared_corpus import PreparedCorpus
from mlmclm.corpora.shelf import Shelf
from mlmclm.models.sizes import SIZES, training_flops
from mlmclm.objectives.corruption import Corruption
from mlmclm.objectives.mlm import Masked
from mlmclm.objectives.objective import parse_objective
from mlmclm.plans.names import parse_name
from mlmclm.plans.recipe import Recipe
from mlmclm.plans.stages import make_plan, study_fingerprint

SIZE = "32m"
VOCABULARY = 32_768
LENGTH = 512
BATCH = 16
WAYS = ("trainer", "bare", "one", "two")
WORKERS = {"one": 1, "two": 2}
BATCHES = {"trainer": BATCH, "bare": BATCH // 2, "one": BATCH // 2, "two": BATCH}
STEPS = {"trainer": 12, "bare": 24, "one": 40, "two": 40}
WARM = {"trainer": 2, "bare": 2, "one": 10, "two": 10}
"""Steps that don't count; of a stage, those until its first look at the losses."""
PROFILED = 4
ROUNDS = 3


def corpus(folder: Path, length: int = LENGTH) -> PreparedCorpus:
    """Random tokens as a prepared corpus of blocks of a length."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<mask>", *(f"w{number}" for number in range(VOCABULARY - 4))]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "<pad>")),
        pad_token="<pad>", bos_token="<s>", eos_token="</s>", mask_token="<mask>",
    )  # fmt: skip
    tokenizer.save_pretrained(str(folder / "tokenizer"))
    chance = np.random.default_rng(0)
    parts = []
    for name, blocks in (("train", 2048), ("validation", BATCH)):
        content = chance.integers(4, VOCABULARY, (blocks, length), dtype=np.uint16).tobytes()
        (folder / f"{name}.bin").write_bytes(content)
        shard = Shard(f"{name}.bin", blocks, hashlib.sha256(content).hexdigest())
        parts.append(Blocks(Shelf(str(folder)), [shard], length, "<u2"))
    train, validation = parts
    return PreparedCorpus(
        "benchmark", folder, folder / "tokenizer", "benchmark", length, train, validation, 1, 2048 * length, VOCABULARY
    )


def trainer(folder: Path, objective: str) -> list[float]:
    """Seconds of the steps of Hugging Face's Trainer, two threads."""
    import torch
    from transformers import (
        DataCollatorForLanguageModeling,
        EuroBertForMaskedLM,
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from mlmclm.models.build import build_model, load_prepared_tokenizer, model_config

    prepared, parsed = corpus(folder), parse_objective(objective, where="benchmark")
    tokenizer = load_prepared_tokenizer(prepared.tokenizer)
    shape = model_config(SIZE, tokenizer, LENGTH)
    model: Any
    if parsed.causal:
        model = LlamaForCausalLM(LlamaConfig(**{**shape.to_dict(), "model_type": "llama"}))
    else:
        model = build_model(shape, 0)
        assert isinstance(model, EuroBertForMaskedLM)
    rows = [{"input_ids": torch.from_numpy(row)} for row in prepared.train.take(np.arange(BATCH * STEPS["trainer"]))]
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

    arguments = TrainingArguments(
        str(folder / "trainer"), per_device_train_batch_size=BATCH, max_steps=STEPS["trainer"], bf16=True, use_cpu=True,
        report_to=[], save_strategy="no", logging_steps=10**6, adam_beta2=0.95, weight_decay=0.1, disable_tqdm=True,
    )  # fmt: skip
    collator = DataCollatorForLanguageModeling(
        tokenizer,
        mlm=isinstance(parsed, Masked),
        mlm_probability=parsed.mask_percent / 100 if isinstance(parsed, Masked) else None,
    )
    Trainer(model, arguments, collator, rows, callbacks=[Clock()]).train()
    return np.diff(times).tolist()


def bare_step(folder: Path, objective: str) -> Callable[[int], None]:
    """A step of this project's model in a plain loop on half the batch."""
    import torch

    from mlmclm.corpora.tokenizer import vocabulary
    from mlmclm.models.build import PretrainingModel, build_model, load_prepared_tokenizer, model_config
    from mlmclm.pretraining.collator import Collator

    prepared, parsed = corpus(folder), parse_objective(objective, where="benchmark")
    tokenizer = load_prepared_tokenizer(prepared.tokenizer)
    model = PretrainingModel(build_model(model_config(SIZE, tokenizer, LENGTH), 0), precision="bf16-autocast")
    label = Collator(parsed, vocabulary(prepared.tokenizer), Corruption(), 0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    rows = np.arange(BATCH // 2)

    def step(number: int) -> None:
        taken = prepared.train.take(rows + number * len(rows))
        ids, labels = (torch.from_numpy(part) for part in label(taken, rows=rows, step=number))
        loss = model(ids, labels, parsed.causal) / int((labels != -100).sum())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()

    return step


def bare(folder: Path, objective: str) -> list[float]:
    """Seconds of each `bare_step`, one thread."""
    step, times = bare_step(folder, objective), [time.perf_counter()]
    for number in range(STEPS["bare"]):
        step(number)
        times.append(time.perf_counter())
    return np.diff(times).tolist()


def profile(folder: Path, objective: str) -> list[tuple[str, float]]:
    """Shares of the time of `bare_step` by kind of work, the largest first."""
    import torch

    step = bare_step(folder, objective)
    for number in range(PROFILED):
        step(number)
    with own_ranges(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for number in range(PROFILED, 2 * PROFILED):
            step(number)
    kinds = {
        "aten::mm": "other products (oneDNN)", "aten::bmm": "other products (oneDNN)", "aten::_fused_adamw_": "AdamW",
        "aten::linalg_vector_norm": "clipping", "aten::mul_": "clipping", "aten::copy_": "copies and casts",
        "aten::cat": "copies and casts",
    }  # fmt: skip
    times: dict[str, float] = {}
    for event in profiler.key_averages():
        kind = event.key if event.key in (ATTENTION, WEIGHTS, LOGITS, LOOPS) else kinds.get(event.key, "other")
        times[kind] = times.get(kind, 0.0) + event.self_cpu_time_total
    total = sum(times.values())
    return sorted(((kind, part / total) for kind, part in times.items()), key=lambda item: -item[1])


def stage(folder: Path, objective: str, way: str) -> tuple[list[float], float]:
    """Seconds of the steps of a Ray Train and DeepSpeed run, and the share of the last ones spent waiting for data."""
    from mlmclm.cluster.ray_cluster import prepare_environment, ray_session
    from mlmclm.launches.run_stage import run_stage

    prepared, workers = corpus(folder), WORKERS[way]
    recipe = Recipe(
        block_length=LENGTH, batch=BATCHES[way], peak_learning_rate=1e-4, warmup_steps=2, decay_steps=2,
        workers=workers, checkpoint_every=10**6, evaluate_every=10**6, evaluation_blocks=2, max_failures=0,
    )  # fmt: skip
    mark = study_fingerprint(recipe, prepared.key, VOCABULARY)
    plan = make_plan([parse_name(f"{SIZE}-{objective}-{STEPS[way]}")], recipe)
    seen: list[dict[str, Any]] = []
    prepare_environment()
    with ray_session(folder / "store", num_cpus=workers):
        run_stage(
            plan.stages[0], store=folder / "store", corpus=prepared, recipe=recipe, fingerprint=mark,
            device="cpu", observer=seen.extend,
        )  # fmt: skip
    steps = [record for record in seen if "step_seconds" in record]
    return [record["step_seconds"] for record in steps], steps[-1]["data_wait"]


class Measured(NamedTuple):
    """The measurements of one objective."""

    steps: dict[str, list[list[float]]]
    """Seconds of the steps after warm-up, by way and round."""
    wait: float
    """Share of a step that two workers spend waiting for data, the median of the rounds."""
    peak: float
    """FLOP/s of the best matrix product."""

    def speeds(self, of: Callable[[list[float]], float]) -> dict[str, list[float]]:
        """Return the tokens a second of each way in each round; `of` gives a round's seconds for a step, such as the median."""
        return {way: [BATCHES[way] * LENGTH / of(steps) for steps in rounds] for way, rounds in self.steps.items()}


def measure(objective: str) -> Measured:
    """Run all ways, `ROUNDS` times."""
    steps: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    waits, peak = [], 0.0
    for number in range(ROUNDS):
        peak = max(peak, matrix_peak())
        for way in WAYS:
            seconds, *wait = run_apart(way, objective)
            steps[way].append(seconds[WARM[way] :])
            waits += wait if way == "two" else []
            median, mean = (BATCHES[way] * LENGTH / of(steps[way][-1]) for of in (statistics.median, statistics.mean))
            print(
                f"{objective} {way}: {median:,.0f} tokens/s by the median step, {mean:,.0f} by all (round {number + 1} of {ROUNDS})",
                flush=True,
            )
    return Measured(steps, statistics.median(waits), peak)


def ratios(speeds: dict[str, list[float]], way: str, other: str) -> list[float]:
    """The ratio of two ways' speeds in each round."""
    return [mine / peers for mine, peers in zip(speeds[way], speeds[other], strict=True)]


def spread(values: list[float], form: str) -> str:
    """Return the median, with minimum and maximum in brackets."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def environment(way: str) -> dict[str, str]:
    """Return the variables of one way's process; only the number of threads differs between ways."""
    threads = "2" if way == "trainer" else "1"
    return {**worker_environment(), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}


def run_apart(way: str, objective: str) -> list[Any]:
    """Run one way of training in its own process, and return its answer."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.pretraining", way, objective],
        env={**os.environ, **environment(way)}, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return list(json.loads(done.stdout.strip().splitlines()[-1]))


def main() -> None:
    """Measure everything, and write the section of RESULTS.md."""
    measured = {objective: measure(objective) for objective in ("mlm40", "clm")}
    peak = max(results.peak for results in measured.values())
    lines = [
        f"Command: `python -m benchmarks.pretraining`. Machine: {machine()}; matrix peak {peak / 1e12:.2f} TFLOP/s with two threads",
        "(the best of bf16 products of 2,048 to 4,096 rows, measured in each round).",
        f"Model: 8 layers x 512, vocabulary {VOCABULARY:,}, {BATCH} x {LENGTH} tokens a step, bf16 autocast. Tokens a second, medians of",
        f"{ROUNDS} rounds (least to most), ratios taken within a round; by the median step of a round, and by the mean of all its steps.",
        "",
        "| objective | by | Trainer, 2 threads | bare loop, 1 thread | Ray + DeepSpeed, 1 worker | 2 workers | over Trainer "
        "| Ray + DeepSpeed cost | 2 over 1 | data wait | share of peak |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for objective, results in measured.items():
        tokens = BATCH * LENGTH
        labelled = round(tokens * (0.4 if objective == "mlm40" else (LENGTH - 1) / LENGTH))
        flops = training_flops(
            SIZES[SIZE],
            tokens=tokens,
            labelled=labelled,
            length=LENGTH,
            vocabulary=VOCABULARY,
            causal=objective == "clm",
        )
        for name, of in (("median step", statistics.median), ("mean step", statistics.mean)):
            speeds = results.speeds(of)
            two = statistics.median(speeds["two"])
            costs = [1 - ratio for ratio in ratios(speeds, "one", "bare")]
            lines.append(
                f"| {objective} | {name} | {' | '.join(spread(speeds[way], ',.0f') for way in WAYS)} "
                f"| {spread(ratios(speeds, 'two', 'trainer'), '.2f')} | {spread(costs, '.1%')} | {spread(ratios(speeds, 'two', 'one'), '.2f')} "
                f"| {results.wait:.2%} | {two * flops / tokens / peak:.0%} |"
            )
    lines += [
        "",
        "All processes have the allocator's settings of `mlmclm.cluster.worker_environment.worker_environment`.",
        "FLOPs are the model's: 6 a weight and token in the blocks, 6 a weight and labelled token in the LM head, attention as",
        "`mlmclm.models.sizes.training_flops` counts it.",
    ]
    shares = [run_apart("profile", objective) for objective in ("mlm40", "clm")]
    causal = dict(shares[1])
    lines += [
        "",
        "Where the time of a step of the bare loop goes (torch's profiler):",
        "",
        "| work | mlm40 | clm |",
        "|---|---|---|",
        *(f"| {kind} | {share:.0%} | {causal.get(kind, 0):.0%} |" for kind, share in shares[0]),
    ]
    write_section("Pretraining", lines)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        with tempfile.TemporaryDirectory(prefix="mlmclm-benchmark-") as place:
            way, objective = sys.argv[1:]
            answer: list[Any]
            if way in WORKERS:
                answer = list(stage(Path(place), objective, way))
            elif way == "profile":
                answer = profile(Path(place), objective)
            else:
                answer = [{"trainer": trainer, "bare": bare}[way](Path(place), objective)]
        print(json.dumps(answer))

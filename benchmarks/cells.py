"""Cells of a sweep an hour, beside Hugging Face's Trainer:  python -m benchmarks.cells --data FOLDER

The grid is 6 learning rates x 2 seeds of SST-2 and CoNLL-2003, fine-tuned from one EuroBERT (6 layers x 256, vocabulary 16,384, random
weights) for 300 steps of 32, in bf16 autocast with fp32 weights, and evaluated on validation and test at the end; two cores. Three ways:

    sweep      the engine of `mlmclm sweep`: Ray Tune with two one-thread workers, the whole grid
    actors     Trainer in two reused one-thread Ray Tune actors (`benchmarks.cells_trainer`), the cells of two rates
    processes  Trainer in a process a cell, two threads, the same cells

The sweep's time is that of its process from start to end, with imports, tokenising and Ray. The peers' data are tokenised before.
`profile` runs one cell of each task under torch's profiler, for the shares of training's time; not on a GPU. FOLDER holds enwiki2015/ (the
tokenizer is trained on it), sst2/ and conll2003/ as Parquet. What was measured is kept in --store: a part that was interrupted is measured
again, a finished one (of `processes` each cell) is not. The section of RESULTS.md is written when all parts are there.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import typer

from benchmarks.profiles import ATTENTION, LOGITS, LOOPS, WEIGHTS, own_ranges, ranged
from benchmarks.results import machine, write_section
from mlmclm.cluster.worker_environment import worker_environment
from mlmclm.storage.files import read_json, whole_folder, write_json

PARTS = ("sweep", "actors", "processes", "profile")
TASKS = {"sst2": "accuracy", "conll2003": "f1"}
"""Tasks, each with the metric that is compared."""
SIZE = "7m"
VOCABULARY = 16_384
LENGTH = 256
STEPS = 300
RATES = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 3e-3)
SEEDS = (0, 1)
PEER_RATES = RATES[2:4]
"""The learning rates at which the peers are measured."""
PROFILED_STEPS = 20
"""Steps of a profiled cell; the profiler's events of 300 take 20 GiB."""
CLASSES = {
    "matrix products": ("aten::mm", "aten::bmm", "aten::addmm", "aten::linear", "aten::mkldnn_linear", "aten::_addmm_activation",
        ATTENTION, WEIGHTS),
    "optimizer": ("optimizer",),
    "data": ("data",),
    "element-wise loops": (LOOPS, LOGITS),
}  # fmt: skip
"""Classes of the profile, by the name of an event or of the nearest range around it. Attention by tiles includes its softmax."""


@dataclass(frozen=True)
class Work:
    """Folders and settings of the measurement; a worker process gets them as JSON."""

    place: Path
    data: Path
    trial: bool = False
    """A few steps and sentences, at the peers' rates only, to try the command out."""
    size: str = SIZE
    gpu_share: float = 0.0
    """Share of a GPU that a cell takes; with 0 it takes one of two cores."""

    @property
    def steps(self) -> int:
        return 3 if self.trial else STEPS

    @property
    def rates(self) -> tuple[float, ...]:
        return PEER_RATES if self.trial else RATES

    @property
    def model(self) -> Path:
        return self.place / "model"

    @property
    def splits(self) -> Path:
        """The tasks' data as `load_task` gives them: validation is held out of SST-2's train."""
        return self.place / "splits"

    def protocol(self, steps: int | None = None) -> dict[str, Any]:
        """Return the protocol, which the peers read too."""
        from mlmclm.finetuning.protocol import Protocol

        # Tags at first tokens and no dropout before the tagger are what transformers' example and EuroBERT's class do.
        changes = {
            "max_steps": steps or self.steps, "max_length": LENGTH, "label_sub_tokens": "first", "head_dropout": 0.0,
        }  # fmt: skip
        return Protocol.model_validate({**changes, "max_evaluation_examples": 60 if self.trial else None}).model_dump()

    def described(self) -> str:
        """Return this as JSON, for a worker process."""
        return json.dumps({**asdict(self), "place": str(self.place), "data": str(self.data)})


def prepare(work: Work) -> None:
    """Write the model, and the tasks' splits, tokenised for the peers."""
    from benchmarks.cells_trainer import encoded
    from mlmclm.corpora.corpus_config import CorpusConfig, TokenizerConfig
    from mlmclm.corpora.prepare_corpus import prepare_corpus
    from mlmclm.models.architectures import weights_of
    from mlmclm.models.build import build_model, load_prepared_tokenizer, model_config
    from mlmclm.models.exported_folder import export_folder
    from mlmclm.tasks.declared_tasks import get_task
    from mlmclm.tasks.load import load_task

    if not work.model.is_dir():
        corpus = prepare_corpus(
            CorpusConfig(source="enwiki2015", max_documents=600), TokenizerConfig(train_vocab_size=VOCABULARY),
            block_length=LENGTH, store=work.place / "corpus", data_root=work.data,
        )  # fmt: skip
        config = model_config(work.size, load_prepared_tokenizer(corpus.tokenizer), LENGTH)
        export_folder(work.model, weights_of(build_model(config, 0)), config, corpus.tokenizer, card="")
    for task in TASKS:
        if not (work.splits / task).is_dir():
            import pyarrow.parquet as parquet

            loaded = load_task(get_task(task), store=work.place / "corpus", data_root=work.data)
            with whole_folder(work.splits / task) as folder:
                for split in ("train", "validation", "test"):
                    parquet.write_table(getattr(loaded, split), folder / f"{split}.parquet")
                write_json(folder / "labels.json", loaded.label_names)
        encoded(task, work.splits, work.model, LENGTH)


def cells_of(work: Work, store: Path, steps: int | None = None) -> list[Any]:
    """Return the grid's cells in a sweep's order; tokenise data that is not yet tokenised."""
    from mlmclm.models.folder import weights_hash
    from mlmclm.sweeps.cells import SweepModel, expand
    from mlmclm.sweeps.space import Space
    from mlmclm.tasks.prepare_task import prepare_task

    values = {
        "tasks": list(TASKS),
        "learning_rates": work.rates,
        "seeds": list(SEEDS),
        "protocol": work.protocol(steps),
    }
    space = Space.model_validate(values)
    fingerprints = {
        task: prepare_task(task, work.model, space.protocol_for(task), store, work.data).task_data for task in TASKS
    }
    return expand(space, [SweepModel(work.size, work.model, weights_hash(work.model))], fingerprints)


def sweep(work: Work) -> dict[str, Any]:
    """Run the whole grid by this project's engine, in an empty store."""
    from mlmclm.cluster.ray_cluster import ray_session
    from mlmclm.sweeps.run_sweep import run_sweep
    from mlmclm.sweeps.sweep_options import SweepOptions

    store = work.place / "store"
    shutil.rmtree(store, ignore_errors=True)
    session = partial(ray_session, store, num_cpus=None if work.gpu_share else 2)
    options = SweepOptions(
        store=store, data_root=work.data, session=session, gpus_per_cell=work.gpu_share, on_result=lambda result: print(
            f"{result['task']} {result['learning_rate']:g}: {result['cost']['seconds']:.1f} s", file=sys.stderr, flush=True,
        ),
    )  # fmt: skip
    outcome = run_sweep(cells_of(work, store), options)
    outcome.check()
    return {"cells": [summary(result) for result in outcome.results]}


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """A cell's result in the form of the peers'."""
    metric, scores = TASKS[result["task"]], result["scores"]
    return {
        **{name: result[name] for name in ("task", "learning_rate", "seed", "tokens")},
        "scores": scores and {split: scores[split][metric] for split in ("validation", "test")},
        **{name: result["cost"][name] for name in ("start_up", "train", "evaluate")},
    }


def peer_cells(work: Work) -> list[dict[str, Any]]:
    """Return the cells that `cells_trainer` computes."""
    names = {task: read_json(work.splits / task / "labels.json") for task in TASKS}
    return [
        {"task": task, "names": names[task], "rate": rate, "seed": seed}
        for task in TASKS
        for rate in PEER_RATES
        for seed in SEEDS
    ]


def actors(work: Work) -> dict[str, Any]:
    """The peer's cells in reused actors."""
    from benchmarks.cells_trainer import run_actors

    return run_actors(peer_cells(work), work.splits, work.model, work.protocol(), work.gpu_share)


def process(work: Work, number: int) -> dict[str, Any]:
    """One of the peer's cells, in this process."""
    from benchmarks.cells_trainer import run_process

    return run_process(peer_cells(work)[number], work.splits, work.model, work.protocol())


def profile(work: Work) -> dict[str, Any]:
    """The shares of training's time by task and class (`CLASSES`), on one thread, and the loops' share of evaluation."""
    import torch

    from mlmclm.finetuning.run import run_cell

    torch.set_num_threads(1)
    store, cache, shares = work.place / "profile", dict[Any, Any](), dict[str, Any]()
    cells = cells_of(work, store, min(PROFILED_STEPS, work.steps))
    by_task = {cell.task: cell for cell in cells if cell.learning_rate == PEER_RATES[0]}
    for task, cell in by_task.items():
        for _ in range(2):  # the first fills caches
            measured: list[dict[str, float]] = []
            with profiled(measured.append):
                run_cell(cell, store=store, data_root=work.data, cache=cache)
        shares[task] = measured[0]
    return {"shares": shares}


@contextmanager
def profiled(tell: Callable[[dict[str, float]], None]) -> Iterator[None]:
    """Run torch's profiler over the calls of `train`, and pass the shares of its time by class to `tell`."""
    import torch
    from torch.profiler import ProfilerActivity

    from mlmclm.backends.packing import Packing
    from mlmclm.finetuning import loop, run

    def watched(encoder: Any, head: Any, family: Any, *arguments: Any, **named: Any) -> Any:
        with (
            patch.object(family, "batch", ranged("data", family.batch)),
            torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler,
        ):
            started = time.perf_counter()
            trained = yield from train(encoder, head, family, *arguments, **named)
            seconds = time.perf_counter() - started
        tell(by_class(profiler.events(), seconds))
        return trained

    def watched_optimizer(*arguments: Any) -> Any:
        optimizer = optimizer_for(*arguments)
        for name in ("norm", "step", "finish"):
            setattr(optimizer, name, ranged("optimizer", getattr(optimizer, name)))
        return optimizer

    train, optimizer_for = loop.fine_tune, loop.optimizer_for
    with ExitStack() as stack:
        stack.enter_context(patch.object(run, "fine_tune", watched))
        stack.enter_context(patch.object(loop, "optimizer_for", watched_optimizer))
        stack.enter_context(patch.object(Packing, "of", staticmethod(ranged("data", Packing.of))))
        stack.enter_context(own_ranges())
        yield


def by_class(events: Sequence[Any], seconds: float) -> dict[str, float]:
    """Return the shares of `seconds` by class; `rest` is torch's other operations and Python."""
    spent: Counter[str] = Counter()
    for event in events:
        above = event
        kind = None
        while above is not None and kind is None:
            kind = next((name for name, starts in CLASSES.items() if above.name.startswith(starts)), None)
            above = above.cpu_parent
        if kind is not None:
            spent[kind] += event.self_cpu_time_total / 1e6
    shares = {name: spent[name] / seconds for name in CLASSES}
    return {**shares, "rest": 1 - sum(shares.values())}


def measure(work: Work, part: str, number: int = 0) -> dict[str, Any]:
    """Run a part in its own process; return its answer, with the seconds from start to end."""
    # The peers get the allocator's settings of the sweep's workers. Otherwise they have their defaults, but for two threads a
    # process, and without Tune's tables.
    variables = {name: value for name, value in worker_environment().items() if name.startswith(("MALLOC_", "GLIBC_"))}
    if part in ("sweep", "profile"):
        variables = worker_environment() if part == "profile" else {}
    environment = {**os.environ, **variables, "HF_HUB_OFFLINE": "1"}
    threads = {"OMP_NUM_THREADS": "2"} if part == "processes" else {"RAY_AIR_NEW_OUTPUT": "0"}
    answer = work.place / "answer.json"
    answer.unlink(missing_ok=True)
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "benchmarks.cells", "--worker", part, str(number), work.described()], env={**environment, **threads}, check=True
    )  # fmt: skip
    return {**read_json(answer), "seconds": time.perf_counter() - started}


def worker(part: str, number: int, work: Work) -> None:
    """A part, in this process."""
    parts = {"sweep": sweep, "actors": actors, "profile": profile}
    write_json(work.place / "answer.json", process(work, number) if part == "processes" else parts[part](work))


def once(file: Path, measured: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the content of a file, which is measured and written first if the file is missing."""
    if not file.is_file():
        write_json(file, measured())
    return dict(read_json(file))


def difference(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], task: str, split: str) -> tuple[float, float]:
    """Return our score less theirs, mean over `PEER_RATES`, and half of its 95 % interval (Student's, pooled deviation)."""
    from scipy.stats import t as student

    gaps, squares, free, weight = [], 0.0, 0, 0.0
    for rate in PEER_RATES:
        groups = [
            [cell["scores"][split] for cell in cells if (cell["task"], cell["learning_rate"]) == (task, rate) and cell["scores"]]
            for cells in (ours, theirs)
        ]  # fmt: skip
        means = [sum(group) / len(group) for group in groups]
        gaps.append(means[0] - means[1])
        for group, mean in zip(groups, means, strict=True):
            squares += sum((score - mean) ** 2 for score in group)
            free += len(group) - 1
            weight += 1 / len(group)
    deviation = math.sqrt(squares / free)
    return sum(gaps) / len(gaps), float(student.ppf(0.975, free)) * deviation * math.sqrt(weight) / len(gaps)


def report(work: Work, answers: dict[str, Any]) -> list[str]:
    """The section of RESULTS.md."""
    grid = len(TASKS) * len(work.rates) * len(SEEDS)
    ours, reused, fresh = answers["sweep"], answers["actors"], answers["processes"]
    hours = {
        "sweep": ours["seconds"],
        # Its start once, then all cells at the pace of those that were measured.
        "actors": reused["seconds"] - reused["rest"] + reused["rest"] * grid / len(reused["cells"]),
        "processes": sum(cell["seconds"] for cell in fresh) * grid / len(fresh),
    }
    speed = {name: 3600 * grid / seconds for name, seconds in hours.items()}
    several = f"{round(1 / work.gpu_share)} on the GPU" if work.gpu_share else "two one-thread"
    share = f" --gpu-share {work.gpu_share:g}" if work.gpu_share else ""
    titles = {
        "sweep": f"`mlmclm sweep`: Ray Tune, workers: {several}",
        "actors": f"Trainer in reused Ray Tune actors: {several}",
        "processes": "Trainer, a process a cell, two threads",
    }
    measured = {"sweep": ours["cells"], "actors": reused["cells"], "processes": fresh}
    lines = [
        f"Command: `python -m benchmarks.cells --data FOLDER --size {work.size}{share}`. Machine: {machine(gpu=bool(work.gpu_share))}.",
        f"Grid: {len(work.rates)} learning rates x {len(SEEDS)} seeds of SST-2 and CoNLL-2003, {grid} cells; {work.size} with random weights,",
        f"vocabulary {VOCABULARY:,}; {work.steps} steps of 32, bf16 autocast, validation and test evaluated at the end. The sweep is timed from the",
        "start of its process to its end, imports, Ray and tokenising included, over the whole grid; the peers, whose data are tokenised before, over",
        f"{len(reused['cells'])} cells (rates {', '.join(f'{rate:g}' for rate in PEER_RATES)}), extrapolated to the grid by cell (the actors' start once).",
        "",
        "| | cells measured | s a cell | start-up | training | evaluation | cells an hour | sweep over it |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, title in titles.items():
        cells = measured[name]
        parts = [sum(cell[part] for cell in cells) / len(cells) for part in ("start_up", "train", "evaluate")]
        ratio = f"{speed['sweep'] / speed[name]:.2f}" if name != "sweep" else ""
        lines.append(
            f"| {title} | {len(cells)} | {hours[name] / grid:.1f} | "
            + " | ".join(f"{part:.1f}" for part in parts)
            + f" | {speed[name]:,.0f} | {ratio} |"
        )
    lines += [
        "",
        "Start-up, training and evaluation: seconds within a cell, on its one or two threads. Scores at the rates that all have, ours",
        "less the peer's, with the 95 % interval over seeds (Student's, one deviation for all rates and both sides):",
        "",
        "| task | split | less actors' | less processes' |",
        "|---|---|---|---|",
    ]
    for task in TASKS:
        for split in ("validation", "test"):
            gaps = [difference(ours["cells"], peer, task, split) for peer in (reused["cells"], fresh)]
            lines.append(f"| {task} | {split} | " + " | ".join(f"{gap:+.4f} ± {half:.4f}" for gap, half in gaps) + " |")
    if "profile" in answers:
        lines += ["", *shares_of(ours, answers["profile"]["shares"])]
    return lines


def shares_of(ours: dict[str, Any], profiled: dict[str, dict[str, float]]) -> list[str]:
    """Where the two workers' time goes: training's shares are those of the profile."""
    total = 2 * ours["seconds"]
    spent: defaultdict[str, float] = defaultdict(float)
    for cell in ours["cells"]:
        for kind, share in profiled[cell["task"]].items():
            spent[kind] += share * cell["train"]
        spent["evaluation"] += cell["evaluate"]
    spent["start-up"] = total - sum(spent.values())
    kinds = [*CLASSES, "rest", "evaluation", "start-up"]
    return [
        "Of the sweep's time on both cores (training divided as torch's profiler does for a cell of each task; *rest* is other operations and",
        "Python; *start-up* all that is no training or evaluation: imports, Ray, tokenising, Tune between cells, waiting for the last cell):",
        "",
        "| " + " | ".join(kinds) + " |",
        "|---" * len(kinds) + "|",
        "| " + " | ".join(f"{spent[kind] / total:.1%}" for kind in kinds) + " |",
    ]


def main(
    data: Annotated[Path, typer.Option(help="Folder with enwiki2015/, sst2/ and conll2003/.")],
    parts: Annotated[str, typer.Option(help="What to measure, with commas between; by default all.")] = "",
    trial: Annotated[bool, typer.Option("--trial", help="Few steps, cells and sentences, to try it out.")] = False,
    store: Annotated[Path, typer.Option(help="Where everything is kept.")] = Path("store-cells"),
    size: Annotated[str, typer.Option(help="A name of mlmclm.models.sizes.")] = SIZE,
    gpu_share: Annotated[float, typer.Option(help="Part of a GPU that a cell takes; 0: one of two cores.")] = 0.0,
    write: Annotated[bool, typer.Option("--write/--print", help="Write the section, or only print it.")] = True,
) -> None:
    """Measure the missing parts, and write the section of RESULTS.md when all are measured."""
    all_parts = [part for part in PARTS if part != "profile" or not gpu_share]
    chosen = parts.split(",") if parts else all_parts
    if wrong := set(chosen) - set(all_parts):
        raise typer.BadParameter(f"--parts: no {', '.join(sorted(wrong))}; there are {', '.join(all_parts)}")
    work = Work((store / ("trial" if trial else "grid")).resolve(), data.resolve(), trial, size, gpu_share)
    prepare(work)
    results: dict[str, Any] = {}
    for part in all_parts:
        numbers = range(len(peer_cells(work))) if part == "processes" else range(1)
        files = [work.place / "measured" / f"{part}-{number}.json" for number in numbers]
        if part in chosen:
            for number, file in zip(numbers, files, strict=True):
                answer = once(file, partial(measure, work, part, number))
                print(f"{part} {number + 1}/{len(files)}: {answer['seconds']:.0f} s", flush=True)
        if all(file.is_file() for file in files):
            answers = [read_json(file) for file in files]
            results[part] = answers if part == "processes" else answers[0]
    if missing := [part for part in all_parts if part not in results]:
        print(f"not measured yet: {', '.join(missing)}")
    elif trial or not write:
        print("\n".join(report(work, results)))
    else:
        write_section(f"Cells an hour{' on a GPU' if gpu_share else ''}", report(work, results))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        values = json.loads(sys.argv[4])
        work = Work(**{**values, "place": Path(values["place"]), "data": Path(values["data"])})
        worker(sys.argv[2], int(sys.argv[3]), work)
    else:
        typer.run(main)

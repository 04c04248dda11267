"""Training steps of this tree beside those of an earlier commit:  python -m benchmarks.against COMMIT

Two processes, one of each tree, take the same step in turn, so that both meet the same noise of the machine. A step is
forward, backward and AdamW of 18m over 8 sequences of 256 tokens on one thread, in bf16 autocast. The losses must be equal,
or the two trees don't compute the same.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

ROOT = Path(__file__).parents[1]
KINDS = ("mlm40", "clm")
SEQUENCES, LENGTH, VOCABULARY = 8, 256, 8192
ROUNDS = 6
"""Pairs of processes: several, as processes of the same tree differ in speed by the placement of their memory."""
WARM_UP = 3
"""Steps of each process that don't count."""


def steps() -> None:
    """Take a step for each kind that comes on standard input, and print its seconds and loss.

    Runs in the process of either tree, so it may call only what both have.
    """
    import torch

    from mlmclm.models.architectures import ARCHITECTURES
    from mlmclm.models.build import PretrainingModel, build_model
    from mlmclm.models.sizes import SIZES

    torch.set_num_threads(1)
    size, kind = SIZES["18m"], ARCHITECTURES["eurobert"].model
    shape = {
        "vocab_size": VOCABULARY, "hidden_size": size.hidden, "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers, "num_attention_heads": size.heads, "num_key_value_heads": size.key_value_heads,
        "max_position_embeddings": LENGTH, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "mask_token_id": 3,
        "tie_word_embeddings": False,
    }  # fmt: skip
    model = PretrainingModel(build_model(kind.config_class(**shape), 0), precision="bf16-autocast")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(4, VOCABULARY, (SEQUENCES, LENGTH), generator=random)
    labels = {"clm": ids, "mlm40": torch.where(torch.rand(ids.shape, generator=random) < 0.4, ids, -100)}
    # Training passes the positions of the labels, if the model of this tree takes them.
    takes = "where" in inspect.signature(model.forward).parameters
    where = {
        name: {"where": torch.nonzero(gold.flatten() != -100)[:, 0]} if takes else {} for name, gold in labels.items()
    }
    for line in sys.stdin:
        name = line.strip()
        began = time.perf_counter()
        loss = model(ids, labels[name], name == "clm", **where[name])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(time.perf_counter() - began, loss.item(), flush=True)


@contextmanager
def process(tree: Path) -> Iterator[subprocess.Popen[str]]:
    """Run `steps` with the package of a tree for the duration of the block."""
    with subprocess.Popen(
        [sys.executable, "-P", __file__, "steps"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(tree)},
    ) as started:  # fmt: skip
        yield started
        assert started.stdin is not None
        started.stdin.close()


def step(process: subprocess.Popen[str], kind: str) -> tuple[float, float]:
    """Return a step's seconds and loss."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{kind}\n")
    process.stdin.flush()
    seconds, loss = process.stdout.readline().split()
    return float(seconds), float(loss)


def main(
    commit: Annotated[str, typer.Argument(help="An earlier commit.")],
    pairs: Annotated[
        int, typer.Option(help=f"Pairs of steps for each objective and of each of {ROUNDS} pairs of processes.")
    ] = 30,
) -> None:
    """Compare the steps' times, and write the section."""
    from benchmarks.results import machine, write_section

    with tempfile.TemporaryDirectory() as place:
        tree = Path(place) / "tree"
        git = ("git", "-C", str(ROOT), "worktree")
        subprocess.run([*git, "add", "--quiet", "--detach", tree, commit], check=True)
        try:
            rows = list(measure(tree, pairs))
        finally:
            subprocess.run([*git, "remove", "--force", tree], check=True)
    write_section("Training steps beside an earlier commit's", [
        f"`python -m benchmarks.against {commit} --pairs {pairs}` on {machine()}. Time of a step over that of the commit (forward, backward and AdamW",
        f"of 18m, {SEQUENCES} sequences of {LENGTH} tokens, one thread), in turn: median over the steps of a pair of processes, mean of {ROUNDS} pairs, and",
        "its 95 % interval (bootstrap of the pairs of processes).",
        "", "| objective | ratio | interval | losses |", "|---|---|---|---|", *rows,
    ])  # fmt: skip


def measure(tree: Path, pairs: int) -> Iterator[str]:
    """Yield a row of the table for each kind."""
    random = np.random.default_rng(0)
    ratios: dict[str, list[float]] = {kind: [] for kind in KINDS}
    equal = dict.fromkeys(KINDS, 0)
    for _ in range(ROUNDS):
        with process(ROOT) as current, process(tree) as earlier:
            for kind in KINDS:
                for worker in (current, earlier) * WARM_UP:
                    step(worker, kind)
                for number in range(pairs):
                    order = (current, earlier) if number % 2 else (earlier, current)
                    taken = {worker: step(worker, kind) for worker in order}
                    ratios[kind].append(taken[current][0] / taken[earlier][0])
                    equal[kind] += taken[current][1] == taken[earlier][1]
    for kind, values in ratios.items():
        medians = np.median(np.reshape(values, (ROUNDS, pairs)), axis=1)
        means = random.choice(medians, (2000, ROUNDS)).mean(axis=1)
        low, high = np.percentile(means, [2.5, 97.5])
        row = f"| {kind} | {medians.mean():.3f} | {low:.3f} to {high:.3f} | {equal[kind]} of {len(values)} equal |"
        print(row, flush=True)
        yield row


if __name__ == "__main__":
    steps() if sys.argv[1:] == ["steps"] else typer.run(main)

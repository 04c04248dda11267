"""A whole study on this machine's GPU, or on its CPU where there is none: do two runs have the same bits, and what fits?

Both are parts of `benchmarks.gpu`. The study is the tests' own: three models by Ray Train and DeepSpeed, and 24 cells by Ray Tune.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks.results import write_section
from benchmarks.study_on_a_bucket import content_of

WIDE, NARROW = 8192, 64
"""Sequences of 32 tokens in a step of `fitting` on a GPU and on a CPU. No GPU holds 610m's activations of 262,144 tokens."""


def make_study(place: Path, recipe: dict[str, Any], **changes: Any) -> Path:
    """Write the tests' study with one deterministic worker and these changes of its recipe; return its file."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from small_study import write_study

    file = write_study(place, **changes)
    study = yaml.safe_load(file.read_text())
    study["recipe"] |= {"workers": 1, "deterministic": True, **recipe}
    file.write_text(yaml.safe_dump(study))
    space = yaml.safe_load((place / "space.yaml").read_text())
    space["protocol"]["deterministic"] = True
    (place / "space.yaml").write_text(yaml.safe_dump(space))
    return file


def run(command: str, file: Path, store: Path) -> tuple[float, str]:
    """Run `mlmclm COMMAND` in its own process; return its seconds and its output."""
    import small_study  # `make_study` has put its folder on sys.path

    began = time.perf_counter()
    words = (command, file, "--data", file.parent / "data", "--store", store)
    code, output, errors = small_study.run(*words, home=file.parent, timeout=3600)
    if code:
        raise RuntimeError(output[-2000:] + errors[-4000:])
    return time.perf_counter() - began, output + errors


def twice(title: str, write: bool) -> None:
    """Run the study in two stores, and compare states, scores and tables."""
    with tempfile.TemporaryDirectory() as temporary:
        file = make_study(Path(temporary), {})
        stores = [Path(temporary) / name for name in ("one", "two")]
        seconds = [run("study", file, store)[0] for store in stores]
        one, two = (content_of(store) for store in stores)
        lines = [
            f"`python -m benchmarks.gpu study` on {title}: three models by Ray Train and DeepSpeed, and 24 cells by Ray Tune, in two stores one after the "
            f"other, with `deterministic: true`. {seconds[0]:.0f} and {seconds[1]:.0f} s.",
            "",
            "| | in both | the same bits |",
            "|---|---|---|",
        ]
        for name in one:
            common = one[name].keys() & two[name].keys()
            same = sum(one[name][key] == two[name][key] for key in common)
            lines.append(f"| {name} | {len(common)} | {same} |")
    print("\n".join(lines), flush=True)
    if write:
        write_section("A whole study, twice", lines)


def fitting(title: str, size: str, write: bool, *, gpu: bool) -> None:
    """Train a few steps whose batch does not fit into a GPU at once, and print the micro-batch that the search chose."""
    batch = WIDE if gpu else NARROW
    recipe = {
        "batch": batch, "warmup_steps": 1, "decay_steps": 1, "checkpoint_every": 100, "evaluate_every": 100, "deterministic": False,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary:
        file = make_study(Path(temporary), recipe, models=[f"{size}-mlm40-4"], baseline=None)
        store = Path(temporary) / "store"
        seconds, said = run("pretrain", file, store)
        (state,) = store.glob("states/*/state.json")
        micro_batch = json.loads(state.read_text())["system"]["micro_batch"]
    line = (
        f"`python -m benchmarks.gpu fitting` on {title}: a worker trains {size} on {batch:,} sequences of 32 tokens a step, and takes {micro_batch:,} at "
        f"once; {said.count('at once don')} larger numbers were tried and did not fit. {seconds:.0f} s for 4 steps, from Ray's start on."
    )
    print(line, flush=True)
    if write:
        write_section("The micro-batch that fits", [line])

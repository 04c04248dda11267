"""Probe scores along training on real text:  python -m benchmarks.curves --data FOLDER [--size 1m] [--steps 2048] [--seeds 5]

The question of the study's data-efficiency figure (arXiv 2507.00994) at small scale: what CLM, MLM at 40 % and CLM followed by MLM
are worth after a quarter, a half and the whole of a budget. Every point is a model of its own, trained to its number of steps with
the decay of the learning rate at its end; steps before it are shared. FOLDER holds enwiki2015/, sst2/ and conll2003/ as Parquet.

It is one `mlmclm study`, so that it goes on where it was stopped: store, report and MLflow runs lie in --store. The figure is
benchmarks/curves.png, its numbers a section of RESULTS.md.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Hashable
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
import yaml

from benchmarks.results import machine, write_section

FIGURE = Path(__file__).with_name("curves.png")
SHARES = (8, 4, 2, 1)
"""Points are at the budget divided by these."""
RECIPES = {"CLM": "clm-{steps}", "MLM 40 %": "mlm40-{steps}", "CLM 25 %, then MLM 40 %": "clm-{quarter}-mlm40-{steps}"}
BLOCK, BATCH = 128, 32
PROBE = {
    "description": "The probe tasks, fine-tuned on all they have to train on, four learning rates.",
    "tasks": ["sst2", "conll2003"],
    "learning_rates": [5e-4, 1e-3, 2e-3, 4e-3],
    "protocol": {"batch_size": 16, "max_steps": 300, "max_length": 128, "stride": 32, "max_evaluation_examples": 1000},
    "cpus_per_cell": 1,
}
TASKS: list[str] = PROBE["tasks"]  # type: ignore[assignment]


def study(size: str, steps: int, space: Path) -> tuple[dict[str, object], dict[tuple[str, int], str]]:
    """Return the content of the study file, and the model's name by (recipe, steps)."""
    from mlmclm.plans.names import format_steps

    names = {
        (recipe, steps // share): f"{size}-"
        + form.format(steps=format_steps(steps // share), quarter=format_steps(steps // share // 4))
        for recipe, form in RECIPES.items()
        for share in SHARES
    }
    content: dict[str, object] = {
        "name": "curves",
        "models": [f"{size}-untrained", *names.values()],
        "baseline": f"{size}-untrained",
        "corpus": {"source": "enwiki2015", "max_tokens": steps * BATCH * BLOCK + 2**17},
        "tokenizer": {"train_vocab_size": 4096},
        "recipe": {
            "block_length": BLOCK, "batch": BATCH, "peak_learning_rate": 4e-3, "adam_eps": 1e-8,
            "warmup_steps": steps // 40, "decay_steps": steps // 20, "checkpoint_every": 500, "evaluate_every": 250,
            "evaluation_blocks": 192, "zero_stage": 0,
        },
        "space": str(space),
    }  # fmt: skip
    return content, names


def draw(points: pd.DataFrame, untrained: pd.Series, path: Path) -> None:
    """One panel a task: test score with its 95 % interval against pretraining tokens, the untrained model as a line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(TASKS), figsize=(5 * len(TASKS), 3.8), sharex=True)
    for axis, task in zip(axes, TASKS, strict=True):
        for recipe, group in points[points["task"] == task].groupby("recipe", sort=False):
            around = [group["score"] - group["score_low"], group["score_high"] - group["score"]]
            axis.errorbar(group["tokens"] / 1e6, group["score"], yerr=around, label=recipe, marker="o", capsize=3)
        axis.axhline(untrained[task], color="gray", linestyle=":", label="untrained")
        axis.set_xscale("log", base=2)
        budgets = sorted(set(points["tokens"] / 1e6))
        axis.set_xticks(budgets, [f"{budget:.1f}" for budget in budgets])
        axis.set_xlabel("pretraining tokens, millions")
        axis.set_title(task)
    axes[0].set_ylabel("test score at the best learning rate")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(
    data: Annotated[Path, typer.Option(help="Folder with enwiki2015/, sst2/ and conll2003/.")],
    size: Annotated[str, typer.Option(help="A size of mlmclm.")] = "1m",
    steps: Annotated[int, typer.Option(help="The budget, a multiple of 64; a step is 4,096 tokens.")] = 2048,
    seeds: Annotated[int, typer.Option(min=2, help="Fine-tuning runs of each learning rate.")] = 5,
    store: Annotated[Path, typer.Option(help="Where the study is kept.")] = Path("store-curves"),
) -> None:
    """Run the study, draw the figure, and write the section of RESULTS.md."""
    store.mkdir(parents=True, exist_ok=True)
    file, space = store / "curves.yaml", store / "probe.yaml"
    content, names = study(size, steps, space)
    file.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    space.write_text(yaml.safe_dump(PROBE | {"seeds": list(range(seeds))}, sort_keys=False), encoding="utf-8")
    subprocess.run(
        [sys.executable, "-m", "mlmclm", "study", str(file), "--data", str(data), "--store", str(store)], check=True
    )
    table = pd.read_csv(store / "studies" / "curves" / "best.csv").to_dict("records")
    best: dict[tuple[str, str], dict[Hashable, Any]] = {(row["model"], row["task"]): row for row in table}
    rows = [
        {"recipe": recipe, "task": task, "steps": taken, "tokens": taken * BATCH * BLOCK} | best[name, task]
        for (recipe, taken), name in names.items()
        for task in TASKS
    ]
    points = pd.DataFrame(rows).sort_values("tokens", kind="stable")
    untrained = pd.Series({task: best[f"{size}-untrained", task]["score"] for task in TASKS})
    draw(points, untrained, FIGURE)
    lines = [
        f"Command: `python -m benchmarks.curves --data FOLDER --size {size} --steps {steps} --seeds {seeds}`. Machine: {machine()}.",
        f"Corpus enwiki2015, {BATCH} x {BLOCK} tokens a step. Test scores at the learning rate that is best on validation, mean over",
        "seeds with its 95 % interval.",
        "",
        "![probe scores along training](curves.png)",
        "",
        "| recipe | tokens | " + " | ".join(TASKS) + " |",
        "|---|---|" + "---|" * len(TASKS),
        "| untrained | 0 | " + " | ".join(f"{untrained[task]:.3f}" for task in TASKS) + " |",
    ]
    for (recipe, taken), name in names.items():
        scores = [
            f"{row['score']:.3f} [{row['score_low']:.3f}, {row['score_high']:.3f}]"
            for row in (best[name, task] for task in TASKS)
        ]
        lines.append(f"| {recipe} | {taken * BATCH * BLOCK / 1e6:.1f} M | " + " | ".join(scores) + " |")
    write_section("Probe scores along training", lines)


if __name__ == "__main__":
    typer.run(main)

"""Scores of small models on all local tasks:  python -m benchmarks.scores [--data FOLDER] [--size 2m] [--steps 2048]

Without --data these are the generated pydocs tasks, with the models and the grid of `make quickstart` but five seeds. With it:

CLM, MLM at 40 %, CLM followed by MLM, and the same model untrained, on every task of FOLDER (rte, qqp_20k, sick with both its labels, sst2,
conll2003, squad_4k, squad_v2, reqa_squad, and the corpus enwiki2015, as Parquet): the best learning rate of three, five seeds, fine-tuning of
100 to 200 steps. Beside them stands what chance scores on the same test rows. It asks whether scores are sane, not how good a model can be.

Each is one `mlmclm study`, so that it goes on where it was stopped; store, report and MLflow runs lie in --store. Its table is a section of
RESULTS.md. Of SQuAD v2 FOLDER has the official development set only, which is cut by article: the first 25 are the training set, the others the
test set of a task of this benchmark's own, `squad_v2_dev`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Hashable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pandas as pd
import typer
import yaml

from benchmarks.results import machine, write_section

SEEDS = (0, 1, 2, 3, 4)
RATES = (5e-4, 1e-3, 2e-3)
BLOCK, BATCH = 128, 32
SETS = ("enwiki2015", "rte", "qqp_20k", "sick", "sst2", "conll2003", "squad_4k", "reqa_squad")
SPACE: dict[str, Any] = {
    "tasks": [
        "rte", "qqp_20k", "sick", "sick_relatedness", "sst2", "conll2003", "squad_4k", "squad_v2_dev", "reqa_squad",
    ],
    "learning_rates": list(RATES),
    "seeds": list(SEEDS),
    "protocol": {
        "batch_size": 32, "max_steps": 150, "max_length": BLOCK, "stride": 32, "max_evaluation_examples": 1000,
        "max_evaluation_documents": 1000,
    },
    "per_task": {
        "rte": {"batch_size": 16, "max_steps": 100},
        "sst2": {"max_steps": 200},
        "conll2003": {"max_steps": 200},
        "squad_4k": {"batch_size": 16, "max_steps": 120, "max_evaluation_examples": 300},
        "squad_v2_dev": {"batch_size": 16, "max_steps": 120, "max_evaluation_examples": 300},
        "reqa_squad": {"max_steps": 100, "max_evaluation_examples": 500},
    },
}  # fmt: skip
TRAIN_ARTICLES = 25
ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ("1m", 1000)
"""Size and steps of the models of examples/quickstart.yaml."""
SQUAD_V2_DEV = {
    "name": "squad_v2_dev",
    "family": "question-answering",
    "title": "SQuAD v2.0's development set, cut by article into train and test",
    "source": "local",
    "folder": "squad_v2_dev",
    "splits": {"train": "train", "validation_fraction": 0.05, "validation_group": "context", "test": "test"},
    "unanswerable": True,
    "metric": "f1",
    "licence": "CC BY-SA 4.0",
    "citation": "Rajpurkar et al., 2018. Know What You Don't Know: Unanswerable Questions for SQuAD. ACL.",
}


class Case(NamedTuple):
    """One of the two studies."""

    file: Path
    names: dict[str, str]
    """Labels of the models in the table, with their names."""
    data: Path | None
    task_dirs: list[Path]
    title: str
    """Title of the section of RESULTS.md."""
    opening: list[str]
    """Lines of the section before the table."""

    @property
    def options(self) -> list[str]:
        """The options of `mlmclm study`."""
        data = [] if self.data is None else ["--data", str(self.data)]
        return [*data, *(word for folder in self.task_dirs for word in ("--task-dir", str(folder)))]


def models(size: str, steps: int) -> dict[str, str]:
    """Labels of the models in the table, with their names."""
    from mlmclm.plans.names import format_steps

    all_steps, quarter_steps = format_steps(steps), format_steps(steps // 4)
    return {
        "untrained": f"{size}-untrained",
        "CLM": f"{size}-clm-{all_steps}",
        "MLM 40 %": f"{size}-mlm40-{all_steps}",
        "CLM 25 %, then MLM 40 %": f"{size}-clm-{quarter_steps}-mlm40-{all_steps}",
    }


def local(data: Path, store: Path, size: str, steps: int, space: dict[str, Any]) -> Case:
    """Return the case of a folder's data sets; write data, tasks, space and study file to the store."""
    import pyarrow.compute
    import pyarrow.parquet as parquet

    place, cut = store / "data", store / "data" / "squad_v2_dev"
    cut.mkdir(parents=True, exist_ok=True)
    for name in SETS:
        if not (place / name).exists():
            (place / name).symlink_to((data / name).resolve(), target_is_directory=True)
    questions = parquet.read_table(data / "squad_v2" / "validation.parquet")
    articles = questions["title"].combine_chunks().unique()
    train = pyarrow.compute.is_in(questions["title"], value_set=articles[:TRAIN_ARTICLES])
    parquet.write_table(questions.filter(train), cut / "train.parquet")
    parquet.write_table(questions.filter(pyarrow.compute.invert(train)), cut / "test.parquet")
    names = models(size, steps)
    study = {
        "name": "scores",
        "models": list(names.values()),
        "baseline": names["untrained"],
        "corpus": {"source": "enwiki2015", "max_tokens": steps * BATCH * BLOCK + 2**17},
        "tokenizer": {"train_vocab_size": 4096},
        "recipe": {
            "block_length": BLOCK, "batch": BATCH, "peak_learning_rate": 4e-3, "adam_eps": 1e-8,
            "warmup_steps": max(1, steps // 40), "decay_steps": max(1, steps // 10), "workers": 2, "zero_stage": 0,
            "checkpoint_every": 500, "evaluate_every": 500, "evaluation_blocks": 192,
        },
    }  # fmt: skip
    (store / "tasks").mkdir(exist_ok=True)
    (store / "tasks" / "squad_v2_dev.yaml").write_text(yaml.safe_dump(SQUAD_V2_DEV, sort_keys=False), encoding="utf-8")
    rates, taken = ", ".join(f"{rate:g}" for rate in RATES), [task["max_steps"] for task in SPACE["per_task"].values()]
    opening = [
        f"Command: `python -m benchmarks.scores --data FOLDER --size {size} --steps {steps}`. Machine: {machine()}.",
        f"Corpus enwiki2015, {steps * BATCH * BLOCK / 1e6:.1f} M tokens, vocabulary 4,096. Test scores at the learning rate (of {rates})",
        f"that is best on validation, mean over {len(SEEDS)} seeds with its 95 % interval; {min(taken)} to {max(taken)} steps of fine-tuning,",
        "at most 1,000 test rows. `squad_v2_dev` is SQuAD v2's development set cut by article. *Chance* is scored on the same rows",
        "without a model.",
    ]
    file = written(store, study, space)
    return Case(file, names, place, [store / "tasks"], "Scores on all local tasks", opening)


def pydocs(store: Path) -> Case:
    """Return the case of the quickstart with this benchmark's seeds; write space and study file to the store."""
    store.mkdir(parents=True, exist_ok=True)
    space = yaml.safe_load((ROOT / "tune_spaces" / "quickstart.yaml").read_text(encoding="utf-8"))
    study = yaml.safe_load((ROOT / "examples" / "quickstart.yaml").read_text(encoding="utf-8"))
    opening = [
        f"Command: `python -m benchmarks.scores`. Machine: {machine()}.",
        f"The models of `make quickstart` (1m, {QUICKSTART[1]:,} steps) and its grid, but five seeds. Test scores at the",
        "learning rate that is best on validation, mean over seeds with its 95 % interval. *Chance* is scored on the same rows without a model.",
    ]
    file = written(store, study | {"name": "scores"}, space | {"seeds": list(SEEDS)})
    return Case(file, models(*QUICKSTART), None, [], "Scores on the pydocs tasks", opening)


def written(store: Path, study: dict[str, Any], space: dict[str, Any]) -> Path:
    """Write a study and its space; return the study file."""
    study = study | {"space": str(store / "space.yaml")}
    for file, content in (("space", space), ("scores", study)):
        (store / f"{file}.yaml").write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return store / "scores.yaml"


def chance(store: Path, model: str, task_dirs: list[Path], data: Path | None) -> dict[str, tuple[float, str]]:
    """Return the chance level on the test rows of each task, and how it is computed.

    Args:
        model: any model of the study; all truncate texts by the same tokenizer.
    """
    from mlmclm.sweeps.space import Space
    from mlmclm.tasks.declared_tasks import find_tasks
    from mlmclm.tasks.prepare_task import prepare_task

    space = Space.model_validate(yaml.safe_load((store / "space.yaml").read_text(encoding="utf-8")))
    tasks, tokenizer = find_tasks(task_dirs), store / "studies" / "scores" / "models" / model
    levels = {}
    for name in space.tasks:
        task, settings = tasks[name].measured_by(space.metrics), space.protocol_for(name)
        level = prepare_task(task, tokenizer, settings, store, data).chance(task.metric)
        assert level is not None, f"the family {task.family} knows no chance level"
        levels[name] = level.score, level.how
    return levels


def _table(best: pd.DataFrame) -> dict[tuple[str, str], dict[Hashable, Any]]:
    """Return the rows of a table whose index is the model and the task."""
    return {(row["model"], row["task"]): row for row in best.reset_index().to_dict("records")}


def report(best: pd.DataFrame, by_chance: dict[str, tuple[float, str]], names: dict[str, str]) -> list[str]:
    """Return the table and its summary; scores are test means with their 95 % interval over seeds."""
    lines = ["| task | metric | chance | " + " | ".join(names) + " |", "|---|---|---|" + "---|" * len(names)]
    table = _table(best)
    for task, (score, how) in by_chance.items():
        rows = [table[name, task] for name in names.values()]
        cells = [f"{row['score']:.3f} [{row['score_low']:.3f}, {row['score_high']:.3f}]" for row in rows]
        lines.append(f"| {task} | {rows[0]['metric']} | {score:.3f} ({how}) | " + " | ".join(cells) + " |")
    return [*lines, "", *reading(best, by_chance, names)]


def reading(best: pd.DataFrame, by_chance: dict[str, tuple[float, str]], names: dict[str, str]) -> list[str]:
    """Return for each model on how many tasks its interval lies above chance, and above or below the untrained model's."""

    def named(tasks: list[str]) -> str:
        all_of_them = len(tasks) == len(by_chance)
        return (
            "all tasks"
            if all_of_them
            else f"{len(tasks)} of {len(by_chance)} tasks" + (f" ({', '.join(tasks)})" if tasks else "")
        )

    table = _table(best)
    lines = ["Reading, by intervals that don't overlap:"]
    for title, name in names.items():
        above = [task for task, (score, _) in by_chance.items() if table[name, task]["score_low"] > score]
        line = f"- {title}: above chance on {named(above)}"
        if title != "untrained":
            base = {task: table[names["untrained"], task] for task in by_chance}
            better = [task for task in by_chance if table[name, task]["score_low"] > base[task]["score_high"]]
            worse = [task for task in by_chance if table[name, task]["score_high"] < base[task]["score_low"]]
            line += f"; above the untrained model on {named(better)}, below it on {named(worse)}"
        lines.append(line + ".")
    return lines


def main(
    data: Annotated[Path | None, typer.Option(help="Folder with the data sets; the pydocs tasks need none.")] = None,
    size: Annotated[str, typer.Option(help="A size of mlmclm.")] = "2m",
    steps: Annotated[int, typer.Option(help="Of pretraining, a multiple of 4; a step is 4,096 tokens.")] = 2048,
    trial: Annotated[bool, typer.Option("--trial", help="A few steps and rows, to try the command out.")] = False,
    store: Annotated[Path, typer.Option(help="Where the study is kept.")] = Path("store-scores"),
) -> None:
    """Run the study, and write the section of RESULTS.md."""
    space = SPACE
    if trial:
        few = {"batch_size": 4, "max_steps": 2, "max_evaluation_examples": 20, "max_evaluation_documents": 20}
        space = {
            **SPACE,
            "learning_rates": [1e-3],
            "seeds": [0, 1],
            "per_task": {},
            "protocol": {**SPACE["protocol"], **few},
        }
    store = store.resolve()
    if data is not None:
        case = local(data, store, size, steps, space)
    elif trial or (size, steps) != ("2m", 2048):
        raise typer.BadParameter(
            "--size, --steps and --trial are for --data; the pydocs tasks have the quickstart's models."
        )
    else:
        case = pydocs(store)
    subprocess.run(
        [sys.executable, "-m", "mlmclm", "study", str(case.file), *case.options, "--store", str(store)], check=True
    )
    best = pd.read_csv(store / "studies" / "scores" / "best.csv").set_index(["model", "task"])
    table = report(best, chance(store, case.names["CLM"], case.task_dirs, case.data), case.names)
    if trial:
        print("\n".join(table))
    else:
        write_section(case.title, [*case.opening, "", *table])


if __name__ == "__main__":
    typer.run(main)

"""A whole study that takes a minute: synthetic text, two tiny models, two tasks."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from small_models import BAD, CITIES, FILL, GOOD, NAMES, write_entities, write_sentiment

if TYPE_CHECKING:
    from mlmclm.studies.study_sweep import StudySweep


def write_study(folder: Path, **changes: object) -> Path:
    """Write corpus, task data, search space and study file; return the study file. The data root is `folder`/data."""
    data = folder / "data"
    write_sentiment(data, train=160, test=40)
    write_entities(data, train=120, test=30)
    chance = random.Random(0)
    words = NAMES + CITIES + GOOD + BAD + FILL
    lines = [" ".join(chance.choices(words, k=chance.randint(5, 60))) for _ in range(400)]
    (data / "prose").mkdir(parents=True)
    (data / "prose" / "train.txt").write_text("\n\n".join(lines), encoding="utf-8")
    space = {
        "tasks": ["sst2", "conll2003"],
        "learning_rates": [1e-3, 1e-2],
        "seeds": [0, 1],
        "protocol": {"batch_size": 16, "max_steps": 6, "max_length": 32, "stride": 8},
    }
    study = {
        "name": "small",
        "models": ["1m-untrained", "1m-clm-30", "1m-clm-10-mlm40-30"],
        "baseline": "1m-untrained",
        "corpus": {"source": "prose", "text_documents": "paragraph", "validation_fraction": 0.1},
        "tokenizer": {"train_vocab_size": 400},
        "recipe": {
            "block_length": 32, "batch": 8, "peak_learning_rate": 3e-3, "warmup_steps": 4, "decay_steps": 6,
            "checkpoint_every": 5, "evaluate_every": 10, "evaluation_blocks": 8, "workers": 2,
        },
        "space": str(folder / "space.yaml"),
    }  # fmt: skip
    (folder / "space.yaml").write_text(yaml.safe_dump(space), encoding="utf-8")
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(study | changes), encoding="utf-8")
    return path


MIXED_PHASES = [
    {"name": "a", "steps": 10},
    {"name": "b", "steps": 4, "block_length": 64, "mix": {"verse": 1, "prose": 1}},
]


def write_mixed(folder: Path, **changes: Any) -> Path:
    """Write the study of `write_study` with a second source, with 60 of its 400 paragraphs in upper case."""
    path = write_study(folder)
    study = yaml.safe_load(path.read_text())
    verse = (folder / "data" / "prose" / "train.txt").read_text().split("\n\n")[:60]
    (folder / "data" / "verse").mkdir(parents=True)
    (folder / "data" / "verse" / "train.txt").write_text("\n\n".join(text.upper() for text in verse))
    corpus = study.pop("corpus")
    study["corpora"] = {name: {**corpus, "source": name} for name in ("prose", "verse")}
    recipe = {name: value for name, value in study["recipe"].items() if name not in ("warmup_steps", "decay_steps")}
    study["recipe"] = {**recipe, "mix": {"prose": 3, "verse": 1}, "phases": MIXED_PHASES, "revisions_every": 4}
    study |= {"models": ["1m-mlm40-14"], "baseline": None}
    study["recipe"] |= changes.pop("recipe", {})
    path.write_text(yaml.safe_dump(study | changes))
    return path


def start(*words: str | Path, home: Path) -> subprocess.Popen[str]:
    """Start a command line in its own process, with its own home folder."""
    environment = {**os.environ, "HOME": str(home), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.Popen(
        [sys.executable, "-m", "mlmclm", *map(str, words)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*words: str | Path, home: Path, timeout: float = 1500) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command line."""
    process = start(*words, home=home)
    try:
        output, errors = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return process.returncode, output, errors


def remember(sweep: StudySweep) -> None:
    """Write the files that a run writes before it computes cells."""
    from mlmclm.studies.study_record import record_value, write_record
    from mlmclm.sweeps.manifest import write_manifest

    write_record(sweep, f"mlmclm study {sweep.file.file}", record_value(sweep))
    write_manifest(sweep.place.study_folder(sweep.file.name), sweep.file.name, sweep.plan())

"""A member of every kind of the registry, all of a user's own, in one study: from its pretraining to its published record."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml

from mlmclm.registry import KINDS

MEMBERS = '''
import os
import random
from functools import partial
from typing import ClassVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import mlmclm
from mlmclm.backends.optimizers.optimizer import Optimizer
from mlmclm.backends.reference import Reference
from mlmclm.corpora.documents import Source
from mlmclm.models.encoder import pool
from mlmclm.objectives.mlm import Masked
from mlmclm.pretraining.callbacks.callback import Callback
from mlmclm.readers.reader import Reader
from mlmclm.reports.charts import Axis, Chart
from mlmclm.reports.drawing import Figure, FigureGroup
from mlmclm.results.measures import WeightedMean
from mlmclm.schedules.decay import Decay
from mlmclm.tasks.declaration import Splits, Task
from mlmclm.tasks.family import Family
from mlmclm.tasks.metric import Metric
from mlmclm.tasks.prepared_task import PreparedTask

WORDS = ["good", "fine", "bad", "poor", "film", "plot", "long", "short", "a", "the"]
OTHERS = [f"{first}{last}" for first in ("be", "un", "re", "mis") for last in ("lieve", "stand", "turn", "take", "mind")]


@mlmclm.register("objective")
class FirstHalf(Masked):
    name = "half"
    examples = ("half15",)

    @property
    def words(self):
        return "masked in the first half"

    def label(self, tokens, draw):
        inputs, labels = super().label(tokens, draw)
        labels[:, tokens.shape[1] // 2 :] = -100
        return inputs, labels


@mlmclm.register("schedule")
class Root(Decay):
    name = "root"

    def factor(self, left):
        return left**0.5


@mlmclm.register("optimizer")
class Quick(Optimizer):
    name = "quick"

    @classmethod
    def build(cls, groups, settings):
        return torch.optim.AdamW(groups, lr=0.0, betas=settings[:2], eps=settings.epsilon)


@mlmclm.register("callback", "noted")
class Noted(Callback):
    def __init__(self, stage):
        super().__init__(stage)
        self.steps = 0

    def on_step_end(self, step):
        self.steps += 1

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


@mlmclm.register("backend")
class Mine(Reference):
    name = "mine"


class CountingTask(PreparedTask):
    def head(self, hidden, linear):
        return linear(hidden, 1)

    def _found(self, head, hidden, packing):
        return head(pool(hidden, packing, self.settings.pooling)).float().squeeze(1)

    def loss(self, head, hidden, packing, targets):
        found = self._found(head, hidden, packing)
        return torch.nn.functional.mse_loss(found, torch.from_numpy(targets["count"]).to(found))

    def predict(self, head, hidden, packing, split, rows):
        return list(self._found(head, hidden, packing).cpu().numpy())

    def examples(self, split, predictions):
        gold, found = self.columns[split]["count"], np.array(predictions, dtype=np.float64)
        return {"count": gold, "found": found, "near": (abs(found - gold) <= 1).astype(float)}


@mlmclm.register("family")
class Counting(Family):
    name, title, prepared = "counting", "Counting", CountingTask
    columns: ClassVar = {"text": pa.string(), "count": pa.float64()}
    metrics: ClassVar = {"near": "share within one"}
    gold_columns = ("count",)
    shown: ClassVar = {"count": "count", "prediction": "found"}


@mlmclm.register("metric")
class Close(Metric):
    name, title, family = "closeness", "closeness of counts", "counting"

    @classmethod
    def measure(cls, columns, classes):
        return WeightedMean(1 / (1 + abs(columns["found"] - columns["count"])))


class Made:
    """Makes sentences, whose good words are counted."""

    def find(self, task, store):
        folder = store / "own-data" / task
        return folder if (folder / "test.parquet").is_file() else None

    def build(self, task, store):
        folder, chance = store / "own-data" / task, random.Random(0)
        folder.mkdir(parents=True, exist_ok=True)
        for split, rows in (("train", 96), ("validation", 24), ("test", 24)):
            words = [chance.choices(WORDS, k=6) for _ in range(rows)]
            counts = [float(sum(word in WORDS[:2] for word in own)) for own in words]
            pq.write_table(pa.table({"text": [" ".join(own) for own in words], "count": counts}), folder / f"{split}.parquet")
        return folder


mlmclm.register("generator", "made", Made())
mlmclm.register(
    "task", "counts",
    Task(
        name="counts", family="counting", title="Good words", source="made", metric="closeness+near", licence="none",
        citation="none", splits=Splits(train="train", validation="validation", test="test"),
    ),
)


class Babble(Source):
    def fingerprint(self):
        return "0123456789abcdef"

    def pieces(self, part):
        return [partial(_babble, part)]


def _babble(part):
    chance = random.Random(part)
    return iter([" ".join(chance.choices(WORDS + OTHERS, k=40)) for _ in range(200 if part == "train" else 40)])


@mlmclm.register("corpus", "babble")
def babble(store):
    return Babble()


@mlmclm.register("statistic", "cells-a-model")
def cells_a_model(analysis):
    return analysis.cells.groupby("model", as_index=False)["task"].count()


@mlmclm.register("figure")
class Empty(FigureGroup):
    name, title = "empty", "Nothing to see"

    def draw(self, study):
        chart = Chart(Axis.numbers([0, 1], ""), Axis.names([]), 10)
        return [Figure("own-figure", f"{len(study.looks)} models", chart, "nothing")]


@mlmclm.register("sink", "counted")
def counted(study, runs, folder):
    (folder / "kinds.txt").write_text("\\n".join(run.kind for run in runs))
    return f"cat {folder}"


@mlmclm.register("reader")
class Lines(Reader):
    name, title = "lines", "lines of scores"

    def recognises(self, path):
        return path.suffix == ".lines"

    def runs(self, path, only=None):
        return []

    def results(self, path):
        rows = [line.split() for line in path.read_text().splitlines()]
        return [
            {
                "key": f"{model}-{seed}", "model": model, "task": "read", "family": "read", "metric": "accuracy", "setting": "",
                "learning_rate": 1e-3, "seed": int(seed), "status": "ok", "start": "", "seconds": 1.0,
                "scores": {"validation": {"accuracy": float(score)}, "test": {"accuracy": float(score)}},
            }
            for model, seed, score in rows
        ]
'''
STUDY = {
    "name": "every-kind",
    "models": ["1m-untrained", "1m-half15-6"],
    "baseline": "1m-untrained",
    "corpus": {"source": "babble"},
    "tokenizer": {"train_vocab_size": 300},
    "recipe": {
        "block_length": 32, "batch": 4, "peak_learning_rate": 3e-3, "warmup_steps": 2, "decay_steps": 2, "decay": "root",
        "optimizer": "quick", "callbacks": ["noted"], "workers": 1, "device": "cpu", "evaluation_blocks": 4,
    },
    "space": {
        "tasks": ["counts"],
        "learning_rates": [1e-2],
        "seeds": [0, 1],
        "protocol": {"batch_size": 8, "max_steps": 4, "max_length": 32, "optimizer": "quick", "decay": "root"},
    },
}  # fmt: skip
RUN = """
from pathlib import Path

import own_members
import mlmclm

study = mlmclm.study("study.yaml", store="store")
study.run()
study.report(track="counted")
study.publish(Path("record"))
again = mlmclm.open("store").results("record").write(Path("again"))
again.predictions().to_csv("predictions.csv")
mlmclm.import_results("lines", "scores.lines").write(Path("imported"))
"""


@pytest.mark.slow
def test_a_member_of_every_kind_reaches_report_card_and_record(tmp_path: Path) -> None:
    (tmp_path / "own_members.py").write_text(MEMBERS)
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(STUDY))
    lines = [
        f"{model} {seed} {0.5 + 0.1 * place + 0.01 * seed}" for place, model in enumerate("ab") for seed in (0, 1, 2)
    ]
    (tmp_path / "scores.lines").write_text("\n".join(lines))
    without = [kind for kind in KINDS if f'register("{kind}"' not in MEMBERS and f'"{kind}", "' not in MEMBERS]
    assert not without, f"no member of {without}"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "MLMCLM_BACKEND": "mine", "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-c", RUN], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert "left out" not in done.stderr
    folder, again = tmp_path / "store" / "studies" / "every-kind", tmp_path / "again"
    cells = [json.loads(file.read_text()) for file in (tmp_path / "store" / "cells").glob("*/*.json")]
    assert len(cells) == 4 and all(cell["status"] == "ok" for cell in cells)
    assert {cell["cost"]["backend"] for cell in cells} == {"mine"}
    assert all({"near", "closeness"} <= cell["scores"]["test"].keys() for cell in cells)
    page = (folder / "report.html").read_text()
    for words in (
        "closeness of counts", "share within one", "Counting", "cells-a-model",
        "Nothing to see", 'id="own-figure"', "masked in the first half", "root", "quick",
    ):  # fmt: skip
        assert words in page, words
    card = (folder / "models" / "1m-half15-6" / "README.md").read_text()
    assert "masked in the first half" in card and "babble" in card
    # The record says the same.
    tables = sorted(file.name for file in folder.glob("*.csv"))
    assert {"cells-a-model.csv", "best.csv"} <= set(tables)
    assert tables == sorted(file.name for file in again.glob("*.csv"))
    for table in tables:
        pd.testing.assert_frame_equal(pd.read_csv(folder / table), pd.read_csv(again / table))
    best = pd.read_csv(folder / "best.csv").set_index("model")
    assert best["score_low"].notna().any(), "the noise of the test set is that of the added metric"
    assert list(pd.read_csv(tmp_path / "imported" / "best.csv")["model"]) == ["a", "b"]
    (kinds,) = (tmp_path / "store").rglob("kinds.txt")
    assert kinds.read_text().split().count("cell") == 4
    predictions = pd.read_csv(tmp_path / "predictions.csv")
    assert len(predictions) == 4 * 24 and {"count", "prediction"} <= set(predictions.columns)

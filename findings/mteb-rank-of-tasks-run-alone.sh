#!/bin/bash
# mteb 2.26.24: the Borda rank of a benchmark's table where models have run unlike numbers of its tasks.
# Guess: a model without a task is last on it, or the models are ranked on the tasks that all have.
# In fact: a model gets as many points on a task as there are models in the table, less its rank among those that ran the task. So
# one that runs a task alone gets all points there, whatever its score: the worst model ranks first. The mean of the others is NaN.
# Hurts: tables of models that one is still evaluating, and of models that fail on a hard task.
# Source: embeddings-benchmark/mteb 1921 says that a missing task gives no points, and not what that gives the others.
# Seen: STS12 .9, .8 and .1; only the last ran STS13 and STS14, with .1: ranks 2, 3 and 1.
set -u
place=$(mktemp -d) && trap 'rm -rf "$place"' EXIT
"${PYTHON:-python3}" -m venv "$place/venv" || exit 2
"$place/venv/bin/pip" install -q torch==2.13.0 mteb==2.26.24 sentence-transformers==6.2.0 datasets==5.2.0 polars==2.1.0 || exit 2
export HF_HUB_OFFLINE=1 HF_HOME="$place/home"
"$place/venv/bin/python" -W ignore - 2>"$place/log" <<'PYTHON'
import importlib.metadata
import sys

import mteb
from mteb.results import BenchmarkResults, ModelResult, TaskResult

SCORES = {
    "intfloat/e5-large-v2": [0.9],
    "intfloat/e5-base-v2": [0.8],
    "intfloat/e5-small-v2": [0.1, 0.1, 0.1],
}
tasks = mteb.get_tasks(tasks=["STS12", "STS13", "STS14"])


def result(task, score):
    row = {"main_score": score, "hf_subset": "default", "languages": ["eng-Latn"]}
    facts = {"task_name": task.metadata.name, "dataset_revision": task.metadata.dataset["revision"]}
    facts |= {"mteb_version": mteb.__version__, "evaluation_time": 1.0, "kg_co2_emissions": None}
    return TaskResult.from_dict({**facts, "scores": {split: [row] for split in task.metadata.eval_splits}})


models = [
    ModelResult(model_name=name, model_revision="one", task_results=[result(*each) for each in zip(tasks, scores)])
    for name, scores in SCORES.items()
]
table = BenchmarkResults(model_results=models, benchmark=mteb.Benchmark(name="three", tasks=tasks)).get_benchmark_result()
print("mteb", importlib.metadata.version("mteb"))
print(table[["Model", "Rank (Borda)", "Mean (Task)"]].to_string(index=False))
ranks = dict(zip(table["Model"], table["Rank (Borda)"]))
same = [ranks[name] for name in SCORES] == [2, 3, 1]
print("as described" if same else "CHANGED")
sys.exit(0 if same else 1)
PYTHON

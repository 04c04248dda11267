#!/bin/bash
# ray 2.60.0 (Ray Tune) with pandas 3.1.1.
# Guess: get_best_result(scope="all") compares the highest scores that the trials ever had, and
# get_dataframe(filter_metric=...) has a row for each trial, or none for one without a score.
# In fact a NaN makes Tune forget what was before: a trial of 0.9, NaN, 0.5 loses to one of 0.7, though its kept checkpoint and
# its row say 0.9. And a trial with NaN alone makes get_dataframe fail, as pandas 3 has an error where Ray expects a NaN.
# Hurts: whoever looks for the best setting among rates of which some diverge: another one is named, or no table comes.
# Source: none found; ray-project/ray#9381 handled such trials under the pandas of 2020.
# Output seen: scope="all" takes the trial of 0.7; the other's checkpoint has 0.9; ValueError: Encountered all NA values.
set -u
place=$(mktemp -d) && trap 'rm -rf "$place"' EXIT
"${PYTHON:-python3}" -m venv "$place/venv" || exit 2
"$place/venv/bin/pip" install -q "ray[tune]==2.60.0" pandas==3.1.1 || exit 2
export RAY_USAGE_STATS_ENABLED=0 RAY_TMPDIR="$place" RAY_AIR_NEW_OUTPUT=0
"$place/venv/bin/python" -W ignore - "$place" 2>"$place/log" <<'PYTHON'
import logging
import math
import sys

import pandas
import ray
from ray import tune


class Trial(tune.Trainable):
    def setup(self, config):
        self.reports = 0

    def step(self):
        score = self.config["scores"][self.reports]
        self.reports += 1
        return {"score": score, "done": self.reports == len(self.config["scores"])}

    def save_checkpoint(self, folder):
        return {"reports": self.reports}

    def load_checkpoint(self, checkpoint):
        self.reports = checkpoint["reports"]


def run(name, *scores):
    return tune.Tuner(
        Trial,
        param_space={"scores": tune.grid_search([list(each) for each in scores])},
        tune_config=tune.TuneConfig(max_concurrent_trials=1),
        run_config=tune.RunConfig(
            storage_path=sys.argv[1],
            name=name,
            verbose=0,
            checkpoint_config=tune.CheckpointConfig(
                num_to_keep=1, checkpoint_score_attribute="score", checkpoint_frequency=1
            ),
        ),
    ).fit()


ray.init(num_cpus=1, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
print(f"ray {ray.__version__}, pandas {pandas.__version__}")
interrupted, steady = [0.9, math.nan, 0.5], [0.7, 0.7, 0.7]
results = run("interrupted", interrupted, steady)
best = results.get_best_result("score", "max", scope="all").config["scores"]
kept = results[0].best_checkpoints[0][1]["score"]
rows = sorted(results.get_dataframe(filter_metric="score", filter_mode="max")["score"])
print(f"{interrupted} and {steady}: scope='all' takes {best}")
print(f"the first one's kept checkpoint has {kept}; rows of get_dataframe: {rows}")
results = run("diverged", [math.nan, math.nan], [0.7, 0.6])
try:
    answer = str(len(results.get_dataframe(filter_metric="score", filter_mode="max"))) + " rows"
except ValueError as error:
    answer = f"ValueError: {error}"
print(f"one trial with NaN alone: {answer}")
same = best == steady and kept == 0.9 and rows == [0.7, 0.9] and answer.startswith("ValueError")
print("as described" if same else "CHANGED")
ray.shutdown()
sys.exit(0 if same else 1)
PYTHON

#!/bin/bash
# ray 2.60.0 (Ray Tune).
# Guess: ASHA stops a trial whose metric is NaN, as the worst there is, or Tune does.
# In fact a comparison with NaN is false, so at no rung is the trial below the cutoff: a diverged trial runs to the end,
# while one that is a little behind the best is stopped at its first report.
# Hurts: whoever searches learning rates with ASHA to save time: it is spent on the rates that diverged.
# Source: ray-project/ray#6659 and #11670, closed, made ASHA's cutoff ignore NaN; the trial itself was left as it is.
# Output seen: reports until the end, of at most 16: score 0.9: 16, 0.8: 1, NaN: 16, 0.1: 1, NaN: 16.
set -u
place=$(mktemp -d) && trap 'rm -rf "$place"' EXIT
"${PYTHON:-python3}" -m venv "$place/venv" || exit 2
"$place/venv/bin/pip" install -q "ray[tune]==2.60.0" || exit 2
export RAY_USAGE_STATS_ENABLED=0 RAY_TMPDIR="$place" RAY_AIR_NEW_OUTPUT=0
"$place/venv/bin/python" -W ignore - "$place" 2>"$place/log" <<'PYTHON'
import logging
import math
import sys

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler

SCORES = (0.9, 0.8, math.nan, 0.1, math.nan)
MOST = 16


class Trial(tune.Trainable):
    def setup(self, config):
        self.reports = 0

    def step(self):
        self.reports += 1
        return {"score": SCORES[self.config["which"]], "done": self.reports == MOST}

    def save_checkpoint(self, folder):
        return {"reports": self.reports}

    def load_checkpoint(self, checkpoint):
        self.reports = checkpoint["reports"]


ray.init(num_cpus=1, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
results = tune.Tuner(
    Trial,
    param_space={"which": tune.grid_search(list(range(len(SCORES))))},
    tune_config=tune.TuneConfig(
        metric="score",
        mode="max",
        max_concurrent_trials=1,  # so that they report in this order
        scheduler=ASHAScheduler(max_t=MOST, grace_period=1, reduction_factor=2),
    ),
    run_config=tune.RunConfig(storage_path=sys.argv[1], name="asha", verbose=0),
).fit()
reports = [result.metrics["training_iteration"] for result in results]
print(f"ray {ray.__version__}, reports until each trial's end, of at most {MOST}:")
for score, count in zip(SCORES, reports):
    print(f"score {score}: {count}")
same = reports == [16, 1, 16, 1, 16]
print("as described" if same else "CHANGED")
ray.shutdown()
sys.exit(0 if same else 1)
PYTHON

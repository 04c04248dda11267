#!/bin/bash
# Ray 2.60.0, Ray Tune with `reuse_actors=True`, and the actors' names in the dashboard and the state API (`repr_name`).
# Guess: an actor that is reset for the next trial is shown by what its `__repr__` says then, as its log lines are.
# In fact: Ray keeps what `__repr__` said when the actor was made. One actor computes all six trials, and is listed as the first one
# until its end, while `trainable.trial_name` is right inside it.
# Hurts: whoever looks in the dashboard for the trial that hangs: it shows one that has long ended. Source: ray-project/ray,
# python/ray/_raylet.pyx sets the actor's `repr_name` after its creation task alone.
# Seen: named trial-0, computed trial-0 to trial-5.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet --disable-pip-version-check "ray[default,tune]==2.60.0" || exit 2
cd "$work"
export HOME="$work" RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=disabled RAY_AIR_NEW_OUTPUT=0
"$work/venv/bin/python" -W ignore - <<'PY'
import logging, os, sys, time

import ray
from ray import tune
from ray.util.state import list_actors


class Trial(tune.Trainable):
    def step(self):
        time.sleep(1)
        return {"score": 0.5, "seen": self.trial_name, "done": True}

    def reset_config(self, config):
        return True

    def save_checkpoint(self, folder):
        return {}

    def load_checkpoint(self, checkpoint):
        pass

    def __repr__(self):
        return str(self.trial_name)


print("ray", ray.__version__)
session = ray.init(num_cpus=1, include_dashboard=True, logging_level=logging.ERROR, log_to_driver=False)
results = tune.Tuner(
    Trial,
    param_space={"seed": tune.grid_search(list(range(6)))},
    tune_config=tune.TuneConfig(reuse_actors=True, trial_name_creator=lambda trial: f"trial-{trial.config['seed']}"),
    run_config=tune.RunConfig(storage_path=f"{os.getcwd()}/results", name="reused", verbose=0),
).fit()
actors = [each for each in list_actors(address=session.address_info["gcs_address"], detail=True) if each.class_name == "Trial"]
seen = sorted(result.metrics["seen"] for result in results)
names = sorted(each.repr_name for each in actors)
ray.shutdown()
print(f"named {', '.join(names)}, computed {', '.join(seen)}")
same = seen == [f"trial-{number}" for number in range(6)] and len(names) < len(seen) and "trial-0" in names
print("as described" if same else "CHANGED")
sys.exit(0 if same else 1)
PY

#!/bin/bash
# MLflow 3.17.2 on SQLite: a metric that is not a number, logged for a run and for a logged model.
# Guess: NaN comes back as NaN from both, and a search for a small loss finds neither.
# In fact: the run has NaN, and is not found since mlflow 25640; the logged model has 0.0, and a search for
# metrics.loss < 1 finds it. A diverged model has the best loss of all.
# Hurts: whoever picks the best model by search_logged_models. Source: mlflow/mlflow 25640 (runs only).
# Seen: run: nan, not found; logged model: 0.0, found.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet --disable-pip-version-check mlflow==3.17.2 || exit 2
cd "$work"
"$work/venv/bin/python" - <<'PY'
import logging, math, os, sys, warnings

warnings.simplefilter("ignore")
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
import mlflow

logging.disable(logging.WARNING)
mlflow.set_tracking_uri("sqlite:///mlflow.db")
mlflow.set_experiment("losses")
print("mlflow", mlflow.__version__)
model = mlflow.create_external_model(name="diverged")
with mlflow.start_run() as run:
    mlflow.log_metric("loss", math.nan, model_id=model.model_id)
of_run = mlflow.get_run(run.info.run_id).data.metrics["loss"]
of_model = mlflow.get_logged_model(model.model_id).metrics[0].value
runs = mlflow.search_runs(experiment_names=["losses"], filter_string="metrics.loss < 1", output_format="list")
models = mlflow.search_logged_models(filter_string="metrics.loss < 1", output_format="list")
print(f"run: loss {of_run}, found by metrics.loss < 1: {len(runs)}")
print(f"logged model: loss {of_model}, found by metrics.loss < 1: {[each.name for each in models]}")
sys.exit(0 if math.isnan(of_run) and not runs and of_model == 0 and len(models) == 1 else 1)
PY

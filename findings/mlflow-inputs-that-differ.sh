#!/bin/bash
# MLflow 3.17.2: data sets of a run (`mlflow.data.from_pandas`, `log_input`).
# Guess: training and test data that differ in their tags are two inputs, each with its context.
# In fact: the digest covers columns of text and numbers alone, and at most 10,000 rows. Tables that differ in a column of lists
# (tokens, tags, token ids) have one digest; the second is taken for the first, and its context is dropped silently.
# Hurts: records of tagging and tokenised data: another version of the tags looks the same, and the run has no test set.
# Source: mlflow/mlflow 22275 (digest; closed). That the context is lost is in no documentation we found.
# Seen: equal digests; one input, context training.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet --disable-pip-version-check mlflow==3.17.2 || exit 2
cd "$work"
"$work/venv/bin/python" - <<'PY'
import logging, os, sys, warnings

warnings.simplefilter("ignore")
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
import mlflow, pandas

logging.disable(logging.WARNING)
mlflow.set_tracking_uri("sqlite:///mlflow.db")
mlflow.set_experiment("tags")
print("mlflow", mlflow.__version__)
train = pandas.DataFrame({"id": [0, 1], "tags": [["B-PER", "O"], ["O", "O"]]})
test = pandas.DataFrame({"id": [0, 1], "tags": [["O", "O"], ["B-LOC", "I-LOC"]]})
sets = [mlflow.data.from_pandas(table, source="tags.jsonl", name="tags") for table in (train, test)]
with mlflow.start_run() as run:
    for data, context in zip(sets, ("training", "test")):
        mlflow.log_input(data, context=context)
inputs = mlflow.get_run(run.info.run_id).inputs.dataset_inputs
contexts = [tag.value for each in inputs for tag in each.tags if tag.key == "mlflow.data.context"]
print("digests:", *(data.digest for data in sets), "; contexts of the run:", contexts)
sys.exit(0 if sets[0].digest == sets[1].digest and contexts == ["training"] else 1)
PY

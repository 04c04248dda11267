#!/bin/bash
# huggingface_hub 2.4.0, `ModelCard` of a card whose model-index, which is a list, has two models.
# Guess: a card that is loaded and saved says the same as before.
# In fact: the results of all models are put under the name of the last one. The smaller model's .7 and the larger
# one's .9 become two accuracies of the larger one, and the smaller one is gone. There is no warning.
# Hurts: one repository for a family of models (sizes, stages, seeds), as soon as a program edits its card.
# Source: huggingface_hub/repocard_data.py; no issue found (4975 is about other fields that are lost).
# Seen: {'large': [0.7, 0.9]}.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet --disable-pip-version-check huggingface_hub==2.4.0 || exit 2
cd "$work"
"$work/venv/bin/python" - <<'PY'
import sys

import huggingface_hub
from huggingface_hub import ModelCard

print("huggingface_hub", huggingface_hub.__version__)
RESULT = """- name: {}
  results:
  - task: {{type: text-classification}}
    dataset: {{type: sst2, name: SST-2}}
    metrics:
    - {{type: accuracy, value: {}}}
"""
text = "---\nmodel-index:\n" + RESULT.format("small", 0.7) + RESULT.format("large", 0.9) + "---\nTwo models.\n"
ModelCard(text).save("README.md")
index = ModelCard.load("README.md", ignore_metadata_errors=True).data.to_dict()["model-index"]
found = {
    model["name"]: [metric["value"] for result in model["results"] for metric in result["metrics"]] for model in index
}
print("written {'small': [0.7], 'large': [0.9]}; after loading and saving", found)
sys.exit(0 if found == {"large": [0.7, 0.9]} else 1)
PY

#!/bin/bash
# lm-evaluation-harness 0.4.13, metric exact_match with ignore_punctuation: true, which many task files set.
# Guess: sentence marks at the end do not count, and numbers must be equal.
# In fact: all punctuation is removed from both texts, signs and decimal points too: -5 is 5, 1.5 is 15, and 3/4 is 34.
# 1,000 and 1000 are equal, but 1.0 and 1 are not.
# Hurts: scores of arithmetic or of extracted numbers, also where `mlmclm evaluate` is given such a file.
# Source: EleutherAI/lm-evaluation-harness, lm_eval/api/metrics.py.
# Seen: right are -5 for 5, 1.5 for 15, 3/4 for 34, 1,000 for 1000; wrong is 1.0 for 1.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet --disable-pip-version-check lm-eval==0.4.13 || exit 2
cd "$work"
"$work/venv/bin/python" - <<'PY'
import importlib.metadata, os, sys, warnings

warnings.simplefilter("ignore")
os.environ["HF_HUB_OFFLINE"] = "1"
from lm_eval.api.registry import get_metric

print("lm-eval", importlib.metadata.version("lm-eval"))
exact_match, found = get_metric("exact_match"), []
for answer, gold in (("-5", "5"), ("1.5", "15"), ("3/4", "34"), ("1,000", "1000"), ("1.0", "1")):
    score = float(exact_match(predictions=[answer], references=[gold], ignore_punctuation=True)["exact_match"])
    found.append(score)
    print(f"answer {answer}, right is {gold}: exact_match {score}")
sys.exit(0 if found == [1, 1, 1, 1, 0] else 1)
PY

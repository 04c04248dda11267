#!/bin/bash
# baycomp 1.0.3, `two_on_multiple` (Bayesian signed-rank test) with its default rope of 0.
# Guess: for two models with the same scores on all data sets both probabilities are one half.
# In fact: the sampled probabilities differ from one half by rounding errors only, the larger is counted as the winner,
# and of equal ones the left: the first model is better with probability .7, whichever model is given first.
# The documentation promises two numbers for a rope of 0; there are three.
# Hurts: models that agree on a benchmark, which seem to differ. Source: janezd/baycomp, baycomp/multiple.py.
# Seen: (0.70346, 0.0, 0.29654) for seed 0, about the same for others, with six data sets.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet --disable-pip-version-check baycomp==1.0.3 numpy==2.4.6 scipy==1.17.1 || exit 2
cd "$work"
"$work/venv/bin/python" - <<'PY'
import importlib.metadata, sys

import baycomp, numpy as np

print("baycomp", importlib.metadata.version("baycomp"))
scores = np.array([0.81, 0.70, 0.90, 0.75, 0.60, 0.88])
found = [tuple(map(float, baycomp.two_on_multiple(scores, scores.copy(), random_state=seed))) for seed in range(3)]
for seed, each in enumerate(found):
    print(f"equal scores, seed {seed}: {each}")
sys.exit(0 if all(len(each) == 3 and each[0] > 0.6 and each[2] < 0.4 for each in found) else 1)
PY

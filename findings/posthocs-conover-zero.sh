#!/bin/bash
# scikit-posthocs 0.17.1, `posthoc_conover_friedman`: pairs of models over data sets.
# Guess: with four data sets no p value is below a thousandth, whatever the scores.
# In fact: where all data sets rank the models alike, the test divides by a variance of 0, and every p is exactly 0.
# Four data sets rank two models alike by chance once in eight. Nemenyi's p for neighbours is .33. Where all scores
# are equal, p is NaN. All that is said is a warning of numpy about a division.
# Hurts: rankings over few tasks, where a clear order is common. Source: maximtrp/scikit-posthocs 82 shows such zeros.
# Seen: Conover 0.0 for all pairs; Nemenyi .333 and .013; Friedman .018.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet --disable-pip-version-check scikit-posthocs==0.17.1 numpy==2.4.6 pandas==3.1.1 scipy==1.17.1 || exit 2
cd "$work"
"$work/venv/bin/python" - <<'PY'
import importlib.metadata, sys, warnings

import numpy as np, pandas as pd, scikit_posthocs as sp
from scipy.stats import friedmanchisquare

warnings.simplefilter("ignore")

print("scikit-posthocs", importlib.metadata.version("scikit-posthocs"))
scores = pd.DataFrame({"x": [0.80, 0.71, 0.62, 0.93], "y": [0.81, 0.72, 0.64, 0.94], "z": [0.82, 0.75, 0.66, 0.95]})
conover, nemenyi = (test(scores).to_numpy() for test in (sp.posthoc_conover_friedman, sp.posthoc_nemenyi_friedman))
equal = sp.posthoc_conover_friedman(scores.assign(y=scores.x, z=scores.x)).to_numpy()
pairs = np.triu_indices(3, 1)
print("Conover", conover[pairs].tolist(), "Nemenyi", nemenyi[pairs].round(3).tolist(), end=" ")
print("Friedman", round(friedmanchisquare(scores.x, scores.y, scores.z).pvalue, 3), "; equal scores", equal[pairs].tolist())
sys.exit(0 if (conover[pairs] == 0).all() and nemenyi[pairs].min() > 0.01 and np.isnan(equal[pairs]).all() else 1)
PY

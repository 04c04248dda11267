#!/bin/bash
# deepsig 1.2.8 (deep-significance), `bonferroni_correction`.
# Guess: each p value times the number of tests, in the order given.
# In fact: the k-th smallest is multiplied by N - k + 1, the results need not rise with p, and they come back in a
# wrong order. Of .5, .001 and .2 the corrected values are .4, .5 and .003: the smallest p gets the largest value.
# Three tests with .049, .045 and .04 give .049 for one of them; Bonferroni and Holm give at least .12 for all.
# Hurts: whoever corrects comparisons of models with it. Source: Kaleidophon/deep-significance, deepsig/correction.py.
# Seen: [0.4, 0.5, 0.003] and [0.049, 0.09, 0.12].
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet --disable-pip-version-check deepsig==1.2.8 numpy==2.4.6 pandas==3.1.1 scipy==1.17.1 || exit 2
cd "$work"
"$work/venv/bin/python" - <<'PY'
import contextlib, importlib.metadata, io, sys

import numpy as np

with contextlib.redirect_stderr(io.StringIO()):
    from deepsig import bonferroni_correction

print("deepsig", importlib.metadata.version("deepsig"))
first, second = np.array([0.5, 0.001, 0.2]), np.array([0.049, 0.045, 0.04])
wrong, significant = (bonferroni_correction(p).round(6).tolist() for p in (first, second))
print("p", first.tolist(), "-> corrected", wrong, "; by Bonferroni", np.minimum(1, 3 * first).round(6).tolist())
print("p", second.tolist(), "-> corrected", significant, "; by Bonferroni", (3 * second).round(6).tolist())
same = wrong == [0.4, 0.5, 0.003] and min(significant) < 0.05
sys.exit(0 if same else 1)
PY

#!/bin/bash
# baycomp 1.0.3, `two_on_multiple` and `SignTest` with a rope, the region of practical equivalence.
# Guess: the probabilities are the same whether scores and rope are fractions (rope .01) or percentages (rope 1).
# In fact: differences of exactly the rope, which scores of two decimals often have, lie in it or beyond by rounding:
# .82 - .81 is more than .01, and 82 - 81 is 1. With a lead of one point on each of six sets the second model is
# better with probability .69 (sign test .89) from fractions, and equivalent with probability 1 from percentages.
# Hurts: whoever takes a verdict of equivalence from rounded scores. Source: janezd/baycomp, baycomp/multiple.py.
# Seen: (0.0, 0.30516, 0.69484) and (0.0, 1.0, 0.0); sign test (0.0, 0.10962, 0.89038) and (0.0, 1.0, 0.0).
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
percent = np.array([81, 70, 90, 75, 60, 88])
found = {}
for name, test in (("signed rank", baycomp.SignedRankTest), ("sign", baycomp.SignTest)):
    for unit, size in (("fractions", 100), ("percentages", 1)):
        p = test.probs(percent / size, (percent + 1) / size, 1 / size, random_state=0)
        found[name, unit] = tuple(map(float, p))
        print(f"{name} test, {unit}: worse, equivalent, better {found[name, unit]}")
differ = [found[name, "fractions"][2] > 0.5 and found[name, "percentages"][1] > 0.9 for name in ("signed rank", "sign")]
sys.exit(0 if all(differ) else 1)
PY

#!/bin/bash
# mlxtend 0.25.0, `evaluate.mcnemar` by default; statsmodels 0.15.0, `mcnemar(exact=False)`, corrected by default.
# Guess: two models that never disagree have p 1, or no p.
# In fact: the continuity correction divides 1 by 0, so that chi2 is infinite and p is 0: two copies of one model
# differ with certainty. Where both are right alone equally often, p is below 1 too (.48 for one example each). R's
# mcnemar.test corrects only where the two counts differ.
# Hurts: comparisons of models or seeds with equal predictions. The exact tests give p 1.
# Seen: mlxtend chi2 inf, p 0.0; statsmodels p 0.0; exact p 1.0 in both.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet --disable-pip-version-check mlxtend==0.25.0 statsmodels==0.15.0 numpy==2.4.6 scipy==1.17.1 pandas==3.1.1 || exit 2
cd "$work"
"$work/venv/bin/python" - <<'PY'
import sys, warnings

import mlxtend, numpy as np, statsmodels
from mlxtend.evaluate import mcnemar, mcnemar_table
from statsmodels.stats.contingency_tables import mcnemar as other

warnings.simplefilter("ignore")
print("mlxtend", mlxtend.__version__, "statsmodels", statsmodels.__version__)
gold, predicted = np.arange(100) % 2, np.arange(100) % 3 % 2
table = mcnemar_table(gold, predicted, predicted)
print("right and wrong of a model and its copy:", table.tolist())
chi2, p = mcnemar(table)
q = other(table, exact=False).pvalue
exact = mcnemar(table, exact=True)[1], other(table, exact=True).pvalue
once = mcnemar(np.array([[50, 1], [1, 48]]))[1]
print(f"mlxtend: chi2 {chi2}, p {p}; statsmodels: p {q}; exact: {exact[0]}, {exact[1]}; right alone once each: p {once:.2f}")
sys.exit(0 if p == q == 0 and exact == (1, 1) and once < 0.5 else 1)
PY

#!/bin/bash
# ir_measures 0.4.3: RR and RR@10 of one ranking.
# Guess: RR@10 is at most RR, and equal where fewer than ten documents are ranked.
# In fact: RR is trec_eval's and RR@10 another provider's. trec_eval keeps scores in 32 bits and ranks the greater id
# first where they are equal; the other compares 64 bits and ranks the smaller id first. A document with .9 before one
# with .89999999 has RR .5 and RR@10 1; the first of three equal ones has RR .33 and RR@10 1.
# Hurts: reports with RR@10 beside MAP or NDCG, where scores are close or tied.
# Source: terrierteam/ir_measures 18 (ties), usnistgov/trec_eval 34 (32 bits).
# Seen: RR 0.5, RR@10 1.0; RR 0.333, RR@10 1.0.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet --disable-pip-version-check ir_measures==0.4.3 pytrec_eval-terrier==0.5.11 || exit 2
cd "$work"
"$work/venv/bin/python" - <<'PY'
import importlib.metadata, sys

import ir_measures
from ir_measures import RR

print("ir_measures", importlib.metadata.version("ir_measures"))
found = []
for what, run in (("close", {"a": 0.9, "b": 0.89999999}), ("equal", {"a": 0.9, "b": 0.9, "c": 0.9})):
    scores = ir_measures.calc_aggregate([RR, RR @ 10], {"q": {"a": 1}}, {"q": run})
    found.append((scores[RR], scores[RR @ 10]))
    print(f"{what} scores {run}, relevant is a: RR {scores[RR]:.3f}, RR@10 {scores[RR @ 10]:.3f}")
sys.exit(0 if all(cut > whole for whole, cut in found) else 1)
PY

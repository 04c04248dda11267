#!/bin/bash
# trectools 0.0.50, `TrecEval.get_ndcg`, whose argument trec_eval=True (the default) asks for trec_eval's results.
# Guess: documents of equal score are ranked as in trec_eval (greater id first), as in get_map of the same object.
# In fact: get_ndcg ranks nothing anew, it takes the documents in the run's order; get_map, get_precision and
# get_reciprocal_rank sort as trec_eval does. So one ranking has NDCG 1 and, with its only relevant document, MAP .5.
# Hurts: models with tied scores, such as collapsed ones or those rounded to a few decimals: NDCG is too high or low.
# Source: joaopalotti/trectools, trectools/trec_eval.py.
# Seen: trectools NDCG@10 1.0, MAP 0.5, reciprocal rank 0.5; trec_eval (pytrec_eval) 0.6309, 0.5, 0.5.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv" || exit 2
"$work/venv/bin/pip" install --quiet --disable-pip-version-check trectools==0.0.50 pytrec_eval-terrier==0.5.11 numpy==2.4.6 pandas==3.1.1 scipy==1.17.1 || exit 2
cd "$work"
"$work/venv/bin/python" - <<'PY'
import importlib.metadata, sys, warnings

warnings.simplefilter("ignore")
import pytrec_eval
from trectools import TrecEval, TrecQrel, TrecRun

print("trectools", importlib.metadata.version("trectools"))
with open("qrels", "w") as file:
    file.write("1 0 a 1\n1 0 c 0\n")
with open("run", "w") as file:
    file.write("1 Q0 a 1 0.5 x\n1 Q0 c 2 0.5 x\n")
own = TrecEval(TrecRun("run"), TrecQrel("qrels"))
ndcg, average, reciprocal = (float(each) for each in (own.get_ndcg(depth=10), own.get_map(), own.get_reciprocal_rank()))
measures = {"ndcg_cut.10", "map", "recip_rank"}
right = pytrec_eval.RelevanceEvaluator({"1": {"a": 1, "c": 0}}, measures).evaluate({"1": {"a": 0.5, "c": 0.5}})["1"]
print(f"trectools: NDCG@10 {ndcg}, MAP {average}, reciprocal rank {reciprocal}")
print(f"trec_eval: NDCG@10 {right['ndcg_cut_10']:.4f}, MAP {right['map']}, reciprocal rank {right['recip_rank']}")
sys.exit(0 if ndcg == 1 and average == reciprocal == 0.5 and right["ndcg_cut_10"] < 0.7 else 1)
PY

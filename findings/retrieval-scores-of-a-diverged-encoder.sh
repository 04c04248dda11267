#!/bin/bash
# sentence-transformers 6.2.0 with transformers 5.24.0, torch 2.13.0: retrieval scores of an encoder whose weights are NaN.
# Guess: an error, NaN, or 0.
# In fact no score compares with another, so the documents keep an order that has to do with their places in the corpus only, and
# the scores are finite: four times chance, or 0, by where the relevant documents stand. Similarity (Spearman) is NaN.
# Hurts: whoever chooses a learning rate or a checkpoint by nDCG: the best one may be a diverged one, and 0.45 reads as learned.
# Source: the evaluator orders equal scores by document on purpose; nothing there names NaN.
# Seen: 20 queries, 100 documents, the relevant ones first: accuracy@10 0, nDCG@10 0; last: 0.45 (chance .1) and 0.177.
set -u
place=$(mktemp -d) && trap 'rm -rf "$place"' EXIT
"${PYTHON:-python3}" -m venv "$place/venv" || exit 2
"$place/venv/bin/pip" install -q torch==2.13.0 sentence-transformers==6.2.0 transformers==5.24.0 || exit 2
export TRANSFORMERS_VERBOSITY=error HF_HUB_OFFLINE=1 HF_HOME="$place/home"
"$place/venv/bin/python" -W ignore - "$place" 2>"$place/log" <<'PYTHON'
import math
import sys

import sentence_transformers
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator, InformationRetrievalEvaluator
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

folder = sys.argv[1]
words = ["[PAD]", "[UNK]", *(f"w{number}" for number in range(1100))]
tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(f"{folder}/model")
small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
encoder = BertModel(BertConfig(vocab_size=len(words), **small))
with torch.no_grad():
    for parameter in encoder.parameters():
        parameter.fill_(math.nan)
encoder.save_pretrained(f"{folder}/model")
model = SentenceTransformer(f"{folder}/model")
print("sentence-transformers", sentence_transformers.__version__, "embeddings", model.encode(["w1"])[0, :2].tolist())
queries = {f"q{number}": f"w{number}" for number in range(20)}
corpus = {f"d{number:04}": f"w{number}" for number in range(100)}
found = {}
for place, first in (("first", 0), ("last", 80)):
    relevant = {f"q{number}": {f"d{first + number:04}"} for number in range(20)}
    scores = InformationRetrievalEvaluator(queries, corpus, relevant, show_progress_bar=False)(model)
    found[place] = scores["cosine_accuracy@10"], round(scores["cosine_ndcg@10"], 3)
    print("relevant documents", place, "accuracy@10, nDCG@10", found[place])
pairs = ["w1", "w2", "w3"], ["w4", "w5", "w6"], [0.1, 0.5, 0.9]
similarity = EmbeddingSimilarityEvaluator(*pairs)(model)["spearman_cosine"]
print("Spearman", similarity)
same = max(found.values()) > (0.3, 0.1) and not any(map(math.isnan, sum(found.values(), ()))) and math.isnan(similarity)
print("as described" if same else "CHANGED")
sys.exit(0 if same else 1)
PYTHON

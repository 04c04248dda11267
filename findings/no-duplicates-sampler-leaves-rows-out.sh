#!/bin/bash
# sentence-transformers 6.2.0 with transformers 5.23.0, torch 2.13.0, datasets 5.2.0.
# Guess: with batch_sampler="no_duplicates" an epoch trains on every row once, as with the default sampler.
# In fact rows that share a text (a query with several documents) end in more, smaller batches than the sampler's length
# says, and Trainer stops an epoch at that length: the last ones are never seen, and the epoch still counts as whole.
# Hurts: dense retrievers on data with repeated queries, which the sampler is made for: the rows that it moves are lost.
# Source: huggingface/sentence-transformers#3348 and #3946 treat too few batches (drop_last); a comment there allows more.
# Output seen: 64 rows, 16 of them with one query, batches of 8: 56 rows seen in epoch 1.0; 64 with the default sampler.
set -u
place=$(mktemp -d) && trap 'rm -rf "$place"' EXIT
"${PYTHON:-python3}" -m venv "$place/venv" || exit 2
"$place/venv/bin/pip" install -q torch==2.13.0 sentence-transformers==6.2.0 transformers==5.23.0 accelerate==1.15.0 \
    datasets==5.2.0 || exit 2
export TRANSFORMERS_VERBOSITY=error HF_HUB_OFFLINE=1 HF_HOME="$place/home"
"$place/venv/bin/python" -W ignore - "$place" 2>"$place/log" <<'PYTHON'
import sys

import sentence_transformers
import transformers
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import MultipleNegativesRankingLoss
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

folder = sys.argv[1]
words = ["[PAD]", "[UNK]", *(f"w{number}" for number in range(200))]
tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(f"{folder}/model")
small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
BertModel(BertConfig(vocab_size=len(words), **small)).save_pretrained(f"{folder}/model")
rows = Dataset.from_dict(
    {
        "anchor": ["w0" if row < 16 else f"w{row}" for row in range(64)],
        "positive": [f"w{100 + row}" for row in range(64)],
    }
)


class Noting(MultipleNegativesRankingLoss):
    seen: set

    def forward(self, features, labels):
        features = list(features)
        self.seen.update(map(tuple, features[1]["input_ids"].tolist()))
        return super().forward(features, labels)


print(f"sentence-transformers {sentence_transformers.__version__}, transformers {transformers.__version__}")
seen = {}
for sampler in ("batch_sampler", "no_duplicates"):
    model = SentenceTransformer(f"{folder}/model")
    loss = Noting(model)
    loss.seen = set()
    settings = SentenceTransformerTrainingArguments(
        f"{folder}/{sampler}", num_train_epochs=1, per_device_train_batch_size=8, batch_sampler=sampler, use_cpu=True,
        report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )
    trainer = SentenceTransformerTrainer(model, settings, rows, loss=loss)
    trainer.remove_callback(transformers.PrinterCallback)
    loader = trainer.get_train_dataloader()
    batches = sum(1 for _ in loader.batch_sampler)
    trainer.train()
    seen[sampler] = len(loss.seen)
    print(
        f"{sampler}: length {len(loader)}, batches {batches}, steps {trainer.state.global_step}, "
        f"epoch {trainer.state.epoch}, rows seen {len(loss.seen)} of {len(rows)}"
    )
same = seen["batch_sampler"] == 64 and seen["no_duplicates"] < 64
print("as described" if same else "CHANGED")
sys.exit(0 if same else 1)
PYTHON

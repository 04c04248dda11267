#!/bin/bash
# transformers 5.23.0 with tokenizers 0.23.3.
# Guess: DataCollatorForLanguageModeling(whole_word_mask=True) masks words, with any fast tokenizer.
# In fact a word ends where the next token's offsets don't begin at once. In byte-level BPE, and where a space becomes
# part of a token (Metaspace), they always do, unless the post-processor trims offsets. So a text is one word: it is
# masked from end to end, or not at all. The mean share of masked tokens is right, so no average shows it.
# Hurts: whoever pretrains further with whole words on such a tokenizer: the loss is of texts without any context.
# Source: huggingface/transformers#39485 added it; its docstring asks for a fast tokenizer and says no more.
# Output seen, of 1,000 texts: WordPiece 0.8 % without a mask, 0 % masked whole; byte-level BPE 73.1 % and 26.9 %.
set -u
place=$(mktemp -d) && trap 'rm -rf "$place"' EXIT
"${PYTHON:-python3}" -m venv "$place/venv" || exit 2
"$place/venv/bin/pip" install -q transformers==5.23.0 tokenizers==0.23.3 || exit 2
TRANSFORMERS_VERBOSITY=error "$place/venv/bin/python" -W ignore - <<'PYTHON'
import sys

import numpy as np
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

TEXTS = [f"the quick brown foxes were jumping over {n} unbelievably lazy dogs near the river" for n in range(50)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEMPLATE = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])


def fast(model, splitter, trainer, processor):
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.post_processor = splitter, processor
    tokenizer.train_from_iterator(TEXTS, trainer)
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


alphabet = pre_tokenizers.ByteLevel.alphabet()
pieces = trainers.BpeTrainer(vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
level = pre_tokenizers.ByteLevel(add_prefix_space=False)
trimmed = processors.Sequence([processors.ByteLevel(trim_offsets=True), TEMPLATE])
kinds = {
    "WordPiece": fast(
        models.WordPiece(unk_token="[UNK]"),
        pre_tokenizers.Whitespace(),
        trainers.WordPieceTrainer(vocab_size=110, special_tokens=SPECIAL, show_progress=False),
        TEMPLATE,
    ),
    "byte-level BPE, offsets trimmed": fast(models.BPE(), level, pieces, trimmed),
    "byte-level BPE": fast(models.BPE(), level, pieces, TEMPLATE),
    "Metaspace": fast(
        models.BPE(unk_token="[UNK]"),
        pre_tokenizers.Metaspace(),
        trainers.BpeTrainer(vocab_size=120, special_tokens=SPECIAL, show_progress=False),
        TEMPLATE,
    ),
}
print(f"transformers {transformers.__version__}, 30 % of the tokens of {20 * len(TEXTS)} texts to be masked:")
ends = {}
for kind, tokenizer in kinds.items():
    collator = DataCollatorForLanguageModeling(
        tokenizer, mlm_probability=0.3, whole_word_mask=True, seed=0, return_tensors="np"
    )
    options = {"return_special_tokens_mask": True, "return_offsets_mapping": True}
    rows = [tokenizer(text, **options, padding="max_length", max_length=90) for text in TEXTS]
    shares = []
    for _ in range(20):
        batch = collator([dict(row) for row in rows])
        shares.append((batch["labels"] != -100).sum(1) / (batch["attention_mask"].sum(1) - 2))
    share = np.concatenate(shares)
    ends[kind] = float(np.mean((share == 0) | (share == 1)))
    print(f"{kind}: mean {share.mean():.1%}; texts without a mask {np.mean(share == 0):.1%}, masked whole {np.mean(share == 1):.1%}")
*sound, bytes_, meta = ends.values()
same = max(sound) < 0.05 and bytes_ == meta == 1
print("as described" if same else "CHANGED")
sys.exit(0 if same else 1)
PYTHON

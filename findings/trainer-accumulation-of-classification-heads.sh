#!/bin/bash
# transformers 5.23.0 with torch 2.13.0 and accelerate 1.15.0.
# Guess: four accumulated micro-batches of 2 give Trainer the gradient and the loss of one batch of 8.
# In fact they are four times as large for every sequence and token classification head tried (ModernBERT, EuroBERT, BERT,
# RoBERTa, DeBERTa, Llama, Qwen3), and for masked language models of BERT, RoBERTa and DeBERTa; not for those of
# ModernBERT and EuroBERT. Their forward accepts the number of items and ignores it, so nobody divides.
# Hurts: clipping then cuts gradients that were small, and losses of runs with another micro-batch can't be compared.
# Source: huggingface/transformers#47688, open.
# Output seen, accumulated over whole: x4.00 for both heads of ModernBERT and BERT; MLM: ModernBERT x1.00, BERT x4.00.
set -u
place=$(mktemp -d) && trap 'rm -rf "$place"' EXIT
"${PYTHON:-python3}" -m venv "$place/venv" || exit 2
"$place/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 || exit 2
export TRANSFORMERS_VERBOSITY=error HF_HUB_OFFLINE=1
"$place/venv/bin/python" -W ignore - "$place" 2>"$place/log" <<'PYTHON'
import copy
import sys

import torch
import transformers
from transformers import (
    AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoModelForTokenClassification, BertConfig, ModernBertConfig,
    Trainer, TrainingArguments,
)

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
CONFIGS = {
    "ModernBERT": ModernBertConfig(**SMALL, **TOKENS, num_labels=3),
    "BERT": BertConfig(**SMALL, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
}
ids = torch.randint(5, 64, (8, 12), generator=torch.Generator().manual_seed(0))
# As many labels in each row, so that means of micro-batches have the mean of the whole.
KINDS = {
    "sequence": (AutoModelForSequenceClassification, lambda row, text: torch.tensor(row % 3)),
    "token": (AutoModelForTokenClassification, lambda row, text: text % 3),
    "masked": (AutoModelForMaskedLM, lambda row, text: torch.where(torch.arange(12) % 3 == 0, text, -100)),
}


def first_step(model, rows, micro, steps):
    options = {"max_steps": 1, "logging_steps": 1, "report_to": "none", "save_strategy": "no", "max_grad_norm": 1e9}
    settings = TrainingArguments(
        sys.argv[1], per_device_train_batch_size=micro, gradient_accumulation_steps=steps, use_cpu=True,
        disable_tqdm=True, learning_rate=0.0, **options,
    )
    trainer = Trainer(model, settings, train_dataset=rows)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return trainer.state.log_history[0]


print(f"transformers {transformers.__version__}, torch {torch.__version__}: 4 x 2 over 1 x 8")
found = {}
for kind, (auto, label) in KINDS.items():
    rows = [{"input_ids": text, "labels": label(row, text)} for row, text in enumerate(ids)]
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        model = auto.from_config(config)
        whole, parts = (first_step(copy.deepcopy(model), rows, *split) for split in ((8, 1), (2, 4)))
        gradient, loss = (parts[key] / whole[key] for key in ("grad_norm", "loss"))
        found[kind, name] = gradient
        print(f"{name}, {kind}: gradient x{gradient:.2f}, loss x{loss:.2f}")
wanted = {key: 1.0 if key == ("masked", "ModernBERT") else 4.0 for key in found}
same = all(abs(found[key] / wanted[key] - 1) < 0.01 for key in found)
print("as described" if same else "CHANGED")
sys.exit(0 if same else 1)
PYTHON

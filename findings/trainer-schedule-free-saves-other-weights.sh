#!/bin/bash
# transformers 5.24.0 with schedulefree 1.4.1, torch 2.13.0, accelerate 1.15.0: Trainer with optim="schedule_free_adamw".
# Guess: what Trainer saves is what it evaluates: the average of the steps, the one model that schedule-free training is about.
# In fact evaluation alone brings the average into the model. A checkpoint, or save_model() after train(), has it if an evaluation came
# since the last step; else it has the point where the next gradient is taken. Neither the files nor the log tell which.
# Hurts: pretraining that saves more often than it evaluates, or that is evaluated from its checkpoints only: the scores are of other
# weights than the run's own, and a series of checkpoints mixes both kinds. Calling trainer.optimizer.eval() before saving helps.
# Source: facebookresearch/schedule_free 48 asks for eval() before a checkpoint; the pages on Trainer's option that we found don't.
# Output seen, losses: evaluate() after 20 steps 0.061; checkpoint-20 0.034, save_model() before and after evaluate() 0.034 and 0.061.
# The same run with an evaluation in step 20: 0.061 in all of them.
set -u
place=$(mktemp -d) && trap 'rm -rf "$place"' EXIT
"${PYTHON:-python3}" -m venv "$place/venv" || exit 2
"$place/venv/bin/pip" install -q torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 schedulefree==1.4.1 || exit 2
export TRANSFORMERS_VERBOSITY=error HF_HUB_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1 HF_HOME="$place/home"
"$place/venv/bin/python" -W ignore - "$place" 2>"$place/log" <<'PYTHON' || { code=$?; tail -n 3 "$place/log"; exit $code; }
import importlib.metadata
import sys

import torch
import transformers
from transformers import BertConfig, BertForSequenceClassification, PrinterCallback, Trainer, TrainingArguments, set_seed
from transformers.utils import logging

logging.disable_progress_bar()
CONFIG = BertConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, num_labels=2
)
set_seed(0)
ids = torch.randint(5, 64, (64, 8))
rows = [{"input_ids": each, "labels": each[0] % 2} for each in ids]


def loss_of(folder):
    model = BertForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return float(model(input_ids=ids, labels=ids[:, 0] % 2).loss)


def train(name, **more):
    set_seed(0)
    folder = f"{sys.argv[1]}/{name}"
    trainer = Trainer(
        BertForSequenceClassification(CONFIG),
        TrainingArguments(
            folder, optim="schedule_free_adamw", lr_scheduler_type="constant", learning_rate=1e-2, max_steps=20,
            per_device_train_batch_size=8, save_strategy="steps", save_steps=20, logging_strategy="no", use_cpu=True,
            report_to="none", disable_tqdm=True, **more,
        ),
        train_dataset=rows,
        eval_dataset=rows,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.save_model(f"{folder}/before")
    losses = {"evaluate()": trainer.evaluate()["eval_loss"]}
    trainer.save_model(f"{folder}/after")
    losses |= {each: loss_of(f"{folder}/{each}") for each in ("checkpoint-20", "before", "after")}
    print(f"{name}: " + ", ".join(f"{each} {loss:.3f}" for each, loss in losses.items()))
    return losses


print(
    f"transformers {transformers.__version__}, schedulefree {importlib.metadata.version('schedulefree')}, "
    f"torch {torch.__version__}; losses:"
)
first = train("without")
second = train("with", eval_strategy="steps", eval_steps=20)


def near(one, other):
    return abs(one - other) < 2e-3


said = first["evaluate()"]
same = (
    not near(first["checkpoint-20"], said)
    and near(first["before"], first["checkpoint-20"])
    and near(first["after"], said)
    and all(near(loss, said) for loss in second.values())
)
print("as described" if same else "CHANGED")
sys.exit(0 if same else 1)
PYTHON

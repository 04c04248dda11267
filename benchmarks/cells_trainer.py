"""The peer of benchmarks/cells.py: the same cells by Hugging Face's Trainer, each in its own process or in reused Ray Tune actors.

Stock transformers: `AutoModelFor...`, dynamic padding, bf16 autocast, fused AdamW; steps, batch, rates, schedule, examples and metric
are ours. Tokenised data come from the cache that `datasets` keeps on disk, which is filled before anything is timed.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

IGNORED = -100


def encoded(task: str, data: Path, model: Path, longest: int) -> dict[str, Any]:
    """Return train, validation and test of a task as tokenised `datasets`, from the cache if it has them."""
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(str(model))
    files = {split: str(data / task / f"{split}.parquet") for split in ("train", "validation", "test")}
    loaded = datasets.load_dataset("parquet", data_files=files, cache_dir=str(data / "cache"))
    encode = {"sst2": encode_texts, "conll2003": encode_words}[task]
    columns = loaded["train"].column_names
    return dict(loaded.map(partial(encode, tokenizer=tokenizer, longest=longest), batched=True, remove_columns=columns))


def encode_texts(rows: dict[str, list[Any]], tokenizer: Any, longest: int) -> dict[str, list[Any]]:
    """Token ids, closed by EOS as ours are, and labels."""
    ids = tokenizer(rows["text"], add_special_tokens=False, truncation=True, max_length=longest - 1)["input_ids"]
    return {"input_ids": [[*row, tokenizer.eos_token_id] for row in ids], "labels": rows["label"]}


def encode_words(rows: dict[str, list[Any]], tokenizer: Any, longest: int) -> dict[str, list[Any]]:
    """Token ids, closed by EOS, and the tag of each word at its first token."""
    texts = [" ".join(words) for words in rows["tokens"]]
    encoding = tokenizer(
        texts, add_special_tokens=False, truncation=True, max_length=longest - 1, return_offsets_mapping=True
    )
    ids, labels = [], []
    for row, offsets, words, tags in zip(
        encoding["input_ids"], encoding["offset_mapping"], rows["tokens"], rows["tags"], strict=True
    ):
        ends = np.cumsum([len(word) + 1 for word in words])
        word = np.searchsorted(ends, [max(stop - 1, start) for start, stop in offsets], side="right")
        first = np.append(True, word[1:] != word[:-1])[: len(word)]
        ids.append([*row, tokenizer.eos_token_id])
        labels.append([*np.where(first, np.array(tags)[word], IGNORED).tolist(), IGNORED])
    return {"input_ids": ids, "labels": labels}


def accuracy(predicted: Any) -> dict[str, float]:
    """Return the accuracy on sentences; the predictions are classes, by `most_probable`."""
    return {"accuracy": float((predicted.predictions == predicted.label_ids).mean())}


def entities(names: list[str]) -> Callable[[Any], dict[str, float]]:
    """seqeval's F1 over the first tokens of words."""
    from seqeval.metrics import f1_score

    def compute(predicted: Any) -> dict[str, float]:
        pairs = list(zip(predicted.predictions, predicted.label_ids, strict=True))
        true = [[names[tag] for tag in labels[labels != IGNORED]] for _, labels in pairs]
        tags = [[names[tag] for tag in row[labels != IGNORED]] for row, labels in pairs]
        return {"f1": float(f1_score(true, tags, zero_division=0))}

    return compute


def most_probable(logits: Any, labels: Any) -> Any:
    """Return the most probable classes, so that Trainer does not keep the logits of a whole split."""
    return logits.argmax(-1)


def train_cell(
    task: str, names: list[str], rate: float, seed: int, parts: dict[str, Any], model: Path, protocol: dict[str, Any]
) -> dict[str, Any]:
    """Fine-tune and evaluate one cell; return its scores and the seconds of its parts."""
    import torch
    from transformers import (
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
        AutoTokenizer,
        DataCollatorForTokenClassification,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    began = time.perf_counter()
    set_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(str(model))
    tokens = task == "conll2003"
    kind: Any = AutoModelForTokenClassification if tokens else AutoModelForSequenceClassification
    network = kind.from_pretrained(str(model), num_labels=len(names), classifier_pooling=protocol["pooling"])
    collator: Any = DataCollatorForTokenClassification if tokens else DataCollatorWithPadding
    steps, batch = protocol["max_steps"], protocol["batch_size"]
    with tempfile.TemporaryDirectory(prefix="mlmclm-benchmark-") as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=batch, per_device_eval_batch_size=batch,
            learning_rate=rate, lr_scheduler_type="linear", warmup_steps=round(protocol["warmup_ratio"] * steps),
            adam_beta1=protocol["adam_beta1"], adam_beta2=protocol["adam_beta2"],
            adam_epsilon=protocol["adam_epsilon"], weight_decay=protocol["weight_decay"],
            max_grad_norm=protocol["clip_norm"], bf16=True, use_cpu=not torch.cuda.is_available(), seed=seed, save_strategy="no",
            logging_strategy="no", eval_strategy="no", report_to=[], disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(
            network, arguments, collator(tokenizer), parts["train"],
            compute_metrics=entities(names) if tokens else accuracy, preprocess_logits_for_metrics=most_probable,
        )  # fmt: skip
        started = time.perf_counter()
        trainer.train()
        ended = time.perf_counter()
        scores = {}
        for split in ("validation", "test"):
            rows = parts[split].select(range(min(len(parts[split]), protocol["max_evaluation_examples"] or 10**9)))
            metrics = trainer.evaluate(rows, metric_key_prefix=split)
            scores[split] = metrics[f"{split}_f1" if tokens else f"{split}_accuracy"]
    finished = time.perf_counter()
    return {
        "task": task, "learning_rate": rate, "seed": seed, "scores": scores,
        "start_up": started - began, "train": ended - started, "evaluate": finished - ended,
    }  # fmt: skip


def run_process(cell: dict[str, Any], data: Path, model: Path, protocol: dict[str, Any]) -> dict[str, Any]:
    """Compute one cell; called in its own process with two threads."""
    parts = encoded(cell["task"], data, model, protocol["max_length"])
    return train_cell(**cell, parts=parts, model=model, protocol=protocol)


def run_actors(
    cells: list[dict[str, Any]], data: Path, model: Path, protocol: dict[str, Any], gpu_share: float = 0.0
) -> dict[str, Any]:
    """Compute all cells as trials in reused one-thread actors, two or as many as share a GPU; each keeps a task's tokenised data."""
    import ray
    import torch
    from ray import tune

    class Actor(tune.Trainable):
        def setup(self, config: dict[str, Any]) -> None:
            torch.set_num_threads(1)
            self.cell = config["cell"]
            self.parts: dict[str, Any] = {}

        def reset_config(self, new_config: dict[str, Any]) -> bool:
            self.cell = new_config["cell"]
            return True

        def step(self) -> dict[str, Any]:
            began = time.time()
            task = self.cell["task"]
            if task not in self.parts:
                self.parts[task] = encoded(task, data, model, protocol["max_length"])
            result = train_cell(**self.cell, parts=self.parts[task], model=model, protocol=protocol)
            return {"found": result, "began": began, "done": True}

        def save_checkpoint(self, checkpoint_dir: str) -> None:
            pass

        def load_checkpoint(self, checkpoint: Any) -> None:
            pass

    began = time.time()
    with tempfile.TemporaryDirectory(prefix="mlmclm-benchmark-") as folder:
        at_once = int(1 / gpu_share) if gpu_share else 2
        ray.init(num_cpus=at_once, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
        trials = tune.Tuner(
            tune.with_resources(Actor, {"CPU": 1, "GPU": gpu_share}),
            param_space={"cell": tune.grid_search(cells)},
            tune_config=tune.TuneConfig(reuse_actors=True, max_concurrent_trials=at_once),
            run_config=tune.RunConfig(storage_path=folder, verbose=0),
        ).fit()
        ray.shutdown()
    if trials.errors:
        raise trials.errors[0]
    metrics = [trial.metrics for trial in trials]
    return {
        "cells": [trial["found"] for trial in metrics],
        "start_up": min(trial["began"] for trial in metrics) - began,
        "rest": time.time() - min(trial["began"] for trial in metrics),
    }

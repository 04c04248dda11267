"""Small models, tokenizers and task data for tests, each made in well under a second."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    EuroBertConfig,
    EuroBertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from mlmclm.models.tokenizer_settings import PREPARED
from mlmclm.storage.files import write_json

NAMES = ["Anna", "Berta", "Carl", "Dora", "Emil", "Fritz", "Greta", "Hans"]
CITIES = ["Paris", "Oslo", "Rome", "Lima", "Cairo", "Delhi", "Quito", "Minsk"]
GOOD = ["lovely", "bright", "warm", "clever", "fresh"]
BAD = ["dull", "cold", "stale", "clumsy", "bleak"]
FILL = ["the", "film", "was", "and", "so", "very", "one", "of", "a", "kind", "here", "today", "again", "with", "in"]


def small_tokenizer(vocabulary: int = 400) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of the words above."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<bos>", "<eos>", "<mask>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=special, initial_alphabet=alphabet)
    words = NAMES + CITIES + GOOD + BAD + FILL + ["Question:", "Context:", "Query:", "Document:"]
    tokenizer.train_from_iterator([" ".join(words)] * 3 + words, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", mask_token="<mask>"
    )


def as_written_by_5_23(config: Path) -> bytes:
    """Return a config.json as transformers 5.23.0 writes it; the hashes in tests are of files of this version."""
    return re.sub(rb'("transformers_version": ")[^"]+', rb"\g<1>5.23.0", config.read_bytes())


def save_small_model(
    folder: Path, *, seed: int = 0, length: int = 128, key_value_heads: int = 2, hidden: int = 32
) -> Path:
    """Write a folder as pretraining leaves it: an untrained EuroBERT of 2 layers with its tokenizer."""
    tokenizer = small_tokenizer()
    tokenizer.save_pretrained(folder)
    roles = {f"{role}_token": f"<{role}>" for role in ("pad", "bos", "eos", "mask")}
    write_json(folder / "tokenizer_config.json", {**PREPARED, **roles, "model_max_length": 1_000_000})
    config = EuroBertConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=length,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        mask_token_id=3,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        EuroBertForMaskedLM(config).save_pretrained(folder)
    return folder


PRONOUNS = ("he", "his", "him", "she", "her", "they", "their", "them")


def save_pronoun_model(folder: Path, words: str = "", pronouns: Sequence[str] = PRONOUNS) -> Path:
    """Write an untrained encoder whose vocabulary has each of these pronouns and words as one token."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<pad>", "<bos>", "<eos>", "<mask>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    forms = [*words.split(), *pronouns, *(form.capitalize() for form in pronouns if form in ("he", "she"))]
    backend.train_from_iterator(
        [f" {word}" for word in forms for _ in range(3)] + forms,
        trainers.BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=alphabet),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", mask_token="<mask>"
    )
    tokenizer.save_pretrained(folder)
    config = EuroBertConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        mask_token_id=3, initializer_range=0.3,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(3)
        EuroBertForMaskedLM(config).save_pretrained(folder)
    return folder


def save_framed_model(folder: Path, *, length: int = 128) -> Path:
    """Write the same model with a tokenizer that turns texts into `<bos> a <eos>` and `<bos> a <eos> b <eos>`."""
    save_small_model(folder, length=length)
    file = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    template = processors.TemplateProcessing(
        single="<bos> $A <eos>", pair="<bos> $A <eos> $B:1 <eos>:1", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    tokenizer.post_processor = template
    tokenizer.save(str(file))
    return folder


def save_small_decoder(folder: Path, *, seed: int = 0, length: int = 64, vocabulary: int = 400) -> Path:
    """A Llama of 2 layers x 32 with random weights and a tokenizer of its own, which has no mask token."""
    backend = small_tokenizer(vocabulary).backend_tokenizer
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace("<mask>", "<other>"))
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=length, bos_token_id=1, eos_token_id=2, initializer_range=0.2,
        tie_word_embeddings=True,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_table(folder: Path, split: str, rows: dict[str, Any]) -> None:
    """One Parquet file of a data set's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(rows), folder / f"{split}.parquet")


FEELINGS = """
name: feelings
family: sequence-classification
title: Films, good or bad
source: local
folder: sst2
columns: {text: sentence}
splits: {train: train, validation_fraction: 0.2, test: validation}
metric: accuracy
licence: mine
citation: none
"""
"""The declaration of a user's own task, on the files of `write_sentiment`."""


def write_sentiment(root: Path, train: int = 400, test: int = 60) -> None:
    """Write a learnable stand-in for sst2: one word decides the label."""
    chance = random.Random(1)
    for split, count in (("train", train), ("validation", test)):
        rows: dict[str, list[Any]] = {"sentence": [], "label": []}
        for _ in range(count):
            label = chance.randrange(2)
            words = chance.choices(FILL, k=chance.randint(1, 12))
            words.insert(chance.randrange(len(words) + 1), chance.choice(GOOD if label else BAD))
            rows["sentence"].append(" ".join(words))
            rows["label"].append(label)
        write_table(root / "sst2", split, rows)


def write_similarities(root: Path, train: int = 300, test: int = 60) -> None:
    """Write a learnable stand-in for stsb: the score is the number of good words among five; `validation` is the test split."""
    chance = random.Random(5)
    for split, count in (("train", train), ("validation", test)):
        rows: dict[str, list[Any]] = {"sentence1": [], "sentence2": [], "label": []}
        for _ in range(count):
            good = chance.randint(0, 5)
            words = chance.choices(GOOD, k=good) + chance.choices(BAD, k=5 - good)
            chance.shuffle(words)
            rows["sentence1"].append(" ".join(words[:3]))
            rows["sentence2"].append(" ".join(words[3:]))
            rows["label"].append(float(good))
        write_table(root / "stsb", split, rows)


def write_entities(root: Path, train: int = 300, test: int = 50) -> None:
    """Write a learnable stand-in for conll2003: people and two-word places."""
    chance = random.Random(2)
    for split, count in (("train", train), ("validation", test), ("test", test)):
        rows: dict[str, list[Any]] = {"tokens": [], "ner_tags": []}
        for _ in range(count):
            words: list[str] = []
            tags: list[int] = []
            for _ in range(chance.randint(1, 4)):
                entity = chance.choice(([chance.choice(NAMES)], [chance.choice(CITIES), chance.choice(CITIES)]))
                words += [*entity, chance.choice(FILL)]
                tags += [1, 0] if len(entity) == 1 else [5, 6, 0]
            rows["tokens"].append(words)
            rows["ner_tags"].append(tags)
        write_table(root / "conll2003", split, rows)


def write_questions(root: Path, train: int = 240, test: int = 40, *, unanswerable: bool = False) -> None:
    """Write a learnable stand-in for squad_4k: which city, or which person? With `unanswerable` it is for squad_v2: a third
    of the passages lack the answer."""
    chance = random.Random(3)
    for split, count in (("train", train), ("validation", test)):
        rows: dict[str, list[Any]] = {name: [] for name in ("id", "title", "context", "question", "answers")}
        for number in range(count):
            words = chance.choices(FILL, k=chance.randint(4, 14))
            answers = {"Paris": chance.choice(CITIES), "Anna": chance.choice(NAMES)}
            for word in answers.values():
                words.insert(chance.randrange(len(words) + 1), word)
            asked = chance.choice(["Paris", "Anna"])
            missing = unanswerable and number % 3 == 0
            if missing:
                words.remove(answers[asked])
            context = f"{' '.join(words)} {number % 7}"
            rows["id"].append(f"{split}-{number}")
            rows["title"].append("")
            rows["context"].append(context)
            rows["question"].append(f"like {asked}")
            rows["answers"].append(
                {"text": [], "answer_start": []}
                if missing
                else {"text": [answers[asked]], "answer_start": [context.index(answers[asked])]}
            )
        write_table(root / ("squad_v2" if unanswerable else "squad_4k"), split, rows)


def write_retrieval(root: Path, train: int = 300, test: int = 40) -> None:
    """Write a learnable stand-in for reqa_squad: a query's document shares a name and a place with it."""
    chance = random.Random(4)

    def pair() -> tuple[str, str]:
        name, city = chance.choice(NAMES), chance.choice(CITIES)
        filler = chance.choices(FILL, k=4)
        return f"{name} {city}", f"{filler[0]} {city} {filler[1]} {name} {' '.join(filler[2:])}"

    pairs = [pair() for _ in range(train)]
    folder = root / "reqa_squad"
    write_table(folder, "train", {"query": [query for query, _ in pairs], "positive": [text for _, text in pairs]})
    judged = [pair() for _ in range(test)]
    write_table(folder, "queries", {"_id": [f"q{n}" for n in range(test)], "text": [query for query, _ in judged]})
    write_table(folder, "corpus", {"_id": [f"d{n}" for n in range(test)], "text": [text for _, text in judged]})
    ids = {"query-id": [f"q{n}" for n in range(test)], "corpus-id": [f"d{n}" for n in range(test)]}
    write_table(folder, "qrels", {**ids, "score": [1] * test})


def write_all(root: Path) -> Path:
    """Write the data of four tasks: sst2, conll2003, squad_4k and reqa_squad."""
    write_sentiment(root)
    write_entities(root)
    write_questions(root)
    write_retrieval(root)
    return root


def write_two(folder: Path, *, sentences: int = 30) -> None:
    """Write `data/` with a few rows of sst2 and conll2003, and `model/`.

    Args:
        sentences: the number of sentences in sst2's test split.
    """
    write_sentiment(folder / "data", train=80, test=sentences)
    write_entities(folder / "data", train=80, test=30)
    save_small_model(folder / "model")


def write_place(folder: Path) -> None:
    """Write `data/` with all tasks of this module, and `model/`."""
    write_all(folder / "data")
    write_similarities(folder / "data")
    write_questions(folder / "data", unanswerable=True)
    save_small_model(folder / "model")

"""From text to packed blocks on disk, once: the same input gives the same bytes, whatever the number of workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mlmclm.corpora.blocks import Blocks, BlockWriter, token_type
from mlmclm.corpora.config import CorpusConfig, TokenizerConfig
from mlmclm.corpora.documents import Source, open_source
from mlmclm.corpora.selection import head, held_out, sample
from mlmclm.corpora.tokenizer import (
    TRAINING_CHARACTERS,
    load_tokenizer,
    prepare_tokenizer,
    special_ids,
    tokenizer_key,
)
from mlmclm.corpora.workers import Progress, ordered_map, silent, worker_count
from mlmclm.errors import UserError
from mlmclm.files import read_json, stable_hash, whole_folder, write_json

CORPUS_VERSION = 1
"""Part of every key: raise it when the blocks of the same text change."""

_BATCH_CHARACTERS = 200_000
_CHARACTERS_A_TOKEN = 8
"""Text set aside for each token wanted; English needs about 4, and what falls short is read again with more."""

TRAIN, VALIDATION = "train", "validation"


@dataclass(frozen=True)
class PreparedCorpus:
    """Packed blocks of a corpus, and the tokenizer that they were made with."""

    key: str
    folder: Path
    tokenizer: Path
    """A Hugging Face fast tokenizer's folder."""
    tokenizer_key: str
    block_length: int
    train: Blocks
    validation: Blocks
    documents: int
    """Documents in the training blocks."""
    tokens: int
    """Tokens in the training blocks, EOS included."""
    vocabulary: int
    """Tokens of the tokenizer, special ones included: ids are below it."""


class _Batch(NamedTuple):
    """Documents of one part, for a worker."""

    part: str
    texts: list[str]


class _Encoded(NamedTuple):
    """A worker's answer: the documents' tokens in a row (each with its EOS), the tokens and the UTF-8 bytes of each."""

    part: str
    tokens: NDArray[np.uint32]
    lengths: list[int]
    bytes: list[int]


def prepare_corpus(
    corpus: CorpusConfig,
    tokenizer: TokenizerConfig,
    *,
    block_length: int,
    store: Path,
    data_root: Path | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> PreparedCorpus:
    """Reads, tokenises and packs a corpus, or opens it where it is already in the store (well under a second).

    Args:
        block_length: tokens a block.
        store: the study's folder; blocks go to `corpora/`, the tokenizer to `tokenizers/`.
        data_root: the folder in which a local source's name is also looked up.
        workers: processes; all processors where None. It does not change the result.

    Raises:
        UserError: a source, column or tokenizer that is not there, or too little text.
        EnvironmentFault: the hub cannot be reached, the disk is full, or a worker was killed.
    """
    report = progress or silent
    count = worker_count(workers)
    place = _locate(corpus, tokenizer, block_length, store, data_root, count, report)
    if not place.complete:
        tokenizer_folder = _tokenizer(tokenizer, corpus, place.source, place.origin, store, report)
        if not place.folder.is_dir():
            with whole_folder(place.folder) as temporary:
                meta = _pack(temporary, corpus, place.source, tokenizer_folder, block_length, count, report)
                meta |= {"key": place.key, "tokenizer_key": place.tokenizer.name, "block_length": block_length}
                write_json(
                    temporary / "meta.json",
                    {**meta, "source_fingerprint": place.origin, "corpus": corpus.model_dump()},
                )
    return _open(place.key, place.folder, place.tokenizer)


def find_corpus(
    corpus: CorpusConfig,
    tokenizer: TokenizerConfig,
    *,
    block_length: int,
    store: Path,
    data_root: Path | None = None,
) -> PreparedCorpus | None:
    """What `prepare_corpus` would return without any work, or None where there is some to do; raises what it raises."""
    place = _locate(corpus, tokenizer, block_length, store, data_root, 1, silent)
    return _open(place.key, place.folder, place.tokenizer) if place.complete else None


def open_corpus(store: Path, key: str) -> tuple[PreparedCorpus, CorpusConfig]:
    """A corpus of the store by its key, and what it was made from.

    Raises:
        UserError: it is not there.
    """
    folder = store / "corpora" / key
    meta = read_json(folder / "meta.json")
    corpus = _open(key, folder, store / "tokenizers" / meta["tokenizer_key"])
    return corpus, CorpusConfig.model_validate(meta["corpus"])


class _Place(NamedTuple):
    """Where a corpus is, or will be."""

    source: Source
    origin: str
    key: str
    folder: Path
    tokenizer: Path

    @property
    def complete(self) -> bool:
        """Whether blocks and tokenizer are there."""
        return self.folder.is_dir() and self.tokenizer.is_dir()


def _locate(
    corpus: CorpusConfig,
    tokenizer: TokenizerConfig,
    block_length: int,
    store: Path,
    data_root: Path | None,
    workers: int,
    report: Progress,
) -> _Place:
    if block_length < 2:
        raise UserError(f"the block length must be at least 2 tokens, got {block_length}.")
    source = open_source(corpus, store=store, data_root=data_root, workers=workers, progress=report)
    origin = source.fingerprint()
    own_key = tokenizer_key(tokenizer, _text_key(corpus, origin))
    # Where the text lies does not matter, only what it is.
    facts = [CORPUS_VERSION, corpus.model_dump(exclude={"source"}), origin, own_key, block_length]
    key = stable_hash(facts)[:16]
    return _Place(source, origin, key, store / "corpora" / key, store / "tokenizers" / own_key)


def describe(prepared: PreparedCorpus, *, examples: int = 3) -> dict[str, Any]:
    """What a person asks about a corpus: sizes, vocabulary, bytes a token, and the beginnings of a few blocks."""
    meta = read_json(prepared.folder / "meta.json")
    tokenizer = load_tokenizer(prepared.tokenizer)
    rows = np.arange(min(examples, len(prepared.train)), dtype=np.int64)
    beginnings = prepared.train.take(rows)[:, :100]
    return {
        "source": meta["corpus"]["source"],
        "folder": str(prepared.folder),
        "tokenizer": str(prepared.tokenizer),
        "vocabulary": prepared.vocabulary,
        "block_length": prepared.block_length,
        "bytes_per_token": round(meta["train"]["bytes"] / meta["train"]["encoded_tokens"], 3),
        "train": {name: meta["train"][name] for name in ("documents", "tokens", "blocks")},
        "validation": {name: meta["validation"][name] for name in ("documents", "tokens", "blocks")},
        "examples": [tokenizer.decode(row.tolist(), skip_special_tokens=False) for row in beginnings],
    }


def _open(key: str, folder: Path, tokenizer: Path) -> PreparedCorpus:
    """Opens what is in the store."""
    meta = read_json(folder / "meta.json")
    length, dtype = meta["block_length"], meta["dtype"]
    return PreparedCorpus(
        key=key,
        folder=folder,
        tokenizer=tokenizer,
        tokenizer_key=meta["tokenizer_key"],
        block_length=length,
        train=Blocks(folder / "train.bin", length, dtype),
        validation=Blocks(folder / "validation.bin", length, dtype),
        documents=meta["train"]["documents"],
        tokens=meta["train"]["tokens"],
        vocabulary=meta["vocabulary"],
    )


def _text_key(corpus: CorpusConfig, origin: str) -> str:
    """Identifies the text that a tokenizer is trained on: the whole training text, however much of it is packed."""
    return stable_hash([origin, corpus.validation_split, corpus.validation_fraction, corpus.streaming, corpus.seed])


def _tokenizer(
    config: TokenizerConfig, corpus: CorpusConfig, source: Source, origin: str, store: Path, report: Progress
) -> Path:
    """The tokenizer's folder, trained on a fixed sample of the training text where it is to be trained."""

    def texts() -> Iterator[str]:
        training = _part(TRAIN, corpus, source)
        if corpus.streaming:
            chosen = list(head(training, characters=TRAINING_CHARACTERS))
        else:
            chosen, _ = sample(
                training, characters=TRAINING_CHARACTERS, documents=None, purpose="tokenizer", seed=corpus.seed
            )
        if not chosen:
            raise _no_text(corpus)
        report("training the tokenizer", 0, None)
        yield from chosen

    folder = prepare_tokenizer(config, store=store, corpus_key=_text_key(corpus, origin), texts=texts())
    report("tokenizer ready", 1, 1)
    return folder


def _part(part: str, corpus: CorpusConfig, source: Source) -> Iterator[str]:
    """The documents of train or validation, in the source's order, the empty ones left out."""
    own = source.validation()
    if own is None:
        return (text for text_part, text in _mixed(corpus, source) if text_part == part)
    return (text for text in (source.train() if part == TRAIN else own) if text.strip())


def _mixed(corpus: CorpusConfig, source: Source) -> Iterator[tuple[str, str]]:
    """(part, text) of the documents of a source that has no validation part of its own: some are held out."""
    for text in source.train():
        if text.strip():
            out = held_out(text, fraction=corpus.validation_fraction, seed=corpus.seed)
            yield (VALIDATION if out else TRAIN), text


def _pack(
    folder: Path,
    corpus: CorpusConfig,
    source: Source,
    tokenizer: Path,
    block_length: int,
    workers: int,
    report: Progress,
) -> dict[str, Any]:
    """Writes `train.bin` and `validation.bin`; returns the facts about them."""
    characters_a_token = _CHARACTERS_A_TOKEN
    while True:
        streams, left_out = _chosen(corpus, source, characters_a_token)
        facts = _write(folder, corpus, streams, tokenizer, block_length, workers, report)
        short = [part for part in left_out if not facts[part].pop("full")]
        if not short:
            break
        characters_a_token *= 2
    for part in (TRAIN, VALIDATION):
        _check(facts[part], part, corpus, block_length)
        facts[part].pop("full", None)
    return facts


_Stream = Iterable[tuple[str, str]]
"""(part, text) of documents, of one part or of both."""


def _chosen(corpus: CorpusConfig, source: Source, characters_a_token: int) -> tuple[list[_Stream], list[str]]:
    """The documents to tokenise, and the parts that may turn out short because some documents were left out."""
    if corpus.streaming and source.validation() is None:
        return [_mixed(corpus, source)], []
    streams: list[_Stream] = []
    left_out = []
    for part, tokens, documents in (
        (TRAIN, corpus.max_tokens, corpus.max_documents),
        (VALIDATION, corpus.max_validation_tokens, None),
    ):
        texts: Iterable[str] = _part(part, corpus, source)
        if not corpus.streaming and (tokens is not None or documents is not None):
            characters = None if tokens is None else tokens * characters_a_token
            texts, dropped = sample(
                texts, characters=characters, documents=documents, purpose="selection", seed=corpus.seed
            )
            if dropped and (documents is None or len(texts) < documents):
                left_out.append(part)
        streams.append(zip(repeat(part), texts, strict=False))
    return streams, left_out


def _write(
    folder: Path,
    corpus: CorpusConfig,
    streams: list[_Stream],
    tokenizer: Path,
    block_length: int,
    workers: int,
    report: Progress,
) -> dict[str, Any]:
    """Tokenises and packs documents until both parts are full or there are no more."""
    vocabulary = load_tokenizer(tokenizer).get_vocab_size(with_added_tokens=True)
    dtype = token_type(vocabulary)
    limits = {TRAIN: corpus.max_tokens, VALIDATION: corpus.max_validation_tokens}
    sizes = {part: {"bytes": 0, "encoded_tokens": 0} for part in limits}
    with (
        BlockWriter(folder / "train.bin", block_length, dtype, limits[TRAIN]) as train,
        BlockWriter(folder / "validation.bin", block_length, dtype, limits[VALIDATION]) as validation,
    ):
        writers = {TRAIN: train, VALIDATION: validation}
        batches = _batches(streams, writers, corpus)
        setup = (str(tokenizer), special_ids(tokenizer)["eos"])
        for answer in ordered_map(_encode, batches, workers=workers, setup=_set_up, setup_arguments=setup):
            writer = writers[answer.part]
            ends = np.cumsum(answer.lengths)
            for end, length, size in zip(ends, answer.lengths, answer.bytes, strict=True):
                if not writer.full:
                    writer.add(answer.tokens[end - length : end])
                    sizes[answer.part]["bytes"] += size
                    sizes[answer.part]["encoded_tokens"] += length
            report("tokenising", train.tokens, corpus.max_tokens)
        counts = {
            part: {"documents": writer.documents, "tokens": writer.tokens, "blocks": writer.blocks, "full": writer.full}
            for part, writer in writers.items()
        }
    return {
        "vocabulary": vocabulary,
        "dtype": dtype.str,
        **{part: {**counts[part], **sizes[part]} for part in counts},
    }


def _batches(streams: list[_Stream], writers: dict[str, BlockWriter], corpus: CorpusConfig) -> Iterator[_Batch]:
    """Batches of about `_BATCH_CHARACTERS` of one part; ends early when nothing more is needed.

    A stream that holds both parts ends with the training part: the validation part's limit is an upper bound only.
    """
    waiting: dict[str, list[str]] = {TRAIN: [], VALIDATION: []}
    sizes = {TRAIN: 0, VALIDATION: 0}
    taken = 0
    both = len(streams) == 1
    for stream in streams:
        for part, text in stream:
            enough = part == TRAIN and corpus.max_documents is not None and taken >= corpus.max_documents
            if enough or writers[part].full:
                if part == TRAIN or not both:
                    break
                continue
            taken += part == TRAIN
            waiting[part].append(text)
            sizes[part] += len(text)
            if sizes[part] >= _BATCH_CHARACTERS:
                yield _Batch(part, waiting[part])
                waiting[part], sizes[part] = [], 0
    for part, texts in waiting.items():
        if texts:
            yield _Batch(part, texts)


def _check(facts: dict[str, Any], part: str, corpus: CorpusConfig, block_length: int) -> None:
    """Raises UserError where a part has no block."""
    if facts["blocks"]:
        return
    if part == TRAIN and not facts["documents"]:
        raise _no_text(corpus)
    source = f"corpus source {corpus.source!r}"
    found = f"{source}: the {part} part has {facts['encoded_tokens']} tokens, fewer than one block of {block_length}."
    if part == TRAIN:
        raise UserError(f"{found} Choose a shorter block, more text, or a larger max_tokens or max_documents.")
    raise UserError(
        f"{found} Raise validation_fraction (now {corpus.validation_fraction:g}) or max_validation_tokens, or name a "
        "validation_split."
    )


def _no_text(corpus: CorpusConfig) -> UserError:
    return UserError(
        f"corpus source {corpus.source!r}: there is no text in it (split {corpus.split!r}, column {corpus.text_column!r})."
    )


_worker: dict[str, Any] = {}
"""A worker process's tokenizer and EOS id: loaded once a process."""


def _set_up(tokenizer: str, eos: int) -> None:
    """Loads the tokenizer in a worker."""
    _worker.update(tokenizer=load_tokenizer(Path(tokenizer)), eos=eos)


def _encode(batch: _Batch) -> _Encoded:
    """Tokenises documents; each ends with EOS."""
    raw = [text.encode("utf-8", "replace") for text in batch.texts]  # JSON can hold lone surrogates, UTF-8 cannot.
    encodings = _worker["tokenizer"].encode_batch_fast([text.decode() for text in raw], add_special_tokens=False)
    ids = [[*encoding.ids, _worker["eos"]] for encoding in encodings]
    tokens = np.fromiter((token for row in ids for token in row), dtype=np.uint32)
    return _Encoded(batch.part, tokens, [len(row) for row in ids], [len(text) for text in raw])

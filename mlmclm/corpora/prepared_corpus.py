"""A prepared corpus: opening it, describing it, and the files by which it is verified."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mlmclm.corpora.blocks import Blocks, Shard
from mlmclm.corpora.documents import TRAIN, VALIDATION, StoredText
from mlmclm.corpora.shelf import INDEX, Shelf
from mlmclm.corpora.tokenizer import StoredTokenizer, load_text_tokenizer, special_ids
from mlmclm.errors import UserError
from mlmclm.storage.addresses import address_of, discard, is_local
from mlmclm.storage.artifact import KEY, Artifact, Origin, folders_in
from mlmclm.storage.checksums import DIFFERS, MISSING, Piece, parse_sealed, parsed, read_sealed, seal_damage, sealed_in
from mlmclm.storage.files import hash_file, remove_folder

SAMPLED_TOKENS = 8_000_000
"""Tokens read to estimate the length of documents."""

SOURCES = "sources.json"
"""File with the keys of several corpora by name, in their common folder in the store's `corpora/`."""
ELSEWHERE = "shelf.json"
"""File in a corpus's folder in the store that says where its shards are, if not in that folder."""


@dataclass(frozen=True)
class PreparedCorpus:
    """A corpus's packed blocks, and the tokenizer that they were made with."""

    key: str
    folder: Path
    """The shards' folder; for shards at an address, the folder of this node's copies."""
    tokenizer: Path
    """The folder of a Hugging Face fast tokenizer."""
    tokenizer_key: str
    block_length: int
    train: Blocks
    validation: Blocks
    documents: int
    """Documents in the training blocks."""
    tokens: int
    """Tokens in the training blocks, EOS included."""
    vocabulary: int
    """Number of the tokenizer's tokens, including special ones: all ids are below it."""
    left_out: str = ""
    """Description of the source's files that were not read; empty if there are none or the source was not opened."""

    @property
    def sources(self) -> Mapping[str, PreparedCorpus]:
        """This corpus under the name "": the counterpart of `mixed_corpus.PreparedSources.sources`, which has several names."""
        return {"": self}


class StoredCorpus(Artifact):
    """A corpus in the store; a mix of several has only the keys of its sources.

    Its shards are made one by one, in the folder or at an address, so that an interrupted preparation can be continued.
    """

    kind = part = "corpora"
    again = (
        "`mlmclm data` on its study, after an index is deleted; a shard is set aside and made again where it is used"
    )

    @classmethod
    def all(cls, store: Path) -> Iterator[StoredCorpus]:
        """Yield the corpora of a store, finished or not."""
        local, address = {folder.name for folder in folders_in(store / cls.part)}, address_of(store / cls.part)
        remote = {path.parent.name for path in address.iterdir()} if address is not None else set()
        for key in sorted(local | {name for name in remote if KEY.fullmatch(name)}):
            yield cls(store, key)

    @property
    def folder(self) -> Path:
        """Its folder in the store, whether or not its shards are there."""
        return self.store / self.part / self.key

    @property
    def shelf(self) -> Shelf:
        """The location of its shards.

        Raises:
            UserError: the file with the location is damaged.
        """
        elsewhere = self.folder / ELSEWHERE
        again = f"Delete {self.folder} and run `mlmclm data` on the study."
        return Shelf(**read_sealed(elsewhere, again)) if is_local(elsewhere) else self.own_shelf

    @property
    def own_shelf(self) -> Shelf:
        """Its location in the store, or at the store's address."""
        address = address_of(self.folder)
        return Shelf(str(self.folder), None if address is None else str(address))

    def damage(self, *, read: bool = True) -> str | None:
        """Return what is wrong with a finished corpus; shards are checked by their sizes only."""
        return None if is_local(self.folder / SOURCES) else shelf_damage(self.shelf)

    def remove(self) -> None:
        """Delete it. Shards at an address outside the store stay, as other stores may use them; preparing it again finds them."""
        discard(self.folder)
        remove_folder(self.folder)

    def files(self) -> Iterator[Piece]:
        """Yield the JSON files and the shards, wherever the shards are, also of an unfinished corpus."""
        yield from sealed_in(self.folder, self.kind, self.again)
        with suppress(UserError):  # a damaged index or note is reported as a JSON file
            shelf = self.shelf
            names = sorted(shelf.sizes())
            if shelf.address is not None:
                for name in (name for name in names if name.endswith(".json")):
                    check = partial(seal_damage, partial(shelf.read, name))
                    yield Piece(self.kind, self.again, shelf.where(name), 0, check)
            index = read_index(shelf)
            if index is None:
                records = [name for name in names if re.fullmatch(rf"({TRAIN}|{VALIDATION})-\d+\.json", name)]
                shards = [parsed(partial(shelf.read, name)) for name in records]
            else:
                shards = [*index[TRAIN]["shards"], *index[VALIDATION]["shards"]]
            for shard in shards:
                if isinstance(shard, dict):
                    check = partial(_shard_damage, shelf, shard["file"], shard["sha256"])
                    yield Piece(self.kind, self.again, shelf.where(shard["file"]), shard["bytes"], check)

    def origin(self) -> Origin:
        """Read what the corpus was made from: text, tokenizer and block length; for a mix, its corpora."""
        mixed = self.folder / SOURCES
        if is_local(mixed):
            keys = read_sealed(mixed, f"Delete {self.folder} and run `mlmclm data` on the study.")["sources"]
            return Origin({"sources": keys}, needs=tuple(StoredCorpus(self.store, key) for key in keys.values()))
        index = read_index(self.shelf)
        if index is None:
            return Origin()
        made_from, text = index["corpus"], index["source_fingerprint"]
        facts = {**made_from, "text": text, "tokenizer": index["tokenizer_key"], "block_length": index["block_length"]}
        kept = StoredText(self.store, f"{made_from['source']}-{text}")
        return Origin(facts, needs=(StoredTokenizer(self.store, index["tokenizer_key"]), kept))


def shelf_damage(shelf: Shelf) -> str | None:
    """Return which shards on a shelf are missing or have the wrong size, in words; None if there are none."""
    index = read_index(shelf)
    if index is None:
        return "it is not finished"
    wrong = (item for part in (TRAIN, VALIDATION) for item in blocks_of(index, shelf, part).damaged().items())
    return ", ".join(f"{file}: {what}" for file, what in wrong) or None


def _shard_damage(shelf: Shelf, file: str, sha256: str) -> str | None:
    try:
        return None if hash_file(shelf.at(file)) == sha256 else DIFFERS
    except FileNotFoundError:
        return MISSING
    except OSError as error:
        return f"it cannot be read ({error.strerror})"


def read_index(shelf: Shelf) -> dict[str, Any] | None:
    """Return the index of a finished corpus: its contents and origin. None for a corpus that is not finished.

    `train` and `validation` each have facts and `shards`; a shard has its file, blocks, bytes and SHA-256, and the
    position in the documents at which it ends.
    """
    content, where = shelf.read(INDEX), shelf.where(INDEX)
    remedy = f"Delete {where} and run `mlmclm data` on the study: the corpus is then prepared again."
    return None if content is None else parse_sealed(content, where, remedy)


def describe_corpus(prepared: PreparedCorpus, *, examples: int = 3) -> dict[str, Any]:
    """Describe a corpus for display: sizes, vocabulary, bytes per token, and the beginnings of a few blocks."""
    shelf = prepared.train.shelf
    index = read_index(shelf) or {}
    tokenizer = load_text_tokenizer(prepared.tokenizer)
    rows = np.arange(min(examples, len(prepared.train)), dtype=np.int64)
    beginnings = prepared.train.take(rows)[:, :100]
    return {
        "source": index["corpus"]["source"],
        "folder": shelf.address or str(prepared.folder),
        "tokenizer": str(prepared.tokenizer),
        "vocabulary": prepared.vocabulary,
        "block_length": prepared.block_length,
        "bytes_per_token": round(index["train"]["bytes"] / index["train"]["encoded_tokens"], 3),
        "shards": len(prepared.train.shards) + len(prepared.validation.shards),
        "median_document_tokens": median_length(prepared),
        **({"files_left_out": prepared.left_out} if prepared.left_out else {}),
        "train": {name: index["train"][name] for name in ("documents", "tokens", "blocks")},
        "validation": {name: index["validation"][name] for name in ("documents", "tokens", "blocks")},
        "examples": [tokenizer.decode(row.tolist(), skip_special_tokens=False) for row in beginnings],
    }


def median_length(prepared: PreparedCorpus) -> int | None:
    """Estimate the median length of training documents, in tokens without EOS; None if the sample has no whole one.

    The sample is the first `SAMPLED_TOKENS` of the first shard that this node has, so that nothing is fetched. A node
    without shards fetches the first.
    """
    shards, shelf = prepared.train.shards, prepared.train.shelf
    number = next((number for number, shard in enumerate(shards) if (shelf.local / shard.file).is_file()), 0)
    first = sum(shard.blocks for shard in shards[:number])
    blocks = min(shards[number].blocks, max(1, SAMPLED_TOKENS // prepared.block_length))
    tokens = prepared.train.take(np.arange(first, first + blocks, dtype=np.int64)).ravel()
    ends = np.flatnonzero(tokens == special_ids(prepared.tokenizer)["eos"])
    # Only the first shard begins with a document; in a later one the tokens before the first EOS are no whole document.
    lengths = np.diff(ends) if number else np.diff(ends, prepend=-1)
    return int(np.median(lengths - 1)) if len(lengths) else None


def corpus_summary(prepared: PreparedCorpus) -> str:
    """Summarise a corpus in one line: the number and length of its documents, and the files left out."""
    index = read_index(prepared.train.shelf) or {}
    train, validation = (f"{index[part]['documents']:,}" for part in (TRAIN, VALIDATION))
    median = median_length(prepared)
    length = "longer than the sample" if median is None else f"median length {median:,} tokens"
    left_out = f"; files left out: {prepared.left_out}" if prepared.left_out else ""
    return f"corpus {index['corpus']['source']}: {train} documents, {length}; {validation} for validation{left_out}"


def open_prepared(key: str, shelf: Shelf, store: Path, left_out: str) -> PreparedCorpus | None:
    """Return the corpus that the index on a shelf describes; None without an index."""
    index = read_index(shelf)
    if index is None:
        return None
    return PreparedCorpus(
        key=key,
        folder=shelf.local,
        tokenizer=StoredTokenizer(store, index["tokenizer_key"]).folder,
        tokenizer_key=index["tokenizer_key"],
        block_length=index["block_length"],
        train=blocks_of(index, shelf, TRAIN),
        validation=blocks_of(index, shelf, VALIDATION),
        documents=index["train"]["documents"],
        tokens=index["train"]["tokens"],
        vocabulary=index["vocabulary"],
        left_out=left_out,
    )


def blocks_of(index: dict[str, Any], shelf: Shelf, part: str) -> Blocks:
    shards = [Shard(value["file"], value["blocks"], value["sha256"]) for value in index[part]["shards"]]
    return Blocks(shelf, shards, index["block_length"], index["dtype"])

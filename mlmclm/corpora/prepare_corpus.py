"""Preparation of a corpus: text is tokenised and packed into shards of blocks, once.

The same input gives the same bytes, wherever it is tokenised and however often the preparation is interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from mlmclm import versions
from mlmclm.configuration import Role
from mlmclm.corpora.blocks import token_type
from mlmclm.corpora.chosen_documents import divide_source, head, is_held_out, no_text, smallest_hashes, too_little
from mlmclm.corpora.corpus_config import CorpusConfig, TokenizerConfig
from mlmclm.corpora.documents import TRAIN, VALIDATION, Folders, Source, open_source
from mlmclm.corpora.filling import check_fit, fill
from mlmclm.corpora.prepared_corpus import (
    ELSEWHERE,
    PreparedCorpus,
    StoredCorpus,
    blocks_of,
    corpus_summary,
    open_prepared,
    read_index,
    shelf_damage,
)
from mlmclm.corpora.shard_writer import Record, ShardWriter, read_shard_record, record_file
from mlmclm.corpora.shelf import CACHE, INDEX, Shelf
from mlmclm.corpora.tokenising import Encoder, Tokeniser, local_encoder, without_surrogates
from mlmclm.corpora.tokenizer import (
    TRAINING_CHARACTERS,
    StoredTokenizer,
    check_embedding_rows,
    load_text_tokenizer,
    prepare_tokenizer,
    special_ids,
    tokenizer_key,
)
from mlmclm.errors import UserError
from mlmclm.progress import bars, say
from mlmclm.storage.addresses import send_file
from mlmclm.storage.checksums import sealed, write_sealed
from mlmclm.storage.files import expanded, stable_hash

Elsewhere = Callable[[Tokeniser], AbstractContextManager[Encoder]]
"""Callable that returns a context manager of an encoder on other machines (`launches.ray_tokenising`)."""


def prepare_corpus(
    corpus: CorpusConfig,
    tokenizer: TokenizerConfig,
    *,
    block_length: int,
    elsewhere: Elsewhere | None = None,
    **folders: Unpack[Folders],
) -> PreparedCorpus:
    """Read, tokenise and pack a corpus, or open it if it is prepared already (well under a second).

    The shards that an interrupted preparation finished are kept. If a finished corpus has lost shards, only those are
    made again.

    Args:
        block_length: tokens per block.
        elsewhere: tokenises for `corpus.workers: auto` and `ray`; called only if there is text to tokenise.

    Raises:
        UserError: the source, a column or the tokenizer is missing or doesn't fit, or there is too little text.
        EnvironmentFault: the hub or an address cannot be reached, the disk is full, or a worker was killed.
    """
    place = _locate(corpus, tokenizer, block_length, folders, settle=True)
    new = read_index(place.shelf) is None
    if not place.complete():
        place.source.check()
        # First, so that too little text is reported before a tokenizer is trained on it.
        byte_level = tokenizer.train_vocab_size is not None
        below = divide_source(corpus, place.source, block_length=block_length, byte_level=byte_level)
        place = replace(place, below=below)
        _tokenizer(tokenizer, place)
        check_embedding_rows(place.tokenizer.folder)
        with StoredCorpus(place.store, place.key).leased(place.complete, title=f"corpus {corpus.source}"):
            # The process that held the lease before may have made the whole corpus.
            if not place.complete():
                with _encoder(place, elsewhere) as encoder:
                    _make(place, encoder)
    prepared = place.open()
    assert prepared is not None
    if new:
        say(corpus_summary(prepared))
    return prepared


def find_corpus(
    corpus: CorpusConfig,
    tokenizer: TokenizerConfig,
    *,
    block_length: int,
    **folders: Unpack[Folders],
) -> PreparedCorpus | None:
    """Return the corpus if it is already prepared, None if there is work to do; prepare nothing.

    Raises what `prepare_corpus` does, and UserError if the tokenizer is damaged.
    """
    place = _locate(corpus, tokenizer, block_length, folders)
    folder = place.tokenizer.folder
    fault = place.tokenizer.damage()
    if fault is not None and folder.is_dir():
        raise UserError(f"{folder}: {fault}. Run `mlmclm data` on the study: it makes the tokenizer again.")
    return place.open() if place.complete() else None


@dataclass(frozen=True)
class _Place:
    """The location of a corpus, finished or not, and what it is made from."""

    corpus: CorpusConfig
    source: Source
    origin: str
    """The source's fingerprint."""
    block_length: int
    key: str
    shelf: Shelf
    store: Path
    tokenizer: StoredTokenizer
    below: int | None = None
    """The hash below which a document is held out; None until the source is read, or if it has a validation part."""

    def complete(self) -> bool:
        """Return whether the tokenizer and all shards exist. Checks the shards' sizes, not their content."""
        return self.tokenizer.damage() is None and shelf_damage(self.shelf) is None

    def open(self) -> PreparedCorpus | None:
        """Return the corpus; None if it is not finished."""
        return open_prepared(self.key, self.shelf, self.store, self.source.left_out())


def _locate(
    corpus: CorpusConfig,
    tokenizer: TokenizerConfig,
    block_length: int,
    folders: Folders,
    *,
    settle: bool = False,
) -> _Place:
    if block_length < 2:
        raise UserError(f"the block length must be at least 2 tokens, got {block_length}.")
    source, store = open_source(corpus, **folders), folders["store"]
    if settle:
        source.settle()
    origin = source.fingerprint()
    own_key = tokenizer_key(tokenizer, text_key(corpus, origin))
    # The key depends on the text, not on where it is stored.
    key = stable_hash([versions.CORPORA, corpus.identity(), origin, own_key, block_length])[:16]
    shelf = _shelf(corpus, store, key)
    return _Place(corpus, source, origin, block_length, key, shelf, store, StoredTokenizer(store, own_key))


def _shelf(corpus: CorpusConfig, store: Path, key: str) -> Shelf:
    if corpus.shards is None:
        return replace(StoredCorpus(store, key).own_shelf, gib=corpus.cache_gib)
    if "://" not in corpus.shards:
        return Shelf(str(expanded(corpus.shards).resolve() / key))
    return Shelf(f"{corpus.cache or CACHE}/{key}", f"{corpus.shards.rstrip('/')}/{key}", corpus.cache_gib)


def text_key(corpus: CorpusConfig, origin: str) -> str:
    """Return a key of the text that a tokenizer is trained on: the whole training text, however much of it is packed."""
    # The order of the class's fields is part of the key.
    return stable_hash([origin, *corpus.keyed(Role.TEXT).values()])


def _tokenizer(config: TokenizerConfig, place: _Place) -> None:
    """Make the tokenizer; one that is to be trained sees a fixed sample of the training text."""

    def texts() -> Iterator[str]:
        report("choosing text for the tokenizer", 0, None)
        chosen = tokenizer_sample(place.corpus, place.source, place.below, characters=TRAINING_CHARACTERS)
        report("training the tokenizer", 0, None)
        yield from chosen

    with bars() as report:
        key = text_key(place.corpus, place.origin)
        path = prepare_tokenizer(config, store=place.store, corpus_key=key, texts=texts())
    if path != place.tokenizer.folder:
        raise UserError(f"tokenizer.path: {config.path} has changed since it was hashed. Run the same command again.")


def tokenizer_sample(corpus: CorpusConfig, source: Source, below: int | None, *, characters: int) -> list[str]:
    """Return a fixed sample of a source's training text, for a tokenizer; raise UserError if there is no text.

    Documents with a hash smaller than `below` (from `divide_source`) are held out.
    """
    # In the source's order, without empty documents.
    training = (
        text
        for text in source.train()
        if text.strip() and (below is None or not is_held_out(text, below=below, seed=corpus.seed))
    )
    if corpus.streaming:
        chosen = list(head(training, characters=characters))
    else:
        hashed, _ = smallest_hashes(training, characters=characters, purpose="tokenizer", seed=corpus.seed)
        chosen = [text for _, text in hashed]
    if not chosen:
        raise no_text(corpus)
    return list(map(without_surrogates, chosen))


def _encoder(place: _Place, elsewhere: Elsewhere | None) -> AbstractContextManager[Encoder]:
    """Choose where to tokenise, local processes or a Ray cluster, and return the encoder."""
    tokeniser = Tokeniser.of(place.tokenizer.folder, special_ids(place.tokenizer.folder)["eos"])
    where = place.corpus.workers
    if where == "local" or (where == "auto" and elsewhere is None):
        return local_encoder(tokeniser)
    if elsewhere is None:
        raise UserError("corpus.workers: ray: there is no Ray session here; allowed without one: auto, local.")
    return elsewhere(tokeniser)


def _make(place: _Place, encoder: Encoder) -> None:
    """Make what is missing: lost shards of a finished corpus, or the rest of an unfinished one."""
    shelf, corpus = place.shelf, place.corpus
    # Hidden files are what a killed process left behind: the lease keeps living processes out of this folder.
    for left in shelf.local.glob(".*"):
        if left.suffix != ".lock":
            left.unlink(missing_ok=True)
    index = read_index(shelf)
    if index is not None:
        _repair(place, index, encoder)
        return
    facts = _pack(place, encoder)
    place.source.check_unchanged()
    facts |= {"key": place.key, "tokenizer_key": place.tokenizer.key, "block_length": place.block_length}
    made_from = {"source": corpus.source, **corpus.identity()}
    shelf.write_json(INDEX, sealed({**facts, "source_fingerprint": place.origin, "corpus": made_from}))
    # The index holds all records, so their files can go; not before, because they are what resuming needs.
    for part in (TRAIN, VALIDATION):
        for number in range(len(facts[part]["shards"])):
            shelf.at(record_file(part, number)).unlink(missing_ok=True)
    if corpus.shards is not None:
        # A note in the store, so that `StoredCorpus` finds the shards by key alone.
        note = place.store / "corpora" / place.key / ELSEWHERE
        write_sealed(note, {"folder": shelf.folder, "address": shelf.address})
        send_file(note)


def _pack(place: _Place, encoder: Encoder) -> dict[str, Any]:
    """Make the missing shards of an unfinished corpus; return the facts about all of them."""
    corpus = place.corpus
    vocabulary = load_text_tokenizer(place.tokenizer.folder).get_vocab_size(with_added_tokens=True)
    dtype, length = token_type(vocabulary), place.block_length
    shard_blocks = blocks_a_shard(corpus, length * dtype.itemsize)
    limits = {TRAIN: corpus.max_tokens, VALIDATION: corpus.max_validation_tokens}
    with ExitStack() as stack:
        writers = {
            part: stack.enter_context(
                ShardWriter(
                    place.shelf,
                    part,
                    length,
                    dtype,
                    shard_blocks=shard_blocks,
                    max_blocks=None if tokens is None else tokens // length,
                    # Without streaming, the stream has applied the limit when it chose documents by hash.
                    max_documents=corpus.max_documents if part == TRAIN and corpus.streaming else None,
                    finished=_finished(place.shelf, part),
                )
            )
            for part, tokens in limits.items()
        }
        fill(writers, corpus, place.source, place.below, encoder)
        # Both parts must pass before either gets its last shard.
        for writer in writers.values():
            _check_size(writer, place)
            check_fit(writer, corpus)
    return {
        "vocabulary": vocabulary,
        "dtype": dtype.str,
        **{
            part: {
                **writer.counts._asdict(),
                "tokens": writer.tokens,
                "blocks": writer.blocks,
                "shards": [record.to_json() for record in writer.records],
            }
            for part, writer in writers.items()
        },
    }


def blocks_a_shard(corpus: CorpusConfig, size: int) -> int:
    """Return the blocks of a whole shard, for blocks of `size` bytes."""
    return max(1, int(corpus.shard_mib * 2**20) // size)


def _finished(shelf: Shelf, part: str) -> list[Record]:
    """Return the records of a part's first shards, up to the first damaged one, and remove all later records.

    A later record would be wrong if the shards before it were made again with another size.
    """
    sizes = shelf.sizes()
    records: list[Record] = []
    while record_file(part, len(records)) in sizes:
        record = read_shard_record(shelf, part, len(records))
        if record is None or sizes.get(record.shard.file) != record.bytes:
            break
        records.append(record)
    for file in sizes:
        name, _, number = file.removesuffix(".json").rpartition("-")
        if file.endswith(".json") and name == part and int(number) >= len(records):
            shelf.at(file).unlink(missing_ok=True)
    return records


def _repair(place: _Place, index: dict[str, Any], encoder: Encoder) -> None:
    """Make the damaged shards of a finished corpus again, each one separately."""
    shelf, dtype = place.shelf, np.dtype(index["dtype"])
    for part in (TRAIN, VALIDATION):
        damaged = blocks_of(index, shelf, part).damaged()
        records = [Record.from_json(value) for value in index[part]["shards"]] if damaged else []
        for number, record in enumerate(records):
            file = record.shard.file
            if file not in damaged:
                continue
            say(f"making {file} again ({damaged[file]})")
            # The writer starts where the shard before ended, and is full after as many blocks as the lost shard had.
            with ShardWriter(
                shelf,
                part,
                place.block_length,
                dtype,
                shard_blocks=record.shard.blocks,
                max_blocks=sum(item.shard.blocks for item in records[: number + 1]),
                finished=records[:number],
            ) as writer:
                fill({part: writer}, place.corpus, place.source, place.below, encoder)
            shelf.at(record_file(part, number)).unlink(missing_ok=True)
            # The record has the shard's SHA-256: anything but the same bytes would make another corpus under this key.
            if writer.records[number:] != [record]:
                shelf.at(file).unlink(missing_ok=True)
                raise UserError(
                    f"{shelf.where(file)}: it was lost ({damaged[file]}), and the source's text has changed since it was made. Delete "
                    f"{shelf.where('')} to have the corpus prepared again."
                )


def _check_size(writer: ShardWriter, place: _Place) -> None:
    """Refuse a part without a block, and remove what was made: with other settings the corpus has another key."""
    if writer.blocks:
        return
    place.shelf.clear()
    limit = place.corpus.max_tokens if writer.part == TRAIN else place.corpus.max_validation_tokens
    if limit is not None and limit < place.block_length:
        raise too_little(place.corpus, writer.part, f"at most {limit:,} tokens", place.block_length)
    if writer.part == TRAIN and not writer.counts.documents:
        raise no_text(place.corpus)
    raise too_little(place.corpus, writer.part, f"{writer.counts.encoded_tokens:,} tokens", place.block_length)

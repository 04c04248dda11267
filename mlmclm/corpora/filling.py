"""Filling of shard writers: a source's documents are tokenised until there are enough, and the tokenizer is checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from typing import TYPE_CHECKING

from mlmclm.corpora.corpus_config import CorpusConfig
from mlmclm.corpora.documents import TRAIN, VALIDATION, Source
from mlmclm.corpora.shard_writer import ShardWriter
from mlmclm.corpora.streams import MORE, Stream, streams
from mlmclm.corpora.tokenising import Encoder, tokenised
from mlmclm.errors import UserError
from mlmclm.progress import bars

if TYPE_CHECKING:
    import pyarrow

CHARACTERS_A_TOKEN = 8
"""Characters of text chosen for each token wanted. English needs about 4; if the text falls short, more is chosen."""


def fill(
    writers: Mapping[str, ShardWriter], corpus: CorpusConfig, source: Source, below: int | None, encoder: Encoder
) -> None:
    """Tokenise and pack documents of `streams` until all writers are full or the source is exhausted."""
    characters_a_token: float = CHARACTERS_A_TOKEN
    unfilled = set(writers)
    with bars() as report:
        while unfilled:
            short: set[str] = set()
            for stream in streams(corpus, source, below, characters_a_token):
                active = {part: writers[part] for part in stream.parts if part in unfilled}
                if not all(writer.full for writer in active.values()):
                    short |= _run(stream, active, corpus, encoder, report)
            # Go on only for parts whose choice of text was too small; the others have used all of their documents.
            unfilled = {part for part in short if not writers[part].full}
            # The next choice starts with the same documents, which the writers skip, and continues with others.
            characters_a_token *= 2


def _run(
    stream: Stream,
    writers: Mapping[str, ShardWriter],
    corpus: CorpusConfig,
    encoder: Encoder,
    report: Callable[..., None],
) -> set[str]:
    """Pack one stream; return the parts of which it left documents out."""
    short: set[str] = set()
    training = writers.get(TRAIN)  # Progress is that of the training part if the stream has it.
    if stream.chosen:  # All documents are read before the first one is tokenised.
        report("choosing documents" if training is not None else "choosing documents for validation", 0, None)
    with closing(encoder(stream, {part: writer.next for part, writer in writers.items()})) as answers:
        for encoded in answers:
            ended = _add(encoded, writers, short)
            for writer in writers.values():
                # Not before the first shard is finished: a few documents are not a fair sample.
                if writer.records:
                    check_fit(writer, corpus)
            if training is not None:
                report("tokenising", training.tokens, corpus.max_tokens, "tokens")
            else:
                tokens, most = writers[VALIDATION].tokens, corpus.max_validation_tokens
                report("tokenising for validation", tokens, most, "tokens")
            if ended:
                break
    return short


def _add(encoded: pyarrow.Table, writers: Mapping[str, ShardWriter], short: set[str]) -> bool:
    """Pack a batch of a stream; return whether the rest of the stream can be skipped.

    Adds to `short` the parts of which the stream left documents out. A stream of both parts ends with the first
    training document that is not wanted, once the validation part has a block. It may have fewer tokens than its limit,
    which is only an upper bound.
    """
    validation = writers.get(VALIDATION)
    for place, training, tokens, size, unknown in tokenised(encoded):
        part = TRAIN if training else VALIDATION
        if place.number == MORE:
            short.add(part)
        elif not writers[part].full:
            writers[part].add(place, tokens, size=size, unknown=unknown)
        elif training and (validation is None or validation.blocks or validation.full):
            return True
    return all(writer.full for writer in writers.values())


def check_fit(writer: ShardWriter, corpus: CorpusConfig) -> None:
    """Raise a UserError if too many tokens are unknown, or too many documents have no token."""
    counts = writer.counts
    for unfit, of, what in (
        (counts.unknown, counts.encoded_tokens, "tokens of the {} part stand for text that the tokenizer doesn't know"),
        (counts.empty, counts.documents, "documents of the {} part have not a single token"),
    ):
        share = unfit / max(1, of)
        if share > corpus.max_unknown:
            raise UserError(
                f"the tokenizer doesn't fit the text of corpus source {corpus.source!r}: {share:.1%} of the first {of:,} {what.format(writer.part)}, "
                f"more than corpus.max_unknown ({corpus.max_unknown:.0%}). Choose a tokenizer for this language and script, or train one "
                "(tokenizer.train_vocab_size)."
            )

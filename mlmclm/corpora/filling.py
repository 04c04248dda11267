"""Documents into shards' writers: which are tokenised, until when, and whether the tokenizer fits them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing

from mlmclm.corpora.config import CorpusConfig
from mlmclm.corpora.documents import TRAIN, VALIDATION, Source
from mlmclm.corpora.process_map import Progress
from mlmclm.corpora.shard_writer import ShardWriter
from mlmclm.corpora.streams import MORE, Stream, streams
from mlmclm.corpora.tokenising import Encoded, Encoder
from mlmclm.errors import UserError

CHARACTERS_A_TOKEN = 8
"""Text set aside for each token wanted; English needs about 4, and what falls short is read again with more."""


def fill(
    writers: Mapping[str, ShardWriter],
    corpus: CorpusConfig,
    source: Source,
    below: int | None,
    encoder: Encoder,
    report: Progress,
) -> None:
    """Tokenises and packs documents until all writers are full or there are no more documents; `below` as in `streams`."""
    characters_a_token: float = CHARACTERS_A_TOKEN
    wanted = set(writers)
    while wanted:
        short: set[str] = set()
        for stream in streams(corpus, source, below, characters_a_token):
            own = {part: writers[part] for part in stream.parts if part in wanted}
            if not all(writer.full for writer in own.values()):
                short |= _run(stream, own, corpus, encoder, report)
        wanted = {part for part in short if not writers[part].full}
        characters_a_token *= 2  # the same documents again, which are passed over, and then others


def _run(
    stream: Stream, writers: Mapping[str, ShardWriter], corpus: CorpusConfig, encoder: Encoder, report: Progress
) -> set[str]:
    """Packs one stream; returns the parts of which it left documents out."""
    short: set[str] = set()
    shown = writers.get(TRAIN)
    with closing(encoder(stream, {part: writer.next for part, writer in writers.items()})) as answers:
        for encoded in answers:
            ended = _add(encoded, writers, short)
            for writer in writers.values():
                if writer.records:
                    check_fit(writer, corpus)
            if shown is not None:
                report("tokenising", shown.tokens, corpus.max_tokens)
            else:
                report("tokenising for validation", writers[VALIDATION].tokens, corpus.max_validation_tokens)
            if ended:
                break
    return short


def _add(encoded: Encoded, writers: Mapping[str, ShardWriter], short: set[str]) -> bool:
    """Packs a batch of a stream; returns whether no more of the stream is wanted, and adds to `short` what it left out.

    A stream of both parts ends with the first training document that is not wanted, but not before the validation part
    has a block: its limit is an upper bound only.
    """
    validation = writers.get(VALIDATION)
    for place, training, tokens, size, unknown in encoded.documents():
        part = TRAIN if training else VALIDATION
        if place.number == MORE:
            short.add(part)
        elif not writers[part].full:
            writers[part].add(place, tokens, size=size, unknown=unknown)
        elif training and (validation is None or validation.blocks or validation.full):
            return True
    return all(writer.full for writer in writers.values())


def check_fit(writer: ShardWriter, corpus: CorpusConfig) -> None:
    """Raises UserError where the tokenizer knows too little of the text."""
    counts = writer.counts
    for share, of, what in (
        (
            counts.unknown / max(1, counts.encoded_tokens),
            f"{counts.encoded_tokens:,} tokens",
            "stand for text that it doesn't know",
        ),
        (counts.empty / max(1, counts.documents), f"{counts.documents:,} documents", "have not a single token"),
    ):
        if share > corpus.max_unknown:
            raise UserError(
                f"the tokenizer doesn't fit the text of corpus source {corpus.source!r}: {share:.1%} of the first {of} of the {writer.part} part {what}, "
                f"more than corpus.max_unknown ({corpus.max_unknown:.0%}). Choose a tokenizer for this language and script, or train one "
                "(tokenizer.train_vocab_size)."
            )

"""Early check that a source holds both training and validation text, even before a tokenizer is trained on it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mlmclm.corpora.chosen_documents import Division, divide, text_bytes
from mlmclm.corpora.corpus_config import CorpusConfig
from mlmclm.corpora.documents import TRAIN, VALIDATION, Source
from mlmclm.errors import UserError
from mlmclm.progress import bars

_DOCUMENTS_A_REPORT = 10_000


def divide_source(corpus: CorpusConfig, source: Source, *, block_length: int, byte_level: bool) -> int | None:
    """Return the hash below which a document is held out, or None if the source has validation documents of its own.

    Reads the text of a few blocks, or all of a small source.

    Args:
        byte_level: whether a document never has more tokens than bytes. If so, a part that cannot fill one block is
            refused now; otherwise only an empty part is.

    Raises:
        UserError: a part has no text, or too little.
    """
    validation = source.validation()
    if validation is None:
        fraction, texts = corpus.validation_fraction, _followed(source.train())
        division = divide(texts, fraction=fraction, seed=corpus.seed, enough=block_length)
    else:
        # No hash is below 0: the documents of `train` are all for training.
        division = Division(0, _bytes(validation, block_length), _bytes(source.train(), block_length), True)
    # A source without any text and a source whose only text is held out are different errors.
    if not division.training and not (validation is None and division.held):
        raise no_text(corpus)
    if not division.training and division.several:
        raise UserError(
            f"corpus source {corpus.source!r}: all of its documents are held out for validation (validation_fraction "
            f"{corpus.validation_fraction:g}). Lower validation_fraction, or give more documents."
        )
    if not division.training:
        raise UserError(
            f"corpus source {corpus.source!r}: it is a single document, and at least one is held out for validation. Give more documents, or a "
            "validation part of its own (a file whose name begins with 'validation', or the name of one as validation_split). A text file is "
            "one document; with 'text_documents: paragraph' each of its paragraphs is one."
        )
    for part, size in ((TRAIN, division.training), (VALIDATION, division.held)):
        if size < block_length and (byte_level or not size):
            raise too_little(corpus, part, f"at most {size:,} tokens", block_length)
    return None if validation is not None else division.below


def no_text(corpus: CorpusConfig) -> UserError:
    return UserError(
        f"corpus source {corpus.source!r}: it has no text (split {corpus.split!r}, column {corpus.text_column!r})."
    )


def too_little(corpus: CorpusConfig, part: str, size: str, block_length: int) -> UserError:
    """Return the error for a part that doesn't fill one block."""
    problem = f"corpus source {corpus.source!r}: the {part} part has {size}, fewer than one block of {block_length}."
    if part == TRAIN:
        return UserError(f"{problem} Choose a shorter block, more text, or a larger max_tokens or max_documents.")
    return UserError(
        f"{problem} Choose a shorter block or more validation text: a larger validation_fraction (now {corpus.validation_fraction:g}; it counts where "
        "the source has no validation part of its own) or max_validation_tokens, or name a validation_split."
    )


def _bytes(texts: Iterable[str], enough: int) -> int:
    """Count the bytes of the first texts until there are `enough`."""
    size = 0
    for text in texts:
        size += text_bytes(text) if text.strip() else 0
        if size >= enough:
            break
    return size


def _followed(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts, and show the number read every `_DOCUMENTS_A_REPORT`."""
    with bars() as report:
        for number, text in enumerate(texts):
            if number and number % _DOCUMENTS_A_REPORT == 0:
                report("looking for documents to validate on", number, None, "documents")
            yield text

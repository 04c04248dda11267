"""Tokenisation of one text or two into a sequence of limited length.

    special_tokens: end          text EOS; the task's template joins two texts (as in the study)
    special_tokens: tokenizer    as the corpus's tokenizer does: [CLS] a [SEP], [CLS] a [SEP] b [SEP], with token types

If two texts are too long together, the longer one is truncated so that neither is lost, as in BERT's and GLUE's own
tools.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from mlmclm.errors import UserError
from mlmclm.tasks.settings import TaskSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MARK = re.compile(r"[\u0300-\u036f\u1160-\u11ff\u3099\u309a]")
"""Characters that combine with the one before: accents, vowels and final consonants of Hangul, voicing marks of kana."""
FIRST, SECOND = "{text}", "{text_pair}"


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Return how many tokens to keep of two texts, given their lengths and the `room` for both.

    The result is that of transformers' `truncation="longest_first"` with a fast tokenizer.
    """
    if first + second <= room:
        return first, second
    short, long = sorted((first, second))
    long = max(short, room - short)
    if short + long > room:
        short, long = room // 2, room - room // 2
    return (short, long) if first <= second else (long, short)


def encode_texts(
    texts: list[str],
    seconds: list[str] | None,
    template: str | None,
    tokenizer: PreTrainedTokenizerFast,
    settings: TaskSettings,
) -> dict[str, pa.Array]:
    """Tokenise texts, or pairs of texts, into columns of a task's table.

    Returns:
        `input_ids`. For pairs joined by a template also `lost`, whether truncation leaves nothing of one of the texts,
        and `recut`, whether truncating the longer text gives another sequence than truncating the joined text. For
        pairs in the tokenizer's own form also `token_types`, if the tokenizer gives a pair more than one type.

    Raises:
        UserError: the tokenizer lacks a required token or puts a pair's second text first, or the limit leaves no room for
            the texts.
    """
    if settings.special_tokens == "tokenizer":
        _check_special_tokens(tokenizer, pairs=seconds is not None)
        tokenizer.truncation_side = "right"
        options = {"return_token_type_ids": True, "return_attention_mask": False}
        encoded = tokenizer(texts, seconds, truncation="longest_first", max_length=settings.max_length, **options)
        columns = {"input_ids": int_lists(encoded["input_ids"])}
        if seconds is not None and _has_types(tokenizer):
            columns["token_types"] = int_lists(encoded["token_type_ids"])
        return columns
    end = ending(tokenizer)
    if seconds is None or template is None:
        return {
            "input_ids": int_lists(
                [with_closing_token(row, end, settings.max_length) for row in token_ids(tokenizer, texts)]
            )
        }
    return _joined(list(zip(texts, seconds, strict=True)), template, tokenizer, settings, end)


def _joined(
    pairs: Sequence[tuple[str, str]],
    template: str,
    tokenizer: PreTrainedTokenizerFast,
    settings: TaskSettings,
    end: int,
) -> dict[str, pa.Array]:
    """Tokenise pairs, each joined into one text by the template."""
    texts = [template.replace(FIRST, first).replace(SECOND, second) for first, second in pairs]
    encoded = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    room = settings.max_length - 1
    rows: list[list[int]] = []
    lost, recut = np.zeros(len(pairs), dtype=bool), np.zeros(len(pairs), dtype=bool)
    for number, (pair, encoding) in enumerate(zip(pairs, encoded, strict=True)):
        ids = encoding.ids
        if len(ids) > room:
            owner = _owners(template, pair, np.array(encoding.offsets)[:, 1] - 1)
            counts = int((owner == 0).sum()), int((owner == 1).sum())
            left = room - (len(ids) - sum(counts))  # what the template's own tokens leave to the two texts
            if settings.pair_truncation == "joined":
                keep = np.arange(len(ids)) < room
            elif left < 2:
                raise UserError(
                    f"max_length {settings.max_length} leaves no room for two texts: the pair_template {template!r} has "
                    f"{len(ids) - sum(counts)} tokens of its own. Choose a longer max_length, or pair_truncation: joined."
                )
            else:
                keep = np.ones(len(ids), dtype=bool)
                for text, kept in enumerate(longest_first(*counts, left)):
                    keep[np.flatnonzero(owner == text)[kept:]] = False
            recut[number] = not keep[:room].all()
            lost[number] = any(count and not (keep & (owner == text)).any() for text, count in enumerate(counts))
            ids = np.array(ids)[keep].tolist()
        rows.append([*ids, end])
    return {"input_ids": int_lists(rows), "lost": pa.array(lost), "recut": pa.array(recut)}


def _owners(template: str, pair: tuple[str, str], last: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the text that each token belongs to, int [tokens]: 0 or 1 for the pair's texts, -1 for the template.

    A token belongs to the text in which its last character lies; its first may be a space before the text.

    Args:
        last: position of each token's last character in the joined text, int [tokens].
    """
    first, second = template.index(FIRST), template.index(SECOND)
    # `_joined` replaces {text} and then {text_pair}, also where the first text contains the latter.
    first_size, second_size = len(pair[0].replace(SECOND, pair[1])), len(pair[1])
    if first < second:
        second += first_size - len(FIRST)
    else:
        first += second_size - len(SECOND)
    owner = np.full(len(last), -1)
    owner[(last >= first) & (last < first + first_size)] = 0
    owner[(last >= second) & (last < second + second_size)] = 1
    return owner


def special_tokens(tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """Return the ids that a tokenizer puts before and after a text."""
    framed = tokenizer("a", return_special_tokens_mask=True)
    ids, special = framed["input_ids"], framed["special_tokens_mask"]
    first = special.index(0)
    return ids[:first], ids[first + special[first:].count(0) :]


def _check_special_tokens(tokenizer: PreTrainedTokenizerFast, *, pairs: bool) -> None:
    """Raise UserError if the tokenizer puts no token around a text, or none between two texts, or the second text first."""
    where = f"special_tokens: tokenizer: the tokenizer in {tokenizer.name_or_path}"
    if not any(special_tokens(tokenizer)):
        raise UserError(f"{where} adds no token to a text. Use special_tokens: end, which ends it with EOS.")
    owners = tokenizer("a", "a").sequence_ids(0)
    if pairs and owners.index(1) < owners.index(0):
        raise UserError(
            f"{where} puts the second text before the first. Use special_tokens: end, which joins them by the task's pair_template."
        )
    if pairs and owners.index(1) == owners.index(0) + owners.count(0):
        raise UserError(
            f"{where} puts no token between two texts. Use special_tokens: end, which joins them by the task's pair_template."
        )


def _has_types(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Return whether a tokenizer gives a pair more than one token type; a missing special token at either end counts as type 0."""
    pair = tokenizer("a", "a", return_token_type_ids=True, return_special_tokens_mask=True)
    types, special = set(pair["token_type_ids"]), pair["special_tokens_mask"]
    return len(types | (set() if special[0] and special[-1] else {0})) > 1


def ending(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the id that closes every sequence: the end-of-sequence token, else BERT's separator, else UserError."""
    for token in (tokenizer.eos_token_id, tokenizer.sep_token_id):
        if token is not None:
            return int(token)
    raise UserError(
        f"the tokenizer in {tokenizer.name_or_path} has no end-of-sequence token; every sequence must end with one."
    )


def token_ids(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[list[int]]:
    """Tokenise each text without special tokens."""
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False, return_attention_mask=False)
    ids: list[list[int]] = encoded["input_ids"]
    return ids


def token_spans(
    tokenizer: PreTrainedTokenizerFast, texts: list[str]
) -> tuple[list[list[int]], list[list[tuple[int, int]]]]:
    """Tokenise as `token_ids` does; also return the (start, end) characters of each token.

    Byte-level post-processors shorten a span by the spaces in its token. If the pre-tokenizer put a space before a word that
    has none in the text (RobBERT), this cuts off a letter, which is restored. Marks that a normalizer has joined to the letter
    before them, or removed, are restored too.
    """
    from tokenizers import processors

    options = {"add_special_tokens": False, "verbose": False, "return_attention_mask": False}
    encoded = tokenizer(texts, return_offsets_mapping=True, **options)
    trimmed = untrimmed = encoded["offset_mapping"]
    backend = tokenizer.backend_tokenizer
    processor = backend.post_processor
    if processor is not None and b'"trim_offsets":true' in processor.__getstate__():
        try:
            backend.post_processor = processors.Sequence([])
            untrimmed = [encoding.offsets for encoding in backend.encode_batch(texts, add_special_tokens=False)]
        finally:
            backend.post_processor = processor
    return encoded["input_ids"], [_restored(*row) for row in zip(texts, trimmed, untrimmed, strict=True)]


def _restored(
    text: str, trimmed: Sequence[tuple[int, int]], untrimmed: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Return trimmed spans with the letters and the marks that they lack."""
    if trimmed is untrimmed and text.isascii():
        return list(trimmed)
    inner, outer = (np.array(spans, dtype=np.int64).reshape(-1, 2) for spans in (trimmed, untrimmed))
    solid = np.cumsum([0, *(not character.isspace() for character in text)])  # non-spaces before each position
    cut = solid[inner[:, 1]] - solid[inner[:, 0]] < solid[outer[:, 1]] - solid[outer[:, 0]]
    spans = np.where(cut[:, None], outer, inner)
    if not text.isascii():
        covered = np.zeros(len(text) + 1, dtype=np.int64)
        np.add.at(covered, outer[:, 0], 1)
        np.add.at(covered, outer[:, 1], -1)
        lost = np.array([MARK.match(character) is not None for character in text], dtype=bool)
        lost &= np.cumsum(covered)[:-1] == 0
        for place in np.flatnonzero(lost).tolist():
            spans[spans[:, 1] == place, 1] += 1
    return [(start, end) for start, end in spans.tolist()]


def with_closing_token(ids: list[int], end: int, longest: int) -> list[int]:
    """Return the ids followed by the closing token, truncated to `longest` tokens in all."""
    return [*ids[: longest - 1], end]


def int_lists(rows: Sequence[Any]) -> pa.Array:
    """Return a list<int32> column."""
    return pa.array(rows, pa.list_(pa.int32()))

"""Tokenisation of one text or two into a sequence of limited length.

    special_tokens: end          text EOS; the task's template joins two texts (as in the study)
    special_tokens: tokenizer    as the corpus's tokenizer does: [CLS] a [SEP], [CLS] a [SEP] b [SEP], with token types

If two texts are too long together, the longer one is truncated so that neither is lost, as in BERT's and GLUE's own
tools.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from mlmclm.errors import UserError
from mlmclm.tasks.family import closed, ending, int_lists, token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from mlmclm.tasks.settings import TaskSettings

FIRST, SECOND = "{text}", "{text_pair}"


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Return how many tokens to keep of two texts, given their lengths.

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
        pairs in the tokenizer's own form `token_types`, if there is more than one type.

    Raises:
        UserError: the tokenizer lacks a required token, or the limit leaves no room for the texts.
    """
    if settings.special_tokens == "tokenizer":
        frame = Frame.of(tokenizer, pairs=seconds is not None)
        firsts = token_ids(tokenizer, texts)
        if seconds is None:
            return {"input_ids": int_lists([frame.around(row, settings.max_length) for row in firsts])}
        rows = zip(firsts, token_ids(tokenizer, seconds), strict=True)
        both = [frame.around_both(*row, settings.max_length) for row in rows]
        columns = {"input_ids": int_lists([ids for ids, _ in both])}
        if len(set(frame.types)) > 1:
            columns["token_types"] = int_lists([types for _, types in both])
        return columns
    end = ending(tokenizer)
    if seconds is None or template is None:
        return {"input_ids": int_lists([closed(row, end, settings.max_length) for row in token_ids(tokenizer, texts)])}
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
    # `_joined` replaces {text_pair} after {text}, so also in a first text that contains it.
    size, other = len(pair[0].replace(SECOND, pair[1])), len(pair[1])
    if first < second:
        second += size - len(FIRST)
    else:
        first += other - len(SECOND)
    owner = np.full(len(last), -1)
    owner[(last >= first) & (last < first + size)] = 0
    owner[(last >= second) & (last < second + other)] = 1
    return owner


@dataclass(frozen=True)
class Frame:
    """The special tokens that a tokenizer puts around one text, and around and between two."""

    single: tuple[tuple[int, ...], tuple[int, ...]]
    """Ids before and after one text."""
    pair: tuple[tuple[int, ...], ...]
    """Ids before, between and after two texts; empty if made for single texts only."""
    types: tuple[int, ...]
    """Token types of a pair's five parts: `pair[0]`, the first text, `pair[1]`, the second text, `pair[2]`."""

    @staticmethod
    def of(tokenizer: PreTrainedTokenizerFast, *, pairs: bool) -> Frame:
        """Read the frame off the encoding of a short text; raise UserError if there is no token around or between."""
        one = tokenizer.backend_tokenizer.encode("a")
        inside = np.flatnonzero(np.array(one.sequence_ids) == 0)  # the sequence id of a special token is None
        single = tuple(one.ids[: inside[0]]), tuple(one.ids[inside[-1] + 1 :])
        where = f"the tokenizer in {tokenizer.name_or_path}"
        if not any(single):
            raise UserError(
                f"special_tokens: tokenizer: {where} adds no token to a text. Use special_tokens: end, which ends it with EOS."
            )
        if not pairs:
            return Frame(single, (), ())
        two = tokenizer.backend_tokenizer.encode("a", "a")
        owner = np.array(two.sequence_ids)
        first, second = np.flatnonzero(owner == 0), np.flatnonzero(owner == 1)
        cuts = [0, first[0], first[-1] + 1, second[0], second[-1] + 1, len(owner)]
        parts = [slice(*ends) for ends in pairwise(cuts)]
        if cuts[2] == cuts[3]:
            raise UserError(
                f"special_tokens: tokenizer: {where} puts no token between two texts. Use special_tokens: end, which joins them by the "
                "task's pair_template."
            )
        return Frame(
            single,
            tuple(tuple(two.ids[part]) for part in parts[::2]),
            tuple(max(two.type_ids[part], default=0) for part in parts),
        )

    def around(self, ids: list[int], longest: int) -> list[int]:
        """Return one text's ids, truncated to fit, with the special tokens."""
        before, behind = self.single
        return [*before, *ids[: max(0, longest - len(before) - len(behind))], *behind]

    def around_both(self, first: list[int], second: list[int], longest: int) -> tuple[list[int], list[int]]:
        """Return the ids and token types of two texts, the longer one truncated until both fit."""
        kept = longest_first(len(first), len(second), max(0, longest - sum(map(len, self.pair))))
        before, between, behind = self.pair
        parts = (before, first[: kept[0]], between, second[: kept[1]], behind)
        ids = [token for part in parts for token in part]
        return ids, [kind for part, kind in zip(parts, self.types, strict=True) for _ in part]

"""Readers of other projects' tokenizer files: tiktoken ranks (Llama 3, EuroBERT), and GPT-2's vocabulary and merges."""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import TYPE_CHECKING

from mlmclm.errors import UserError, one_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pre-tokenisation pattern of Meta's `llama/tokenizer.py`."""

LLAMA3_SPECIAL_TOKENS = (
    # EuroBERT uses the first reserved token (128002) as its mask token; the others are Llama 3's.
    ["<|begin_of_text|>", "<|end_of_text|>", "<|mask|>", *(f"<|reserved_special_token_{n}|>" for n in range(1, 4))]
    + ["<|start_header_id|>", "<|end_header_id|>", "<|reserved_special_token_4|>", "<|eot_id|>"]
    + [f"<|reserved_special_token_{n}|>" for n in range(5, 251)]
)
"""The 256 special tokens, whose ids follow the 128,000 ranks."""


def tiktoken_tokenizer(path: Path) -> Tokenizer:
    """Build a tokenizer from a file of tiktoken ranks, with Llama 3's pattern and EuroBERT's special tokens.

    As in tiktoken, two tokens merge if their bytes together are a token, lowest rank first.
    """
    from transformers.convert_slow_tokenizer import TikTokenConverter

    class Converter(TikTokenConverter):
        load_tiktoken_bpe = staticmethod(_read_ranks)  # without the package tiktoken

    return Converter(path, LLAMA3_PATTERN, extra_special_tokens=LLAMA3_SPECIAL_TOKENS).converted()


def gpt2_tokenizer(vocabulary: Path, merges: Path) -> Tokenizer:
    """Build a byte-level BPE from GPT-2's two files, or raise UserError."""
    from tokenizers import models

    try:
        model = models.BPE.from_file(str(vocabulary), str(merges))
    except Exception as error:  # The library raises bare Exception.
        raise UserError(
            f"tokenizer.path: {vocabulary} and {merges.name} are not a BPE vocabulary and its merges ({one_line(error)})."
        ) from error
    return byte_level(model)


def byte_level(model: BPE, pattern: str | None = None) -> Tokenizer:
    """Return a byte-level tokenizer that splits text by a pattern, by default GPT-2's."""
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers

    tokenizer = Tokenizer(model)
    characters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    if pattern is not None:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, characters])
    else:
        tokenizer.pre_tokenizer = characters
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Read a mapping of tokens to ranks, one base64 token and its rank per line; raise a UserError for anything else."""
    ranks: dict[bytes, int] = {}
    try:
        for line in path.read_bytes().splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (ValueError, binascii.Error) as error:
        raise UserError(
            f"tokenizer.path: {path}: not a file of tiktoken ranks (lines of base64 and a number)."
        ) from error
    if len(ranks) < 256 or sorted(ranks.values()) != list(range(len(ranks))):
        raise UserError(
            f"tokenizer.path: {path}: the ranks are not 0 to n - 1, each once, with all 256 bytes among them."
        )
    return ranks

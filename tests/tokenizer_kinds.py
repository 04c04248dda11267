"""Small tokenizers of the kinds that published models have, trained on a made-up text."""

from __future__ import annotations

import random
from collections.abc import Callable

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace("{1,3}", "")
TEXT = (
    "the a I of in on for with said new report today week one over war minister troops vote goal match coach season "
    "which Amsterdam Zürich São Łódź café naïve 1990 1990s 12:30 3.5 don't it's (see) \"quoted\" e-mail A/B 東京 Москва U.S. – € 😀"
)
WORDS = TEXT.split()


def text_of(draw: random.Random, length: int = 12) -> str:
    """Return `length` words of `WORDS`, most of them one space apart."""
    gaps = [" ", " ", " ", " ", ", ", ". ", "  ", "\n", " (", ") ", "-"]
    return "".join(word + draw.choice(gaps) for word in draw.choices(WORDS, k=length)).strip()


def _trained(model: str, *, alphabet: bool = False, **parts: object) -> Tokenizer:
    untrained = {
        "bpe": models.BPE(unk_token="<unk>"),
        "wordpiece": models.WordPiece(unk_token="<unk>"),
        "unigram": models.Unigram(),
    }
    options = {"special_tokens": SPECIAL, "show_progress": False, "vocab_size": 420}
    if alphabet:
        options["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    untrained["fallback"] = models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    if model == "fallback":
        options["special_tokens"] = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
        options["vocab_size"] = 620
    if model == "end":
        untrained["end"] = models.BPE(unk_token="<unk>", end_of_word_suffix="</w>")
        options["end_of_word_suffix"] = "</w>"
    kinds = {"wordpiece": trainers.WordPieceTrainer, "unigram": trainers.UnigramTrainer}
    trainer = kinds.get(model, trainers.BpeTrainer)(**options, **({"unk_token": "<unk>"} if model == "unigram" else {}))
    tokenizer = Tokenizer(untrained[model])
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    draw = random.Random(0)
    tokenizer.train_from_iterator([text_of(draw) for _ in range(400)], trainer)
    return tokenizer


def _byte_level(pre: object = None, *, trim: bool | None = True, prefix: bool = False, **parts: object) -> Tokenizer:
    pre = pre or pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer = _trained("bpe", alphabet=True, pre_tokenizer=pre, decoder=decoders.ByteLevel(), **parts)
    if trim is not None:
        tokenizer.post_processor = processors.RobertaProcessing(
            ("</s>", 2), ("<s>", 0), trim_offsets=trim, add_prefix_space=prefix
        )
    return tokenizer


def _split(pattern: str) -> object:
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), level])


def _level(*others: object, prefix: bool = True, before: bool = False) -> object:
    level = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    return pre_tokenizers.Sequence([*others, level] if before else [level, *others])


_pre, _norm = pre_tokenizers, normalizers
KINDS: dict[str, Callable[[], Tokenizer]] = {
    "GPT-2": lambda: _byte_level(trim=False),
    "GPT-2 trimmed": lambda: _byte_level(trim=True),
    "GPT-2 no post-processor": lambda: _byte_level(trim=None),
    "RoBERTa with a prefix": lambda: _byte_level(prefix=True),
    "RoBERTa with a prefix, untrimmed": lambda: _byte_level(prefix=True, trim=False),
    "ByteLevel with a prefix that trimming does not know": lambda: _byte_level(_pre.ByteLevel(add_prefix_space=True)),
    "RobBERT": lambda: _byte_level(
        _pre.Sequence([_pre.Whitespace(), _pre.ByteLevel(add_prefix_space=True), _pre.Punctuation()]), prefix=True
    ),
    "RobBERT, trimmed without prefix": lambda: _byte_level(
        _pre.Sequence([_pre.Whitespace(), _pre.ByteLevel(add_prefix_space=True), _pre.Punctuation()])
    ),
    "WhitespaceSplit, ByteLevel": lambda: _byte_level(_level(_pre.WhitespaceSplit(), before=True), prefix=True),
    "Digits, ByteLevel": lambda: _byte_level(_level(_pre.Digits(individual_digits=True), prefix=False, before=True)),
    "Punctuation, ByteLevel": lambda: _byte_level(_level(_pre.Punctuation(), before=True), prefix=True),
    "Llama 3": lambda: _byte_level(_split(LLAMA3)),
    "Qwen2": lambda: _byte_level(_split(QWEN2), normalizer=_norm.NFC()),
    "NFKC, ByteLevel": lambda: _byte_level(prefix=True, normalizer=_norm.NFKC()),
    "lower case, ByteLevel": lambda: _byte_level(
        prefix=True, normalizer=_norm.Sequence([_norm.NFD(), _norm.StripAccents(), _norm.Lowercase()])
    ),
    "BERT": lambda: _trained(
        "wordpiece",
        normalizer=_norm.BertNormalizer(lowercase=True),
        pre_tokenizer=_pre.BertPreTokenizer(),
        decoder=decoders.WordPiece(),
    ),
    "WordPiece, Whitespace": lambda: _trained(
        "wordpiece", pre_tokenizer=_pre.Whitespace(), decoder=decoders.WordPiece()
    ),
    "XLM-R": lambda: _trained(
        "unigram",
        pre_tokenizer=_pre.Sequence([_pre.WhitespaceSplit(), _pre.Metaspace()]),
        decoder=decoders.Metaspace(),
        normalizer=_norm.NFKC(),
    ),
    "T5": lambda: _trained("unigram", pre_tokenizer=_pre.Metaspace(), decoder=decoders.Metaspace()),
    "Metaspace never": lambda: _trained(
        "unigram",
        pre_tokenizer=_pre.Metaspace(prepend_scheme="never"),
        decoder=decoders.Metaspace(prepend_scheme="never"),
    ),
    "ALBERT": lambda: _trained(
        "unigram",
        pre_tokenizer=_pre.Metaspace(),
        decoder=decoders.Metaspace(),
        normalizer=_norm.Sequence(
            [_norm.Replace(Regex(" {2,}"), " "), _norm.NFKD(), _norm.StripAccents(), _norm.Lowercase()]
        ),
    ),
    "DeBERTa-v2": lambda: _trained(
        "unigram",
        normalizer=_norm.Sequence([_norm.Strip(), _norm.NFKC()]),
        decoder=decoders.Metaspace(),
        pre_tokenizer=_pre.Sequence([_pre.Punctuation(), _pre.Metaspace()]),
    ),
    "Llama 2": lambda: _trained(
        "fallback",
        normalizer=_norm.Sequence([_norm.Prepend("▁"), _norm.Replace(" ", "▁")]),
        pre_tokenizer=_pre.Split(Regex("(?<=[^▁])(?=▁)"), "isolated"),
        decoder=decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    ),
    "CLIP": lambda: _trained(
        "end",
        normalizer=_norm.Sequence([_norm.NFC(), _norm.Replace(Regex(r"\s+"), " "), _norm.Lowercase()]),
        pre_tokenizer=_pre.Whitespace(),
        decoder=decoders.BPEDecoder("</w>"),
    ),
}
"""Functions that train a tokenizer, by the name of a model that has such a one, or by its parts."""

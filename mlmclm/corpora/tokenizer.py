"""The tokenizer folder of a study: trained here, or converted from a hub name, a file or a folder.

Whatever the origin, the folder holds `tokenizer.json` and `tokenizer_config.json` with pad, bos, eos and mask tokens
(added if missing), and loads with `AutoTokenizer.from_pretrained` without the network.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mlmclm import versions
from mlmclm.configuration import Role
from mlmclm.corpora.corpus_config import TokenizerConfig
from mlmclm.corpora.exported_tokenizer import (
    TOKENIZER_FILES,
    UNLIMITED,
    corpus_tokenizer,
    hash_of_corpus,
    original_text,
    tokenizer_file_hash,
)
from mlmclm.corpora.fast_tokenizer import read_tokenizer
from mlmclm.corpora.hub_repository import HubRepository
from mlmclm.corpora.tokenizer_formats import byte_level, gpt2_tokenizer, tiktoken_tokenizer
from mlmclm.errors import UserError, one_line
from mlmclm.storage.artifact import FolderArtifact
from mlmclm.storage.checksums import CHECKSUMS
from mlmclm.storage.files import expanded, read_json, stable_hash, write_atomic, write_json
from mlmclm.storage.unchanged import check_hashed, marked_hash

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TRAINING_CHARACTERS = 8_000_000
"""Characters that a tokenizer is trained on; more would change few of the first 32,000 merges and cost time in
proportion."""

PRETOKENISATION = (
    # Llama 3's pattern, with single digits instead of groups of three: numbers compose in small vocabularies.
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

USUAL_TOKENS = {
    "pad": ("<|pad|>", "[PAD]", "<pad>", "<|padding|>"),
    "bos": ("<|begin_of_text|>", "[CLS]", "<s>", "<bos>", "<|endoftext|>"),
    "eos": ("<|end_of_text|>", "[SEP]", "</s>", "<eos>", "<|endoftext|>"),
    "mask": ("<|mask|>", "[MASK]", "<mask>"),
}
"""By role: the special tokens to look for if a tokenizer names none. If its vocabulary has none of them, the first is added."""
ROLES = tuple(USUAL_TOKENS)


@dataclass(frozen=True)
class SpecialTokens:
    """The texts of the special tokens that a tokenizer's own configuration names; None for those it doesn't name."""

    pad: str | None = None
    bos: str | None = None
    eos: str | None = None
    mask: str | None = None


class StoredTokenizer(FolderArtifact):
    """A study's tokenizer in the store."""

    kind = part = "tokenizers"
    again = "`mlmclm data` on its study sets it aside and makes it again"

    def seal(self, folder: Path) -> None:
        """Write the checksums.

        Raises:
            UserError: the tokenizer differs from the damaged one that it replaces, with which the store's corpora and
                models were made.
        """
        super().seal(folder)
        damaged = self.folder.with_name(f"{self.key}.damaged")
        if (damaged / CHECKSUMS).is_file() and (damaged / CHECKSUMS).read_bytes() != (folder / CHECKSUMS).read_bytes():
            raise UserError(
                f"{damaged}: the tokenizer is damaged, and its origin now gives another one, which doesn't fit the store's "
                f"corpora and models. Put back a copy of its files and rename it to {damaged.stem}; or choose another --store."
            )


def tokenizer_key(config: TokenizerConfig, corpus_key: str) -> str:
    """Return the name of the tokenizer's folder: 16 hex digits of a hash of its origin.

    The origin is the content of its files, its name and revision on the hub, or the text that it is trained on. Raises
    a UserError if the path does not exist or is not a tokenizer.
    """
    origin: list[Any]
    if config.path is not None:
        files = _tokenizer_files(expanded(config.path))
        origin = ["path", [[file.name, tokenizer_file_hash(file)] for file in files]]
    elif config.name is not None:
        origin = ["name", config.name, config.revision]
    else:
        origin = ["trained", config.train_vocab_size, TRAINING_CHARACTERS, PRETOKENISATION, corpus_key]
    more = config.keyed(Role.TOKENS)
    return stable_hash([versions.TOKENIZERS, *origin, *([more] if more else [])])[:16]


def prepare_tokenizer(config: TokenizerConfig, *, store: Path, corpus_key: str = "", texts: Iterable[str] = ()) -> Path:
    """Return the tokenizer's folder, which is created on first use.

    To train one, a sample of `texts` is needed, and a key of the corpus that they come from.

    Raises:
        UserError: the path is not a tokenizer, or there is too little text for the vocabulary.
        EnvironmentFault: the hub cannot be reached, or the disk is full.
    """

    files = _tokenizer_files(expanded(config.path)) if config.path is not None else []
    hashed = {file: marked_hash(file) for file in files}

    def make(folder: Path) -> None:
        if config.path is not None:
            tokenizer, named = _from_path(expanded(config.path))
            for file, (mark, content) in hashed.items():
                check_hashed(file, mark, content)
        elif config.name is not None:
            tokenizer, named = _from_hub(config.name, config.revision)
        else:
            tokenizer, named = train_tokenizer(texts, config.train_vocab_size or 0), SpecialTokens()
        save(tokenizer, named, folder)

    return StoredTokenizer(store, tokenizer_key(config, corpus_key)).ensure(make, title="the tokenizer")


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Train a byte-level BPE of `vocabulary` tokens, including 256 bytes and four special tokens (ids 0 to 3).

    Raises UserError if the texts hold too few different words for that.
    """
    from tokenizers import models, pre_tokenizers, trainers

    tokenizer = byte_level(models.BPE(), PRETOKENISATION)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[texts[0] for texts in USUAL_TOKENS.values()],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # All 256 bytes, so that no text is unknown.
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() < vocabulary:
        raise UserError(
            f"tokenizer.train_vocab_size: the corpus gives only {tokenizer.get_vocab_size()} different tokens, fewer "
            f"than {vocabulary}. Choose a smaller vocabulary or more text."
        )
    return tokenizer


def save(tokenizer: Tokenizer, named: SpecialTokens, folder: Path) -> None:
    """Complete the special tokens and write `tokenizer.json` and `tokenizer_config.json`."""
    from tokenizers import AddedToken, processors

    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    texts: dict[str, str] = {}
    for role, usual in USUAL_TOKENS.items():
        # In order of preference: the token that the origin names, a usual one of its vocabulary, a new one.
        texts[role] = getattr(named, role) or next((text for text in usual if text in vocabulary), usual[0])
        tokenizer.add_special_tokens([AddedToken(texts[role], special=True, normalized=False)])
    if not tokenizer.encode("", add_special_tokens=True).ids:  # The origin's tokenizer puts no token around a text.
        # A dictionary, because bos and eos may be the same token, which the template must list once.
        ids = {
            text: index for text in (texts["bos"], texts["eos"]) if (index := tokenizer.token_to_id(text)) is not None
        }
        template = processors.TemplateProcessing(
            single=f"{texts['bos']} $A {texts['eos']}",
            pair=f"{texts['bos']} $A {texts['eos']} $B:1 {texts['eos']}:1",
            special_tokens=list(ids.items()),
        )
        # Trimmed offsets leave out the space before a word, so that an answer's span starts at its first letter.
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), template])
    # Settings of the origin, such as truncation to 512 tokens, would silently cut every document.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    write_atomic(folder / "tokenizer.json", tokenizer.to_str())
    settings: dict[str, Any] = {f"{role}_token": text for role, text in texts.items()}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings |= {"model_input_names": ["input_ids", "attention_mask"], "model_max_length": UNLIMITED}
    write_json(folder / "tokenizer_config.json", settings)


def load_text_tokenizer(folder: Path) -> Tokenizer:
    """Load a folder's tokenizer, or raise UserError, for text that is data: a special token in it is ordinary text."""
    file = folder / "tokenizer.json"
    try:
        return text_tokenizer(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{file}: no such file. Delete {folder} to have it built again.") from error
    except Exception as error:  # The library raises bare Exception.
        raise UserError(f"{file}: damaged ({one_line(error, 300)}). Delete {folder} to have it built again.") from error


def text_tokenizer(content: str) -> Tokenizer:
    """Make the tokenizer of `load_text_tokenizer` from the content of a `tokenizer.json`."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(content)
    tokenizer.encode_special_tokens = True  # A document that contains "<|mask|>" must not get the mask's id.
    return tokenizer


def special_ids(folder: Path) -> dict[str, int]:
    """Return the ids of the pad, bos, eos and mask tokens; raise UserError if the folder lacks one of them."""
    tokenizer = load_text_tokenizer(folder)
    settings = read_json(folder / "tokenizer_config.json")
    ids: dict[str, int] = {}
    for role in ROLES:
        text = settings.get(f"{role}_token")
        index = None if text is None else tokenizer.token_to_id(text)
        if index is None:
            lack = "no" if text is None else f"{text!r} as"
            detail = "" if text is None else ", which tokenizer.json does not have"
            raise UserError(
                f"{folder}: tokenizer_config.json names {lack} {role}_token{detail}. Delete the folder to have it built again."
            )
        ids[role] = index
    return ids


def check_embedding_rows(folder: Path) -> None:
    """Raise UserError for a token without a row in an embedding of the vocabulary's size."""
    tokens = load_text_tokenizer(folder).get_vocab(with_added_tokens=True)
    size = len(tokens)
    text, index = max(tokens.items(), key=lambda item: item[1])
    if index >= size:
        raise UserError(
            f"{folder}: token {text!r} has id {index}, but the tokenizer has {size} tokens, and the model's embedding has as many rows: ids must be below "
            f"{size}. Number the tokens of its tokenizer.json without gaps."
        )


def check_special(folder: Path, *, masked: bool) -> None:
    """Raise a UserError for a missing special token or, if tokens will be `masked`, for a mask token with another role."""
    ids = special_ids(folder)
    shared = [role for role in ROLES if role != "mask" and ids[role] == ids["mask"]]
    if masked and shared:
        raise UserError(
            f"{folder}: the mask token is also the {shared[0]} token (id {ids['mask']}), so the two could not be told apart. "
            "Name another mask_token in the tokenizer's tokenizer_config.json, or none: one is added."
        )


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer's size and special tokens, which masking needs."""

    size: int
    """Number of tokens, including special ones: all ids are below it."""
    mask: int
    special: tuple[int, ...]
    """Sorted ids of all tokens that are not text: pad, bos, eos, mask, and the other special ones of tokenizer.json."""

    @cached_property
    def ordinary(self) -> NDArray[np.int64]:
        """Sorted ids of all other tokens, int64 [size - len(special)]."""
        return np.setdiff1d(np.arange(self.size), self.special)


def vocabulary(folder: Path) -> Vocabulary:
    """Return the vocabulary of a prepared tokenizer; raise what `special_ids` does."""
    roles = special_ids(folder)
    tokenizer = load_text_tokenizer(folder)
    added = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return Vocabulary(
        tokenizer.get_vocab_size(with_added_tokens=True), roles["mask"], tuple(sorted(added | set(roles.values())))
    )


def _tokenizer_files(path: Path) -> list[Path]:
    """Return the files of the tokenizer at a path, or raise UserError."""
    if path.is_file():
        return [path]
    if not path.exists():
        raise UserError(f"tokenizer.path: {path}: no such file or folder.")
    for names in (["tokenizer.json"], ["vocab.json", "merges.txt"], ["tokenizer.model"]):
        files = [path / name for name in names]
        if all(file.is_file() for file in files):
            extra = path / "tokenizer_config.json"
            return [*files, *([extra] if names == ["tokenizer.json"] and extra.is_file() else [])]
    raise UserError(
        f"tokenizer.path: {path}: not a tokenizer folder. It needs tokenizer.json, or vocab.json and merges.txt "
        "(GPT-2), or tokenizer.model (tiktoken ranks)."
    )


def _from_path(path: Path) -> tuple[Tokenizer, SpecialTokens]:
    """Read a tokenizer in any of the known formats."""
    from tokenizers import Tokenizer

    files = _tokenizer_files(path)
    names = [file.name for file in files]
    if files[0].suffix == ".model":  # Ranks name no special tokens, so EuroBERT's are given here; pad is also eos.
        return tiktoken_tokenizer(files[0]), SpecialTokens(
            "<|end_of_text|>", "<|begin_of_text|>", "<|end_of_text|>", "<|mask|>"
        )
    if names == ["vocab.json", "merges.txt"]:
        return gpt2_tokenizer(files[0], files[1]), SpecialTokens()
    try:
        tokenizer = Tokenizer.from_str(original_text(files[0]))
    except Exception as error:  # The library raises bare Exception.
        raise UserError(f"tokenizer.path: {files[0]}: not a tokenizer file ({one_line(error)}).") from error
    return tokenizer, _named_in(files[1:])


def _named_in(files: Sequence[Path]) -> SpecialTokens:
    """Return the special tokens that a tokenizer_config.json names; BERT's cls and sep serve as bos and eos."""
    settings: dict[str, Any] = read_json(files[0]) if files else {}
    # A tokenizer exported with a model may have another bos token; its note has the one of the corpus.
    if files and hash_of_corpus(files[0]) and (noted := corpus_tokenizer(files[0].parent)) is not None:
        settings["bos_token"] = noted["bos_token"]

    def text(*keys: str) -> str | None:
        for key in keys:
            value = settings.get(key)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                return value
        return None

    return SpecialTokens(
        text("pad_token"), text("bos_token", "cls_token"), text("eos_token", "sep_token"), text("mask_token")
    )


def repository_of(name: str, revision: str | None) -> HubRepository:
    """Return the repository that `tokenizer.name` and `tokenizer.revision` name."""
    instead = "or give a local tokenizer as tokenizer.path"
    return HubRepository(name, "model", revision, where="tokenizer.name", instead=instead)


def _from_hub(name: str, revision: str | None) -> tuple[Tokenizer, SpecialTokens]:
    """Load a tokenizer by its name on the hub, without running code from the repository."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer
    from transformers.utils import cached_file

    try:
        if cached_file(name, TOKENIZER_FILES[0], revision=revision, _raise_exceptions_for_missing_entries=False):
            loaded = read_tokenizer(name, revision=revision)
        else:  # a vocabulary in the format of its tokenizer class
            loaded = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise repository_of(name, revision).trouble(error) from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise UserError(f"tokenizer.name: {name!r} has no fast tokenizer (tokenizer.json), which is needed.")
    named = SpecialTokens(
        loaded.pad_token, loaded.bos_token or loaded.cls_token, loaded.eos_token or loaded.sep_token, loaded.mask_token
    )
    return Tokenizer.from_str(backend.to_str()), named

"""What a corpus and its tokenizer are, as plain frozen values."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from mlmclm.configuration import Frozen

PLACEMENT = frozenset({"workers", "shards", "cache", "shard_mib", "max_unknown"})
"""Keys of a corpus that change no token of its blocks."""


class CorpusConfig(Frozen):
    """Which text to read, and how much of it.

    `source` is `pydocs` (the documentation of this Python environment), a local file or folder (Parquet, JSON, JSON
    lines or text: .txt and .md; looked up beside the study file, as given and under the data root), or the name of a Hugging Face data set.
    """

    source: str = Field(min_length=1)
    config_name: str | None = None
    revision: str | None = None
    split: str = "train"
    validation_split: str | None = None
    """The split of the validation blocks. Absent: the source's own validation part where it has one (`pydocs`, or a
    folder with validation files), else a share of the documents of `split`."""
    text_column: str = "text"
    text_documents: Literal["file", "paragraph"] = "file"
    """The documents of text files (.txt, .md): each file, or each of its paragraphs, which empty lines divide. Paragraphs of
    one file can be on both sides of the division into training and validation text, and no context is longer than they are."""
    streaming: bool = False
    """Take documents in the order of the stream instead of choosing them by hash; nothing is downloaded whole."""
    validation_fraction: float = Field(default=0.01, gt=0.0, lt=1.0)
    """Share of documents held out (chosen by a hash of the text) where the source has no validation part of its own."""
    max_documents: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    """Upper bound of the training tokens; whole blocks only, so that the number reached is rounded down to blocks."""
    max_validation_tokens: int | None = Field(default=262_144, ge=1)
    """Upper bound of the validation tokens: a validation loss over 262,144 tokens is known to about 0.005 nats."""
    seed: int = 0
    """Changes which documents `max_documents` and `max_tokens` choose, and which are held out."""
    workers: Literal["auto", "local", "ray"] = "auto"
    """Who tokenises: `local` processes of this machine, or `ray` Data over a cluster. `auto`: a cluster where there is one."""
    shards: str | None = None
    """Where the blocks are kept in place of the store: a folder, or any fsspec address such as s3://bucket/corpora, from
    which every node copies to `cache` what it touches."""
    cache: str | None = None
    """A node's folder for its copies of shards that lie at an address; by default ~/.cache/mlmclm/corpora."""
    shard_mib: float = Field(default=64.0, gt=0.0)
    """Size of a shard, in MiB. What is finished when a preparation ends early is finished shards."""
    max_unknown: float = Field(default=0.2, ge=0.0, le=1.0)
    """Share of unknown tokens, and of documents without any token, above which the tokenizer doesn't fit the text."""

    def identity(self) -> dict[str, object]:
        """All that can change a token of the blocks, but for where the text lies and what the source's fingerprint holds."""
        return self.model_dump(exclude={"source", "text_documents", *PLACEMENT})

    @model_validator(mode="after")
    def _cache_of_an_address(self) -> Self:
        """A cache only for shards that are copied."""
        if self.cache is not None and "://" not in (self.shards or ""):
            raise ValueError("cache goes with an address (PROTOCOL://...) as shards only")
        return self


class TokenizerConfig(Frozen):
    """Where the tokenizer comes from: exactly one of `name`, `path` and `train_vocab_size`."""

    name: str | None = Field(default=None, min_length=1)
    """A model on the Hugging Face hub."""
    revision: str | None = None
    """The hub's revision of `name`."""
    path: str | None = Field(default=None, min_length=1)
    """A `tokenizer.json`, a folder with it or with GPT-2's `vocab.json` and `merges.txt`, or tiktoken `.model`."""
    train_vocab_size: int | None = Field(default=None, ge=300, le=1_000_000)
    """Train a byte-level BPE of this size (256 bytes and special tokens included) on the corpus."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        """Exactly one origin, and a revision only for a hub name."""
        given = [key for key in ("name", "path", "train_vocab_size") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of name, path and train_vocab_size is needed, got {given or 'none'}")
        if self.revision is not None and self.name is None:
            raise ValueError("revision goes with name only")
        return self

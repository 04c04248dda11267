"""Configuration of a corpus and its tokenizer, as plain frozen values."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from mlmclm.configuration import Enters, Frozen, Inside, Role
from mlmclm.storage.objects import protocol_fault


class CorpusConfig(Frozen):
    """The text to read, and how much of it.

    `source` is one of:

    - `pydocs`, the documentation of this Python environment;
    - a local file or folder (Parquet, JSON, JSON lines or text: .txt and .md), looked up beside the study file, as
      given, and under the data root;
    - the name of a Hugging Face data set.
    """

    source: Annotated[str, Role.SOURCE, Enters.INDIRECTLY] = Field(min_length=1)
    config_name: Annotated[str | None, Inside, Role.SOURCE] = None
    revision: Annotated[str | None, Inside, Role.SOURCE] = None
    split: Annotated[str, Inside, Role.SOURCE] = "train"
    validation_split: Annotated[str | None, Inside, Role.SOURCE, Role.TEXT] = None
    """The split of the validation blocks. By default the source's own validation part if it has one (`pydocs`, or a
    folder with validation files), else a share of the documents of `split`."""
    text_column: Annotated[str, Role.SOURCE] = "text"
    text_documents: Annotated[Literal["file", "paragraph"], Role.SOURCE, Enters.INDIRECTLY] = "file"
    """Unit that counts as one document in a text file (.txt, .md): the file, or each of its paragraphs (separated by empty
    lines). With paragraphs, one file's text can be in both training and validation, and no context is longer than a
    paragraph."""
    validation_fraction: Annotated[float, Role.TEXT] = Field(default=0.01, gt=0.0, lt=1.0)
    """Share of documents held out (by a hash of the text) if the source has no validation part of its own."""
    streaming: Annotated[bool, Role.TEXT] = False
    """Take documents in the order of the stream instead of choosing them by hash; no data set is downloaded whole."""
    max_documents: Annotated[int | None, Role.TOKENS] = Field(default=None, ge=1)
    max_tokens: Annotated[int | None, Role.TOKENS] = Field(default=None, ge=1)
    """Upper bound of the training tokens, rounded down to whole blocks."""
    max_validation_tokens: Annotated[int | None, Role.TOKENS] = Field(default=262_144, ge=1)
    """Upper bound of the validation tokens. On 262,144 tokens, a validation loss is estimated to about 0.005 nats."""
    seed: Annotated[int, Role.TEXT] = 0
    """Seed for choosing documents: those within `max_documents` and `max_tokens`, and those held out."""
    workers: Annotated[Literal["auto", "local", "ray"], Role.WORK] = "auto"
    """Where to tokenise: in `local` processes of this machine, or on a cluster with `ray` Data. `auto` uses a cluster
    if there is one."""
    shards: Annotated[str | None, Role.WORK] = None
    """Location of the blocks if not the store: a folder, or any fsspec address such as s3://bucket/corpora, from which
    each node copies the shards that it reads to `cache`."""
    cache: Annotated[str | None, Role.WORK] = None
    """A node's folder for its copies of shards from an address; by default ~/.cache/mlmclm/corpora."""
    cache_gib: Annotated[float, Role.WORK] = Field(default=64.0, gt=0.0)
    """Bound in GiB of a node's copies, of all corpora in the same folder. Blocks of a larger corpus are read one by one from the
    address instead."""
    shard_mib: Annotated[float, Role.WORK] = Field(default=64.0, gt=0.0)
    """Size of a shard, in MiB. A preparation that ends early keeps its finished shards."""
    max_unknown: Annotated[float, Role.WORK] = Field(default=0.2, ge=0.0, le=1.0)
    """Maximum share of unknown tokens, and of documents without any token; above it, the tokenizer doesn't fit the text."""

    max_left_out: Annotated[float, Role.WORK] = Field(default=0.1, ge=0.0, le=1.0)
    """Largest share of a folder's bytes that may be in files which are not read: of other kinds, or without the column."""

    def identity(self) -> dict[str, object]:
        """Return the values that can change the blocks' tokens, except for the text itself.

        The text and `text_documents` are covered by the source's fingerprint, which doesn't depend on where the text is stored.
        """
        return self.keyed(Role.SOURCE, Role.TEXT, Role.TOKENS)

    @model_validator(mode="after")
    def _shards_at_an_address(self) -> Self:
        address = "://" in (self.shards or "")
        if address and (fault := protocol_fault(self.shards or "", "shards")) is not None:
            raise ValueError(fault)
        if self.cache is not None and not address:
            raise ValueError("cache goes with an address (PROTOCOL://...) as shards only")
        return self


class TokenizerConfig(Frozen):
    """The tokenizer's origin: exactly one of `name`, `path` and `train_vocab_size`."""

    name: Annotated[str | None, Role.TOKENS, Enters.INDIRECTLY] = Field(default=None, min_length=1)
    """A model on the Hugging Face hub."""
    revision: Annotated[str | None, Inside, Role.TOKENS, Enters.INDIRECTLY] = None
    """The hub's revision of `name`."""
    path: Annotated[str | None, Role.TOKENS, Enters.INDIRECTLY] = Field(default=None, min_length=1)
    """A `tokenizer.json`, a folder with it or with GPT-2's `vocab.json` and `merges.txt`, or a tiktoken `.model`."""
    train_vocab_size: Annotated[int | None, Role.TOKENS, Enters.INDIRECTLY] = Field(default=None, ge=300, le=1_000_000)
    """Train a byte-level BPE of this size (256 bytes and special tokens included) on the corpus."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        origins = [key for key in ("name", "path", "train_vocab_size") if getattr(self, key) is not None]
        if len(origins) != 1:
            raise ValueError(f"exactly one of name, path and train_vocab_size is needed, got {origins or 'none'}")
        if self.revision is not None and self.name is None:
            raise ValueError("revision goes with name only")
        return self

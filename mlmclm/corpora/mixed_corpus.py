"""Several prepared corpora with one tokenizer, from which mixes are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, Unpack

from mlmclm.corpora.chosen_documents import divide_source
from mlmclm.corpora.corpus_config import CorpusConfig, TokenizerConfig
from mlmclm.corpora.documents import Folders, Source, open_source
from mlmclm.corpora.mixed_blocks import MixedBlocks
from mlmclm.corpora.mixes import Mix, shares
from mlmclm.corpora.prepare_corpus import Elsewhere, find_corpus, prepare_corpus, text_key, tokenizer_sample
from mlmclm.corpora.prepared_corpus import SOURCES, PreparedCorpus
from mlmclm.corpora.tokenizer import TRAINING_CHARACTERS, StoredTokenizer, prepare_tokenizer, tokenizer_key
from mlmclm.errors import UserError, for_each
from mlmclm.storage.addresses import is_local, send_file
from mlmclm.storage.checksums import write_sealed
from mlmclm.storage.files import stable_hash

T = TypeVar("T")


@dataclass(frozen=True)
class PreparedSources:
    """The corpora that the mixes of a study are drawn from."""

    key: str
    sources: Mapping[str, PreparedCorpus]
    tokenizer: Path
    """The folder of their tokenizer."""
    vocabulary: int
    train: MixedBlocks
    validation: MixedBlocks

    @property
    def documents(self) -> int:
        """Documents in the training blocks."""
        return sum(corpus.documents for corpus in self.sources.values())

    @property
    def tokens(self) -> int:
        """Tokens in the training blocks, EOS included."""
        return sum(corpus.tokens for corpus in self.sources.values())


AnyCorpus = PreparedCorpus | PreparedSources
"""The corpus of a study."""


def prepare_sources(
    corpora: Mapping[str, CorpusConfig],
    mix: Mix,
    tokenizer: TokenizerConfig,
    *,
    block_length: int,
    elsewhere: Callable[[CorpusConfig], Elsewhere | None] = lambda corpus: None,
    **folders: Unpack[Folders],
) -> PreparedSources:
    """Prepare several corpora with one tokenizer, or open those that are prepared.

    If a tokenizer is trained, its text has the shares of the mix. `elsewhere` returns the argument of `prepare_corpus` for
    one of the corpora. Raises what `prepare_corpus` does; the message names the source.
    """
    tokenizer = _shared_tokenizer(corpora, mix, tokenizer, block_length, folders, train=True) or tokenizer

    def one(name: str) -> PreparedCorpus:
        corpus = corpora[name]
        return prepare_corpus(corpus, tokenizer, block_length=block_length, elsewhere=elsewhere(corpus), **folders)

    prepared = _joined(_each(corpora, one))
    file = folders["store"] / "corpora" / prepared.key / SOURCES
    if not is_local(file):
        write_sealed(file, {"sources": {name: corpus.key for name, corpus in prepared.sources.items()}})
        send_file(file)
    return prepared


def find_sources(
    corpora: Mapping[str, CorpusConfig],
    mix: Mix,
    tokenizer: TokenizerConfig,
    *,
    block_length: int,
    **folders: Unpack[Folders],
) -> PreparedSources | None:
    """Return the corpora if all of them are prepared, None if there is work to do (`find_corpus`)."""
    shared = _shared_tokenizer(corpora, mix, tokenizer, block_length, folders)
    if shared is None:
        return None

    def one(name: str) -> PreparedCorpus | None:
        return find_corpus(corpora[name], shared, block_length=block_length, **folders)

    prepared = _each(corpora, one)
    ready = {name: corpus for name, corpus in prepared.items() if corpus is not None}
    if len(ready) < len(prepared) or not is_local(folders["store"] / "corpora" / _key(ready) / SOURCES):
        return None
    return _joined(ready)


def _shared_tokenizer(
    corpora: Mapping[str, CorpusConfig],
    mix: Mix,
    tokenizer: TokenizerConfig,
    block_length: int,
    folders: Folders,
    *,
    train: bool = False,
) -> TokenizerConfig | None:
    """Return the tokenizer of all sources: the given one, or one trained on text with the shares of the mix.

    Without `train`, None if it would have to be trained first.
    """
    if tokenizer.train_vocab_size is None:
        return tokenizer
    keys, sources = [], dict[str, Source]()
    for name, weight in mix:
        with _named(name):
            sources[name] = source = open_source(corpora[name], **folders)
            if train:
                source.settle()
            keys.append([text_key(corpora[name], source.fingerprint()), weight])

    def texts() -> Iterator[str]:
        for (name, source), share in zip(sources.items(), shares(mix).values(), strict=True):
            with _named(name):
                below = divide_source(corpora[name], source, block_length=block_length, byte_level=True)
                characters = max(1, round(share * TRAINING_CHARACTERS))
                chosen = tokenizer_sample(corpora[name], source, below, characters=characters)
            yield from chosen

    key, store = stable_hash(keys), folders["store"]
    if train:
        folder = prepare_tokenizer(tokenizer, store=store, corpus_key=key, texts=texts())
    else:
        folder = StoredTokenizer(store, tokenizer_key(tokenizer, key)).folder
    return TokenizerConfig(path=str(folder.resolve())) if folder.is_dir() else None


def _each(corpora: Mapping[str, CorpusConfig], work: Callable[[str], T]) -> dict[str, T]:
    """Apply `work` to all names; every error names its source."""

    def named(name: str) -> T:
        with _named(name):
            return work(name)

    names = sorted(corpora)
    return dict(zip(names, for_each(names, named), strict=True))


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Prefix the message of a user error with the source that it is about."""
    try:
        yield
    except UserError as error:
        raise UserError(f"corpora.{name}: {error}") from error


def _key(sources: Mapping[str, PreparedCorpus]) -> str:
    return stable_hash({"sources": {name: corpus.key for name, corpus in sources.items()}})[:16]


def _joined(sources: Mapping[str, PreparedCorpus]) -> PreparedSources:
    first = next(iter(sources.values()))
    return PreparedSources(
        key=_key(sources),
        sources=sources,
        tokenizer=first.tokenizer,
        vocabulary=first.vocabulary,
        train=MixedBlocks({name: corpus.train for name, corpus in sources.items()}),
        validation=MixedBlocks({name: corpus.validation for name, corpus in sources.items()}),
    )

"""Tiny corpora: how tests prepare them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlmclm.corpora import filling, process_map
from mlmclm.corpora.corpus_config import CorpusConfig, TokenizerConfig
from mlmclm.corpora.prepare_corpus import prepare_corpus
from mlmclm.corpora.prepared_corpus import PreparedCorpus
from mlmclm.launches.ray_tokenising import on_cluster

BPE = TokenizerConfig(train_vocab_size=320)
SMALL = 0.004
"""MiB a shard: 131 blocks of 16 tokens."""
LIMITS: list[dict[str, Any]] = [
    {}, {"max_tokens": 9000}, {"streaming": True, "max_tokens": 9000}, {"streaming": True, "max_documents": 60},
]  # fmt: skip
"""Settings that read a whole source or a part of it."""


def build(
    source: Path | str,
    store: Path,
    *,
    workers: int = 1,
    length: int = 16,
    workers_setting: str = "auto",
    **options: Any,
) -> PreparedCorpus:
    options.setdefault("validation_fraction", 0.1)
    config = CorpusConfig(source=str(source), workers=workers_setting, **options)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(process_map, "usable_cpus", lambda: workers)
        return prepare_corpus(config, BPE, block_length=length, store=store, elsewhere=on_cluster(None))


def tell(monkeypatch: pytest.MonkeyPatch, function: Callable[..., None]) -> None:
    """Give the progress of packing to a function, which may end it."""
    monkeypatch.setattr(filling, "bars", lambda: nullcontext(function))


def stream(blocks: Any) -> list[int]:
    tokens: list[int] = blocks.take(np.arange(len(blocks))).ravel().tolist()
    return tokens

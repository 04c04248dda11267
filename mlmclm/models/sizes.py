"""Named model sizes: EuroBERT's block (Llama's, but bidirectional) and ModernBERT's at several widths and depths.

A size implies its architecture, so a model's name does too. Ettin's sizes have no hyphen, because hyphens separate the
parts of a name: `ettin150m-clm-10k-mlm30-42k`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

GLOBAL_EVERY = 3
"""ModernBERT's layers 0, 3, 6, ... attend globally, the others locally."""


@dataclass(frozen=True)
class Size:
    """Shape of a model. The vocabulary is the tokenizer's, the longest sequence the recipe's."""

    layers: int
    hidden: int
    intermediate: int
    """Width of the feed-forward layer."""
    heads: int
    key_value_heads: int
    initial_deviation: float = 0.02
    """Standard deviation of the normal distribution that weights are drawn from; the study's is 0.02 at every size."""
    architecture: str = "eurobert"
    """A key of `architectures.ARCHITECTURES`."""
    window: int | None = None
    """Number of tokens that a token sees to each side in layers with local attention; None if there are none."""
    local: int | None = None
    """Number of layers with local attention; None for all but every third, if there is a window."""
    head_width: int | None = None
    """Head dimension; None for `hidden / heads`."""
    gated: bool = True
    """The feed-forward layer has a gate beside its two matrices."""
    extra: int = 0
    """Parameters without LM head beyond the closed form of `parameters`: biases, learned positions, further norms."""
    vocabulary: int | None = None
    """Rows of the embedding in a model that brings its own; None for the tokenizer's."""

    @property
    def rotary(self) -> bool:
        """Whether positions are rotary; BERT and RoBERTa learn an embedding for each."""
        return self.architecture not in ("bert", "roberta")

    @property
    def local_layers(self) -> int:
        """Number of layers with local attention."""
        if self.window is None:
            return 0
        return self.layers - -(-self.layers // GLOBAL_EVERY) if self.local is None else self.local

    @property
    def local_rotary(self) -> bool:
        """Whether the layers with local attention have a RoPE base of their own; Qwen's have not."""
        return self.local_layers > 0 and self.architecture == "modernbert"

    @property
    def attended(self) -> int:
        """Width of all attention heads together."""
        return self.heads * (self.head_width or self.hidden // self.heads)

    @property
    def products(self) -> int:
        """Number of weights in a layer's matrices."""
        key_values = self.key_value_heads * (self.head_width or self.hidden // self.heads)
        return (
            2 * self.hidden * (self.attended + key_values) + (3 if self.gated else 2) * self.hidden * self.intermediate
        )


def _small(layers: int, hidden: int, intermediate: int, heads: int) -> Size:
    """Return one of this project's own sizes.

    Weights start with a deviation of sqrt(2 / (5 hidden)) (Nguyen and Salazar 2019, arXiv 1910.05895, section 2.2),
    which is about 0.02 at the study's widths and larger at these narrower ones. With 0.02, MLM stays on its first plateau
    for hundreds of steps longer.
    """
    return Size(layers, hidden, intermediate, heads, heads, round(math.sqrt(2 / (5 * hidden)), 4))


def _ettin(layers: int, hidden: int, intermediate: int, heads: int) -> Size:
    """Return a size of Ettin (arXiv 2507.11412, its released configurations): ModernBERT's block with a window of
    128."""
    return Size(layers, hidden, intermediate, heads, heads, architecture="modernbert", window=64)


SIZES: dict[str, Size] = {
    # For two CPU cores; named by their parameters without LM head at a vocabulary of 8,192. The first is shallow: with
    # two layers MLM leaves its first plateau after as many tokens as with four, at two thirds of the cost.
    "1m": _small(2, 128, 384, 2),
    "2m": _small(4, 128, 384, 2),
    "7m": _small(6, 256, 768, 4),
    "18m": _small(8, 384, 1152, 6),
    "32m": _small(8, 512, 1536, 8),
    # The study's sizes (arXiv 2507.00994 and its pretraining code; the 1b row is from a recap of the paper).
    "210m": Size(12, 768, 3072, 12, 12),
    "610m": Size(26, 1152, 4096, 18, 6),
    "1b": Size(28, 1728, 5120, 18, 6),
    "ettin17m": _ettin(7, 256, 384, 4),
    "ettin32m": _ettin(10, 384, 576, 6),
    "ettin68m": _ettin(19, 512, 768, 8),
    "ettin150m": _ettin(22, 768, 1152, 12),
    "ettin400m": _ettin(28, 1024, 2624, 16),
    "ettin1b": _ettin(28, 1792, 3840, 28),
}

STUDY_VOCABULARY = 128_256
"""Rows of the embedding in the study's models (Llama 3's vocabulary)."""
PUBLISHED_VOCABULARY = {"eurobert": STUDY_VOCABULARY, "modernbert": 50_368}
"""Rows of the embedding in an architecture's published models: the study's, and ModernBERT's, which Ettin shares."""
TITLES = {"eurobert": "the paper's, Llama 3's", "modernbert": "ModernBERT's"}
"""Titles of these vocabularies, for output."""
DENSE_HEADS = frozenset({"modernbert", "bert", "roberta"})
"""Architectures with a dense layer before the LM head."""


def parameters(size: Size, vocabulary: int) -> int:
    """Return the number of parameters without the LM head: embedding, layers and norms in closed form, and `extra`.

    One form serves all architectures: ModernBERT's first layer lacks a norm before attention, but one follows its
    embedding.
    """
    return vocabulary * size.hidden + size.layers * (size.products + 2 * size.hidden) + size.hidden + size.extra


def training_flops(
    size: Size,
    *,
    tokens: int,
    labelled: int,
    length: int,
    vocabulary: int,
    causal: bool,
    documents: npt.NDArray[Any] | None = None,
) -> int:
    """Return the model FLOPs of training.

    These are 6 per weight and token in the blocks, 6 per weight and labelled token in the LM head, and attention as
    computed.

    Args:
        tokens: tokens that go through the blocks.
        labelled: tokens at which the loss is taken, the only ones whose logits are computed.
        length: block length; attention costs 12 * length * (width of all heads) per token and layer, half of it if
            causal; in a layer with local attention, no more than a window's.
        documents: if attention stays within documents, the lengths of a sample of them; they replace `length`.
    """
    lengths = np.array([length]) if documents is None else documents
    seen = lengths / (2 if causal else 1)  # keys per token, by document; so is `local`
    local = np.minimum(seen, size.window if causal else 2 * size.window + 1) if size.window else seen
    # A document of n tokens has n queries, so documents are weighted by their length.
    keys = ((size.layers - size.local_layers) * seen + size.local_layers * local) @ (lengths / lengths.sum())
    attention = round(12 * size.attended * float(keys))
    head = vocabulary * size.hidden + (size.hidden**2 if size.architecture in DENSE_HEADS else 0)
    return tokens * (6 * size.layers * size.products + attention) + 6 * labelled * head

"""Batches and logits of language models of transformers, from which `LanguageModel` scores and generates texts.

Nothing is padded: only sequences of equal length are computed together. No model sees a padding token, so the batch
changes a score only in the last bits of floating-point sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

TOKENS = 2048
"""Most tokens computed together, unless a single sequence has more."""

Observer = Callable[[int, int], None]
"""Called with the number of sequences computed so far, and the number of all."""


class ContinuationIds(NamedTuple):
    """Token ids of a context and of the continuation to score."""

    context: list[int]
    continuation: list[int]


class Likelihood(NamedTuple):
    """Natural logarithm of a continuation's probability, and whether each of its tokens was the likeliest one."""

    total: float
    greedy: bool


@dataclass(frozen=True)
class MaskedReading:
    """The way a masked language model reads a text from left to right (arXiv 2406.04823).

    Each token is predicted from `start`, the context, the true tokens before it, `masks` mask tokens and `end`, at the
    first mask. More than one mask leaves open how long the text goes on.

    Attributes:
        mask: id of the mask token.
        start: ids before a text; empty if the model was trained without any.
        end: ids after a text.
        masks: number of mask tokens.
        earlier: read the prediction one position before the first mask (masked next-token prediction).
    """

    mask: int
    start: list[int]
    end: list[int]
    masks: int = 3
    earlier: bool = False

    def room(self, longest: int) -> int:
        """Return how many tokens of a text fit into a sequence."""
        return longest - len(self.start) - self.masks - len(self.end)

    def inputs(self, tokens: Sequence[int]) -> list[int]:
        """Return the ids from which the token after `tokens` is predicted."""
        return [*self.start, *tokens, *[self.mask] * self.masks, *self.end]

    def position(self, tokens: int) -> int:
        """Return the position that predicts the token after `tokens` tokens of the text."""
        return len(self.start) + tokens - self.earlier


def length_batches(
    lengths: Sequence[int], tokens: int = TOKENS, observe: Observer | None = None
) -> Iterator[list[int]]:
    """Divide the numbers of sequences into batches of sequences of equal length, the longest first.

    Args:
        tokens: most tokens in a batch of more than one sequence.
        observe: called when the loop asks for the next batch, after its work on the last one.
    """
    order, done = sorted(range(len(lengths)), key=lambda number: -lengths[number]), 0
    for length, group in groupby(order, key=lambda number: lengths[number]):
        same, rows = list(group), max(1, tokens // max(length, 1))
        for first in range(0, len(same), rows):
            batch = same[first : first + rows]
            yield batch
            done += len(batch)
            if observe is not None:
                observe(done, len(lengths))


def logits_at(model: PreTrainedModel, ids: Tensor, positions: Tensor) -> Tensor:
    """Compute logits at some positions only; a vocabulary's logits at all of them would take most of the memory.

    Args:
        ids: [rows, length].
        positions: [rows, n].

    Returns:
        [rows, n, vocabulary], fp32.
    """

    def select(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden = inputs[0]  # [rows, length, hidden]
        return (hidden.gather(1, positions[..., None].expand(-1, -1, hidden.shape[-1])),)

    hook = model.get_output_embeddings().register_forward_pre_hook(select)
    try:
        logits: Tensor = model(input_ids=ids).logits
    finally:
        hook.remove()
    return logits.float()


def before_stop(text: str, stop: Sequence[str]) -> str:
    """Return a text up to the first stop string."""
    return text[: min([place for word in stop if (place := text.find(word)) >= 0], default=len(text))]

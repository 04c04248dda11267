"""Token ids of texts, and of contexts with continuations, with the special tokens that a model was trained with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

from mlmclm.errors import UserError
from mlmclm.tasks.texts import special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class ContinuationIds(NamedTuple):
    """Token ids of a context and of the continuation to score."""

    context: list[int]
    continuation: list[int]


@dataclass(frozen=True)
class Texts:
    """A tokenizer, and the special tokens that it puts around a text."""

    tokenizer: PreTrainedTokenizerFast
    start: list[int]
    end: list[int]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast) -> Self:
        """Read the special tokens from what the tokenizer puts around a text."""
        return cls(tokenizer, *special_tokens(tokenizer))

    def ids(self, text: str) -> list[int]:
        """Return a text's tokens, without special ones around it."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return ids

    def pair(self, context: str, continuation: str) -> ContinuationIds:
        """Tokenise context and continuation as one text, and divide it where the context alone ends.

        Spaces at the end of the context count as the continuation's, because most tokenizers join a space to the word
        after it. lm-evaluation-harness divides a text in the same way.

        Raises:
            UserError: the continuation has no token of its own.
        """
        spaces = context[len(context.rstrip()) :]
        context, continuation = context.rstrip(), spaces + continuation
        begin, joined = self.ids(context) if context else [], self.ids(context + continuation)
        if len(joined) <= len(begin):
            raise UserError(
                f"the continuation {continuation[:80]!r} has no token of its own after {context[-80:]!r}; begin it with a space."
            )
        return ContinuationIds(begin, joined[len(begin) :])

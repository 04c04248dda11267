"""Log likelihoods of continuations, and greedy generation, by causal and masked language models of transformers.

Nothing is padded: only sequences of equal length are computed together. No model sees a padding token, so the batch
changes a score only in the last bits of floating-point sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from mlmclm.errors import UserError

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


@torch.inference_mode()
def causal_likelihoods(
    model: PreTrainedModel, pairs: Sequence[ContinuationIds], *, longest: int, observe: Observer | None = None
) -> list[Likelihood]:
    """Score continuations under a causal language model: the sum of log p(token | all tokens before it).

    Args:
        pairs: contexts, of at least one token each, and continuations. Contexts that are too long lose tokens at
            their beginning.
        longest: number of tokens that the model takes.

    Raises:
        UserError: a continuation is too long for the model.
    """
    rows = []
    for context, continuation in pairs:
        _check(len(continuation), longest)
        # The last token is only predicted, so one more than the longest sequence fits.
        rows.append([*context, *continuation][-(longest + 1) :])
    result = [Likelihood(0.0, True)] * len(pairs)
    for batch in length_batches([len(row) for row in rows], observe=observe):
        ids = torch.tensor([rows[number] for number in batch], device=model.device)  # [rows, length + 1]
        last = ids.shape[1] - 1
        kept = max(len(pairs[number].continuation) for number in batch)
        positions = torch.arange(last - kept, last, device=ids.device).expand(len(batch), -1)
        logits = logits_at(model, ids[:, :-1], positions)  # [rows, kept, vocabulary]
        for number, row, predicted in zip(batch, ids, logits, strict=True):
            count = len(pairs[number].continuation)
            scores, targets = predicted[-count:], row[-count:]
            log_probs = scores.log_softmax(-1).gather(1, targets[:, None])
            result[number] = Likelihood(float(log_probs.double().sum()), bool((scores.argmax(-1) == targets).all()))
    return result


@torch.inference_mode()
def masked_likelihoods(
    model: PreTrainedModel,
    pairs: Sequence[ContinuationIds],
    reading: MaskedReading,
    *,
    longest: int,
    score_end: bool = True,
    observe: Observer | None = None,
) -> list[Likelihood]:
    """Score continuations under a masked language model, token by token from left to right (`MaskedReading`).

    Args:
        pairs: contexts and continuations. Contexts that are too long lose tokens at their beginning.
        longest: number of tokens that the model takes.
        score_end: add the log probability of the end token after the continuation. It never counts in `greedy`: a
            continuation rarely ends its document.

    Raises:
        UserError: a continuation is too long for the model, or its first token has no position to be predicted at.
    """
    texts, steps = [], []
    for number, (context, continuation) in enumerate(pairs):
        room = reading.room(longest) - len(continuation)
        _check(len(continuation), reading.room(longest))
        begin = context[-room:] if room else []
        if reading.position(len(begin)) < 0:
            raise UserError("a model that predicts one position earlier cannot predict a text's first token.")
        texts.append([*begin, *continuation, *(reading.end[:1] if score_end else [])])
        steps += [(number, place) for place in range(len(begin), len(texts[-1]))]
    totals, greedy = [0.0] * len(pairs), [True] * len(pairs)
    for batch in length_batches([len(reading.inputs(())) + place for _, place in steps], observe=observe):
        chosen = [steps[index] for index in batch]
        place = chosen[0][1]
        ids = torch.tensor([reading.inputs(texts[number][:place]) for number, _ in chosen], device=model.device)
        targets = torch.tensor([texts[number][place] for number, _ in chosen], device=model.device)
        position = torch.full((len(chosen), 1), reading.position(place), device=model.device)
        logits = logits_at(model, ids, position)[:, 0]  # [rows, vocabulary]
        log_probs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0].tolist()
        likeliest = (logits.argmax(-1) == targets).tolist()
        for (number, _), chance, hit in zip(chosen, log_probs, likeliest, strict=True):
            totals[number] += chance
            at_end = score_end and place == len(texts[number]) - 1
            greedy[number] &= hit or at_end
    return [Likelihood(*pair) for pair in zip(totals, greedy, strict=True)]


def _check(length: int, most: int) -> None:
    if length > most:
        raise UserError(f"a continuation has {length} tokens, but the model takes {most} at most.")


def before_stop(text: str, stop: Sequence[str]) -> str:
    """Return a text up to the first stop string."""
    return text[: min([place for word in stop if (place := text.find(word)) >= 0], default=len(text))]


@torch.inference_mode()
def generate_causal(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    contexts: Sequence[list[int]],
    *,
    stop: Sequence[str],
    most: int,
    observe: Observer | None = None,
) -> list[str]:
    """Continue texts with a causal model's likeliest tokens, by transformers' `generate`.

    Args:
        contexts: token ids, at least one each.
        stop: strings before which the text ends; it also ends at the model's end token.
        most: largest number of tokens to generate.
    """
    end = model.generation_config.eos_token_id
    settings = GenerationConfig(
        max_new_tokens=most,
        do_sample=False,
        use_cache=True,
        eos_token_id=tokenizer.eos_token_id if end is None else end,
        # Fills up rows that have ended; these tokens are skipped below.
        pad_token_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        stop_strings=list(stop) or None,
    )
    outputs = [""] * len(contexts)
    for batch in length_batches([len(context) + most for context in contexts], observe=observe):
        ids = torch.tensor([contexts[number] for number in batch], device=model.device)  # [rows, length]
        sequences = model.generate(ids, settings, attention_mask=torch.ones_like(ids), tokenizer=tokenizer)
        for number, row in zip(batch, sequences[:, ids.shape[1] :].tolist(), strict=True):
            outputs[number] = before_stop(tokenizer.decode(row, skip_special_tokens=True), stop)
    return outputs


@torch.inference_mode()
def generate_masked(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    contexts: Sequence[list[int]],
    reading: MaskedReading,
    *,
    stop: Sequence[str],
    most: int,
    observe: Observer | None = None,
) -> list[str]:
    """Continue texts with the tokens that a masked model finds likeliest at the first of its masks (`MaskedReading`).

    The arguments are those of `generate_causal`; the text ends at the first token of `reading.end`.
    """
    outputs = [""] * len(contexts)
    for batch in length_batches([len(reading.inputs(context)) + most for context in contexts], observe=observe):
        generated: dict[int, list[int]] = {number: [] for number in batch}
        active = list(batch)
        for _ in range(most):
            texts = [[*contexts[number], *generated[number]] for number in active]
            ids = torch.tensor([reading.inputs(text) for text in texts], device=model.device)
            position = torch.full((len(active), 1), reading.position(len(texts[0])), device=model.device)
            tokens = logits_at(model, ids, position)[:, 0].argmax(-1).tolist()
            for number, token in zip(list(active), tokens, strict=True):
                if token not in reading.end[:1]:
                    generated[number].append(token)
                    outputs[number] = tokenizer.decode(generated[number], skip_special_tokens=True)
                    if before_stop(outputs[number], stop) == outputs[number]:
                        continue
                    outputs[number] = before_stop(outputs[number], stop)
                active.remove(number)
            if not active:
                break
    return outputs

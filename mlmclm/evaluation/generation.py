"""Greedy generation, by decoders and by encoders; like likelihoods, in batches of equal length without padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

from mlmclm.evaluation.likelihoods import MaskedReading, Observer, length_batches, logits_at


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

"""Training and evaluating one model on one task: a plain loop over packed batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from mlmclm.backends.packing import Packing
from mlmclm.finetuning.batching import Array, batches_by_length, training_rows
from mlmclm.finetuning.forward import compute_in, forward
from mlmclm.finetuning.optimizer import optimizer_for
from mlmclm.finetuning.protocol import Protocol, learning_rate_at
from mlmclm.models.encoder import encode, pack_ids
from mlmclm.tasks.family import Examples, Family

CURVE_POINTS = 50
"""Points of the loss curve that a result keeps, each the mean over its share of the steps."""


@dataclass(frozen=True)
class Trained:
    """What training leaves beside the weights."""

    curve: list[list[float]]
    """[step (from 1), mean loss of the steps since the point before] pairs."""
    steps: int
    examples: int
    tokens: int
    """Real tokens seen."""
    diverged_step: int | None
    """The step (from 1) whose loss or gradient was not finite."""


def train(
    encoder: PreTrainedModel,
    head: nn.Module,
    family: Family,
    protocol: Protocol,
    *,
    learning_rate: float,
    order: int,
    on_step: Callable[[int, int, float], None] | None = None,
) -> Trained:
    """Fine-tunes in place; ends at the first loss or gradient that is not finite.

    Chance enters through the stream `order` and, in layers with dropout, through torch's global generator, which the
    caller seeds.

    Args:
        order: what the stream `order` is seeded with.
        on_step: called with step (from 1), steps, loss.
    """
    steps = protocol.steps(family.train_size)
    encoder.train()
    head.train()
    optimizer = optimizer_for(encoder, head, protocol, learning_rate, steps)
    rows = training_rows(family.train_size, protocol.batch_size, order)
    curve: list[list[float]] = []
    since: list[float] = []
    every = max(1, steps // CURVE_POINTS)
    tokens = 0
    for step in range(steps):
        found = forward(encoder, head, family, protocol, family.batch(next(rows)))
        tokens += found.tokens
        finite = math.isfinite(found.loss)
        if finite:
            found.backward()
            norm = optimizer.norm()
            finite = math.isfinite(norm)
        if not finite:
            return Trained(curve, step, step * protocol.batch_size, tokens, diverged_step=step + 1)
        rate = learning_rate_at(learning_rate, step, steps, protocol.warmup_ratio)
        optimizer.step(rate, clipping(norm, protocol.clip_norm))
        since.append(found.loss)
        if (step + 1) % every == 0 or step + 1 == steps:
            curve.append([step + 1, sum(since) / len(since)])
            since = []
        if on_step is not None:
            on_step(step + 1, steps, found.loss)
    optimizer.finish()
    return Trained(curve, steps, steps * protocol.batch_size, tokens, diverged_step=None)


def evaluate(
    encoder: PreTrainedModel,
    head: nn.Module,
    family: Family,
    protocol: Protocol,
    splits: Iterable[str],
) -> dict[str, Examples] | None:
    """What each example got, by split, which `Family.scores` are made of; None where the model's predictions are not finite."""
    device = next(encoder.parameters()).device
    encoder.eval()
    head.eval()
    examples = {}
    for split in splits:
        sequences, types = family.evaluation_sequences(split), family.token_types(split)
        predictions: list[Array] = [np.empty(0)] * len(sequences)
        for rows in batches_by_length(sequences.lengths, protocol.evaluation_batch_tokens):
            packing = Packing.of(sequences.lengths[rows], device)
            ids = pack_ids([sequences[row] for row in rows], packing)
            kinds = None if types is None else pack_ids([types[row] for row in rows], packing)
            with torch.no_grad(), compute_in(protocol, device):
                hidden = encode(encoder, ids, packing, causal=protocol.attention == "causal", token_types=kinds)
                found = family.predict(head, hidden, packing, split, rows)
            for row, prediction in zip(rows, found, strict=True):
                predictions[row] = prediction
        if not all(np.isfinite(prediction).all() for prediction in predictions):
            return None
        examples[split] = family.examples(split, predictions)
    return examples


def clipping(norm: float, largest: float | None) -> float:
    """What gradients of a joint norm are to be multiplied by, so that it is at most `largest`."""
    return largest / (norm + 1e-6) if largest is not None and norm > largest else 1.0

"""Training and evaluation of one model on one task: a plain loop over packed batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from mlmclm.backends.choice import backend_of
from mlmclm.backends.optimizers.optimizer import OPTIMIZERS, Hyperparameters
from mlmclm.backends.optimizers.updates import Updates
from mlmclm.finetuning.batching import batches_by_length, training_rows
from mlmclm.finetuning.forward import compute_in, forward, hidden_states
from mlmclm.finetuning.protocol import Protocol
from mlmclm.results.measures import Array
from mlmclm.results.metrics import value_of
from mlmclm.schedules.decay import finetuning_rate
from mlmclm.tasks.prepared_task import Examples, PreparedTask

CURVE_POINTS = 50
"""Target number of points in a result's loss curve, each the mean loss over an interval of steps. The interval is
rounded down, so there can be up to twice as many."""


class BestWeights:
    """The weights of the best evaluation so far.

    A tie goes to the earlier evaluation. A score that is not finite is never the best. For `patience` see `Protocol`.
    """

    def __init__(self, modules: Sequence[nn.Module], patience: int | None) -> None:
        self._modules, self._patience = modules, patience
        self._kept: list[torch.Tensor] = []
        self._best, self._since = -math.inf, 0
        self.step = 0
        """The step (from 1) of the best evaluation; 0 before there is one."""
        self.evaluations: list[list[float | None]] = []
        """Pairs [step, score]; None for a score that is not finite."""

    def add(self, step: int, score: float) -> bool:
        """Note an evaluation, keep the weights if it is the best, and return whether to stop."""
        finite = math.isfinite(score)
        self.evaluations.append([step, score if finite else None])
        if finite and score > self._best:
            self._best, self._since, self.step = score, 0, step
            # In the host's memory, because a GPU may be shared by as many cells as fit without these copies.
            self._kept = [tensor.detach().to("cpu", copy=True) for tensor in self._tensors()]
        else:
            self._since += 1
        return self._patience is not None and self._since >= self._patience

    def restore(self) -> None:
        """Put the kept weights back into the modules, if there are any."""
        for tensor, kept in zip(self._tensors(), self._kept, strict=False):
            tensor.data.copy_(kept)

    def _tensors(self) -> list[torch.Tensor]:
        return [tensor for module in self._modules for tensor in (*module.parameters(), *module.buffers())]


@dataclass(frozen=True)
class Trained:
    """The outcome of training, without the weights."""

    curve: list[list[float]]
    """Pairs [step (from 1), mean loss since the previous point]."""
    steps: int
    tokens: int
    """Number of real tokens seen."""
    diverged_step: int | None
    """The step (from 1) with a non-finite loss or gradient; None if training completed."""
    peak_learning_rate: float
    """Highest learning rate that the optimiser was given."""
    best: BestWeights | None = None
    """The evaluations during training, if the protocol has any."""


def fine_tune(
    encoder: PreTrainedModel,
    head: nn.Module,
    task: PreparedTask,
    protocol: Protocol,
    *,
    learning_rate: float,
    order: int,
    metric: str = "",
    on_step: Callable[[int, int, float], None] | None = None,
    report_every: int | None = None,
) -> Generator[dict[str, Any], None, Trained]:
    """Fine-tune the encoder and the head in place; stop at the first loss or gradient that is not finite.

    Randomness comes from the stream `order` and, in layers with dropout, from torch's global generator, which the
    caller seeds.

    Args:
        order: seed of the stream `order`.
        metric: the validation score that chooses the best weights and is reported, if there are evaluations during training.
        on_step: called with step (from 1), number of steps, and loss.
        report_every: steps between reports; None for none. They change no bit of the weights.

    Yields:
        Before the last step, reports on the present weights: `step` (from 1), `steps`, `score` (that of the metric;
        NaN if a prediction is not finite) and `validation`, all scores on that split (empty if `score` is NaN).
    """
    steps = protocol.steps(task.rows["train"])
    encoder.train()
    head.train()
    best = BestWeights((encoder, head), protocol.patience) if protocol.evaluate_every else None
    optimizer = optimizer_for(encoder, head, protocol, learning_rate, steps)
    rows = training_rows(task.rows["train"], protocol.batch_size, order, task.distinct)
    curve: list[list[float]] = []
    since: list[float] = []
    interval = max(1, steps // CURVE_POINTS)
    tokens, peak = 0, 0.0
    for step in range(steps):
        result = forward(encoder, head, task, protocol, task.batch(next(rows)))
        tokens += result.tokens
        finite = math.isfinite(result.loss)
        if finite:
            result.backward()
            norm = optimizer.norm()
            finite = math.isfinite(norm)
        # Stop before the update. No later step could recover, and the cell's result is "diverged" either way.
        if not finite:
            return Trained(curve, step, tokens, step + 1, peak, best)
        rate = finetuning_rate(learning_rate, step, steps, protocol.warmup_ratio, protocol.decay)
        peak = max(peak, rate)
        # The optimiser also clears the gradients, so the loop needs no zero_grad.
        optimizer.step(rate, clipping(norm, protocol.clip_norm))
        since.append(result.loss)
        if (step + 1) % interval == 0 or step + 1 == steps:
            curve.append([step + 1, sum(since) / len(since)])
            since = []
        if on_step is not None:
            on_step(step + 1, steps, result.loss)
        last = step + 1 == steps
        chooses = best is not None and (last or (step + 1) % (protocol.evaluate_every or 1) == 0)
        reports = report_every is not None and not last and (step + 1) % report_every == 0
        if chooses or reports:
            # The CPU's row-wise AdamW defers updates of embedding rows without a gradient.
            optimizer.settle()
            examples = evaluate_splits(encoder, head, task, protocol, ("validation",))
            encoder.train()
            head.train()
            scores = None if examples is None else task.scores(examples["validation"], metric)
            score = math.nan if scores is None else value_of(scores, metric)
            if chooses and best is not None and best.add(step + 1, score):
                break
            if reports:
                yield {"step": step + 1, "steps": steps, "score": score, "validation": scores or {}}
    optimizer.finish()
    if best is not None:
        best.restore()
    return Trained(curve, step + 1, tokens, None, peak, best)


def optimizer_for(encoder: PreTrainedModel, head: nn.Module, protocol: Protocol, peak: float, steps: int) -> Updates:
    """Return the device's implementation of the protocol's optimiser, for the parameters of the encoder and the head.

    A decoupled weight decay is relative to the peak of the cell's learning rate.
    """
    decay = protocol.optimizer_weight_decay(peak)
    settings = Hyperparameters(protocol.adam_beta1, protocol.adam_beta2, protocol.adam_epsilon, decay, peak)
    parameters = [*encoder.parameters(), *head.parameters()]
    rule, embedding = OPTIMIZERS[protocol.optimizer], encoder.get_input_embeddings()
    return backend_of(encoder.device).updates(rule, parameters, embedding, settings, steps)


def evaluate_splits(
    encoder: PreTrainedModel, head: nn.Module, task: PreparedTask, protocol: Protocol, splits: Iterable[str]
) -> dict[str, Examples] | None:
    """Return each split's per-example results, from which `PreparedTask.scores` computes the metrics.

    Return None if a prediction is not finite.
    """
    device = next(encoder.parameters()).device
    encoder.eval()
    head.eval()
    examples = {}
    for split in splits:
        sequences, types = task.columns[split]["input_ids"], task.columns[split].get("token_types")
        predictions: list[Array] = [np.empty(0)] * len(sequences)
        # Sequences of similar length share a batch, so attention's padded blocks waste little. Predictions are then put
        # back in the split's order.
        for rows in batches_by_length(sequences.lengths, protocol.evaluation_batch_tokens):
            kinds = None if types is None else [types[row] for row in rows]
            with torch.no_grad(), compute_in(protocol, device):
                packing, hidden = hidden_states(encoder, protocol, [sequences[row] for row in rows], kinds)
                outputs = task.predict(head, hidden, packing, split, rows)
            for row, prediction in zip(rows, outputs, strict=True):
                predictions[row] = prediction
        if not all(np.isfinite(prediction).all() for prediction in predictions):
            return None
        examples[split] = task.examples(split, predictions)
    return examples


def clipping(norm: float, largest: float | None) -> float:
    """Return the factor that scales gradients of this global norm to a norm of at most `largest`."""
    # The 1e-6 is that of torch.nn.utils.clip_grad_norm_.
    return largest / (norm + 1e-6) if largest is not None and norm > largest else 1.0

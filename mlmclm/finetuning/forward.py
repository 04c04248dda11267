"""Forward and backward pass of a training batch: in one piece, or in chunks with cached gradients.

A contrastive loss needs the embeddings of the whole batch, but its gradient flows back into the encoder through each
embedding separately. A batch of any size therefore fits in the memory of one chunk (GradCache, Gao et al. 2021,
arXiv 2101.06983, section 3.2):

1. Compute all embeddings without a graph, chunk by chunk.
2. Compute the loss, and its gradient with respect to the embeddings.
3. Recompute each chunk with a graph and the same dropout, and backpropagate its part of that gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mlmclm.backends.choice import autocast, backend_of, rounded_products
from mlmclm.backends.packing import Packing
from mlmclm.finetuning.batching import batches_by_length
from mlmclm.finetuning.protocol import Protocol
from mlmclm.models.encoder import encode, pack_ids
from mlmclm.results.measures import Array
from mlmclm.tasks.prepared_task import Batch, PreparedTask


@dataclass(frozen=True)
class Forward:
    """The outcome of a batch's forward pass."""

    loss: float
    tokens: int
    """Number of real tokens in the batch."""
    backward: Callable[[], None]
    """Accumulates the loss's gradient in the parameters. Call it at most once."""


def compute_in(protocol: Protocol, device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which matrices are multiplied in the protocol's precision."""
    if protocol.precision == "bf16":
        return rounded_products(device)
    return autocast(device, protocol.precision == "bf16-autocast")


def forward(encoder: PreTrainedModel, head: nn.Module, task: PreparedTask, protocol: Protocol, batch: Batch) -> Forward:
    """Compute the loss of a batch, in chunks if the protocol and the family allow it and one chunk is not enough."""
    if protocol.chunk_tokens is not None and task.kind.embeds:
        lengths = np.array([len(ids) for ids in batch.sequences])
        chunks = list(batches_by_length(lengths, protocol.chunk_tokens))
        if len(chunks) > 1:
            return _in_chunks(encoder, task, protocol, batch, chunks)
    packing, hidden = hidden_states(encoder, protocol, batch.sequences, batch.token_types)
    with compute_in(protocol, packing.device):
        loss = task.loss(head, hidden, packing, batch.targets)
    return Forward(loss.item(), packing.tokens, loss.backward)


def _in_chunks(
    encoder: PreTrainedModel, task: PreparedTask, protocol: Protocol, batch: Batch, chunks: list[Array]
) -> Forward:
    device = next(encoder.parameters()).device
    backend = backend_of(device)

    def embed(rows: Array) -> Tensor:
        """Return the embeddings of these rows of the batch, [rows, hidden]."""
        packing, hidden = hidden_states(encoder, protocol, [batch.sequences[row] for row in rows])
        with compute_in(protocol, device):
            return task.embeddings(hidden, packing)

    states, parts = [], []
    with torch.no_grad():
        for rows in chunks:
            # The second pass must draw the same dropout masks, else the gradient is not that of these embeddings.
            states.append(backend.random_state())
            parts.append(embed(rows))
    # The chunks are ordered by length; the inverse permutation restores the order that `loss_of` expects.
    places = torch.from_numpy(np.argsort(np.concatenate(chunks))).to(device)
    vectors = torch.cat(parts)[places].requires_grad_()  # [sequences, hidden], in the batch's order
    loss = task.loss_of(vectors, batch.targets)

    def backward() -> None:
        (gradient,) = torch.autograd.grad(loss, vectors)
        for rows, state in zip(chunks, states, strict=True):
            backend.set_random_state(state)
            embed(rows).backward(gradient[torch.from_numpy(rows).to(device)])  # type: ignore[no-untyped-call]

    return Forward(loss.item(), sum(len(ids) for ids in batch.sequences), backward)


def hidden_states(
    encoder: PreTrainedModel, protocol: Protocol, sequences: list[Array], token_types: list[Array] | None = None
) -> tuple[Packing, Tensor]:
    """Return the packing of the sequences, and their final hidden states [T, hidden]."""
    packing = Packing.of([len(ids) for ids in sequences], next(encoder.parameters()).device)
    # Open a new autocast context for each pass: autocast caches the weights that it has cast, and those cast under
    # no_grad carry no gradient.
    with compute_in(protocol, packing.device):
        hidden = encode(
            encoder,
            pack_ids(sequences, packing),
            packing,
            causal=protocol.attention == "causal",
            token_types=None if token_types is None else pack_ids(token_types, packing),
        )
    return packing, hidden

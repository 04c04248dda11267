"""A training batch forward, and backward on demand: at once, or in chunks with cached gradients where the family's loss allows it.

A loss of embeddings needs those of the whole batch, but its gradient reaches the encoder through each of them by itself.
So a batch of any size fits in the memory of a chunk (GradCache, Gao et al. 2021, arXiv 2101.06983, section 3.2): all
embeddings without a graph, chunk by chunk; the loss and its gradient at the embeddings; then each chunk again with a graph
and with the same dropout, and back from its share of that gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mlmclm.backends.choice import autocast, backend_of
from mlmclm.backends.packing import Packing
from mlmclm.finetuning.batching import Array, batches_by_length
from mlmclm.finetuning.protocol import Protocol
from mlmclm.models.encoder import encode, pack_ids
from mlmclm.tasks.family import Batch, Family


@dataclass(frozen=True)
class Forward:
    """What a batch's forward pass leaves."""

    loss: float
    tokens: int
    """Real tokens of the batch."""
    backward: Callable[[], None]
    """Adds the loss's gradient to that of the parameters; to be called once at most."""


def compute_in(protocol: Protocol, device: torch.device) -> AbstractContextManager[object]:
    """Autocast to bfloat16 where the protocol asks for it."""
    return autocast(device, protocol.precision == "bf16-autocast")


def forward(encoder: PreTrainedModel, head: nn.Module, family: Family, protocol: Protocol, batch: Batch) -> Forward:
    """The loss of a batch, in chunks where the protocol asks for it and there are several."""
    if protocol.chunk_tokens is not None and family.in_chunks:
        lengths = np.array([len(ids) for ids in batch.sequences])
        chunks = list(batches_by_length(lengths, protocol.chunk_tokens))
        if len(chunks) > 1:
            return _in_chunks(encoder, family, protocol, batch, chunks)
    return _at_once(encoder, head, family, protocol, batch)


def _at_once(encoder: PreTrainedModel, head: nn.Module, family: Family, protocol: Protocol, batch: Batch) -> Forward:
    packing, hidden = _states(encoder, protocol, batch.sequences, batch.token_types)
    with compute_in(protocol, packing.device):
        loss = family.loss(head, hidden, packing, batch.targets)
    return Forward(loss.item(), packing.tokens, loss.backward)


def _in_chunks(
    encoder: PreTrainedModel, family: Family, protocol: Protocol, batch: Batch, chunks: list[Array]
) -> Forward:
    device = next(encoder.parameters()).device
    backend = backend_of(device)

    def embed(rows: Array) -> Tensor:
        """[rows, hidden]."""
        packing, hidden = _states(encoder, protocol, [batch.sequences[row] for row in rows])
        with compute_in(protocol, device):
            return family.embeddings(hidden, packing)

    states, parts = [], []
    with torch.no_grad():
        for rows in chunks:
            states.append(backend.random_state())
            parts.append(embed(rows))
    places = torch.from_numpy(np.argsort(np.concatenate(chunks))).to(device)
    vectors = torch.cat(parts)[places].requires_grad_()  # [sequences, hidden], in the batch's order
    loss = family.loss_of(vectors, batch.targets)

    def backward() -> None:
        (gradient,) = torch.autograd.grad(loss, vectors)
        for rows, state in zip(chunks, states, strict=True):
            backend.set_random_state(state)
            embed(rows).backward(gradient[torch.from_numpy(rows).to(device)])  # type: ignore[no-untyped-call]

    return Forward(loss.item(), sum(len(ids) for ids in batch.sequences), backward)


def _states(
    encoder: PreTrainedModel, protocol: Protocol, sequences: list[Array], token_types: list[Array] | None = None
) -> tuple[Packing, Tensor]:
    """Where the sequences lie, and their final states [T, hidden]."""
    packing = Packing.of([len(ids) for ids in sequences], next(encoder.parameters()).device)
    # A context of its own: autocast remembers casts of weights, and those made without a graph have no gradient.
    with compute_in(protocol, packing.device):
        hidden = encode(
            encoder,
            pack_ids(sequences, packing),
            packing,
            causal=protocol.attention == "causal",
            token_types=None if token_types is None else pack_ids(token_types, packing),
        )
    return packing, hidden

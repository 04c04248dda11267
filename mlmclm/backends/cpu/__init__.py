"""The CPU backend: loops compiled with numba and, on recent Intel CPUs, tile instructions (AMX)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from mlmclm.backends.attention_settings import AttentionSettings
from mlmclm.backends.cpu import block, kernels, packed_attention, ready, tile_attention, tile_instructions, tiles
from mlmclm.backends.cpu.host import Host
from mlmclm.backends.cpu.host_adamw import HostAdamW
from mlmclm.backends.cpu.rowwise_adamw import RowwiseAdamW
from mlmclm.backends.optimizers.optimizer import Hyperparameters, Optimizer
from mlmclm.backends.optimizers.rules import AdamW
from mlmclm.backends.optimizers.updates import Updates
from mlmclm.backends.packing import Packing
from mlmclm.backends.reference import Reference

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LONGEST_WRITTEN_OUT = 512
"""Longest sequence for which the score matrix is materialised."""


class Cpu(Reference):
    """Operations on this machine's processor; some methods are functions of this folder's modules."""

    name = "cpu"
    blocks = staticmethod(block.run_blocks)
    prepare = staticmethod(ready.prepare)

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings, mask: Tensor | None = None
    ) -> Tensor:
        """Compute `Reference.attention` with tiles or, for short sequences, as two batched products.

        torch's fused kernel spends three times as long in its backward pass (measured at 128 tokens, 64-wide heads,
        bf16: 10.4 ms against 3.0 ms for forward and backward).
        """
        batch, heads, length, _ = query.shape
        alike = length == key.shape[2]
        # torch.compile can't trace numba's loops.
        if mask is None and alike and not settings.traced and packed_attention.by_tiles(query, settings):
            # [1, heads, batch * length, width]: the batch end to end, not copied if its memory has transformers' order.
            q, k, v = (tensor.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] for tensor in (query, key, value))
            packing = Packing.uniform(batch, length)
            attended = packed_attention.packed_attention(q, k, v, packing, settings)
            return attended.view(batch, length, *attended.shape[2:])
        if length > LONGEST_WRITTEN_OUT or not alike:
            return super().attention(query, key, value, settings, mask)
        local = settings.local_mask(length, query.device) if mask is None else None
        if local is not None:
            mask, settings = local, settings._replace(causal=False)  # the mask hides later positions too
        groups = heads // key.shape[1]
        if groups > 1:
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        return _written_out(query, key, value, settings, mask).transpose(1, 2).contiguous()

    def packed_attention(
        self, query: Tensor, key: Tensor, value: Tensor, packing: Packing, settings: AttentionSettings
    ) -> Tensor:
        """Compute `Reference.packed_attention` without score matrices of sequences longer than `LONGEST_WRITTEN_OUT`.

        Each of these goes through torch's kernel by itself. Tiles (AMX) need no score matrices, so they take all sequences.
        """
        if int(packing.lengths.max()) <= LONGEST_WRITTEN_OUT or packed_attention.by_tiles(query, settings):
            return packed_attention.packed_attention(query, key, value, packing, settings)
        places = np.split(np.arange(packing.tokens), packing.starts[1:])  # indices of each sequence's tokens
        short = [place for place in places if len(place) <= LONGEST_WRITTEN_OUT]
        long = [place for place in places if len(place) > LONGEST_WRITTEN_OUT]
        pieces = []  # [1, tokens, heads, width] each
        for place in long:
            q, k, v = (tensor[:, :, int(place[0]) : int(place[-1]) + 1] for tensor in (query, key, value))
            pieces.append(super().attention(q, k, v, settings))
        # There is a long sequence, or all would have been computed together above.
        if short:
            inner = Packing.of([len(place) for place in short])
            rows = np.concatenate([*short, np.full(inner.padded_tokens - inner.tokens, packing.tokens)])
            index = torch.from_numpy(rows)
            q, k, v = (tensor[:, :, index] for tensor in (query, key, value))
            attended = packed_attention.packed_attention(q, k, v, inner, settings)
            pieces.append(attended[:, : inner.tokens].to(pieces[0].dtype))
        padding = np.arange(packing.tokens, query.shape[2])
        pieces.append(pieces[0].new_zeros(1, len(padding), *pieces[0].shape[2:]))
        # Back into the row's order.
        order = np.concatenate([*long, *short, padding])
        return torch.cat(pieces, 1)[:, torch.from_numpy(np.argsort(order))]

    def fuses(
        self,
        model: PreTrainedModel,
        longest: int = 0,
        dtype: torch.dtype | None = None,
        residual: torch.dtype | None = None,
    ) -> bool:
        """Return whether this is EuroBERT or Llama, and the blocks compute what is asked for.

        They keep the residual stream in the weights' dtype, and hold no score matrix of a long sequence.
        """
        dtype = dtype or model.dtype
        if (
            not block.fits(model)
            or residual not in (None, model.dtype)
            or (dtype == torch.bfloat16 and not self.has_bf16())
        ):
            return False
        return longest <= LONGEST_WRITTEN_OUT or tile_attention.fits(dtype, model.config.head_dim)

    # Functions of other modules that benchmarks replace, and which must therefore be looked up at each call.

    def losses(self, logits: Tensor, vocabulary: int, labels: Tensor) -> Tensor:
        """Compute `Reference.losses` in one pass over the logits."""
        return kernels.cross_entropy(logits, vocabulary, labels)

    def add_weight_gradient(self, left: Tensor, right: Tensor, out: Tensor, *, first: bool) -> None:
        """Compute `Reference.add_weight_gradient` with tiles where the shapes fit them."""
        tiles.add_weight_gradient(left, right, out, first=first)

    def updates(
        self,
        rule: type[Optimizer],
        parameters: Sequence[nn.Parameter],
        embedding: nn.Module,
        settings: Hyperparameters,
        steps: int,
    ) -> Updates:
        """Return an AdamW that skips unread rows of the embedding if all weights are fp32, otherwise torch's."""
        narrow = any(parameter.dtype != torch.float32 for parameter in parameters)
        if rule is not AdamW or narrow or not isinstance(embedding, nn.Embedding):
            return super().updates(rule, parameters, embedding, settings, steps)
        return RowwiseAdamW(parameters, embedding, settings, steps)

    def shared_memory(self) -> Host | None:
        """Return the memory that this machine's workers share (Linux on x86-64); see `Reference.shared_memory`."""
        return Host.create()

    def optimizer(
        self, rule: type[Optimizer], parameters: Iterable[nn.Parameter], settings: Hyperparameters
    ) -> torch.optim.Optimizer:
        """Return `Reference.optimizer`; for AdamW, one whose state this machine's workers can share."""
        if rule is AdamW:
            return HostAdamW(rule.groups(parameters, settings), **AdamW.options(settings))
        return super().optimizer(rule, parameters, settings)


class CpuWithTiles(Cpu):
    """`Cpu` with matrix products by tile instructions; the modules of this folder ask `tile_instructions` themselves."""

    name = "cpu+amx"

    @classmethod
    def available(cls) -> bool:
        return tile_instructions.available()


def _written_out(query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings, mask: Tensor | None) -> Tensor:
    """Compute softmax(scale q k') v as two batched products.

    All tensors are [batch, heads, length, width], with equal numbers of heads.
    """
    batch, heads, length, width = query.shape
    # Scaling the queries touches fewer values than scaling the scores.
    scores = torch.bmm(
        (query * settings.scale).reshape(batch * heads, length, width),
        key.reshape(batch * heads, length, width).transpose(1, 2),
    )  # [batch * heads, length, length]
    if settings.causal:
        hidden = torch.ones(length, length, dtype=torch.bool, device=query.device).triu_(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    if mask is not None:
        scores = scores.view(batch, heads, length, length)
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        scores = scores.view(batch * heads, length, length)
    weights = functional.softmax(scores, dim=-1).to(value.dtype)
    if settings.dropout:
        weights = functional.dropout(weights, settings.dropout)
    return torch.bmm(weights, value.reshape(batch * heads, length, width)).view(batch, heads, length, width)

"""Every operation in plain torch, on any device: the reference that other backends must match and fall back on."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from mlmclm.backends import wide_products
from mlmclm.backends.attention_settings import AttentionSettings
from mlmclm.backends.model_shape import ModelShape
from mlmclm.backends.optimizers.optimizer import Hyperparameters, Optimizer, apart
from mlmclm.backends.optimizers.updates import TorchUpdates, Updates
from mlmclm.backends.packing import Chosen, Packing
from mlmclm.backends.shared_memory import SharedMemory
from mlmclm.system import processor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Reference:
    """Interface of all backends, implemented with torch's operations."""

    name = "reference"
    device: ClassVar[str] = "cpu"
    """The kind of device that a backend is for."""
    process_group: ClassVar[str] = "gloo"
    """The process group of the workers on this kind of device, as torch names it."""
    in_host_memory = True
    """Whether the device computes in the host's memory, where a message to another worker is a copy."""
    logits_at_once = 1024
    """Number of positions whose logits the LM head computes at once."""

    @classmethod
    def available(cls) -> bool:
        """Return whether this machine can compute with the backend."""
        return True

    def has_bf16(self) -> bool:
        """Return whether the device multiplies bfloat16 matrices faster than those of float32.

        If not, `bf16-autocast` multiplies in float32, and `bf16` rounds products of float32 to bfloat16.
        """
        return wide_products.processor_has_bf16()

    def described(self, precision: str) -> str:
        """Return the backend's name for output and result records, given a precision of `Recipe` or `Protocol`."""
        if precision == "fp32" or self.has_bf16():
            return self.name
        return f"{self.name} (float32 products, as bfloat16 is slow here)"

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings, mask: Tensor | None = None
    ) -> Tensor:
        """Compute attention over sequences of one length.

        Args:
            query: [batch, heads, length, head dimension]; key and value may have fewer heads (grouped queries).
            settings: `causal` and `window` apply if there is no mask.
            mask: boolean (True where attention is allowed) or added to the scores; broadcastable to [batch, heads,
                length, length].

        Returns:
            [batch, length, heads, head dimension].
        """
        if mask is None:
            mask = settings.local_mask(query.shape[2], query.device)
        attended = functional.scaled_dot_product_attention(
            # torch takes a mask or `is_causal`, not both.
            query, key, value, attn_mask=mask, dropout_p=settings.dropout, is_causal=settings.causal and mask is None,
            scale=settings.scale, enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
        return attended.transpose(1, 2).contiguous()

    def packed_attention(
        self, query: Tensor, key: Tensor, value: Tensor, packing: Packing, settings: AttentionSettings
    ) -> Tensor:
        """Compute attention within each sequence of a packed row, here one sequence after the other.

        Args:
            query: [1, heads, T, head dimension]; key and value [1, key-value heads, T, head dimension].

        Returns:
            [1, T, heads, head dimension]. Values at padding are unspecified but finite, and must not enter a loss.
        """
        pieces = []
        for start, length in zip(packing.starts.tolist(), packing.lengths.tolist(), strict=True):
            q, k, v = (tensor[:, :, start : start + length] for tensor in (query, key, value))
            pieces.append(Reference.attention(self, q, k, v, settings))
        padding = packing.padded_tokens - packing.tokens
        return torch.cat([*pieces, pieces[0].new_zeros(1, padding, *pieces[0].shape[2:])], 1)

    def traces_packed(self, query: Tensor, settings: AttentionSettings) -> bool:
        """Return whether torch.compile can trace `packed_attention`; if not, it runs outside of compiled code."""
        return False

    def fuses(
        self,
        model: PreTrainedModel,
        longest: int = 0,
        dtype: torch.dtype | None = None,
        residual: torch.dtype | None = None,
    ) -> bool:
        """Return whether `blocks` computes this transformers base model faster than the model's own forward.

        Args:
            longest: length of the longest sequence, in tokens.
            dtype: dtype of the matrix products; None for the weights'.
            residual: dtype of the residual stream; None for the weights'.
        """
        return False

    def blocks(
        self, model: PreTrainedModel, input_ids: Tensor, packing: Packing, *, causal: bool, chosen: Chosen | None = None
    ) -> Tensor:
        """Compute final hidden states [T, hidden] of a model that this backend `fuses`, in its weights' dtype.

        Args:
            input_ids: int64 [1, T].
            chosen: return the states of these tokens only, [chosen.number, hidden]; not for causal attention.
        """
        raise NotImplementedError(f"{self.name} fuses no model")

    def losses(self, logits: Tensor, vocabulary: int, labels: Tensor) -> Tensor:
        """Return the sum of the rows' cross-entropies, in fp32 at least.

        Args:
            logits: [rows, vocabulary + unused columns]; the first `vocabulary` columns are overwritten with the sum's gradient
                with respect to them.
            labels: int64 [rows].
        """
        logits, label = logits[:, :vocabulary], labels.unsqueeze(1)
        # In fp32 `values` are the logits themselves, which is why `chosen` is read before they are overwritten.
        values = logits.to(torch.promote_types(logits.dtype, torch.float32))
        chosen = values.gather(1, label)
        largest = values.amax(1, keepdim=True)
        values.sub_(largest).exp_()
        normaliser = values.sum(1, keepdim=True)
        values.div_(normaliser)
        values.scatter_(1, label, values.gather(1, label) - 1)
        logits.copy_(values)
        return (normaliser.log() + largest - chosen).sum()

    def add_weight_gradient(self, left: Tensor, right: Tensor, out: Tensor, *, first: bool) -> None:
        """Add left' right to `out`, for [T, outputs] and [T, inputs]; the `first` product overwrites `out` instead."""
        # bfloat16 products run twice as fast with an untransposed first factor, so the narrower matrix is transposed.
        turned = left.shape[1] > right.shape[1]
        part = (right.t().contiguous() @ left).t() if turned else left.t().contiguous() @ right
        if first:
            out.copy_(part)
        else:
            out += part

    def updates(
        self,
        rule: type[Optimizer],
        parameters: Sequence[nn.Parameter],
        embedding: nn.Module,
        settings: Hyperparameters,
        steps: int,
    ) -> Updates:
        """Return an optimiser for fine-tuning in this number of steps.

        Args:
            embedding: the module that looks up token ids; its weight is one of the parameters.
        """
        return TorchUpdates(parameters, rule.build(apart(parameters, settings), settings))

    def shared_memory(self) -> SharedMemory | None:
        """Return memory that all workers of the process group can write, used in place of messages; collective.

        The result is None on every worker if there is no such memory.
        """
        return None

    def optimizer(
        self, rule: type[Optimizer], parameters: Iterable[nn.Parameter], settings: Hyperparameters
    ) -> torch.optim.Optimizer:
        """Return an optimiser for pretraining; with `shared_memory`, AdamW can `divide` its state among the workers."""
        return rule.build(rule.groups(parameters, settings), settings)

    def prepare(
        self,
        shapes: Sequence[ModelShape],
        announce: Callable[[str], None],
        compute: Callable[[Iterable[ModelShape]], None],
    ) -> None:
        """Compile what models of these shapes need, before any clock starts; by default, do nothing.

        Args:
            announce: receives progress messages for the user, a line each.
            compute: function that runs a small model of each shape in this process. Its module, run as a program with the
                shapes as JSON, does the same in a separate process.
        """

    def matrix_shapes(self) -> Sequence[tuple[int, int, int]]:
        """Return rows, inner and outer width of products that are large enough to reach the device's peak."""
        return (1024, 1024, 1024), (2048, 2048, 2048)

    def synchronize(self) -> None:
        """Wait until the device has finished all work that was submitted to it."""

    def peak_memory(self) -> int:
        """Return the most bytes of the device's memory that this process has held so far."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB

    def title(self) -> str:
        """Return the device's name."""
        return processor()

    def random_state(self) -> list[Tensor]:
        """Return the states, uint8 tensors, of torch's global random generators, which dropout draws from."""
        return [torch.get_rng_state()]

    def set_random_state(self, state: Sequence[Tensor]) -> None:
        """Restore the states that `random_state` returned."""
        torch.set_rng_state(state[0])

    def fork_rng(self) -> AbstractContextManager[None]:
        """Return a context that restores the random generators at its end."""
        return torch.random.fork_rng(devices=[])

"""Every operation by torch alone, on any device: what other backends must equal, and what they fall back on."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from mlmclm.backends.adamw import Optimizer, Settings, TorchAdamW
from mlmclm.backends.model_shape import ModelShape
from mlmclm.backends.packing import Chosen, Packing, near
from mlmclm.tracking.system import processor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mlmclm.backends.cpu.host import Host


class Reference:
    """The interface of all backends, computed by torch's operations."""

    name = "reference"

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None,
        causal: bool,
        scale: float,
        dropout: float,
        window: int | None,
        traced: bool = False,
    ) -> Tensor:
        """Attention over sequences of one length.

        Args:
            query: [batch, heads, length, head width]; key and value may have fewer heads (grouped queries).
            mask: boolean, True where attention is allowed, or added to the scores; broadcastable to [batch, heads, length, length].
            causal: hide later positions, where there is no mask.
            window: positions at this distance or more are hidden, where there is no mask.
            traced: torch.compile reads this call, so that it must consist of torch's operations.

        Returns:
            [batch, length, heads, head width].
        """
        if window is not None and window < query.shape[2] and mask is None:
            mask = near(query.shape[2], causal, window, query.device)
        attended = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal and mask is None, scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
        return attended.transpose(1, 2).contiguous()

    def packed_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        packing: Packing,
        *,
        causal: bool,
        scale: float,
        dropout: float = 0.0,
        window: int | None = None,
    ) -> Tensor:
        """Attention within each sequence of a packed row, here one sequence after the other.

        Args:
            query: [1, heads, T, head width]; key and value [1, key-value heads, T, head width].
            window: positions at this distance or more are hidden.

        Returns:
            [1, T, heads, head width]; what stands at padding is unspecified but finite, and must not enter a loss.
        """
        pieces = []
        for start, length in zip(packing.starts.tolist(), packing.lengths.tolist(), strict=True):
            part = slice(start, start + length)
            pieces.append(
                self.attention_of_one(
                    query[:, :, part], key[:, :, part], value[:, :, part], causal, scale, dropout, window
                )
            )
        padding = packing.padded_tokens - packing.tokens
        return torch.cat([*pieces, pieces[0].new_zeros(1, padding, *pieces[0].shape[2:])], 1)

    @staticmethod
    def attention_of_one(
        query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float, dropout: float, window: int | None
    ) -> Tensor:
        """[1, length, heads, head width] of one sequence, [1, heads, length, head width] each."""
        length = query.shape[2]
        seen = near(length, causal, window, query.device) if window is not None and window < length else None
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, dropout_p=dropout, is_causal=causal and seen is None, scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        ).transpose(1, 2)  # fmt: skip

    def fuses(self, model: PreTrainedModel, longest: int = 0, dtype: torch.dtype | None = None) -> bool:
        """Whether `blocks` computes this transformers base model faster than its own forward.

        Args:
            longest: tokens of the longest sequence.
            dtype: the type of products; None for any.
        """
        return False

    def blocks(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        packing: Packing,
        *,
        causal: bool,
        chosen: Chosen | None = None,
    ) -> Tensor:
        """Final hidden states [T, hidden] of a model that this backend `fuses`, in the type of its weights.

        Args:
            input_ids: int64 [1, T].
            chosen: tokens of the packing, whose states alone are returned, [chosen.number, hidden]; not if causal.
        """
        raise NotImplementedError(f"{self.name} fuses no model")

    def losses(self, logits: Tensor, vocabulary: int, labels: Tensor) -> Tensor:
        """Sum of the rows' cross-entropies, fp32 at least.

        Args:
            logits: [rows, vocabulary + room]; the first `vocabulary` columns become the gradient of the sum with respect to them.
            labels: int64 [rows].
        """
        logits, label = logits[:, :vocabulary], labels.unsqueeze(1)
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
        """out += left' right for [T, outputs] and [T, inputs]; the `first` takes the place of what is there."""
        # Products of bfloat16 want their first factor untransposed, at twice the speed, so the narrow one is transposed.
        turned = left.shape[1] > right.shape[1]
        part = (right.t().contiguous() @ left).t() if turned else left.t().contiguous() @ right
        if first:
            out.copy_(part)
        else:
            out += part

    def adamw(
        self, parameters: Sequence[nn.Parameter], embedding: nn.Module, settings: Settings, steps: int
    ) -> Optimizer:
        """AdamW for fine-tuning.

        Args:
            parameters: all that are trained.
            embedding: the module that looks up token ids; its weight is one of the parameters.
            steps: how many there will be.
        """
        return TorchAdamW(parameters, settings)

    def shared_memory(self) -> Host | None:
        """Memory that all workers of the process group can write, which takes the place of messages; None (on each) where there is
        none. Collective."""
        return None

    def pretraining_adamw(self, parameters: Iterable[nn.Parameter], **settings: Any) -> torch.optim.Optimizer:
        """torch's AdamW; where there is `shared_memory`, one that can `divide` its state over it."""
        return torch.optim.AdamW(parameters, **settings)

    def prepare(
        self,
        shapes: Sequence[ModelShape],
        announce: Callable[[str], None],
        compute: Callable[[Iterable[ModelShape]], None],
    ) -> None:
        """Compile what models of these shapes need, before any clock starts; nothing by default.

        Args:
            announce: gets a line for the person who waits.
            compute: runs a small model of each shape in this process; run as a program, its module does the same in a process of
                its own, given the shapes as JSON.
        """

    def matrix_shapes(self) -> Sequence[tuple[int, int, int]]:
        """Rows, inner and outer width of products that are large enough to reach the device's peak."""
        return (1024, 1024, 1024), (2048, 2048, 2048)

    def synchronize(self) -> None:
        """Wait until the device has computed all that it was given."""

    def peak_memory(self) -> int:
        """Most bytes that this process has held so far, of the device's memory."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def title(self) -> str:
        """The device's name."""
        return processor()

    def random_state(self) -> list[Tensor]:
        """The state of torch's global streams, which dropout draws from."""
        return [torch.get_rng_state()]

    def set_random_state(self, state: Sequence[Tensor]) -> None:
        """The inverse of `random_state`."""
        torch.set_rng_state(state[0])

    def fork_rng(self) -> AbstractContextManager[None]:
        """A context after which the streams are as before it."""
        return torch.random.fork_rng(devices=[])

"""The backend for NVIDIA GPUs: torch's variable-length attention over packed sequences, Liger's kernels and this project's."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as functional
from torch import Tensor

from mlmclm.backends.attention_settings import AttentionSettings, near
from mlmclm.backends.compute_type import compute_type
from mlmclm.backends.packing import Chosen, Packing
from mlmclm.backends.reference import Reference
from mlmclm.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class CudaReference(Reference):
    """torch's operations on the current GPU, with its clock, memory and random generator."""

    device = "cuda"
    process_group = "nccl"
    in_host_memory = False
    # Each chunk adds to the fp32 gradient of the whole embedding. At 128,256 rows these logits take 2.1 GB in bf16.
    logits_at_once = 8192

    def has_bf16(self) -> bool:
        """Return True: recent GPUs multiply bfloat16 faster."""
        return True

    def matrix_shapes(self) -> Sequence[tuple[int, int, int]]:
        """Return a larger product too, since small ones don't reach a GPU's peak."""
        return *super().matrix_shapes(), (8192, 1024, 4096)

    def synchronize(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize()

    def peak_memory(self) -> int:
        """Return the most bytes of GPU memory that this process has held so far."""
        return torch.cuda.max_memory_allocated()

    def title(self) -> str:
        """Return the GPU's name."""
        return torch.cuda.get_device_name()

    def random_state(self) -> list[Tensor]:
        """Return the states of the CPU's and the GPU's random generators."""
        return [*super().random_state(), torch.cuda.get_rng_state()]

    def set_random_state(self, state: Sequence[Tensor]) -> None:
        """Restore the states of both random generators."""
        super().set_random_state(state)
        torch.cuda.set_rng_state(state[1])

    def fork_rng(self) -> AbstractContextManager[None]:
        """Return a context that restores both random generators at its end."""
        return torch.random.fork_rng(devices=[torch.cuda.current_device()])


class Cuda(CudaReference):
    """Kernels made for GPUs in place of torch's plain operations."""

    name = "cuda"

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, settings: AttentionSettings, mask: Tensor | None = None
    ) -> Tensor:
        """Compute `Reference.attention`; with a window, by the kernel for packed sequences, which skips what the window hides."""
        batch, _, length, _ = query.shape
        window = settings.window
        if mask is not None or window is None or window >= length or not _has_kernel(query, settings):
            return super().attention(query, key, value, settings, mask)
        q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
        ends = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=query.device)
        attended = _by_kernel(q, k, v, ends, length, settings)
        return attended.view(batch, length, *attended.shape[1:])

    def traces_packed(self, query: Tensor, settings: AttentionSettings) -> bool:
        """Return whether the kernel computes attention: torch.compile treats it as one operation."""
        return _has_kernel(query, settings)

    def packed_attention(
        self, query: Tensor, key: Tensor, value: Tensor, packing: Packing, settings: AttentionSettings
    ) -> Tensor:
        """Compute `Reference.packed_attention` with one kernel over all sequences.

        The kernel needs bf16 or fp16, and no dropout. Otherwise torch's attention runs over sequences padded to the
        longest. Without a window, equally long sequences are a batch for torch's attention.
        """
        if packing.tokens == packing.padded_tokens and settings.window is None:
            length, width = int(packing.lengths[0]), query.shape[-1]
            q, k, v = (
                tensor.view(-1, len(packing.lengths), length, width).transpose(0, 1) for tensor in (query, key, value)
            )
            batch = self.attention(q, k, v, settings)
            return batch.flatten(0, 1).unsqueeze(0)
        # [T, heads, width], the order in which transformers' projections lie in memory.
        q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
        if _has_kernel(query, settings):
            return _by_kernel(q, k, v, packing.cumulative, packing.longest, settings).unsqueeze(0)
        q, k, v = (tensor.to(compute_type(query)) for tensor in (q, k, v))
        return _padded(q, k, v, packing, settings).unsqueeze(0)

    def fuses(
        self,
        model: PreTrainedModel,
        longest: int = 0,
        dtype: torch.dtype | None = None,
        residual: torch.dtype | None = None,
    ) -> bool:
        """Return whether this is EuroBERT, Llama, Qwen or ModernBERT, for whose operations there are kernels."""
        return any(kernels.fits(model) for kernels in _block_kernels())

    def blocks(
        self, model: PreTrainedModel, input_ids: Tensor, packing: Packing, *, causal: bool, chosen: Chosen | None = None
    ) -> Tensor:
        """Compute `Reference.blocks` with kernels for norms, rotary embedding and gated unit."""
        attend = partial(self.packed_attention, packing=packing)
        kernels = next(kernels for kernels in _block_kernels() if kernels.fits(model))
        blocks: Tensor = kernels.run_blocks(model, input_ids, packing, attend, causal=causal, chosen=chosen)
        return blocks

    def losses(self, logits: Tensor, vocabulary: int, labels: Tensor) -> Tensor:
        """Compute `Reference.losses` with Liger's kernel, but in fp64 with torch's operations."""
        if logits.dtype == torch.float64:
            return super().losses(logits, vocabulary, labels)
        summed: Tensor = _block_kernels()[0].losses(logits, vocabulary, labels)
        return summed


def _has_kernel(query: Tensor, settings: AttentionSettings) -> bool:
    """Return whether the kernel for packed sequences computes in the dtype of products, and with this dropout."""
    return compute_type(query) in (torch.bfloat16, torch.float16) and not settings.dropout


def _by_kernel(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, settings: AttentionSettings
) -> Tensor:
    """Compute attention [T, heads, width] by torch's kernel for sequences that end at `ends`, int32 [S + 1] from 0 on."""
    from torch.nn.attention.varlen import varlen_attn

    dtype = compute_type(query)
    reach = -1 if settings.window is None else settings.window - 1  # its windows include their ends; -1: no limit
    attended: Tensor = varlen_attn(  # type: ignore[assignment]
        query.to(dtype), key.to(dtype), value.to(dtype), ends, ends, longest, longest, scale=settings.scale,
        window_size=(reach, 0 if settings.causal else reach), enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return attended


def _block_kernels() -> tuple[ModuleType, ModuleType]:
    """Import the kernels late, because Triton may be missing where there is no GPU; raise a `UserError` if a package is missing."""
    try:
        from mlmclm.backends.cuda import liger, modernbert
    except ModuleNotFoundError as error:
        raise UserError(
            f"the backend cuda needs liger-kernel and triton, and {error.name} is not installed. In the project's folder: "
            'pip install -c constraints.txt ".[cuda]". To do without, set MLMCLM_BACKEND to reference.'
        ) from error
    return liger, modernbert


def _padded(query: Tensor, key: Tensor, value: Tensor, packing: Packing, settings: AttentionSettings) -> Tensor:
    """Compute [T, heads, width] with torch's attention, every sequence padded to the longest."""
    causal, scale, dropout, window, _ = settings
    grouped = query.shape[1] != key.shape[1]
    longest = int(packing.lengths.max())
    position = torch.arange(longest, device=query.device)
    lengths = torch.from_numpy(packing.lengths).to(query.device)
    real = position < lengths[:, None]  # [S, longest]
    # Padding reads the row's first padding token.
    index = torch.where(real, packing.first_tokens[:, None] + position, packing.tokens)
    q, k, v = (tensor[index].transpose(1, 2) for tensor in (query, key, value))  # [S, heads, longest, width]
    mask = real[:, None, None, :]
    if causal or window is not None:
        seen = near(longest, causal, longest if window is None else window, query.device)
        # Padding attends to itself: a softmax row in which everything is hidden would be NaN.
        mask = (mask & seen) | torch.eye(longest, dtype=torch.bool, device=query.device)
    attended = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=grouped
    )
    return query.new_zeros(query.shape).index_put((index[real],), attended.transpose(1, 2)[real])

"""Changes to DeepSpeed, each with its reason. Written for and tested with DeepSpeed 0.19.8.

All of them reach into DeepSpeed's internals. Review each one when you raise DeepSpeed's version in constraints.txt.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as distributed
from deepspeed.runtime.zero import stage_1_and_2
from torch import Tensor, nn

# On the CPU DeepSpeed would compile a shared-memory all-reduce, which takes half a minute and needs a C++ compiler.
# Only its inference engine uses it.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def send_partitions() -> None:
    """Make ZeRO 1 and 2 exchange updated weights by broadcasts; for process groups that use Gloo."""
    stage_1_and_2.all_gather_dp_groups = _send_partitions


def _send_partitions(
    *, partitioned_param_groups: Sequence[Sequence[Tensor]], dp_process_group: Sequence[Any], **_: Any
) -> None:
    """Send each worker's updated weights to the others, with the signature of DeepSpeed's `all_gather_dp_groups`.

    Gloo's all-gather goes through another copy of all weights. For 244 MB between two processes it takes 160 ms, the
    broadcasts 43 ms.
    """
    # Asynchronous, so that the broadcasts from all ranks are in flight together.
    waits = [
        distributed.broadcast(part.detach(), distributed.get_global_rank(group, rank), group=group, async_op=True)
        for parts, group in zip(partitioned_param_groups, dp_process_group, strict=True)
        for rank, part in enumerate(parts)
    ]
    for wait in waits:
        wait.wait()


def sum_by_messages(gradients: Sequence[Tensor]) -> None:
    """Sum each gradient over the workers, in place.

    DeepSpeed's ZeRO 0 copies all gradients into a buffer and back. On a CPU this costs more than the all-reduce itself.
    """
    for wait in [distributed.all_reduce(gradient, async_op=True) for gradient in gradients]:
        wait.wait()


def leave_norm_on_device() -> None:
    """Let ZeRO 1 and 2 take a step before the host knows the gradient's norm; for devices with memory of their own.

    DeepSpeed makes the host wait for the norm, to skip a step whose norm isn't finite. Here a stage ends at such a step
    (`callbacks.stop_rule`), and no later state is stored.
    """
    stage_1_and_2.is_invalid_grad_norm = _never_invalid
    stage_1_and_2.mask_nan_or_inf_with_val_inplace = _mask


def _never_invalid(norm: Any) -> bool:
    return False


def _mask(norm: Tensor, device: Any = None, val: float = -1.0) -> None:
    """Do what DeepSpeed's function of that name does, without a copy of `val` from the host."""
    norm.masked_fill_(~norm.isfinite(), val)


def divide_weight(parameter: nn.Parameter, config: dict[str, Any]) -> None:
    """Partition one weight over the workers (ZeRO 3), as DeepSpeed does with a whole model at its start; collective."""
    # `zero.Init` takes a module, so wrap the weight in one.
    holder = nn.Module()
    holder.register_parameter("weight", parameter)
    deepspeed.zero.Init(module=holder, config_dict_or_path=config)


def drop_copies(optimiser: Any, rank: int) -> None:
    """Make the optimiser of ZeRO 1 or 2 work on the weights and gradients themselves, not on copies.

    DeepSpeed keeps copies so that the optimiser can have a higher precision than the model. Here both are fp32.
    """
    weights = [parts[rank] for parts in optimiser.parallel_partitioned_bit16_groups]
    for weight in _share(optimiser.single_partition_of_fp32_groups, weights):
        # The buffer for flattened gradients is allocated once and reused in every step.
        optimiser.flatten = partial(_flat, room=torch.empty_like(weight))
    # Each parameter refers to its part of the copy, so refresh these references.
    optimiser._link_all_hp_params()


def drop_copies_of_partitions(optimiser: Any) -> None:
    """Do what `drop_copies` does for ZeRO 3.

    DeepSpeed means to skip the copy where both are fp32, but it compares a device with a device name and finds them
    different.
    """
    optimiser.flatten = _flat
    _share(optimiser.fp32_partitioned_groups_flat, optimiser.fp16_partitioned_groups_flat)


def _share(copies: Sequence[Tensor], weights: Sequence[Tensor | None]) -> list[Tensor]:
    """Let copies share the memory of their weights; return these weights. An offloaded copy, on another device, stays a copy."""
    shared = []
    for copy, weight in zip(copies, weights, strict=True):
        if weight is not None and copy.shape == weight.shape and copy.device == weight.device:
            copy.data = weight.data
            shared.append(weight)
    return shared


def _flat(tensors: Sequence[Tensor], room: Tensor | None = None) -> Tensor:
    """Flatten tensors into one vector.

    Returns:
        A view if the tensors are adjacent in memory, as gradients are in ZeRO 3; else a copy, in `room` if it is large
        enough. The next call overwrites `room`.
    """
    first, count = tensors[0], 0
    joined = True
    for tensor in tensors:
        joined = joined and tensor.is_contiguous() and tensor.data_ptr() == first.data_ptr() + count * first.itemsize
        count += tensor.numel()
    if joined and first.untyped_storage().nbytes() >= (first.storage_offset() + count) * first.itemsize:
        return first.as_strided((count,), (1,))
    out = None if room is None or count > len(room) else room[:count]
    return torch.cat([tensor.flatten() for tensor in tensors], out=out)

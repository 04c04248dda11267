"""What this project changes in DeepSpeed, each with the reason; written for and tested with DeepSpeed 0.19.8.

All of it reaches into DeepSpeed's internals: look at each again when its version in constraints.txt is raised.
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

# On the CPU DeepSpeed compiles a shared-memory all-reduce that only its inference engine uses: half a minute, and a C++ compiler.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def send_partitions() -> None:
    """Have ZeRO 1 and 2 exchange new weights by broadcasts, where Gloo is the process group's backend."""
    stage_1_and_2.all_gather_dp_groups = _send_partitions


def _send_partitions(
    *, partitioned_param_groups: Sequence[Sequence[Tensor]], dp_process_group: Sequence[Any], **_: Any
) -> None:
    """Send each worker's new weights to the others; takes the place of DeepSpeed's `all_gather_dp_groups`, whose signature it has.

    Gloo gathers through another copy of the whole: 160 ms for 244 MB between two processes, and 43 ms so.
    """
    waits = [
        distributed.broadcast(part.detach(), distributed.get_global_rank(group, rank), group=group, async_op=True)
        for parts, group in zip(partitioned_param_groups, dp_process_group, strict=True)
        for rank, part in enumerate(parts)
    ]
    for wait in waits:
        wait.wait()


def sum_by_messages(gradients: Sequence[Tensor]) -> None:
    """Sum each gradient over the workers, in place.

    DeepSpeed's ZeRO 0 copies all gradients into a buffer and back, which on a CPU costs more than the exchange itself.
    """
    for wait in [distributed.all_reduce(gradient, async_op=True) for gradient in gradients]:
        wait.wait()


def divide_weight(parameter: nn.Parameter, config: dict[str, Any]) -> None:
    """Leave this worker its part of a weight (ZeRO 3), as DeepSpeed does for a whole model when it starts; collective."""
    holder = nn.Module()
    holder.register_parameter("weight", parameter)
    deepspeed.zero.Init(module=holder, config_dict_or_path=config)


def drop_copies(optimiser: Any, stage: int, rank: int) -> None:
    """Have DeepSpeed's optimiser work on the weights and gradients themselves.

    It copies them for an optimiser of higher precision than theirs, but here all are fp32. In ZeRO 3 DeepSpeed means to skip the copy
    of such weights, but compares a device with its name and finds them different.
    """
    if stage == 3:
        copies, weights = optimiser.fp32_partitioned_groups_flat, optimiser.fp16_partitioned_groups_flat
        optimiser.flatten = _flat
    else:
        copies = optimiser.single_partition_of_fp32_groups
        weights = [parts[rank] for parts in optimiser.parallel_partitioned_bit16_groups]
    for copy, weight in zip(copies, weights, strict=True):
        offloaded = weight is None or copy.shape != weight.shape or copy.device != weight.device
        if not offloaded:
            copy.data = weight.data
            if stage != 3:
                optimiser.flatten = partial(_flat, room=torch.empty_like(weight))
    if stage != 3:
        optimiser._link_all_hp_params()  # each parameter knows its part of the copy


def _flat(tensors: Sequence[Tensor], room: Tensor | None = None) -> Tensor:
    """Tensors as one vector: a view where they lie one behind the other, as gradients do in ZeRO 3, else a copy in `room`, which the
    next call overwrites."""
    first, count = tensors[0], 0
    behind = True
    for tensor in tensors:
        behind = behind and tensor.is_contiguous() and tensor.data_ptr() == first.data_ptr() + count * first.itemsize
        count += tensor.numel()
    if behind and first.untyped_storage().nbytes() >= (first.storage_offset() + count) * first.itemsize:
        return first.as_strided((count,), (1,))
    out = None if room is None or count > len(room) else room[:count]
    return torch.cat([tensor.flatten() for tensor in tensors], out=out)

"""The division of weights, gradients and moments among a stage's workers: one class per way, chosen once per stage.

The files of a state hold whole tensors, so a state written under one way can be loaded under any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as distributed
import torch.nn.functional as functional
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_optimizer_state,
    safe_set_local_optimizer_state,
    set_z3_leaf_modules,
)
from torch import Tensor, nn
from transformers import PreTrainedModel

from mlmclm.backends.choice import backend_of, device_of_workers
from mlmclm.backends.host_memory import map_large_blocks, return_freed_memory
from mlmclm.backends.optimizers.optimizer import OPTIMIZERS
from mlmclm.backends.optimizers.rules import AdamW
from mlmclm.backends.shared_memory import SharedMemory
from mlmclm.models.architectures import layers_of, load_weights
from mlmclm.plans.recipe import Recipe
from mlmclm.pretraining.deepspeed_patches import (
    divide_weight,
    drop_copies,
    drop_copies_of_partitions,
    leave_norm_on_device,
    send_partitions,
    sum_by_messages,
)

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of the first and second moments in the state of torch's and DeepSpeed's optimisers."""


class Replicated:
    """Every worker holds all weights, gradients and moments (ZeRO 0). The base class of the other ways."""

    stage = 0
    """DeepSpeed's ZeRO stage."""
    deepspeed_clips = False
    """Whether DeepSpeed clips the gradient. Otherwise `reduce` does: it computes the norm for the metrics anyway."""
    divides_weights = False
    """Whether no worker ever holds the whole model."""
    engine: Any
    """DeepSpeed's engine, from `attach` on."""

    def __init__(self, recipe: Recipe) -> None:
        self.clip, self.world, self.rank = recipe.clip, distributed.get_world_size(), distributed.get_rank()
        self.in_host_memory = backend_of(device_of_workers()).in_host_memory
        self._norm: float | Tensor = 0.0

    @classmethod
    def options(cls, bucket: int, *, apart: bool = False) -> dict[str, Any]:
        """Return DeepSpeed's `zero_optimization` for buckets of `bucket` elements.

        Args:
            apart: whether the devices have memory of their own, and compute while messages are under way.
        """
        return {
            "stage": cls.stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            # Under ZeRO 1 and 2 DeepSpeed would reduce a bucket during the backward pass, but then make the host wait for
            # all of the device's work: at each step, under ZeRO 2 at each micro-batch.
            "overlap_comm": False,
            "contiguous_gradients": False,  # True would make one more copy of the gradients
        }

    @property
    def divisor(self) -> int:
        """The number by which DeepSpeed divides the sum of the workers' gradients."""
        return 1 if self.in_host_memory else self.world

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """torch's optimiser."""
        return self.engine.optimizer

    def begin(self, model: PreTrainedModel, weights: Mapping[str, Tensor] | None, config: dict[str, Any]) -> None:
        """Load weights (None: the model keeps its own), before DeepSpeed takes over the model with this configuration."""
        if weights is not None:
            load_weights(model, weights)

    def attach(self, engine: Any) -> None:
        """Adapt DeepSpeed's engine."""
        self.engine = engine
        # On a CPU `reduce` sums the gradients. DeepSpeed would copy all of them into a buffer and back.
        if self.in_host_memory:
            engine.enable_backward_allreduce = False

    def reduce(self) -> None:
        """Sum gradients over the workers unless DeepSpeed has done so, and clip them; collective, before a step.

        Clips like `torch.nn.utils.clip_grad_norm_`, but in the host's memory it leaves gradients alone whose factor would
        be 1. To do so on another device, the host would have to wait for the norm.
        """
        gradients = [parameter.grad for parameter in self.engine.module.parameters() if parameter.grad is not None]
        self._norm, applied = self._sum(gradients)
        if self.clip and isinstance(self._norm, Tensor):
            torch._foreach_mul_(applied, (self.clip / (self._norm + 1e-6)).clamp(max=1))
        elif self.clip and self._norm + 1e-6 > self.clip:  # the same 1e-6 as in `clip_grad_norm_`
            torch._foreach_mul_(applied, self.clip / (self._norm + 1e-6))

    def norm(self) -> float | Tensor:
        """Return the norm of the last step's whole gradient before clipping; a tensor if it's on a device of its own."""
        return self._norm

    def start_moments(self, step: int) -> None:
        """Set Adam's step count and zero moments, overriding any step that DeepSpeed took during initialisation."""
        _start(self.optimizer, (p for group in self.optimizer.param_groups for p in group["params"]), step)

    def load_moments(self, parameter: nn.Parameter, moments: tuple[Tensor, Tensor]) -> None:
        """Set the moments of a weight, given as whole tensors; collective."""
        for moment, value in zip(self._moments(parameter), moments, strict=True):
            moment.copy_(value)

    def gathered(self, parameter: nn.Parameter, *, moments: bool) -> tuple[Tensor, ...]:
        """Return a whole weight, and with `moments` both of its moments; collective. The next step changes them."""
        return (parameter.detach(), *(self._moments(parameter) if moments else ()))

    def _sum(self, gradients: list[Tensor]) -> tuple[float | Tensor, list[Tensor]]:
        """Sum gradients unless DeepSpeed has done so; return the norm of all, and the gradients that this worker's step applies."""
        if self.in_host_memory and self.world > 1:
            sum_by_messages(gradients)
        norm = nn.utils.get_total_norm(gradients)
        return float(norm) if self.in_host_memory else norm, gradients

    def _moments(self, parameter: nn.Parameter) -> tuple[Tensor, Tensor]:
        state = self.optimizer.state[parameter]
        return state[MOMENTS[0]], state[MOMENTS[1]]


class SharedCopy(Replicated):
    """The workers of a machine share weights and moments; each sums and updates its part, as in ZeRO 1 but without messages."""

    def __init__(self, recipe: Recipe, memory: SharedMemory) -> None:
        super().__init__(recipe)
        self.memory = memory

    def start_moments(self, step: int) -> None:
        self.engine.optimizer.divide(self.memory, step)
        return_freed_memory()

    def load_moments(self, parameter: nn.Parameter, moments: tuple[Tensor, Tensor]) -> None:
        # Rank 0 alone writes shared moments. No worker updates them before rank 0 joins the first step.
        if self.rank == 0:
            super().load_moments(parameter, moments)

    def _sum(self, gradients: list[Tensor]) -> tuple[float | Tensor, list[Tensor]]:
        norm = self.memory.sum(gradients)
        return norm, [part for gradient in gradients for part in self.memory.owned(gradient)]

    def _moments(self, parameter: nn.Parameter) -> tuple[Tensor, Tensor]:
        common = self.engine.optimizer.common[parameter]
        return common.first, common.second


class PartitionedMoments(Replicated):
    """Each worker holds a part of the optimiser's moments, and updates that part of the weights (ZeRO 1)."""

    stage = 1
    deepspeed_clips = True

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        if self.in_host_memory:
            send_partitions()
        else:
            leave_norm_on_device()

    @property
    def divisor(self) -> int:
        return self.world

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.engine.optimizer.optimizer  # ZeRO wraps torch's

    def attach(self, engine: Any) -> None:
        self.engine = engine
        drop_copies(engine.optimizer, self.rank)
        return_freed_memory()

    def reduce(self) -> None:
        pass

    def norm(self) -> float | Tensor:
        norm: float | Tensor = self.engine.get_global_grad_norm()  # DeepSpeed computes it to clip
        return float(norm) if self.in_host_memory else norm

    def start_moments(self, step: int) -> None:
        super().start_moments(step)
        # Link the new moments to the parameters, where DeepSpeed's `safe_get_*` and `safe_set_*` functions look for them.
        self.engine.optimizer._lazy_init_hp_params_optimizer_state()

    def load_moments(self, parameter: nn.Parameter, moments: tuple[Tensor, Tensor]) -> None:
        for name, value in zip(MOMENTS, moments, strict=True):
            safe_set_full_optimizer_state(parameter, value.to(self.engine.device), name)

    def gathered(self, parameter: nn.Parameter, *, moments: bool) -> tuple[Tensor, ...]:
        states = (safe_get_full_optimizer_state(parameter, name) for name in (MOMENTS if moments else ()))
        return (safe_get_full_fp32_param(parameter), *states)


class PartitionedGradients(PartitionedMoments):
    """Each worker also keeps only its part of the gradients (ZeRO 2)."""

    stage = 2


class PartitionedWeights(PartitionedMoments):
    """Each worker holds a part of each weight. A layer's weights are gathered while it computes (ZeRO 3)."""

    stage = 3
    divides_weights = True

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        if self.in_host_memory:
            # ZeRO 3 gathers and frees each weight twice per step. If the allocator kept the freed blocks, they would
            # take more memory than partitioning saves.
            map_large_blocks()

    @classmethod
    def options(cls, bucket: int, *, apart: bool = False) -> dict[str, Any]:
        # By default DeepSpeed keeps gathered weights until the backward pass has used them too. For most models that is
        # all weights, so nothing would be saved.
        sizes = ("stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance")
        options = super().options(bucket) | dict.fromkeys(sizes, bucket)
        # DeepSpeed's default: it gathers the next layer's weights and reduces the previous one's gradients during the computation.
        options["overlap_comm"] = apart
        del options["allgather_bucket_size"]
        return options

    def begin(self, model: PreTrainedModel, weights: Mapping[str, Tensor] | None, config: dict[str, Any]) -> None:
        if weights is not None:
            # Partition each weight as soon as it is loaded, so that no worker ever holds the whole model.
            load_weights(model, weights, partial(divide_weight, config=config))
        # Gather a layer's weights together. DeepSpeed gathers in hooks on modules, and a fused block uses all weights of
        # a layer without calling the modules inside it.
        set_z3_leaf_modules(model, list({type(layer) for layer in layers_of(model.base_model)}))

    def attach(self, engine: Any) -> None:
        self.engine = engine
        drop_copies_of_partitions(engine.optimizer)
        return_freed_memory()

    def start_moments(self, step: int) -> None:
        # ZeRO 3 swaps flat partitions into the optimiser one at a time, so its groups do not list them all.
        _start(self.optimizer, self.engine.optimizer.fp32_partitioned_groups_flat, step)

    def load_moments(self, parameter: Any, moments: tuple[Tensor, Tensor]) -> None:
        # Set each worker's part: DeepSpeed's function for the whole tensor fails if the number of workers does not divide
        # its length. The padding is the one that ZeRO 3 itself adds.
        size = parameter.ds_tensor.numel()
        for name, value in zip(MOMENTS, moments, strict=True):
            padded = functional.pad(value.flatten(), (0, size * self.world - value.numel()))
            part = padded.narrow(0, size * self.rank, size).to(self.engine.device)
            safe_set_local_optimizer_state(parameter, part, name)


WAYS = {way.stage: way for way in (Replicated, PartitionedMoments, PartitionedGradients, PartitionedWeights)}
"""The ways by ZeRO stage."""


def partitioning_of(recipe: Recipe) -> Replicated:
    """Return the way in which the workers of the process group divide a model; collective.

    A single worker divides nothing: ZeRO 1 on one worker spends a tenth of a step on copies alone (32m on a CPU). A
    recipe that sets `zero_optimization` in its `deepspeed` block keeps its stage.
    """
    world, stated = distributed.get_world_size(), "zero_optimization" in recipe.deepspeed
    stage = recipe.zero_stage if world > 1 or stated else 0
    if world > 1 and stage <= 1 and not stated and OPTIMIZERS[recipe.optimizer] is AdamW:
        memory = backend_of(device_of_workers()).shared_memory()
        if memory is not None:
            return SharedCopy(recipe, memory)
    return WAYS[stage](recipe)


def _start(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor], step: int) -> None:
    """Set the step count of an optimiser's parameters, and their moments to 0."""
    for parameter in parameters:
        moments = {name: torch.zeros_like(parameter, dtype=torch.float32) for name in MOMENTS}
        optimizer.state[parameter] = {"step": torch.tensor(float(step), device=parameter.device), **moments}

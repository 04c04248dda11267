"""The DeepSpeed engine of one worker: exact losses over the global batch, and states that any number of workers can take up.

Weights, gradients and optimiser state are fp32 and reduced in fp32; matrix products run in bf16 by an autocast *inside* the
model's forward pass. (DeepSpeed's own `bf16` block would start the masters from rounded weights, and its `torch_autocast` block
would reduce gradients in bf16.)
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import deepspeed
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

from mlmclm.backends.choice import backend_of
from mlmclm.backends.packing import Packing
from mlmclm.corpora.segments import document_lengths
from mlmclm.errors import UserError
from mlmclm.models.architectures import ARCHITECTURES, layers_of, load_weights
from mlmclm.models.build import PretrainingModel
from mlmclm.models.compilation import check_compiler
from mlmclm.objectives.objective import Objective
from mlmclm.plans.recipe import Recipe
from mlmclm.pretraining.checkpoints import TrainingState
from mlmclm.pretraining.deepspeed_patches import divide_weight, drop_copies, send_partitions, sum_by_messages
from mlmclm.service.worker_environment import map_large_blocks, return_freed_memory

logging.getLogger("DeepSpeed").setLevel(logging.WARNING)

BUCKETS = 16
"""Parts that ZeRO reduces a model's gradients in: a part is held twice meanwhile. Likewise what ZeRO 3 gathers ahead."""
SMALLEST_BUCKET, LARGEST_BUCKET = 4_000_000, 50_000_000
"""Elements: smaller messages cost time, larger ones memory; DeepSpeed's default of 5e8 is more than most models have."""
BUCKET_MULTIPLE = 2
"""DeepSpeed wants buckets that begin at a multiple of 4 bytes in 16-bit elements."""


def effective_stage(recipe: Recipe, world: int) -> int:
    """The recipe's ZeRO stage; 0 on one worker, which has nothing to share out, unless the `deepspeed` block says more about it.

    ZeRO 1 on one worker takes a tenth of a step for copies alone (32m on a CPU).
    """
    return recipe.zero_stage if world > 1 or "zero_optimization" in recipe.deepspeed else 0


def deepspeed_config(recipe: Recipe, world: int, stage: int, parameters: int) -> dict[str, Any]:
    """DeepSpeed's configuration for a recipe on `world` workers, with the recipe's own `deepspeed` block in it.

    Args:
        stage: DeepSpeed's part of ZeRO.
        parameters: how many the model has.
    """
    share = recipe.batch // world
    micro = recipe.micro_batch or share
    bucket = min(max(parameters // BUCKETS, SMALLEST_BUCKET), parameters, LARGEST_BUCKET)
    bucket = -(-bucket // BUCKET_MULTIPLE) * BUCKET_MULTIPLE
    config: dict[str, Any] = {
        "train_batch_size": recipe.batch,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": share // micro,
        "gradient_clipping": recipe.clip
        if stage != 0
        else 0.0,  # `Engine.step` then clips by the norm that it wants anyway
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "overlap_comm": False,
            "contiguous_gradients": False,  # which would be one more copy of them
        },
    }
    if stage == 3:
        # By default DeepSpeed keeps what it gathers until the backward pass has used it too: all weights of most models.
        sizes = ("stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance")
        config["zero_optimization"] |= dict.fromkeys(sizes, bucket)
        config["zero_optimization"].pop("allgather_bucket_size")
    if "offload_optimizer" in (recipe.deepspeed.get("zero_optimization") or {}):
        config["zero_force_ds_cpu_optimizer"] = False  # torch's AdamW, there as everywhere
    return _merged(config, recipe.deepspeed)


def check_isolation(model_type: str, recipe: Recipe) -> None:
    """Refuses a recipe that isolates documents for an architecture that can't.

    Raises:
        UserError: it names the architectures that can.
    """
    if recipe.isolate_documents and not ARCHITECTURES[model_type].isolates:
        able = ", ".join(name for name, architecture in ARCHITECTURES.items() if architecture.isolates)
        raise UserError(
            f"recipe.isolate_documents: {model_type!r} models can't keep the documents of a block apart; set it to false, or use one of: {able}."
        )


def _merged(base: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Both mappings in one, nested ones too; where both have a value, `other`'s."""
    result = dict(base)
    for key, value in other.items():
        nested = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merged(result[key], value) if nested else value
    return result


class Evaluation(NamedTuple):
    """Of the labelled tokens of some batches."""

    loss: float
    """Mean, in nats."""
    accuracy: float
    """Share whose most probable token is the label."""


class Engine:
    """One worker's part of the training of one model."""

    def __init__(
        self, model: PretrainingModel, recipe: Recipe, state: TrainingState | None, separator: int | None = None
    ) -> None:
        """Takes up a state: its weights, moments and step count; collective over all workers.

        Args:
            state: None for the one before the first step, with the weights that the model has.
            separator: the token that documents end with, if they are isolated (`objectives.separator`).

        Raises:
            UserError: the model's architecture can't isolate documents, or torch.compile doesn't work here.
        """
        check_isolation(model.model.config.model_type, recipe)
        self.recipe = recipe
        self.separator = separator
        self.world = distributed.get_world_size()
        self.rank = distributed.get_rank()
        self.stage = effective_stage(recipe, self.world)
        on_cpu = distributed.get_backend() == "gloo"
        self.backend = backend_of("cpu" if on_cpu else "cuda")
        in_common = self.world > 1 and self.stage <= 1 and "zero_optimization" not in recipe.deepspeed
        self.host = self.backend.shared_memory() if in_common else None
        if self.host is not None:
            self.stage = 0  # of DeepSpeed: what its stage 1 divides, the host divides
        self.sums_itself = self.stage == 0 and on_cpu
        if on_cpu:
            send_partitions()
            if self.stage == 3:
                # It gathers and frees each weight twice a step: kept, the holes would outgrow what is divided.
                map_large_blocks()
        self.names = [name.removeprefix("model.") for name, _ in model.named_parameters()]
        count = sum(parameter.numel() for parameter in model.parameters())
        config = deepspeed_config(recipe, self.world, self.stage, count)
        deepspeed.init_distributed(distributed.get_backend(), dist_init_required=False)
        if state is not None:
            load_weights(model.model, state.weights, partial(divide_weight, config=config) if self.stage == 3 else None)
        optimiser = self.backend.pretraining_adamw(
            model.parameters(),
            lr=0.0,  # set before each step; at 0, an engine that steps while it starts changes nothing
            betas=recipe.adam_betas,
            eps=recipe.adam_eps,
            weight_decay=recipe.weight_decay,
            fused=True,
        )
        if self.stage == 3:
            # A layer's weights are used together, whoever multiplies them, so they are gathered together.
            set_z3_leaf_modules(model, list({type(layer) for layer in layers_of(model.model.base_model)}))
        return_freed_memory()
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimiser, config=config, dist_init_required=False
        )
        if self.stage != 0:
            drop_copies(self.engine.optimizer, self.stage, self.rank)
            return_freed_memory()
        if self.sums_itself:
            self.engine.enable_backward_allreduce = False
        self.device = self.engine.device
        if model.compiled:
            check_compiler(self.device)
        self.micro = self.engine.train_micro_batch_size_per_gpu()
        self.accumulation = self.engine.gradient_accumulation_steps()
        self._start_moments(0 if state is None else state.step)
        if state is not None and state.first:
            self._take_up_moments(state)

    def step(
        self, batches: Sequence[tuple[Tensor, Tensor]], objective: Objective, *, rate: float
    ) -> tuple[Tensor, Tensor, int, float]:
        """One optimiser step.

        Args:
            batches: (input_ids, labels) of this worker's micro batches, int64 [micro, length].

        Returns:
            This worker's summed loss, the global number of labelled tokens as a tensor, this worker's number of tokens, and the
            norm of the whole gradient before clipping (`recipe.loss_weights` are in the gradient, and not in the loss).
        """
        labelled = torch.tensor(sum(int((labels != -100).sum()) for _, labels in batches), device=self.device)
        distributed.all_reduce(labelled)
        for group in self._torch_optimiser().param_groups:
            group["lr"] = rate
        total = torch.zeros((), device=self.device)
        # DeepSpeed averages over workers and micro batches; what is wanted is the sum over the global batch by its labelled tokens.
        scale = self.recipe.loss_weights.of(objective) * self.accumulation / max(1, int(labelled))
        if not self.sums_itself:
            scale *= self.world
        for input_ids, labels in batches:
            loss = self.engine(
                input_ids.to(self.device), labels.to(self.device), objective.causal, self._packing(input_ids)
            )
            total += loss.detach()
            self.engine.backward(loss * scale)
            if self.stage == 0 and self.engine.is_gradient_accumulation_boundary():
                norm = self._sum_and_clip([p.grad for p in self.engine.module.parameters() if p.grad is not None])
            self.engine.step()
        if self.stage != 0:
            norm = float(self.engine.get_global_grad_norm())
        tokens = sum(input_ids.numel() for input_ids, _ in batches)
        return total, labelled, tokens, norm

    def _sum_and_clip(self, gradients: list[Tensor]) -> float:
        """Sums gradients over the workers where DeepSpeed doesn't, then does as `torch.nn.utils.clip_grad_norm_`, without a pass over
        gradients that it would multiply by 1; returns the norm."""
        if self.host is not None:
            norm = self.host.sum(gradients)
            gradients = [part for gradient in gradients for part in self.host.owned(gradient)]
        else:
            if self.sums_itself and self.world > 1:
                sum_by_messages(gradients)
            norm = float(nn.utils.get_total_norm(gradients))
        limit = self.recipe.clip
        if limit and norm + 1e-6 > limit:
            torch._foreach_mul_(gradients, limit / (norm + 1e-6))
        return norm

    @torch.no_grad()
    def evaluate(self, batches: Iterator[tuple[Tensor, Tensor]], *, causal: bool) -> Evaluation:
        """Over all workers' batches, of which every worker must have the same number.

        Raises:
            UserError: no token of them is labelled.
        """
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)  # loss, hits, labelled tokens
        self.engine.eval()
        for input_ids, labels in batches:
            packing = self._packing(input_ids)
            sums[:2] += self.engine(input_ids.to(self.device), labels.to(self.device), causal, packing, count=True)
            sums[2] += (labels != -100).sum()
        self.engine.train()
        distributed.all_reduce(sums)
        loss, hits, labelled = sums.tolist()
        if not labelled:
            raise UserError(
                f"recipe.evaluation_blocks: no token of the validation blocks is to be predicted; raise it (now {self.recipe.evaluation_blocks}) or "
                "validate on more text."
            )
        return Evaluation(loss / labelled, hits / labelled)

    def _packing(self, input_ids: Tensor) -> Packing | None:
        """Where documents lie in a micro batch [micro, length] on the CPU, if they are isolated."""
        if self.separator is None:
            return None
        return Packing.of(document_lengths(input_ids.numpy(), self.separator), self.device, fine=True)

    def state(self, step: int) -> TrainingState | None:
        """The whole state, on the CPU; collective. Rank 0 gets it, the others None: a node may not hold several."""
        weights, first, second = {}, {}, {}
        for name, parameter in zip(self.names, self.engine.module.parameters(), strict=True):
            if self.stage == 0:
                parts = (parameter.detach(), *self._moments(parameter))
            else:
                parts = (
                    safe_get_full_fp32_param(parameter),
                    safe_get_full_optimizer_state(parameter, "exp_avg"),
                    safe_get_full_optimizer_state(parameter, "exp_avg_sq"),
                )
            if self.rank == 0:
                weights[name], first[name], second[name] = (
                    part.detach().to("cpu", torch.float32, copy=True) for part in parts
                )
        return TrainingState(step, weights, first, second) if self.rank == 0 else None

    def _torch_optimiser(self) -> torch.optim.Optimizer:
        return self.engine.optimizer if self.stage == 0 else self.engine.optimizer.optimizer

    def _moments(self, parameter: nn.Parameter) -> tuple[Tensor, Tensor]:
        """Adam's first and second of a whole weight (ZeRO 0)."""
        optimiser = self.engine.optimizer
        if self.host is not None:
            return optimiser.common[parameter][:2]
        return optimiser.state[parameter]["exp_avg"], optimiser.state[parameter]["exp_avg_sq"]

    def _start_moments(self, step: int) -> None:
        """Gives Adam its step count, and moments of zero, whatever DeepSpeed did while starting."""
        optimiser = self._torch_optimiser()
        if self.host is not None:
            self.engine.optimizer.divide(self.host, step)
            return_freed_memory()
            return
        if self.stage == 3:
            parameters = list(self.engine.optimizer.fp32_partitioned_groups_flat)
        else:
            parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
        for parameter in parameters:
            optimiser.state[parameter] = {
                "step": torch.tensor(float(step), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, dtype=torch.float32),
                "exp_avg_sq": torch.zeros_like(parameter, dtype=torch.float32),
            }
        if self.stage in (1, 2):
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()

    def _take_up_moments(self, state: TrainingState) -> None:
        for name, parameter in zip(self.names, self.engine.module.parameters(), strict=True):
            given = (state.first[name], state.second[name])
            if self.stage == 0:
                if self.host is None or self.rank == 0:  # the others can't have come as far as to update them
                    for moment, value in zip(self._moments(parameter), given, strict=True):
                        moment.copy_(value)
                continue
            for key, value in zip(("exp_avg", "exp_avg_sq"), given, strict=True):
                if self.stage == 3:
                    # By parts: DeepSpeed's function for the whole fails where the workers don't divide its length.
                    size = parameter.ds_tensor.numel()
                    whole = functional.pad(value.flatten(), (0, size * self.world - value.numel()))
                    part = whole.narrow(0, size * self.rank, size).to(self.device)
                    safe_set_local_optimizer_state(parameter, part, key)
                else:
                    safe_set_full_optimizer_state(parameter, value.to(self.device), key)

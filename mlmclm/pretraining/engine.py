"""One worker's DeepSpeed engine: exact losses over the global batch, and states that any number of workers can load.

Weights, gradients and optimiser state are fp32, and gradients are reduced in fp32. Matrix products run in bf16 through
an autocast *inside* the model's forward pass. DeepSpeed's own options would lose precision: its `bf16` block would
initialise the master weights from rounded weights, and its `torch_autocast` block would reduce gradients in bf16.
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

from mlmclm.backends.choice import backend_of, device_of_workers
from mlmclm.backends.host_memory import map_large_blocks, return_freed_memory
from mlmclm.backends.optimizers.optimizer import OPTIMIZERS, Hyperparameters
from mlmclm.backends.optimizers.rules import AdamW
from mlmclm.backends.packing import Packing
from mlmclm.corpora.segments import document_lengths
from mlmclm.errors import UserError
from mlmclm.models.architectures import layers_of, load_weights
from mlmclm.models.build import PretrainingModel
from mlmclm.models.compilation import check_compiler
from mlmclm.objectives.objective import Objective
from mlmclm.plans.recipe import Recipe
from mlmclm.pretraining.checkpoints import TrainingState
from mlmclm.pretraining.deepspeed_patches import divide_weight, drop_copies, send_partitions, sum_by_messages
from mlmclm.pretraining.initial import check_isolation

logging.getLogger("DeepSpeed").setLevel(logging.WARNING)

BUCKETS = 16
"""Number of buckets in which ZeRO reduces a model's gradients. A bucket is held twice while it is reduced.

ZeRO 3 also prefetches weights one bucket at a time.
"""
SMALLEST_BUCKET, LARGEST_BUCKET = 4_000_000, 50_000_000
"""Limits of a bucket, in elements. Smaller messages cost time, larger ones memory.

DeepSpeed's default of 5e8 elements is more than most models have.
"""
BUCKET_MULTIPLE = 2
"""Divisor of a bucket's size: DeepSpeed wants buckets aligned to 4 bytes, counted in 16-bit elements."""


def effective_stage(recipe: Recipe, world: int) -> int:
    """Return the recipe's ZeRO stage, or 0 for a single worker, which has nothing to partition.

    ZeRO 1 on one worker spends a tenth of a step on copies alone (32m on a CPU). A recipe that sets
    `zero_optimization` in its `deepspeed` block keeps its stage.
    """
    return recipe.zero_stage if world > 1 or "zero_optimization" in recipe.deepspeed else 0


def deepspeed_config(recipe: Recipe, world: int, stage: int, parameters: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a recipe, with the recipe's own `deepspeed` block merged in.

    It depends on the number of workers (`world`), the ZeRO stage, and how many parameters the model has.
    """
    micro = recipe.sequences_at_once(world)
    bucket = min(max(parameters // BUCKETS, SMALLEST_BUCKET), parameters, LARGEST_BUCKET)
    bucket = -(-bucket // BUCKET_MULTIPLE) * BUCKET_MULTIPLE
    config: dict[str, Any] = {
        "train_batch_size": recipe.batch,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": recipe.batch // world // micro,
        # Without ZeRO, `Engine.step` clips: it computes the norm for the metrics anyway.
        "gradient_clipping": recipe.clip if stage != 0 else 0.0,
        # DeepSpeed otherwise accepts only optimisers on its own list with ZeRO, and the CPU's AdamW is a subclass.
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,  # never: the callbacks report progress
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "overlap_comm": False,
            "contiguous_gradients": False,  # True would make one more copy of the gradients
        },
    }
    if stage == 3:
        # By default DeepSpeed keeps gathered weights until the backward pass has used them too. For most models that is
        # all weights, so nothing would be saved.
        sizes = ("stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance")
        config["zero_optimization"] |= dict.fromkeys(sizes, bucket)
        config["zero_optimization"].pop("allgather_bucket_size")
    if "offload_optimizer" in (recipe.deepspeed.get("zero_optimization") or {}):
        # Use torch's AdamW here as everywhere; with offloading, DeepSpeed would insist on its own CPU optimiser.
        config["zero_force_ds_cpu_optimizer"] = False
    return _merged(config, recipe.deepspeed)


def _merged(base: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Merge two nested mappings. Where both have a value, `other` wins."""
    result = dict(base)
    for key, value in other.items():
        nested = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merged(result[key], value) if nested else value
    return result


class Evaluation(NamedTuple):
    """Mean loss and accuracy over the labelled tokens of some batches."""

    loss: float
    """Mean loss per labelled token, in nats."""
    accuracy: float
    """Share of the labelled tokens whose label is the most probable token."""


class Engine:
    """One worker's share in training a model."""

    def __init__(
        self,
        model: PretrainingModel,
        recipe: Recipe,
        state: TrainingState | None,
        separator: int | None = None,
        *,
        moments_since: int = 0,
    ) -> None:
        """Set up DeepSpeed and load a state (weights, moments and step count); collective.

        Args:
            state: the state to continue from; None starts at step 0 with the weights that the model has.
            separator: the token that ends each document if documents are isolated (`labelling.separator`), else None.
            moments_since: step at which the moments were last 0. A state of that step loses those that it has.

        Raises:
            UserError: if the architecture cannot isolate documents, or torch.compile does not work here.
        """
        check_isolation(model.model.config.model_type, recipe)
        self.recipe = recipe
        self.separator = separator
        self.world = distributed.get_world_size()
        self.rank = distributed.get_rank()
        self.stage = effective_stage(recipe, self.world)
        self.backend = backend_of(device_of_workers())
        rule = OPTIMIZERS[recipe.optimizer]
        # On the CPUs of one machine, workers share one copy of weights and moments instead of exchanging messages.
        in_common = self.world > 1 and self.stage <= 1 and "zero_optimization" not in recipe.deepspeed and rule is AdamW
        self.shared = self.backend.shared_memory() if in_common else None
        if self.shared is not None:
            # `shared` now partitions the optimiser state as ZeRO 1 would, so DeepSpeed itself has nothing to partition.
            self.stage = 0
        # Without ZeRO on a CPU this class sums the gradients. DeepSpeed would copy all of them into a buffer and back.
        self.sums_itself = self.stage == 0 and self.backend.in_host_memory
        if self.backend.in_host_memory:
            send_partitions()
            if self.stage == 3:
                # ZeRO 3 gathers and frees each weight twice per step. If the allocator kept the freed blocks, they
                # would take more memory than partitioning saves.
                map_large_blocks()
        self.names = [name.removeprefix("model.") for name, _ in model.named_parameters()]
        count = sum(parameter.numel() for parameter in model.parameters())
        config = deepspeed_config(recipe, self.world, self.stage, count)
        # Ray Train has created the process group already; DeepSpeed must use that one.
        deepspeed.init_distributed(distributed.get_backend(), dist_init_required=False)
        if state is not None:
            # With ZeRO 3, partition each weight as soon as it is loaded, so that no worker ever holds the whole model.
            load_weights(model.model, state.weights, partial(divide_weight, config=config) if self.stage == 3 else None)
        # `step` sets the rate. At 0, a step that DeepSpeed takes during initialisation changes nothing.
        settings = Hyperparameters(*recipe.adam_betas, recipe.adam_eps, recipe.weight_decay, recipe.peak_learning_rate)
        optimiser = self.backend.optimizer(rule, model.parameters(), settings)
        if self.stage == 3:
            # Gather a layer's weights together. DeepSpeed gathers in hooks on modules, and a fused block uses all
            # weights of a layer without calling the modules inside it.
            set_z3_leaf_modules(model, list({type(layer) for layer in layers_of(model.model.base_model)}))
        # The workers' allocator keeps freed memory. Return that of loading before DeepSpeed allocates its buffers.
        return_freed_memory()
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimiser, config=config, dist_init_required=False
        )
        if self.stage != 0:
            drop_copies(self.engine.optimizer, self.stage, self.rank)
            return_freed_memory()
        if self.sums_itself:
            self.engine.enable_backward_allreduce = False  # `_sum_and_clip` does it
        self.device = self.engine.device
        if model.compiled:
            # Fail here with a clear message rather than in the middle of the first step.
            check_compiler(self.device)
        self.micro = self.engine.train_micro_batch_size_per_gpu()
        self.accumulation = self.engine.gradient_accumulation_steps()
        self._start_moments(0 if state is None else state.step - moments_since)
        if state is not None and state.first and state.step > moments_since:
            self._take_up_moments(state)

    def step(
        self, batches: Sequence[tuple[Tensor, Tensor]], objective: Objective, *, rate: float
    ) -> tuple[Tensor, Tensor, int, float]:
        """Take one optimiser step; collective.

        Args:
            batches: (input_ids, labels) of this worker's micro-batches, int64 [micro, length].
            rate: learning rate of the step.

        Returns:
            This worker's summed loss, the global number of labelled tokens as a tensor, this worker's number of
            tokens, and the norm of the whole gradient before clipping. `recipe.loss_weights` affect the gradient, but
            not the loss.
        """
        # Workers mask different numbers of tokens. Only the global count gives the exact mean over the global batch;
        # a mean of the workers' means would weight tokens by where they happen to be computed.
        labelled = torch.tensor(sum(int((labels != -100).sum()) for _, labels in batches), device=self.device)
        distributed.all_reduce(labelled)
        # Set the rate directly instead of using a scheduler: it is a function of the step, so resuming needs no
        # scheduler state.
        for group in self._torch_optimiser().param_groups:
            group["lr"] = rate
        total = torch.zeros((), device=self.device)
        # Losses are sums over labelled tokens, and the gradient must be that of the global sum over the global count.
        # DeepSpeed divides by the number of micro-batches and of workers, so multiply by both. The maximum guards a
        # step that has no labelled token.
        weight = 1.0
        if objective.loss_weight is not None:
            weight = getattr(self.recipe.loss_weights, objective.loss_weight)
        scale = weight * self.accumulation / max(1, int(labelled))
        if not self.sums_itself:
            scale *= self.world  # sums that this class makes are not averaged over workers
        for input_ids, labels in batches:
            loss = self.engine(
                input_ids.to(self.device), labels.to(self.device), objective.causal, self._packing(input_ids)
            )
            total += loss.detach()
            self.engine.backward(loss * scale)
            # After the last micro-batch the gradient is complete: sum and clip it before `engine.step` uses it. At
            # earlier micro-batches `engine.step` only counts.
            if self.stage == 0 and self.engine.is_gradient_accumulation_boundary():
                norm = self._sum_and_clip([p.grad for p in self.engine.module.parameters() if p.grad is not None])
            self.engine.step()
        if self.stage != 0:
            # ZeRO computed the norm for clipping, over the partitions of all workers.
            norm = float(self.engine.get_global_grad_norm())
        tokens = sum(input_ids.numel() for input_ids, _ in batches)
        return total, labelled, tokens, norm

    def _sum_and_clip(self, gradients: list[Tensor]) -> float:
        """Sum gradients over the workers unless DeepSpeed has done so, clip them, and return the norm before clipping.

        Clips like `torch.nn.utils.clip_grad_norm_`, but skips the pass over gradients that would be multiplied by 1.
        """
        if self.shared is not None:
            # Each worker has the sums of its own part only, which is all that it clips and applies.
            norm = self.shared.sum(gradients)
            gradients = [part for gradient in gradients for part in self.shared.owned(gradient)]
        else:
            if self.sums_itself and self.world > 1:
                sum_by_messages(gradients)
            norm = float(nn.utils.get_total_norm(gradients))
        limit = self.recipe.clip
        if limit and norm + 1e-6 > limit:  # the same 1e-6 as in `clip_grad_norm_`
            torch._foreach_mul_(gradients, limit / (norm + 1e-6))
        return norm

    @torch.no_grad()
    def evaluate(self, batches: Iterator[tuple[Tensor, Tensor]], *, causal: bool) -> Evaluation:
        """Evaluate the model over all workers' batches; collective.

        Args:
            batches: this worker's batches. Every worker must have the same number, since ZeRO 3 gathers weights in each
                forward pass.

        Raises:
            UserError: if no token in them is labelled.
        """
        # Loss, hits and labelled tokens. fp64, since an fp32 sum over many batches would lose digits.
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
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
        """Locate the documents in a micro-batch, [micro, length] on the CPU; None if they are not isolated."""
        if self.separator is None:
            return None
        return Packing.of(document_lengths(input_ids.numpy(), self.separator), self.device, fine=True)

    def state(self, step: int, *, moments: bool = True) -> TrainingState | None:
        """Gather the whole state in rank 0's host memory; collective.

        Args:
            moments: whether to gather the optimiser's moments too; without, the state has none.

        Returns:
            The state on rank 0, None on other ranks: a node may not have the memory for several copies.
        """
        kept: tuple[dict[str, Tensor], ...] = ({}, {}, {})  # weights, first moments, second moments
        for name, parameter in zip(self.names, self.engine.module.parameters(), strict=True):
            if self.stage == 0:
                parts = [parameter.detach(), *(self._moments(parameter) if moments else ())]
            else:
                keys = ("exp_avg", "exp_avg_sq") if moments else ()
                parts = [safe_get_full_fp32_param(parameter)]
                parts += [safe_get_full_optimizer_state(parameter, key) for key in keys]
            # A copy, because the next step overwrites these tensors while the state is being written.
            if self.rank == 0:
                for place, part in zip(kept, parts, strict=False):
                    place[name] = part.detach().to("cpu", torch.float32, copy=True)
        weights, first, second = kept
        return TrainingState(step, weights, first, second) if self.rank == 0 else None

    def _torch_optimiser(self) -> torch.optim.Optimizer:
        # ZeRO wraps torch's optimiser in one of its own.
        return self.engine.optimizer if self.stage == 0 else self.engine.optimizer.optimizer

    def _moments(self, parameter: nn.Parameter) -> tuple[Tensor, Tensor]:
        """Return Adam's first and second moments of a whole weight (ZeRO 0)."""
        optimiser = self.engine.optimizer
        if self.shared is not None:
            return optimiser.common[parameter][:2]
        return optimiser.state[parameter]["exp_avg"], optimiser.state[parameter]["exp_avg_sq"]

    def _start_moments(self, step: int) -> None:
        """Set Adam's step count and zero moments, overriding any step that DeepSpeed took during initialisation."""
        optimiser = self._torch_optimiser()
        if self.shared is not None:
            self.engine.optimizer.divide(self.shared, step)
            return_freed_memory()
            return
        if self.stage == 3:
            # ZeRO 3 swaps flat partitions into the optimiser one at a time, so its groups do not list them all.
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
            # Link the new moments to the parameters; DeepSpeed's `safe_get_*` and `safe_set_*` functions look for
            # them there.
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()

    def _take_up_moments(self, state: TrainingState) -> None:
        """Load the moments of a state."""
        for name, parameter in zip(self.names, self.engine.module.parameters(), strict=True):
            given = (state.first[name], state.second[name])
            if self.stage == 0:
                # Rank 0 alone writes shared moments. No worker updates them before rank 0 joins the first step.
                if self.shared is None or self.rank == 0:
                    for moment, value in zip(self._moments(parameter), given, strict=True):
                        moment.copy_(value)
                continue
            for key, value in zip(("exp_avg", "exp_avg_sq"), given, strict=True):
                if self.stage == 3:
                    # Set each worker's part: DeepSpeed's function for the whole tensor fails if the number of workers
                    # does not divide its length. The padding is the one that ZeRO 3 itself adds.
                    size = parameter.ds_tensor.numel()
                    whole = functional.pad(value.flatten(), (0, size * self.world - value.numel()))
                    part = whole.narrow(0, size * self.rank, size).to(self.device)
                    safe_set_local_optimizer_state(parameter, part, key)
                else:
                    safe_set_full_optimizer_state(parameter, value.to(self.device), key)

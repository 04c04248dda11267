"""One worker's DeepSpeed engine: exact losses over the global batch, and states that any number of workers can load.

Weights, gradients and optimiser state are fp32, and gradients are reduced in fp32. Matrix products run in bf16 through
an autocast *inside* the model's forward pass. DeepSpeed's own options would lose precision: its `bf16` block would
initialise the master weights from rounded weights, and its `torch_autocast` block would reduce gradients in bf16.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import deepspeed
import numpy as np
import torch
import torch.distributed as distributed
from torch import Tensor

from mlmclm.backends.choice import backend_of, device_of_workers
from mlmclm.backends.host_memory import return_freed_memory
from mlmclm.backends.optimizers.optimizer import OPTIMIZERS, Hyperparameters
from mlmclm.backends.packing import Packing
from mlmclm.backends.transfer import to_device
from mlmclm.corpora.row_lengths import document_lengths
from mlmclm.errors import UserError
from mlmclm.models.build import PretrainingModel
from mlmclm.models.compilation import check_compiler
from mlmclm.objectives.objective import Objective
from mlmclm.plans.recipe import Recipe
from mlmclm.pretraining.checkpoints import FIRST, SECOND, WEIGHTS, TrainingState
from mlmclm.pretraining.initial import check_architecture
from mlmclm.pretraining.partitioning import Replicated
from mlmclm.pretraining.parts import PART_BYTES, names_by_part, own_names

logging.getLogger("DeepSpeed").setLevel(logging.WARNING)

BUCKETS = 16
"""Number of buckets in which ZeRO reduces a model's gradients. While a bucket is reduced, memory holds it twice.

ZeRO 3 also prefetches weights one bucket at a time.
"""
SMALLEST_BUCKET, LARGEST_BUCKET = 4_000_000, 50_000_000
"""Limits of a bucket, in elements. Smaller messages cost time, larger ones memory.

DeepSpeed's default of 5e8 elements is more than most models have.
"""
BUCKET_MULTIPLE = 2
"""Divisor of a bucket's size: DeepSpeed wants buckets aligned to 4 bytes, counted in 16-bit elements."""


def deepspeed_config(
    recipe: Recipe, world: int, way: type[Replicated], parameters: int, *, apart: bool = False
) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a recipe, with the recipe's own `deepspeed` block merged in.

    It depends on the number of workers (`world`), how they divide the model, how many parameters it has, and whether the
    devices have memory of their own (`apart`).
    """
    micro = recipe.sequences_at_once(world)
    bucket = min(max(parameters // BUCKETS, SMALLEST_BUCKET), parameters, LARGEST_BUCKET)
    bucket = -(-bucket // BUCKET_MULTIPLE) * BUCKET_MULTIPLE
    config: dict[str, Any] = {
        "train_batch_size": recipe.batch,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": recipe.batch // world // micro,
        "gradient_clipping": recipe.clip if way.deepspeed_clips else 0.0,
        # DeepSpeed otherwise accepts only optimisers on its own list with ZeRO, and the CPU's AdamW is a subclass.
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,  # never: the callbacks report progress
        # Nothing reads DeepSpeed's throughput. To measure it, the host would wait for the device twice in each pass.
        "timers": {"throughput": {"enabled": False}},
        "zero_optimization": way.options(bucket, apart=apart),
    }
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
        partitioning: Replicated,
        state: TrainingState | None,
        separator: int | None = None,
        *,
        moments_since: int = 0,
        part_bytes: int = PART_BYTES,
    ) -> None:
        """Set up DeepSpeed and load a state (weights, moments and step count); collective.

        Args:
            partitioning: how the workers divide the model (`partitioning_of`).
            state: the state to continue from; None starts at step 0 with the weights that the model has.
            separator: the token that ends each document if documents are isolated (`collator.separator`), else None.
            moments_since: step at which the moments were last set to 0. Moments that a state of that step has are ignored.
            part_bytes: maximum size of a state's file in bytes (`parts`).

        Raises:
            UserError: if the architecture cannot isolate documents, or torch.compile does not work here.
        """
        check_architecture(model.model.config.model_type, recipe)
        self.recipe = recipe
        self.partitioning = partitioning
        self.separator = separator
        self.world = distributed.get_world_size()
        self.rank = distributed.get_rank()
        self.backend = backend_of(device_of_workers())
        self.part_bytes = part_bytes
        # Before ZeRO 3 divides the weights, which hides their sizes.
        self.sizes = {name.removeprefix("model."): parameter.numel() for name, parameter in model.named_parameters()}
        count = sum(self.sizes.values())
        apart = not self.backend.in_host_memory
        config = deepspeed_config(recipe, self.world, type(partitioning), count, apart=apart)
        # Ray Train has created the process group already; DeepSpeed must use that one.
        deepspeed.init_distributed(distributed.get_backend(), dist_init_required=False)
        partitioning.begin(model.model, None if state is None else state.weights, config)
        # The rate is 0 until `step` sets it, so a step that DeepSpeed takes during initialisation changes no weight.
        settings = Hyperparameters(*recipe.adam_betas, recipe.adam_eps, recipe.weight_decay, recipe.peak_learning_rate)
        optimiser = self.backend.optimizer(OPTIMIZERS[recipe.optimizer], model.parameters(), settings)
        # The workers' allocator keeps freed memory. Return what loading has freed before DeepSpeed allocates its buffers.
        return_freed_memory()
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimiser, config=config, dist_init_required=False
        )
        partitioning.attach(self.engine)
        self.device = self.engine.device
        if model.compiled:
            # Fail here with a clear message rather than in the middle of the first step.
            check_compiler(self.device)
        self.micro = self.engine.train_micro_batch_size_per_gpu()
        self.accumulation = self.engine.gradient_accumulation_steps()
        partitioning.start_moments(0 if state is None else state.step - moments_since)
        if state is not None and state.first and state.step > moments_since:
            for name, parameter in zip(self.sizes, self.engine.module.parameters(), strict=True):
                partitioning.load_moments(parameter, (state.first[name], state.second[name]))
            distributed.barrier()  # until rank 0 has loaded shared moments, no worker may copy them into a state

    def step(
        self, batches: Sequence[tuple[Tensor, Tensor]], objective: Objective, *, rate: float
    ) -> tuple[Tensor, Tensor, int, float | Tensor]:
        """Take one optimiser step; collective. The host doesn't wait for a device with memory of its own.

        Args:
            batches: (input_ids, labels) of this worker's micro-batches, int64 [micro, length] in the host's memory.
            rate: learning rate of the step.

        Returns:
            This worker's summed loss, the global number of labelled tokens as a tensor, this worker's number of
            tokens, and the norm of the whole gradient before clipping. `recipe.loss_weights` affect the gradient, but
            not the loss.
        """
        places = [_labelled(labels) for _, labels in batches]
        # Workers mask different numbers of tokens. Only the global count gives the exact mean over the global batch;
        # a mean of the workers' means would weight tokens by where they happen to be computed.
        labelled = torch.full((), sum(map(len, places)), device=self.device)
        distributed.all_reduce(labelled)
        # Set the rate directly instead of using a scheduler: it is a function of the step, so resuming needs no
        # scheduler state.
        for group in self.partitioning.optimizer.param_groups:
            group["lr"] = rate
        total = torch.zeros((), device=self.device)
        # Losses are sums over labelled tokens, and the gradient must be that of the global sum over the global count.
        # DeepSpeed divides by the number of micro-batches and of workers, so multiply by both. The maximum guards a
        # step that has no labelled token.
        weight = 1.0
        if objective.loss_weight is not None:
            weight = getattr(self.recipe.loss_weights, objective.loss_weight)
        count = labelled.clamp(min=1).double()  # fp64, like a Python float
        scale = torch.full_like(count, weight * self.accumulation) / count * self.partitioning.divisor
        for (input_ids, labels), where in zip(batches, places, strict=True):
            loss = self._forward(input_ids, labels, where, causal=objective.causal)
            total += loss.detach()
            self.engine.backward(loss * scale.to(loss.dtype))
            # After the last micro-batch the gradient is complete: sum and clip it before `engine.step` uses it. At
            # earlier micro-batches `engine.step` only counts.
            if self.engine.is_gradient_accumulation_boundary():
                self.partitioning.reduce()
            self.engine.step()
        tokens = sum(input_ids.numel() for input_ids, _ in batches)
        return total, labelled, tokens, self.partitioning.norm()

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
            where = _labelled(labels)
            sums[:2] += self._forward(input_ids, labels, where, causal=causal, count=True)
            sums[2] += len(where)
        self.engine.train()
        distributed.all_reduce(sums)
        loss, hits, labelled = sums.tolist()
        if not labelled:
            raise UserError(
                f"recipe.evaluation_blocks: no token of the validation blocks is to be predicted; raise it (now {self.recipe.evaluation_blocks}) or "
                "validate on more text."
            )
        return Evaluation(loss / labelled, hits / labelled)

    def _forward(
        self, input_ids: Tensor, labels: Tensor, where: Tensor, *, causal: bool, count: bool = False
    ) -> Tensor:
        """Return `PretrainingModel.forward` of a micro-batch that is in the host's memory."""
        ids, targets, places = (to_device(tensor, self.device) for tensor in (input_ids, labels, where))
        result: Tensor = self.engine(ids, targets, causal, self._packing(input_ids), count=count, where=places)
        return result

    def _packing(self, input_ids: Tensor) -> Packing | None:
        """Locate the documents in a micro-batch, [micro, length] on the CPU; None if they are not isolated."""
        if self.separator is None:
            return None
        return Packing.of(document_lengths(input_ids.numpy(), self.separator), self.device, fine=True)

    def state(self, step: int, *, moments: bool = True) -> TrainingState:
        """Copy the tensors of this worker's parts of the state to the host's memory; collective.

        Args:
            moments: whether to copy the optimiser's moments too; without, the state has none.
        """
        kinds = (WEIGHTS, FIRST, SECOND) if moments else (WEIGHTS,)
        parts = names_by_part(
            {kind + name: 4 * size for kind in kinds for name, size in self.sizes.items()}, self.part_bytes
        )
        names = own_names(parts, self.rank, self.world)
        weights: dict[str, Tensor] = {}
        first: dict[str, Tensor] = {}
        second: dict[str, Tensor] = {}
        for name, parameter in zip(self.sizes, self.engine.module.parameters(), strict=True):
            tensors = self.partitioning.gathered(parameter, moments=moments)
            for kind, target, tensor in zip(kinds, (weights, first, second), tensors, strict=False):
                if kind + name in names:
                    # A copy, because the next step overwrites these tensors while the state is being written.
                    target[name] = tensor.detach().to("cpu", torch.float32, copy=True)
        return TrainingState(step, weights, first, second, parts=parts)


def _labelled(labels: Tensor) -> Tensor:
    """Return the indices of the positions in a flattened micro-batch that have labels: int64 [labelled], on the host."""
    return torch.from_numpy(np.flatnonzero(labels.numpy() != -100))

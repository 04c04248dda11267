"""The recipe: everything that the models of a study share and their names don't say."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from mlmclm.configuration import Frozen
from mlmclm.errors import unknown
from mlmclm.objectives.corruption import Corruption
from mlmclm.objectives.objective import Objective
from mlmclm.plans.schedules import LAWS

RECIPE_KEYS = {
    "train_batch_size": "'batch'",
    "train_micro_batch_size_per_gpu": "'micro_batch'",
    "gradient_accumulation_steps": "'batch', 'workers' and 'micro_batch'",
    "gradient_clipping": "'clip'",
    "zero_optimization.stage": "'zero_stage'",
    "bf16": "'precision'",
    "fp16": "'precision'",
    "amp": "'precision'",
    "torch_autocast": "'precision'",
    "activation_checkpointing": "'activation_checkpointing'",
    "compile": "'compile'",
    "optimizer": "'adam_betas', 'adam_eps' and 'weight_decay'",
    "scheduler": "'peak_learning_rate', 'warmup_steps', 'decay_steps' and 'decay'",
}
"""Keys of DeepSpeed's configuration that the recipe decides, and the fields that do."""


class LossWeights(Frozen):
    """What a stage's loss is multiplied by before its gradient is taken, by the kind of its objective; losses are reported without.

    Adam divides a gradient by its own size, so a weight acts through what does not scale with it: `clip` (the weighted gradient's
    norm is what is clipped and reported), `adam_eps`, through both the balance against `weight_decay`, and the moments that a
    phase of the other kind takes over.
    """

    clm: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Of causal language modelling."""
    mlm: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Of masked language modelling."""

    def of(self, objective: Objective) -> float:
        """The weight of an objective."""
        return float(getattr(self, objective.loss_weight))


class Recipe(Frozen):
    """How a model is pretrained. Defaults are the study's (arXiv 2507.00994) unless a field says otherwise.

    What changes the weights beyond rounding goes into a state's key (`identity`); how the work is divided over workers does not.
    """

    block_length: int = Field(2048, ge=8)
    """Tokens a sequence."""
    batch: int = Field(1152, ge=1)
    """Sequences a step over all workers: the published 2,359,296 tokens a step (99 B in 42,000 steps) as full blocks of 2,048. The study
    counts 192 GPUs x 12 sequences, which its tokens fill by half."""
    peak_learning_rate: float = Field(5e-4, gt=0)
    warmup_steps: int = Field(2000, ge=0)
    decay_steps: int = Field(2000, ge=0)
    """Steps of decay at the end of the last phase, and of a `dec` phase."""
    decay: str = "linear"
    """How the rate falls in these steps: linear, 1-sqrt or cosine (to 0), or constant (not at all)."""
    rewarmup_steps: int | None = Field(None, ge=0)
    """Steps of warm-up of a phase that starts from a decayed state (`dec` in the name); None is `warmup_steps`."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    adam_eps: float = Field(1e-5, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    """On all parameters."""
    clip: float = Field(1.0, ge=0)
    """Largest norm of the whole gradient; 0 leaves it as it is."""
    precision: Literal["bf16-autocast", "fp32"] = "bf16-autocast"
    """Of the matrix products; weights, gradients and optimiser state are fp32."""
    corruption: Corruption = Corruption()
    """Of the masked tokens."""
    loss_weights: LossWeights = LossWeights()
    isolate_documents: bool = False
    """Documents that share a block don't see each other: attention and positions start anew at each, none is predicted from the
    one before it, and attention costs what the documents' lengths do."""
    seed: int = Field(0, ge=0)
    """Of the initialisation, the order of the data and the masks, a stream each."""

    workers: int = Field(2, ge=1)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device of each worker: a GPU (cuda) or a CPU. `auto` is GPUs where the cluster has or its autoscaler can add any, else CPUs; all
    stages of a study run on the same. Cells of a sweep follow it where the space has no `gpus_per_cell`."""
    micro_batch: int | None = Field(None, ge=1)
    """Sequences a worker computes at once; None is its whole share of the batch."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """DeepSpeed's ZeRO: what is partitioned over workers (1 optimiser state, 2 and gradients, 3 and weights). On the CPUs of one
    machine 0 and 1 are the same: workers have weights and moments in common, and each updates a part."""
    activation_checkpointing: bool = False
    """Less memory for more time: a layer's activations are computed again in the backward pass."""
    compile: bool = False
    """Runs the model's layers through torch.compile (the LM head's loss has kernels of its own); needs a C++ compiler. On the CPU
    it takes the place of this project's fused block."""
    checkpoint_every: int = Field(1000, ge=1)
    """Steps between checkpoints from which a broken run goes on."""
    keep_checkpoints: int = Field(2, ge=1)
    """Checkpoints of a running stage that are kept, the furthest ones; states that a plan names are kept in any case."""
    evaluate_every: int = Field(1000, ge=1)
    """Steps between validation losses; there is always one at the end of a phase."""
    evaluation_blocks: int = Field(256, ge=1)
    """Validation sequences a validation loss is taken over."""
    max_failures: int = Field(3, ge=0)
    """How often a stage is restarted from its last checkpoint after a worker or node dies."""
    deepspeed: dict[str, Any] = Field(default_factory=dict)
    """Passed through into DeepSpeed's configuration, nested keys beside the recipe's own; not what the recipe says itself."""

    @field_validator("adam_betas")
    @classmethod
    def _betas(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError("both betas must lie in [0, 1)")
        return value

    @field_validator("decay")
    @classmethod
    def _known_law(cls, value: str) -> str:
        if value not in LAWS:
            raise ValueError(str(unknown("decay", value, LAWS)).rstrip("."))
        return value

    @field_validator("deepspeed")
    @classmethod
    def _no_contradiction(cls, value: dict[str, Any]) -> dict[str, Any]:
        for key, field in RECIPE_KEYS.items():
            found: Any = value
            for part in key.split("."):
                if not isinstance(found, dict) or part not in found:
                    break
                found = found[part]
            else:
                raise ValueError(
                    f"{key}: {found!r} contradicts the recipe, which says it in {field}; change that instead"
                )
        return value

    @model_validator(mode="after")
    def _divides(self) -> Recipe:
        if self.batch % self.workers:
            raise ValueError(
                f"batch {self.batch} does not divide by workers {self.workers}; allowed numbers of workers: "
                f"{', '.join(str(n) for n in range(1, min(self.batch, 64) + 1) if self.batch % n == 0)}"
            )
        share = self.batch // self.workers
        if self.micro_batch is not None and share % self.micro_batch:
            raise ValueError(
                f"micro_batch {self.micro_batch} does not divide a worker's share of the batch, {share} sequences"
            )
        return self

    def identity(self) -> dict[str, Any]:
        """The fields that decide which weights come out (up to the order of floating-point sums)."""
        fields = {
            "block_length", "batch", "peak_learning_rate", "warmup_steps", "decay_steps", "adam_betas", "adam_eps",
            "weight_decay", "clip", "precision", "seed",
        }  # fmt: skip
        optional = {
            "corruption",
            "decay",
            "loss_weights",
            "isolate_documents",
        }  # left out by default: the keys of older states stay valid
        fields |= {name for name in optional if getattr(self, name) != type(self).model_fields[name].default}
        return self.model_dump(mode="json", include=fields)

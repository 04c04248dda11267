"""The recipe: pretraining settings that all models of a study share and that are not in their names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from mlmclm.backends.device_kinds import keyed_backend
from mlmclm.backends.optimizers.optimizer import OPTIMIZERS, OptimizerName
from mlmclm.configuration import Enters, Frozen, Role
from mlmclm.corpora.chunks import Rows
from mlmclm.corpora.mixes import Mix
from mlmclm.errors import UserError
from mlmclm.models.sizes import Size
from mlmclm.objectives.corruption import Corruption
from mlmclm.plans.phases import CARRIED, ResolvedPhase, TrainingPhase, resolve_phases
from mlmclm.plans.pretraining_seeds import PretrainingSeeds, StreamSeeds
from mlmclm.registry import KINDS, MemberName
from mlmclm.schedules.decay import DecayName

RECIPE_KEYS = {
    "train_batch_size": "'batch'",
    "train_micro_batch_size_per_gpu": "'micro_batch' or 'micro_batch_tokens'",
    "gradient_accumulation_steps": "'batch', 'workers' and 'micro_batch' or 'micro_batch_tokens'",
    "gradient_clipping": "'clip'",
    "zero_optimization.stage": "'zero_stage'",
    "bf16": "'precision'",
    "fp16": "'precision'",
    "amp": "'precision'",
    "torch_autocast": "'precision'",
    "activation_checkpointing": "'activation_checkpointing'",
    "compile": "'compile'",
    "optimizer": "'optimizer', 'adam_betas', 'adam_eps' and 'weight_decay'",
    "scheduler": "'peak_learning_rate', 'warmup_steps', 'decay_steps' and 'decay'",
}
"""Keys of DeepSpeed's configuration that the recipe controls, and the recipe's fields that set them."""

DIVIDING = frozenset(
    {
        "comms_logger", "csv_monitor", "dump_state", "flops_profiler", "memory_breakdown", "steps_per_print", "tensorboard",
        "wall_clock_breakdown", "wandb",
        *(
            f"zero_optimization.{name}"
            for name in (
                "allgather_bucket_size", "allgather_partitions", "contiguous_gradients", "ignore_unused_parameters",
                "memory_efficient_linear", "offload_optimizer", "offload_param", "overlap_comm", "reduce_bucket_size",
                "reduce_scatter", "round_robin_gradients", "stage3_gather_16bit_weights_on_model_save",
                "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_module_granularity_threshold",
                "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size", "sub_group_size",
            )
        ),
    }
)  # fmt: skip
"""Keys of DeepSpeed's configuration that only report, or divide the work differently. All others, such as the precision in
which gradients are added up, may change the weights."""

SCHEDULE = ("warmup_steps", "decay_steps", "decay", "rewarmup_steps")
"""Fields of the learning rate's schedule, which each phase has of its own."""


class LossWeights(Frozen):
    """Factors on a stage's loss before the backward pass, by kind of objective. Reported losses do not include them.

    Adam normalises the gradient's scale, so a weight acts only through what does not scale with the gradient: `clip`
    (the norm that is clipped and reported is the weighted gradient's) and `adam_eps`, and through these the balance
    against `weight_decay`. It also acts on a phase of the other kind, through the moments that this inherits.
    """

    clm: Annotated[float, Role.WEIGHTS] = Field(1.0, gt=0, allow_inf_nan=False)
    """Factor for causal language modelling."""
    mlm: Annotated[float, Role.WEIGHTS] = Field(1.0, gt=0, allow_inf_nan=False)
    """Factor for masked language modelling."""


class Recipe(Frozen):
    """Settings for pretraining a model. Defaults are the study's (arXiv 2507.00994) unless a field says otherwise.

    Fields that change the weights beyond rounding are part of a state's key (`identity`). Fields that only divide the
    work over workers are not. `rewarmup_steps` and phases enter the key with the segments of the state's history.
    """

    block_length: Annotated[int, Role.WEIGHTS, Role.SHAPE] = Field(2048, ge=8)
    """Tokens per sequence."""
    batch: Annotated[int, Role.WEIGHTS] = Field(1152, ge=1)
    """Sequences per step over all workers. The default is the published 2,359,296 tokens a step (99 B in 42,000 steps)
    in full blocks of 2,048. The study states 192 GPUs x 12 sequences, twice as many; its tokens fill half of them."""
    peak_learning_rate: Annotated[float, Role.WEIGHTS] = Field(5e-4, gt=0)
    warmup_steps: Annotated[int, Role.WEIGHTS] = Field(2000, ge=0)
    decay_steps: Annotated[int, Role.WEIGHTS] = Field(2000, ge=0)
    """Steps of learning-rate decay at the end of the last phase and of each `dec` phase."""
    decay: Annotated[DecayName, Role.WEIGHTS, Enters.IF_CHANGED] = "linear"
    """Shape of the decay: linear, 1-sqrt, 1-square or cosine (to 0), or constant (no decay)."""
    rewarmup_steps: Annotated[int | None, Role.WEIGHTS, Enters.INDIRECTLY] = Field(None, ge=0)
    """Steps of warm-up in a phase that starts from a decayed state (`dec` in the name); None takes `warmup_steps`."""
    optimizer: Annotated[OptimizerName, Role.WEIGHTS, Enters.IF_CHANGED] = "adamw"
    """AdamW, or StableAdamW with decoupled weight decay and none on norms and biases, as Ettin's models were trained
    (`mlmclm.backends.optimizers`). The latter needs `zero_stage: 0`."""
    adam_betas: Annotated[tuple[float, float], Role.WEIGHTS] = (0.9, 0.95)
    adam_eps: Annotated[float, Role.WEIGHTS] = Field(1e-5, gt=0)
    weight_decay: Annotated[float, Role.WEIGHTS] = Field(0.1, ge=0)
    """Weight decay. AdamW applies it times the learning rate, to all parameters; StableAdamW applies it times the learning
    rate's share of the peak."""
    clip: Annotated[float, Role.WEIGHTS] = Field(1.0, ge=0)
    """Maximum norm of the whole gradient; 0 turns clipping off."""
    precision: Annotated[Literal["bf16-autocast", "bf16-residual", "fp32"], Role.WEIGHTS] = "bf16-autocast"
    """Precision of matrix products, and with `bf16-residual` of the residual stream too, which is fp32 otherwise. Weights,
    their gradients and optimiser state are always fp32."""
    corruption: Annotated[Corruption, Role.WEIGHTS, Enters.IF_CHANGED] = Corruption()
    """Corruption of the masked tokens."""
    loss_weights: Annotated[LossWeights, Role.WEIGHTS, Enters.IF_CHANGED] = LossWeights()
    isolate_documents: Annotated[bool, Role.WEIGHTS, Enters.IF_CHANGED] = False
    """Isolate the documents that are packed into one block. Attention and positions then restart at each document, no
    document is predicted from the one before it, and the cost of attention depends on the documents' lengths."""
    rows: Annotated[Rows, Role.WEIGHTS, Enters.IF_CHANGED] = "joined"
    """Content of a row: `joined` documents, end to end, or `chunks`. A chunk is BOS, a part of one document, and EOS, as
    Ettin's models were trained on; shorter ones cost no more than their own tokens."""
    rope_base: Annotated[float | None, Role.WEIGHTS, Role.SHAPE, Enters.IF_CHANGED] = Field(None, gt=1)
    """Base of the rotary position embedding; None for that of the architecture or of the model to continue from."""
    local_rope_base: Annotated[float | None, Role.WEIGHTS, Role.SHAPE, Enters.IF_CHANGED] = Field(None, gt=1)
    """The same for layers with local attention, in an architecture that has them."""
    mix: Annotated[Mix | None, Role.WEIGHTS, Enters.IF_CHANGED] = None
    """Sources of the study's `corpora` with their weights: the shares of the blocks, and so of the tokens."""
    phases: Annotated[tuple[TrainingPhase, ...], Role.WEIGHTS, Enters.INDIRECTLY] = ()
    """Phases of training. They replace `warmup_steps`, `decay_steps` and `decay`."""
    phases_by_size: Annotated[dict[str, tuple[TrainingPhase, ...]], Role.WEIGHTS, Enters.INDIRECTLY] = Field(
        default_factory=dict
    )
    """Size -> phases of its models in place of `phases`."""
    callbacks: Annotated[tuple[str, ...], MemberName("callback"), Role.WEIGHTS, Enters.INDIRECTLY] = ()
    """Callbacks that run around each step, beside the built-in ones; registered, or of another package."""
    seed: Annotated[int, Role.WEIGHTS] = Field(0, ge=0)
    """Seed of the initialisation, the data order and the masks; each has its own random stream. Further replicates of a
    model (`-r2` in its name) have the next numbers."""
    pretraining_seeds: Annotated[PretrainingSeeds, Role.WEIGHTS, Enters.INDIRECTLY] = PretrainingSeeds()
    """Seeds of the streams in place of `seed`, such as `{weights: 0}` for replicates that begin with the same weights."""

    workers: Annotated[int, Role.WORK] = Field(2, ge=1)
    fewest_workers: Annotated[int | None, Role.WORK] = Field(None, ge=1)
    """Minimum number of workers. A stage that loses nodes resumes from its last checkpoint with at least this many workers, and
    with up to `workers` again when there are nodes for them. None waits until there are nodes for all."""
    device: Annotated[Literal["auto", "cpu", "cuda"], Role.WORK] = "auto"
    """Device of each worker: a GPU (cuda) or a CPU. `auto` chooses GPUs if the cluster has any or its autoscaler can
    add them, else CPUs. All stages of a study run on the same kind. Cells of a sweep follow it unless the search space
    sets `gpus_per_cell`."""
    micro_batch: Annotated[int | None, Role.WORK] = Field(None, ge=1)
    """Sequences per worker in one forward and backward pass; None takes the worker's whole share of the batch, and on
    GPUs, while it doesn't fit into their memory, the next smaller divisor of that share."""
    micro_batch_tokens: Annotated[int | None, Role.WORK] = Field(None, ge=1)
    """The same as a number of tokens, for phases of different block lengths: in each, the largest divisor of the worker's share
    whose sequences have at most this many tokens."""
    zero_stage: Annotated[Literal[0, 1, 2, 3], Role.WORK] = 1
    """DeepSpeed's ZeRO stage: what is partitioned over the workers (1: optimiser state; 2: also gradients; 3: also
    weights). On the CPUs of one machine 0 and 1 are the same: the workers share one copy of weights and moments in
    memory, and each updates a part of it."""
    activation_checkpointing: Annotated[bool, Role.WORK] = False
    """Recompute each layer's activations in the backward pass, which saves memory and costs time."""
    compile: Annotated[bool, Role.WORK] = False
    """Run the model's layers through torch.compile, which needs a C++ compiler. The LM head's loss keeps its own
    kernels. This replaces the backend's fused blocks."""
    deterministic: Annotated[bool, Role.WORK] = False
    """Compute the same bits each time on the same kind and number of devices. An operation that can't is an error."""
    checkpoint_every: Annotated[int, Role.WORK] = Field(1000, ge=1)
    """Steps between checkpoints from which an interrupted run resumes."""
    keep_checkpoints: Annotated[int, Role.WORK] = Field(2, ge=1)
    """Number of latest checkpoints kept for a running stage. States that a plan names are always kept."""
    revisions_every: Annotated[int | None, Role.CHOICE] = Field(None, ge=1)
    """Steps between revisions, which `mlmclm export --revisions` publishes: the weights at each multiple of this number
    of total steps, from 0 on, are kept for good. None keeps no others than those of the models themselves."""
    revisions_every_tokens: Annotated[int | None, Role.CHOICE] = Field(None, ge=1)
    """The same by the tokens seen: the weights after each step in which their number reaches another multiple of this."""
    evaluate_every: Annotated[int, Role.EVALUATION] = Field(1000, ge=1)
    """Steps between validations. There is always one at the end of a stage."""
    evaluation_blocks: Annotated[int, Role.EVALUATION] = Field(256, ge=1)
    """Number of sequences in a validation."""
    max_failures: Annotated[int, Role.WORK] = Field(3, ge=0)
    """Number of times a stage is restarted from its last checkpoint after a worker or node dies."""
    deepspeed: Annotated[dict[str, Any], Role.WEIGHTS, Role.WORK, Enters.INDIRECTLY] = Field(default_factory=dict)
    """Extra keys for DeepSpeed's configuration. Keys that the recipe itself controls are refused. Those in
    `DIVIDING` change the weights by rounding at most; all others are part of a state's key."""

    @field_validator("adam_betas")
    @classmethod
    def _betas(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError("both betas must lie in [0, 1)")
        return value

    @field_validator("deepspeed")
    @classmethod
    def _no_contradiction(cls, value: dict[str, Any]) -> dict[str, Any]:
        for key, field in RECIPE_KEYS.items():
            group, _, name = key.rpartition(".")
            settings = value.get(group) if group else value
            if isinstance(settings, dict) and name in settings:
                raise ValueError(
                    f"{key}: {settings[name]!r} contradicts the recipe, which sets it by {field}; change that instead"
                )
        return value

    @model_validator(mode="after")
    def _fits(self) -> Recipe:
        if self.batch % self.workers:
            raise ValueError(
                f"batch {self.batch} does not divide by workers {self.workers}; allowed numbers of workers: "
                f"{', '.join(str(n) for n in range(1, min(self.batch, 64) + 1) if self.batch % n == 0)}"
            )
        if self.fewest_workers is not None:
            self._check_fewest(self.fewest_workers)
        if OPTIMIZERS[self.optimizer].whole_gradients and (self.zero_stage or "zero_optimization" in self.deepspeed):
            raise ValueError(
                f"optimizer {self.optimizer} scales a weight's step by all of its gradient, which ZeRO would divide among workers: set zero_stage: 0"
            )
        share = self.batch // self.workers
        if self.micro_batch is not None and share % self.micro_batch:
            raise ValueError(
                f"micro_batch {self.micro_batch} does not divide a worker's share of the batch, {share} sequences"
            )
        if self.micro_batch_tokens is not None:
            if self.micro_batch is not None:
                raise ValueError("micro_batch and micro_batch_tokens: give one of them")
            if self.micro_batch_tokens < self.block_length and not self.has_phases:
                raise ValueError(
                    f"micro_batch_tokens {self.micro_batch_tokens} has no room for a sequence of block_length {self.block_length}"
                )
        if self.revisions_every_tokens is not None and self.revisions_every is not None:
            raise ValueError("revisions_every and revisions_every_tokens: give one of them")
        if self.revisions_every_tokens is not None and self.rows == "chunks":
            raise ValueError("revisions_every_tokens: the tokens of chunks depend on the text; give revisions_every")
        return self

    def _check_fewest(self, fewest: int) -> None:
        if fewest > self.workers:
            raise ValueError(f"fewest_workers {fewest} is more than workers {self.workers}")
        for number in self.possible_workers[:-1]:
            if self.batch % number:
                raise ValueError(
                    f"fewest_workers {fewest}: batch {self.batch} does not divide by {number} workers, one of the numbers from fewest_workers to workers"
                )
            if self.micro_batch is not None and self.batch // number % self.micro_batch:
                raise ValueError(
                    f"fewest_workers {fewest}: micro_batch {self.micro_batch} does not divide the share of one of {number} workers, "
                    f"{self.batch // number} sequences"
                )

    @model_validator(mode="after")
    def _phases_fit(self) -> Recipe:
        if not self.has_phases:
            return self
        for field in SCHEDULE:
            if getattr(self, field) != type(self).model_fields[field].default:
                raise ValueError(f"{field}: the phases have schedules of their own; leave it out")
        for phases in (self.phases, *self.phases_by_size.values()):
            for counted in phases:
                if counted.tokens is not None and self.rows == "chunks":
                    raise ValueError(
                        f"phase {counted.name!r}: tokens {counted.tokens}: the tokens of chunks depend on the text, so the steps can't be known; "
                        "give steps"
                    )
            names = [phase.name for phase in phases]
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"phases: two are called {', '.join(twice)}")
            for phase in resolve_phases(phases, self):
                self._check_phase(phase)
        return self

    def _check_phase(self, phase: ResolvedPhase) -> None:
        where = f"phase {phase.name!r}"
        long, short = max(phase.block_length, self.block_length), min(phase.block_length, self.block_length)
        if long % short and self.rows == "joined":
            raise ValueError(
                f"{where}: block_length {phase.block_length} neither divides the recipe's {self.block_length} nor is a multiple of it"
            )
        if phase.batch_warmup is not None and phase.batch_warmup.steps > phase.stop - phase.start:
            raise ValueError(
                f"{where}: batch_warmup.steps {phase.batch_warmup.steps} are more than its {phase.stop - phase.start} steps, so the batch would never "
                f"reach {phase.batch}"
            )
        if phase.warmup_steps + phase.decay_steps > phase.stop - phase.start:
            raise ValueError(
                f"{where}: its {phase.stop - phase.start} steps are fewer than those of its warm-up and decay"
            )
        try:
            resolved = type(self).model_validate(self.during(phase).model_dump())
        except ValidationError as error:
            reasons = "; ".join(item["msg"].removeprefix("Value error, ") for item in error.errors())
            raise ValueError(f"{where}: {reasons}") from error
        fewest = resolved.batch // resolved.sequences_at_once(resolved.workers)
        if phase.batch_warmup is not None and not fewest <= phase.batch_warmup.first <= phase.batch:
            raise ValueError(
                f"{where}: batch_warmup.first {phase.batch_warmup.first} is not between {fewest}, one sequence for each micro-batch of each "
                f"worker, and batch {phase.batch}"
            )

    @property
    def possible_workers(self) -> range:
        """The numbers of workers with which a stage may run: Ray Train takes any from the fewest to all."""
        return range(self.fewest_workers or self.workers, self.workers + 1)

    def sequences_at_once(self, workers: int) -> int:
        """Return how many sequences each of `workers` workers takes in one forward and backward pass."""
        share = self.batch // workers
        if self.micro_batch_tokens is None:
            return self.micro_batch or share
        most = min(share, self.micro_batch_tokens // self.block_length)
        return next(count for count in range(most, 0, -1) if share % count == 0)

    def fewer_at_once(self, rows: int) -> int | None:
        """Return the next smaller micro-batch, in sequences; None if there is none.

        It divides a worker's share of the batch for every number of workers in `possible_workers`.

        Args:
            rows: sequences of the stage's smallest batch, of which each micro-batch of each worker needs one.
        """
        shares = [self.batch // number for number in self.possible_workers]
        below = range(self.sequences_at_once(self.workers) - 1, 0, -1)
        allowed = (count for count in below if all(share % count == 0 for share in shares))
        return next((at_once for at_once in allowed if self.batch // at_once <= rows), None)

    def seeds_of(self, replicate: int) -> StreamSeeds:
        """Return the seeds of a model's replicate, counted from 1.

        Raises:
            UserError: `pretraining_seeds` has none for it, or the same as for an earlier one.
        """
        seeds = [self.pretraining_seeds.of(number, self.seed) for number in range(1, replicate + 1)]
        if seeds[-1] in seeds[:-1]:
            raise UserError(
                f"recipe.pretraining_seeds: replicates {seeds.index(seeds[-1]) + 1} and {replicate} would have the same seeds, so they would be one "
                "model; leave a stream out, or give it a list with a seed for each replicate."
            )
        return seeds[-1]

    @property
    def seeds(self) -> StreamSeeds:
        """The seeds of the model that this recipe has been resolved for (`State.resolved`), else of first replicates."""
        return self.seeds_of(1)

    @property
    def has_phases(self) -> bool:
        """Whether any size has phases."""
        return bool(self.phases or self.phases_by_size)

    def phases_of(self, size: str) -> tuple[ResolvedPhase, ...]:
        """Return the phases of a size's models, resolved; empty without phases."""
        return resolve_phases(self.phases_by_size.get(size, self.phases), self)

    def during(self, phase: ResolvedPhase | None) -> Recipe:
        """Return the recipe as it is in a phase: without phases, and with the phase's settings in place of its own."""
        if phase is None:
            return self
        return self.model_copy(
            update={"phases": (), "phases_by_size": {}, **{name: getattr(phase, name) for name in CARRIED}}
        )

    @property
    def isolates(self) -> bool:
        """Whether attention stays within documents."""
        return self.isolate_documents or self.rows == "chunks"

    def check_positions(self, size: str, shape: Size) -> None:
        """Refuse a RoPE base for models of a size that have no rotary positions, or no local layers for the local base.

        Raises:
            UserError: the message names the phase.
        """
        for phase in self.phases_of(size) or (None,):
            resolved, where = self.during(phase), "recipe" if phase is None else f"recipe.phases: {phase.name!r}"
            if resolved.rope_base is not None and not shape.rotary:
                raise UserError(
                    f"{where}: rope_base {resolved.rope_base:g}: models of size {size} ({shape.architecture}) have no rotary positions; leave it out."
                )
            if resolved.local_rope_base is not None and not shape.local_rotary:
                raise UserError(
                    f"{where}: local_rope_base {resolved.local_rope_base:g}: models of size {size} ({shape.architecture}) have no layers with local attention "
                    "that have a base of their own; leave it out."
                )

    def lengths(self, sizes: Iterable[str]) -> set[int]:
        """Return the block lengths that models of these sizes are trained on."""
        lengths = {phase.block_length for size in sizes for phase in self.phases_of(size)}
        return lengths or {self.block_length}

    def mixes(self, sizes: Iterable[str]) -> list[Mix | None]:
        """Return the mixes that models of these sizes are trained on, in order; None where there is none."""
        mixes = [phase.mix for size in sizes for phase in self.phases_of(size)]
        return list(dict.fromkeys([self.mix, *mixes]))

    def identity(self) -> dict[str, Any]:
        """Return the fields that determine the resulting weights, up to the order of floating-point sums."""
        changing = {key: value for key, value in _flat(self.deepspeed).items() if key not in DIVIDING}
        registry = KINDS["callback"]
        names = [name for name in self.callbacks if not registry[name].observes]
        timing = {field: getattr(self, field) for name in names for field in registry[name].timing()}
        callbacks = [registry.keyed(name) for name in names]
        more = {"deepspeed": changing, "callbacks": callbacks, **timing, **keyed_backend()}
        return self.keyed(Role.WEIGHTS, Role.TOKENS) | {name: value for name, value in more.items() if value}


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Return DeepSpeed's settings, with those inside `zero_optimization` under the name `zero_optimization.NAME`."""
    zero = settings.get("zero_optimization")
    inner = {f"zero_optimization.{name}": value for name, value in zero.items()} if isinstance(zero, dict) else {}
    return {name: value for name, value in settings.items() if not inner or name != "zero_optimization"} | inner

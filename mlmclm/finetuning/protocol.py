"""The fine-tuning protocol of a cell: every setting except the model, the task, the learning rate and the seed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mlmclm.backends.optimizers.optimizer import OptimizerName
from mlmclm.configuration import Enters, Role, parse_config
from mlmclm.schedules.decay import DecayName
from mlmclm.tasks.settings import TaskSettings


class Protocol(TaskSettings):
    """The fine-tuning settings of a cell.

    Defaults are the study's (arXiv 2507.00994, released configurations), except for the precision of the weights. The
    study trains pure bfloat16 weights (`precision: bf16`), which round small updates away. The default keeps fp32
    weights and computes in bfloat16.
    """

    batch_size: Annotated[int, Role.WEIGHTS] = Field(default=32, ge=1)
    """Examples per step: pairs in retrieval, windows in question answering."""
    max_steps: Annotated[int | None, Role.WEIGHTS] = Field(default=1000, ge=1)
    epochs: Annotated[float | None, Role.WEIGHTS] = Field(default=None, gt=0)
    """Passes over the training split. If `max_steps` is also set, the lower of the two limits applies (study: one epoch
    for CoNLL-2003, 1,000 steps otherwise)."""
    warmup_ratio: Annotated[float, Role.WEIGHTS] = Field(default=0.1, ge=0, le=1)
    """Share of the steps in which the learning rate warms up linearly from 0; it then decays (`decay`)."""
    decay: Annotated[DecayName, Role.WEIGHTS, Enters.IF_CHANGED] = "linear"
    """Shape of the decay after the warm-up: linear, 1-sqrt, 1-square or cosine (to 0), or constant (no decay)."""
    optimizer: Annotated[OptimizerName, Role.WEIGHTS, Enters.IF_CHANGED] = "adamw"
    """AdamW, or StableAdamW with decoupled weight decay."""
    adam_beta1: Annotated[float, Role.WEIGHTS] = Field(default=0.9, ge=0, lt=1)
    adam_beta2: Annotated[float, Role.WEIGHTS] = Field(default=0.95, ge=0, lt=1)
    adam_epsilon: Annotated[float, Role.WEIGHTS] = Field(default=1e-5, gt=0)
    weight_decay: Annotated[float, Role.WEIGHTS] = Field(default=0.1, ge=0)
    """Weight decay of matrices; vectors (norms, biases) have none, as in Hugging Face's Trainer."""
    clip_norm: Annotated[float | None, Role.WEIGHTS] = Field(default=1.0, gt=0)
    """Largest norm of the gradient (1.0 is Trainer's); None disables clipping."""
    precision: Annotated[Literal["bf16-autocast", "fp32", "bf16"], Role.WEIGHTS] = "bf16-autocast"
    """`bf16-autocast` keeps weights and optimiser state in fp32 and multiplies matrices in bfloat16; `fp32` does all in
    fp32; `bf16` keeps weights, gradients and optimiser state in bfloat16 too (study)."""
    attention: Annotated[Literal["bidirectional", "causal"], Role.WEIGHTS] = "bidirectional"
    """Attention mask: a token sees the whole sequence, or no later token."""
    length_share: Annotated[float | None, Role.TOKENS, Role.WEIGHTS, Enters.IF_CHANGED] = Field(
        default=None, gt=0, le=1
    )
    """Share of the model's context length that replaces `max_length`, rounded (study: 0.99); see `at_context` and
    `models.folder.context_of`."""
    evaluation_batch_tokens: Annotated[int, Role.EVALUATION] = Field(default=4096, ge=64)
    """Largest number of tokens in an evaluation batch; a longer sequence gets a batch of its own."""
    decoupled_weight_decay: Annotated[bool, Role.WEIGHTS, Enters.IF_CHANGED] = False
    """If True, a step subtracts the share `weight_decay` x (the step's rate / the peak rate) of a weight, instead of the
    share `weight_decay` x the step's rate. This is MosaicML's DecoupledAdamW, whose values are small (1e-6)."""

    evaluate_every: Annotated[int | None, Role.WEIGHTS, Enters.IF_CHANGED] = Field(default=None, ge=1)
    """Steps between evaluations on the validation split. The cell's scores are then those of the weights with the
    best validation score by the main metric. None evaluates once, at the end."""
    patience: Annotated[int | None, Role.WEIGHTS, Enters.IF_CHANGED] = Field(default=None, ge=1)
    """Number of evaluations in a row without a better score after which training stops. None trains to the end."""

    chunk_tokens: Annotated[int | None, Role.WEIGHTS, Enters.IF_CHANGED] = Field(default=None, ge=64)
    """Retrieval: number of tokens that a step encodes at a time, with cached gradients (GradCache). A larger batch then
    costs time but no memory. None encodes the batch in one piece. Chunking changes the dropout masks of a model with
    dropout."""

    deterministic: Annotated[bool, Role.WORK] = False
    """Compute the same bits each time on the same kind of device. An operation that can't is an error."""

    @model_validator(mode="after")
    def _ends(self) -> Protocol:
        if self.max_steps is None and self.epochs is None:
            raise ValueError("give 'max_steps' or 'epochs'")
        if self.patience is not None and self.evaluate_every is None:
            raise ValueError("'patience' counts evaluations: give 'evaluate_every' too")
        if self.decoupled_weight_decay and self.optimizer != "adamw":
            raise ValueError("'decoupled_weight_decay' belongs to 'optimizer' adamw; leave it out")
        return self

    def at_context(self, context: int) -> Protocol:
        """Return the protocol for a model with this context length in tokens.

        `max_length` replaces `length_share`, and `stride` is at most a quarter of `max_length` (128 for 512).

        Raises:
            UserError: the settings are not valid at that length.
        """
        if self.length_share is None:
            return self
        length = round(self.length_share * context)
        where = f"length_share {self.length_share:g} of a context of {context} tokens (max_length {length})"
        resolved = {"length_share": None, "max_length": length, "stride": min(self.stride, max(1, length // 4))}
        return parse_config(Protocol, {**self.model_dump(), **resolved}, where=where)

    def identity(self) -> dict[str, Any]:
        """Return the settings that enter a cell's key and that reports show, as their fields' roles say.

        `pair_truncation` is missing: `Cell.identity` adds it where it changes the cell's examples.
        """
        return self.keyed(Role.WEIGHTS, Role.TOKENS, Role.EVALUATION)

    @classmethod
    def of_result(cls, identity: Mapping[str, Any]) -> Protocol:
        """Return the protocol of a cell from the settings stored in its result (`Cell.identity`).

        Raises:
            UserError: another version wrote the result.
        """
        # A result without `pair_truncation` has the examples that `joined` gives. With the tokenizer's own special
        # tokens `joined` is not allowed, and the default is the only choice.
        before = {} if identity.get("special_tokens") == "tokenizer" else {"pair_truncation": "joined"}
        return parse_config(cls, {**before, **identity}, where="a result's protocol")

    def optimizer_weight_decay(self, learning_rate: float) -> float:
        """Return the weight decay to give torch's AdamW at this peak learning rate."""
        # torch multiplies the weight decay by the step's rate; dividing by the peak turns that into rate / peak.
        return self.weight_decay / learning_rate if self.decoupled_weight_decay else self.weight_decay

    def steps(self, examples: int) -> int:
        """Return the number of optimiser steps on a training split with this many rows."""
        limits = []
        if self.max_steps is not None:
            limits.append(self.max_steps)
        if self.epochs is not None:
            limits.append(max(1, math.ceil(self.epochs * examples / self.batch_size)))
        return min(limits)


def overridden(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a protocol's settings with some changed; a new `max_length` clears `length_share`."""
    fixed = "max_length" in changes and "length_share" not in changes
    return {**settings, **changes, **({"length_share": None} if fixed else {})}

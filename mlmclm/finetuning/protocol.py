"""How a cell is fine-tuned and evaluated: everything but the model, the task, the learning rate and the seed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from mlmclm.configuration import parse
from mlmclm.tasks.settings import TaskSettings

FIRST_FIELDS = frozenset(
    (
        "max_length", "max_train_examples", "max_evaluation_examples", "max_evaluation_documents", "pooling", "classifier",
        "head_dropout", "label_sub_tokens", "stride", "max_answer_tokens", "query_prefix", "document_prefix", "temperature",
        "symmetric", "batch_size", "max_steps", "epochs", "warmup_ratio", "adam_beta1", "adam_beta2", "adam_epsilon",
        "weight_decay", "clip_norm", "precision", "attention", "evaluation_batch_tokens",
    )
)  # fmt: skip
"""What every cell's key holds; a field that came later is in it where it differs from its default."""


class Protocol(TaskSettings):
    """Defaults are the study's (arXiv 2507.00994, released configurations) but for the precision of the weights.

    The study trains pure bfloat16 weights (`precision: bf16`), which loses small steps; the default keeps fp32 weights
    and computes in bfloat16.
    """

    batch_size: int = Field(default=32, ge=1)
    """Examples a step; pairs in retrieval, windows in question answering."""
    max_steps: int | None = Field(default=1000, ge=1)
    epochs: float | None = Field(default=None, gt=0)
    """Passes over train; with both, whichever ends first (study: one epoch for CoNLL-2003, 1,000 steps else)."""
    warmup_ratio: float = Field(default=0.1, ge=0, le=1)
    """Share of the steps over which the rate rises linearly from 0; it then falls linearly to 0."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    adam_epsilon: float = Field(default=1e-5, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    """On matrices; vectors (norms, biases) have none, as in Hugging Face's Trainer."""
    clip_norm: float | None = Field(default=1.0, gt=0)
    """Largest norm of the gradient (1.0 is Trainer's); None leaves it."""
    precision: Literal["bf16-autocast", "fp32", "bf16"] = "bf16-autocast"
    """fp32 weights and optimiser with products in bfloat16, or all in fp32; `bf16` keeps weights, gradients and
    optimiser states in bfloat16 too (study)."""
    attention: Literal["bidirectional", "causal"] = "bidirectional"
    """What a token sees: the whole sequence, or nothing behind it."""
    length_share: float | None = Field(default=None, gt=0, le=1)
    """In place of `max_length`: this share of the model's context, rounded (study: 0.99); see `at_context` and
    `models.folder.context_of`."""
    evaluation_batch_tokens: int = Field(default=4096, ge=64)
    """Tokens of an evaluation batch, which holds at least one sequence."""
    decoupled_weight_decay: bool = False
    """A step takes `weight_decay` x (its rate / the peak rate) of a weight, not x its rate: MosaicML's DecoupledAdamW, whose
    values are small (1e-6)."""

    chunk_tokens: int | None = Field(default=None, ge=64)
    """Retrieval: a step encodes so many tokens at once, and the gradients of a batch are cached (GradCache), so that its size
    costs time but no memory; None encodes a batch at once. Dropout, where a model has any, then hides something else."""

    @model_validator(mode="after")
    def _ends(self) -> Protocol:
        if self.max_steps is None and self.epochs is None:
            raise ValueError("give 'max_steps' or 'epochs'")
        return self

    def at_context(self, context: int) -> Protocol:
        """The protocol for a model of this context in tokens: `max_length` in place of `length_share`, and a `stride` of
        at most a quarter of it (128 is that of 512).

        Raises:
            UserError: the settings don't go with that length.
        """
        if self.length_share is None:
            return self
        length = round(self.length_share * context)
        where = f"length_share {self.length_share:g} of a context of {context} tokens (max_length {length})"
        settled = {"length_share": None, "max_length": length, "stride": min(self.stride, max(1, length // 4))}
        return parse(Protocol, {**self.model_dump(), **settled}, where=where)

    def identity(self) -> dict[str, Any]:
        """Return the settings that a cell's key holds and reports show, but for `pair_truncation`, which is in a cell's key where it changes its
        examples (`Cell.identity`)."""
        defaults = type(self).model_construct().model_dump(mode="json")
        values = self.model_dump(mode="json", exclude={"pair_truncation"})
        return {name: value for name, value in values.items() if name in FIRST_FIELDS or value != defaults[name]}

    @classmethod
    def of_result(cls, identity: Mapping[str, Any]) -> Protocol:
        """The protocol of a cell, from what its result holds of it (`Cell.identity`).

        Raises:
            UserError: another version wrote it.
        """
        before = {} if identity.get("special_tokens") == "tokenizer" else {"pair_truncation": "joined"}
        return parse(cls, {**before, **identity}, where="a result's protocol")

    def optimizer_weight_decay(self, learning_rate: float) -> float:
        """What torch's AdamW, which multiplies it by a step's rate, is given at this peak rate."""
        return self.weight_decay / learning_rate if self.decoupled_weight_decay else self.weight_decay

    def steps(self, examples: int) -> int:
        """Optimiser steps on a training split of so many rows."""
        limits = []
        if self.max_steps is not None:
            limits.append(self.max_steps)
        if self.epochs is not None:
            limits.append(max(1, math.ceil(self.epochs * examples / self.batch_size)))
        return min(limits)


def overridden(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a protocol with some changed; a `max_length` takes the place of a `length_share`."""
    fixed = "max_length" in changes and "length_share" not in changes
    return {**settings, **changes, **({"length_share": None} if fixed else {})}


def learning_rate_at(peak: float, step: int, steps: int, warmup_ratio: float) -> float:
    """The rate of step `step` (from 0): linear rise over the first `ceil(warmup_ratio * steps)`, linear fall to 0.

    As transformers' linear schedule, except that the first step's rate is not 0, so that no step is wasted.
    """
    warmup = math.ceil(warmup_ratio * steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (steps - step) / max(1, steps - warmup)

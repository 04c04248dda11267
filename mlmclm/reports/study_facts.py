"""What a report says beside the results: facts of the study, filled in by whoever ran it.

Nothing here but `StudyFacts.provenance` may differ between two runs of the same study (no date, duration, host or path), so that
the rest of the report's bytes don't.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mlmclm.seeds import Seed

Kind = Literal["pretrained", "continued", "untrained", "external"]
Value = str | int | float | bool | None


@dataclass(frozen=True)
class ModelFacts:
    """One model and how it was pretrained.

    Attributes:
        name: as in the results.
        kind: "pretrained" here from nothing, "continued" from given weights, "untrained" (initialisation only), or
            "external" (taken as it is).
        description: one sentence: what it is.
        stages: the plan, one text a stage, such as "CLM, steps 0 to 150".
        parameters: their number, without the language-model head.
        steps: optimiser steps of all stages.
        tokens: tokens seen in all stages.
        flops: estimated floating-point operations of all stages.
        validation_loss: of the last stage at its end, in nats a predicted token.
        curve: training loss as (step, nats a predicted token), steps counted over all stages.
        validation_curve: validation loss, the same way.
        switches: steps at which the objective changes; losses on either side don't compare.
    """

    name: str
    kind: Kind
    description: str = ""
    stages: tuple[str, ...] = ()
    parameters: int | None = None
    steps: int | None = None
    tokens: int | None = None
    flops: float | None = None
    validation_loss: float | None = None
    curve: tuple[tuple[int, float], ...] = ()
    validation_curve: tuple[tuple[int, float], ...] = ()
    switches: tuple[int, ...] = ()


@dataclass(frozen=True)
class TaskFacts:
    """One task.

    Attributes:
        name: as in the results.
        title: for people.
        family: the name of its family (`mlmclm.tasks.family`).
        metric: the main one, as in the results.
        sizes: examples by split, in the order to show.
        source: where the data come from, with licence where known.
    """

    name: str
    title: str
    family: str
    metric: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    source: str = ""


@dataclass(frozen=True)
class StudyFacts:
    """A study.

    Attributes:
        name: of the study.
        command: that runs it again, as typed.
        models: in the order to show.
        tasks: in the order to show.
        learning_rates, seeds: the grid of fine-tuning.
        baseline: name of the untrained model, or None.
        corpus: label to value, in the order to show: source, documents, tokens, tokenizer.
        recipe: pretraining's settings shared by all models, the same way.
        protocol: fine-tuning's settings, the same way.
        provenance: when, on what, with which software and data, at what cost (`reports.provenance`).
        question: what the study asks, as one sentence below the title.
    """

    name: str
    command: str
    models: tuple[ModelFacts, ...]
    tasks: tuple[TaskFacts, ...]
    learning_rates: tuple[float, ...]
    seeds: tuple[Seed, ...]
    baseline: str | None = None
    corpus: Mapping[str, Value] = field(default_factory=dict)
    recipe: Mapping[str, Value] = field(default_factory=dict)
    protocol: Mapping[str, Value] = field(default_factory=dict)
    provenance: Mapping[str, str] = field(default_factory=dict)
    question: str = "How should this text encoder be pretrained, and how surely do we know?"

"""Facts of a study that a report shows besides the results, filled in by whoever ran it.

Only `StudyFacts.provenance` may differ between two runs of the same study (no date, duration, host or path elsewhere),
so that the rest of the report is byte-identical.
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
    """A model and how it was pretrained.

    Attributes:
        name: as in the results.
        kind: "pretrained" here from scratch, "continued" from given weights, "untrained" (initialisation only), or
            "external" (used as it is).
        description: what it is, in one sentence.
        stages: the plan, one text per stage, such as "CLM, steps 0 to 150".
        parameters: the number of parameters, without the language-model head.
        steps: optimiser steps of all stages.
        tokens: tokens seen in all stages.
        flops: estimated floating-point operations of all stages.
        validation_loss: at the end of the last stage, in nats per predicted token.
        curve: training loss as (step, nats per predicted token), with steps counted over all stages.
        validation_curve: validation loss in the same form.
        switches: steps at which the objective changes; losses before and after are not comparable.
        size: the word for its architecture with which its name begins.
        made: how it was made as one of a pair (`pairs.MADE`), or "" if it is none.
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
    size: str = ""
    made: str = ""


@dataclass(frozen=True)
class TaskFacts:
    """A task.

    Attributes:
        name: as in the results.
        title: the name for people.
        family: the name of its family (`mlmclm.tasks.family`).
        metric: the main metric, as in the results.
        sizes: examples by split, in display order.
        source: where the data come from, with the licence if known.
    """

    name: str
    title: str
    family: str
    metric: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    source: str = ""


@dataclass(frozen=True)
class ZeroShotFacts:
    """The result of a model on a task that it answers without training.

    Attributes:
        model, task: their names.
        scoring: how tokens are predicted (docs/evaluation.md).
        main: the metric that stands for the task.
        metrics: `score`, `low`, `high` and `examples` of every metric; the ends may be None.
        values: the main metric's value of each example, in the same order for all models; empty if there are none.
    """

    model: str
    task: str
    scoring: str
    main: str
    metrics: Mapping[str, Mapping[str, float | None]]
    values: tuple[float, ...] = ()


@dataclass(frozen=True)
class StudyFacts:
    """A study.

    Attributes:
        name: the study's name.
        command: the command that runs it again, as typed.
        models: in display order.
        tasks: in display order.
        learning_rates, seeds: the fine-tuning grid.
        baseline: the name of the untrained model, or None.
        corpus: label to value, in display order: source, documents, tokens, tokenizer.
        recipe: pretraining settings shared by all models, in the same form.
        protocol: fine-tuning settings, in the same form.
        provenance: when, on what, with which software and data, and at what cost (`reports.provenance`).
        question: what the study asks, as one sentence below the title.
        zero_shot: results without training, by model and then by task, in display order.
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
    zero_shot: tuple[ZeroShotFacts, ...] = ()

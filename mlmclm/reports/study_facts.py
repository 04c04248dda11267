"""Facts of a study that a report shows besides the results, filled in by whoever ran it.

Only `StudyFacts.provenance`, the links in `StudyFacts.pages` and the times in `StudyFacts.basis` may differ between two runs of the same study (no date,
duration, host or path elsewhere), so that the rest of the report is byte-identical.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

from mlmclm.analysis.claim import SourcedClaim
from mlmclm.reports.provenance import NO_BASIS, Basis

Kind = Literal["pretrained", "continued", "untrained", "external"]
"""Origin of a model's weights: pretrained by the study from scratch or from given weights, initialised only, or from elsewhere."""
Value = str | int | float | bool | None
ENCODER, DECODER = "encoder", "decoder"
MADE = (ENCODER, DECODER, "encoder from decoder", "decoder from encoder")
"""Ways to make a model: with masked objectives, with causal ones, with causal and then masked ones, or the reverse."""
WAYS = {(False,): ENCODER, (True,): DECODER, (True, False): MADE[2], (False, True): MADE[3]}
"""The way by a model's sequence of objectives; True is a causal one."""


@dataclass(frozen=True)
class PhaseFacts:
    """Steps of pretraining under one objective."""

    objective: str  # as in model names: `clm`, `mlm40`
    kind: str  # the letters of the objective: `clm`, `mlm`
    causal: bool
    steps: int
    hidden_share: float | None = None  # the mask ratio; None for an objective that masks no tokens
    decayed: bool = False  # whether it ends with its learning-rate decay although another phase follows


@dataclass(frozen=True)
class Continuation:
    """Pretraining that goes on from weights that were finished: given ones, or those at the end of a decay."""

    base: str  # the name of the model with these weights
    start: str  # how these weights were pretrained, or where they are from: `CLM`, `MLM40`, a given model's size
    objective: str  # of the steps from these weights on: `MLM40`
    steps: int  # from these weights on


@dataclass(frozen=True)
class ModelFacts:
    """A model and how it was pretrained; steps, tokens and operations are counted over all stages."""

    name: str
    kind: Kind
    description: str = ""  # in one sentence
    stages: tuple[str, ...] = ()  # the plan, such as "CLM, steps 0 to 150"
    parameters: int | None = None  # without the language-model head
    steps: int | None = None
    tokens: int | None = None
    flops: float | None = None  # estimated
    validation_loss: float | None = None  # at the end of the last stage, in nats per predicted token
    curve: tuple[tuple[int, float], ...] = ()  # training loss: (step, nats per predicted token)
    validation_curve: tuple[tuple[int, float], ...] = ()
    switches: tuple[int, ...] = ()  # steps at which the objective changes; losses before and after are not comparable
    size: str = ""  # the first part of its name, which selects the architecture
    phases: tuple[PhaseFacts, ...] = ()  # in order, as far as trained; empty if how it was pretrained is not known
    continued: Continuation | None = None  # None if it was trained in one go
    since: tuple[PhaseFacts, ...] = ()  # the phases from given weights on; `phases` is then empty
    finished: str = ""  # for an intermediate checkpoint, the name of the final model of its run

    @property
    def made(self) -> str:
        """How it was made, one of `MADE`; "" if its objectives change more often, or are not known."""
        return WAYS.get(tuple(causal for causal, _ in groupby(phase.causal for phase in self.phases)), "")

    @property
    def objective(self) -> str:
        """Its objectives in order, as figures group models: `MLM`, `CLM then MLM`; "" if they are not known."""
        if self.kind == "untrained":
            return "untrained"
        return " then ".join(kind.upper() for kind, _ in groupby(phase.kind for phase in self.phases))


@dataclass(frozen=True)
class TaskFacts:
    """A task; `name` and `metric`, the main one, are as in the results."""

    name: str
    title: str
    family: str
    metric: str
    sizes: Mapping[str, int] = field(default_factory=dict)  # examples by split, in display order
    source: str = ""  # of the data, with the licence if known


@dataclass(frozen=True)
class ZeroShotFacts:
    """The result of a model on a task that it answers without training."""

    model: str
    task: str
    scoring: str  # how tokens are predicted (docs/evaluation.md)
    main: str  # the main metric of the task
    metrics: Mapping[
        str, Mapping[str, int | float | str | None]
    ]  # `score`, its interval, `chance`, `chance_how` and `examples`; any may be None
    values: tuple[float, ...] = ()  # values of the main metric by example, in the same order for all models, if known

    def entry(self, metric: str) -> Mapping[str, Any]:
        """Return what is known of a metric."""
        return self.metrics[metric]


@dataclass(frozen=True)
class RecordedRuns:
    """The places in MLflow of the runs behind a report's numbers."""

    how: str  # sentences on how to find the runs
    search: str  # the filter that finds the runs of a MODEL on a TASK
    pages: Mapping[tuple[str, str], str] = field(default_factory=dict)  # addresses by (model, task), and (model, "")


@dataclass(frozen=True)
class StudyFacts:
    """A study; models, tasks, and labels with their values are in display order."""

    name: str
    command: str  # the command that runs the study again, as typed
    models: tuple[ModelFacts, ...]
    tasks: tuple[TaskFacts, ...]
    corpus: Mapping[str, Value] = field(default_factory=dict)  # source, documents, tokens, tokenizer
    recipe: Mapping[str, Value] = field(default_factory=dict)  # pretraining settings shared by all models
    protocol: Mapping[str, Value] = field(default_factory=dict)  # fine-tuning settings
    provenance: Mapping[str, str] = field(default_factory=dict)  # from `reports.provenance`
    question: str = "How should this text encoder be pretrained, and how sure can we be?"  # below the title
    zero_shot: tuple[ZeroShotFacts, ...] = ()  # by model and then by task
    recorded: RecordedRuns | None = None
    pages: Mapping[str, str] = field(default_factory=dict)  # addresses of live pages of the study, by name
    basis: Basis = NO_BASIS  # what advice needs: what the cells have cost, what they are based on, how to ask for more
    claims: tuple[SourcedClaim, ...] = ()  # the claims that the report tests

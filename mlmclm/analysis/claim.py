"""Claims as files: sentences about models and tasks that a study can test, each with its source.

A file holds the claims of one paper, or of a user. A claim compares two sets of models, `first` and `second`, in pairs that share
the features listed in `alike`. docs/claims.md describes the keys with examples; `reports.claim_pairs` finds the pairs, and
`reports.tested_claims` says what the results show.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from mlmclm.configuration import Frozen, Role, described_as
from mlmclm.errors import unknown
from mlmclm.registry import KINDS

Made = Literal["encoder", "decoder", "encoder from decoder", "decoder from encoder"]
"""How a model was made: by masked objectives, by causal ones, by causal ones first, or by masked ones first."""
Feature = Literal["size", "steps", "tokens", "mask", "objective", "made", "clm_share", "steps_before"]
"""Features that a claim can require both models of a pair to share. `steps_before`: the steps before the last change between
masked and causal objectives, or before the last decay of the learning rate that training went on from."""
Statistic = Literal["score", "sensitivity", "zero_shot", "same_data"]
THEN = " then "


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _span(value: Any) -> Any:
    """Return a number as the range from it to itself, or a range as it is; raise a `ValueError` for anything else."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return [value, value]
    if isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(end, int | float) for end in value):
        if not value[0] <= value[1]:
            raise ValueError("a range is [lowest, highest]")
        return value
    raise ValueError("expected a number, or a range [lowest, highest]")


def _known(kind: str, values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        if value not in KINDS[kind]:
            raise ValueError(str(unknown(kind, value, KINDS[kind])).rstrip("."))
    return values


def _objectives(values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        _known("objective", tuple(value.split(THEN)))
    return values


def _features(value: tuple[str, ...]) -> tuple[str, ...]:
    for entry in value:
        for name in (part.strip() for part in entry.split("=", 1)):
            if name not in get_args(Feature):
                raise ValueError(str(unknown("feature", name, get_args(Feature))).rstrip("."))
    return value


Names = Annotated[tuple[str, ...], described_as(str | tuple[str, ...]), BeforeValidator(_listed), Field(min_length=1)]
Span = Annotated[tuple[float, float], described_as(float | tuple[float, float]), BeforeValidator(_span)]


def within_span(value: float | None, span: tuple[float, float] | None) -> bool:
    """Return whether a value is in a range; True without a range, and False for an unknown value (None)."""
    return span is None or (value is not None and span[0] <= value <= span[1])


class ModelQuery(Frozen):
    """Models by how they were pretrained; a key that is left out allows everything."""

    objective: Annotated[Annotated[Names, AfterValidator(_objectives)] | None, Role.DISPLAY] = None
    """Objectives in order, without mask ratios, such as `mlm` or `clm then mlm`; or a list of such."""
    made: Annotated[
        Annotated[tuple[Made, ...], described_as(Made | tuple[Made, ...]), BeforeValidator(_listed)] | None,
        Role.DISPLAY,
    ] = None
    """How the model was made: `encoder`, `decoder`, `encoder from decoder` or `decoder from encoder`; or a list of such."""
    size: Annotated[Names | None, Role.DISPLAY] = None
    """Sizes, as at the beginning of models' names."""
    clm_share: Annotated[Span | None, Role.DISPLAY] = None
    """Share of the steps that are causal, in per cent: a number or a range."""
    mask: Annotated[Span | None, Role.DISPLAY] = None
    """Mask ratio of the last objective, in per cent: a number or a range."""
    steps: Annotated[Span | None, Role.DISPLAY] = None
    """Optimiser steps: a number or a range."""
    tokens: Annotated[Span | None, Role.DISPLAY] = None
    """Tokens seen: a number or a range."""
    decayed: Annotated[bool | None, Role.DISPLAY] = False
    """Whether the model goes on from one whose learning rate had decayed (`dec` in names); null for either."""
    given: Annotated[bool | None, Role.DISPLAY] = False
    """Whether the model goes on from given weights (`initial` of a study); if so, all other keys describe the training
    since then. null for either."""


class TaskQuery(Frozen):
    """Tasks by family or name; without any key, all tasks of the study."""

    families: Annotated[
        Annotated[Names, AfterValidator(lambda names: _known("family", names))] | None, Role.DISPLAY
    ] = None
    """Families of tasks, such as `retrieval`."""
    names: Annotated[Names | None, Role.DISPLAY] = None
    """Names of tasks. For the statistic `zero_shot` they are those of the evaluations."""


class Than(Frozen):
    """The second comparison of a claim that compares two differences; keys that are left out are those of the claim."""

    first: Annotated[ModelQuery | None, Role.DISPLAY] = None
    """The first models of its pairs."""
    second: Annotated[ModelQuery | None, Role.DISPLAY] = None
    """The second models of its pairs."""
    tasks: Annotated[TaskQuery | None, Role.DISPLAY] = None
    """Its tasks."""
    budgets: Annotated[Span | None, Role.DISPLAY] = None
    """Its budgets."""


class Claim(Frozen):
    """A claim about models."""

    says: Annotated[str, Role.DISPLAY] = Field(min_length=1)
    """The claim in a sentence."""
    where: Annotated[str, Role.DISPLAY] = ""
    """Section, figure or table of the source."""
    statistic: Annotated[Statistic, Role.DISPLAY] = "score"
    """`score`: test score after fine-tuning; `sensitivity`: deviation over learning rates; `zero_shot`: a metric without training;
    `same_data`: whether pairs saw the same tokens in the same order."""
    metric: Annotated[str | None, Role.DISPLAY] = None
    """The metric of a zero-shot task; by default its main one."""
    first: Annotated[ModelQuery, Role.DISPLAY]
    """The models that the claim is about."""
    second: Annotated[ModelQuery, Role.DISPLAY]
    """The models that the first ones are compared with."""
    alike: Annotated[
        Annotated[tuple[str, ...], described_as(tuple[str, ...]), BeforeValidator(_listed), AfterValidator(_features)],
        Role.DISPLAY,
    ] = ("size", "steps")
    """Features that both models of a pair share; `steps = steps_before` compares the first's steps with the second's steps_before."""
    budgets: Annotated[Span, Role.DISPLAY] = (0.0, 100.0)
    """Steps of a pair, in per cent of the steps of the study's longest such pair of the same size: a number or a range."""
    tasks: Annotated[TaskQuery, Role.DISPLAY] = TaskQuery()
    """The tasks that the claim is about."""
    direction: Annotated[Literal["higher", "lower", "differs"], Role.DISPLAY] = "higher"
    """Whether the first models' statistic is higher or lower than the second's, or only different from it."""
    than: Annotated[Than | None, Role.DISPLAY] = None
    """A second comparison, whose difference is smaller than the claim's (if `direction` is `higher`), larger (`lower`), or another (`differs`)."""
    published: Annotated[float | None, Role.DISPLAY] = None
    """The published difference, first minus second, in points."""
    published_for: Annotated[str, Role.DISPLAY] = ""
    """Models and tasks of the published difference."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.than is not None and self.statistic != "score":
            raise ValueError(f"than: it is for the statistic score, not {self.statistic}")
        if self.metric is not None and self.statistic != "zero_shot":
            raise ValueError(f"metric: it is for the statistic zero_shot, not {self.statistic}")
        if self.published is not None and self.direction != "differs":
            right = self.published > 0 if self.direction == "higher" else self.published < 0
            if not right:
                raise ValueError(f"published: {self.published:g} is not a difference that is {self.direction}")
        return self


class ClaimFile(Frozen):
    """A file of claims; Holm's correction is over all claims that are tested together (`reports.tested_claims`)."""

    source: Annotated[str, Role.DISPLAY] = Field(min_length=1)
    """The paper or the person that makes the claims."""
    claims: Annotated[Mapping[str, Claim], Role.DISPLAY] = Field(min_length=1)
    """The claims by name."""

    @field_validator("claims")
    @classmethod
    def _plain(cls, value: Mapping[str, Claim]) -> Mapping[str, Claim]:
        for name in value:
            if not name or not all(letter.isalnum() or letter in "-._" for letter in name):
                raise ValueError(f"{name!r}: a claim's name is letters, digits, '.', '_' and '-'")
        return value


class SourcedClaim(NamedTuple):
    """A claim with its name and source."""

    name: str
    source: str
    claim: Claim

    @property
    def cited(self) -> str:
        """The source of the claim, with the place in it."""
        return ", ".join(filter(None, (self.source, self.claim.where)))

    @property
    def published(self) -> float:
        """The published difference as a fraction of 1; NaN if there is none."""
        return math.nan if self.claim.published is None else self.claim.published / 100

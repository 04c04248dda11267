"""The interface of a pretraining objective, and the lookup of objectives by name.

An objective is one class in its own file in this folder, in another package, or in a notebook (`mlmclm.registry`); nothing
else needs to name it. It defines its spelling in model names, which tokens a step predicts and from what, and whether
attention is causal or bidirectional.

The prediction is the LM head's, over the vocabulary. An objective with a head or a second model of its own, such as
ELECTRA's generator, does not fit this interface.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray

from mlmclm.errors import UserError, unknown
from mlmclm.registry import KINDS, Registry

if TYPE_CHECKING:
    from mlmclm.corpora.tokenizer import Vocabulary
    from mlmclm.objectives.corruption import Corruption

UNLABELLED = -100
"""Label of a position without a prediction (the default `ignore_index` of `torch.nn.functional.cross_entropy`)."""


@dataclass(frozen=True)
class Masking:
    """Everything that labels may depend on besides the tokens. None of it depends on which worker computes a row.

    Attributes:
        rows: int64 [b], each row's index within the step's global batch.
        step: optimiser steps taken before this one.
        seed: the recipe's seed.
        vocabulary: the vocabulary of the corpus's tokenizer.
        corruption: how hidden tokens are corrupted.
        separator: the token that ends each document if documents are isolated, else None; it predicts nothing.
    """

    rows: NDArray[np.int64]
    step: int
    seed: int
    vocabulary: Vocabulary
    corruption: Corruption
    separator: int | None = None

    def one_earlier(self, targets: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return labels that predict each target at the position before it.

        If documents are isolated, a document's first token is not predicted: the position before it belongs to another
        document.

        Args:
            targets: labels at the tokens' own positions, int64 [b, length].
            tokens: int64 [b, length].
        """
        labels = np.full_like(targets, UNLABELLED)
        labels[:, :-1] = targets[:, 1:]
        if self.separator is not None:
            labels[tokens == self.separator] = UNLABELLED
        return labels


class Objective(ABC):
    """Rule for which tokens a step predicts, and from what. Objectives with equal names are equal.

    Class attributes:
        name: the letters that its names begin with: `mlm` of `mlm40`.
        causal: whether a position attends to earlier positions only.
        predicts_one_earlier: whether a hidden token is predicted at the position before it.
        masks: whether the tokenizer needs a mask token.
        loss_weight: the field of `recipe.loss_weights` that multiplies its gradient; None for no such factor.
        examples: names to suggest when an unknown one is asked for.
    """

    name: ClassVar[str]
    causal: ClassVar[bool]
    predicts_one_earlier: ClassVar[bool] = False
    masks: ClassVar[bool]
    loss_weight: ClassVar[Literal["clm", "mlm"] | None] = None
    examples: ClassVar[tuple[str, ...]]

    @classmethod
    @abstractmethod
    def parse(cls, text: str) -> Self | None:
        """Return the objective with this name, or None if the name does not belong to this class.

        Raises:
            ValueError: if a number in the name is out of range; the message gives the number and the range.
        """

    @abstractmethod
    def __str__(self) -> str:
        """Return the spelling used in model names: letters and digits."""

    @property
    def identity(self) -> str:
        """The objective's entry in a state's key: its spelling, then @CODE unless it is built in (`Registry.keyed`)."""
        return str(self) + OBJECTIVES.keyed(self.name).removeprefix(self.name)

    @property
    @abstractmethod
    def words(self) -> str:
        """The name used in reports and model cards."""

    @property
    def hidden_share(self) -> float | None:
        """Expected share of tokens that are hidden; None if the objective hides none."""
        return None

    @abstractmethod
    def label(self, tokens: NDArray[np.int64], masking: Masking) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the inputs and labels for some rows.

        Args:
            tokens: int64 [b, length].

        Returns:
            input_ids and labels, int64 [b, length]. A label is stored at the position whose output predicts it.
            Positions that predict nothing have the label `UNLABELLED`.
        """

    @abstractmethod
    def labelled_share(self, length: int, documents: int) -> float:
        """Return the expected share of tokens that are predicted; special tokens count like any other.

        Args:
            length: tokens in the context.
            documents: number of isolated documents that the context holds.
        """


OBJECTIVES: Registry[type[Objective]] = KINDS["objective"]
"""The objectives, by the letters that their names begin with."""


def parse_objective(text: str, *, where: str) -> Objective:
    """Return the objective with this name.

    Raises:
        UserError: if there is no such objective or its number is out of range; the message starts with `where`.
    """
    for kind in OBJECTIVES.values():
        try:
            objective = kind.parse(text)
        except ValueError as error:
            raise UserError(f"{where}: {error}") from error
        if objective is not None:
            return objective
    raise unknown("objective", text, [name for kind in OBJECTIVES.values() for name in kind.examples], where=where)

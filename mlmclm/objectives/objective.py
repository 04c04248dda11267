"""The interface of a pretraining objective, and the objectives that there are by their names.

An objective is one class in a file of its own in this folder; nothing else names it. It says how it is written in models' names,
which tokens a step predicts from what, and in which direction tokens see each other. Everything else asks it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray

from mlmclm.discovery import classes_in
from mlmclm.errors import UserError, unknown

if TYPE_CHECKING:
    from mlmclm.corpora.tokenizer import Vocabulary
    from mlmclm.objectives.corruption import Corruption

UNLABELLED = -100
"""The label of a position without a prediction (`torch.nn.functional.cross_entropy`'s default)."""


@dataclass(frozen=True)
class Draw:
    """All besides the tokens that labels may depend on; the same on every worker.

    Attributes:
        rows: int64 [b], each row's index within the step's global batch.
        step: optimiser steps taken before this one.
        seed: of the recipe.
        vocabulary: of the corpus's tokenizer.
        corruption: what becomes of hidden tokens.
        separator: the token that a document ends with, where documents are isolated; it predicts nothing.
    """

    rows: NDArray[np.int64]
    step: int
    seed: int
    vocabulary: Vocabulary
    corruption: Corruption
    separator: int | None = None

    def one_earlier(self, targets: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Labels that predict each target at the position before it: int64 [b, length] of both arguments.

        A document's first token has no position before it that sees the document, where documents are isolated.
        """
        labels = np.full_like(targets, UNLABELLED)
        labels[:, :-1] = targets[:, 1:]
        if self.separator is not None:
            labels[tokens == self.separator] = UNLABELLED
        return labels


class Objective(ABC):
    """The loss of a step. Objectives with equal names are equal.

    Class attributes:
        causal: whether a position sees earlier positions only.
        masks: whether the tokenizer needs a mask token.
        loss_weight: the field of `recipe.loss_weights` that its gradient is multiplied by.
        examples: names to show where an unknown one is asked for.
    """

    causal: ClassVar[bool]
    masks: ClassVar[bool]
    loss_weight: ClassVar[Literal["clm", "mlm"]]
    examples: ClassVar[tuple[str, ...]]

    @classmethod
    @abstractmethod
    def parse(cls, text: str) -> Self | None:
        """The objective of a name, None where the name is not one of this class.

        Raises:
            ValueError: a number in it is outside what is allowed; the message says both.
        """

    @abstractmethod
    def __str__(self) -> str:
        """The name in models' names: letters and digits."""

    @property
    @abstractmethod
    def words(self) -> str:
        """Its name in reports and model cards."""

    @abstractmethod
    def label(self, tokens: NDArray[np.int64], draw: Draw) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Inputs and labels of some rows.

        Args:
            tokens: int64 [b, length].

        Returns:
            input_ids and labels, int64 [b, length]. A label stands at the position whose output predicts it, and is
            `UNLABELLED` where there is none.
        """

    @abstractmethod
    def labelled_share(self, length: int, documents: int) -> float:
        """The share of tokens that are predicted, on average, in a context of so many tokens that holds so many documents that
        don't see each other; special tokens count as any other."""


@cache
def objectives() -> tuple[type[Objective], ...]:
    """All objectives: of every file in this folder, in the order of the files' names."""
    return tuple(
        kind for kind in classes_in("mlmclm.objectives") if issubclass(kind, Objective) and kind is not Objective
    )


def parse_objective(text: str, *, where: str) -> Objective:
    """The objective of a name.

    Raises:
        UserError: there is none of that name, or its number is outside what is allowed; the message starts with `where`.
    """
    for kind in objectives():
        try:
            found = kind.parse(text)
        except ValueError as error:
            raise UserError(f"{where}: {error}") from error
        if found is not None:
            return found
    raise unknown("objective", text, [name for kind in objectives() for name in kind.examples], where=where)

"""Collator: an objective with its settings, which turns rows of tokens into inputs and labels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mlmclm.corpora.tokenizer import Vocabulary, special_ids
from mlmclm.objectives.corruption import Corruption
from mlmclm.objectives.objective import Masking, Objective
from mlmclm.plans.recipe import Recipe


@dataclass(frozen=True)
class Collator:
    """An objective with its settings. It gives a row the same labels on any worker."""

    objective: Objective
    vocabulary: Vocabulary
    corruption: Corruption
    seed: int
    separator: int | None = None
    """The token that ends each document if documents are isolated (see `separator`), else None. It predicts nothing."""

    def __call__(
        self, tokens: npt.NDArray[np.int64], *, rows: npt.NDArray[np.int64], step: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the inputs and labels for some rows of a step's global batch (see `Objective.label` and `Masking`)."""
        masking = Masking(rows, step, self.seed, self.vocabulary, self.corruption, self.separator)
        return self.objective.label(tokens, masking)


def separator(recipe: Recipe, tokenizer: Path) -> int | None:
    """Return the token that ends each document, or chunk of one, if the recipe isolates them; else None."""
    return special_ids(tokenizer)["eos"] if recipe.isolates else None

"""From rows of tokens to inputs and labels, by an objective with all that it draws from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mlmclm.corpora.tokenizer import Vocabulary, special_ids
from mlmclm.objectives.corruption import Corruption
from mlmclm.objectives.objective import Draw, Objective
from mlmclm.plans.recipe import Recipe


@dataclass(frozen=True)
class Labelling:
    """How an objective labels tokens; the same object on every worker gives the same labels."""

    objective: Objective
    vocabulary: Vocabulary
    corruption: Corruption
    seed: int
    separator: int | None = None
    """The token that a document ends with, where documents are isolated (`separator`): it predicts nothing."""

    def __call__(
        self, tokens: npt.NDArray[np.int64], *, rows: npt.NDArray[np.int64], step: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Inputs and labels of some rows of step `step`'s global batch.

        Args:
            tokens: [rows, length].
            rows: [rows], each row's index within the global batch.

        Returns:
            input_ids and labels, int64 [rows, length]; a label belongs to the position whose output predicts it (for CLM
            position t is labelled with token t + 1), and is -100 where there is none.
        """
        draw = Draw(rows, step, self.seed, self.vocabulary, self.corruption, self.separator)
        return self.objective.label(tokens, draw)


def separator(recipe: Recipe, tokenizer: Path) -> int | None:
    """The token that each document of a corpus ends with, if the recipe isolates documents.

    Args:
        tokenizer: the prepared tokenizer's folder.
    """
    return special_ids(tokenizer)["eos"] if recipe.isolate_documents else None

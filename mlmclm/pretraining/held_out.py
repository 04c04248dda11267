"""The losses of a model on held-out documents, under an objective, as the validation of a stage computes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from mlmclm.corpora.blocks import Blocks
from mlmclm.corpora.tokenizer import special_ids, vocabulary
from mlmclm.models.build import PretrainingModel
from mlmclm.models.given import read_initial
from mlmclm.objectives.objective import UNLABELLED, Objective
from mlmclm.plans.recipe import Recipe
from mlmclm.pretraining.labelling import Labelling
from mlmclm.pretraining.worker import VALIDATION_STEP
from mlmclm.results.document_losses import DocumentLosses


def document_losses(
    model: Path,
    blocks: Blocks,
    recipe: Recipe,
    objective: Objective,
    tokenizer: Path,
    *,
    observe: Callable[[int], None] = lambda _: None,
) -> DocumentLosses:
    """Return a model's loss on each document of the first `recipe.evaluation_blocks` blocks.

    The blocks, their hidden tokens and the precision are those of a validation in training, so the mean loss is the
    validation loss that the last step of a model's training has recorded.

    Args:
        model: an exported model's folder.
        blocks: of a corpus's validation part, packed end to end.
        tokenizer: the corpus's.
        observe: called with the number of blocks that are done.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    engine = PretrainingModel(read_initial(model).model().eval(), precision=recipe.precision).to(device)
    end, count = special_ids(tokenizer)["eos"], min(recipe.evaluation_blocks, len(blocks))
    label = Labelling(objective, vocabulary(tokenizer), recipe.corruption, recipe.seeds.masks)
    every = blocks.take(np.arange(count))  # [count, length]
    ends = (every == end).ravel()
    # The end of a document is part of it.
    owners = (np.cumsum(ends) - ends).reshape(every.shape)
    sums, tokens = np.zeros(owners.max() + 1), np.zeros(owners.max() + 1, dtype=np.int64)
    for row in range(count):
        input_ids, labels = label(every[row : row + 1], rows=np.array([row]), step=VALIDATION_STEP)
        own, predicted = owners[row : row + 1], labels != UNLABELLED
        if predicted.any():
            owned, given, wanted = (torch.from_numpy(part).to(device) for part in (own, input_ids, labels))
            for document, loss in engine.sums_by(owned, given, wanted, objective.causal).items():
                sums[document] += loss
        np.add.at(tokens, own[predicted], 1)
        observe(row + 1)
    seen = tokens > 0
    return DocumentLosses(sums[seen], tokens[seen])

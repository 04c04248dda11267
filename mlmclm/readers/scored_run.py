"""Scores of one run, example by example, as readers return them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mlmclm.results.measures import Array


@dataclass(frozen=True)
class ScoredRun:
    """The scores of one run on the examples of one task.

    Attributes:
        run: the name of the model, or of whatever was run.
        task: the name of the task; empty if the format has none.
        metric: the name of the score.
        examples: the examples' names, each once.
        scores: [n], in the same order; finite unless there is a `fault`.
        contents: what distinguishes examples of one name, such as a hash of the text, in the same order; empty if the format
            has nothing of the kind.
        seed: the seed of the run; empty if it is not known.
        learning_rate, validation: the learning rate and validation score of a run in a grid; None for other runs.
        groups: the group of each example, such as its document, in the same order; empty if the examples are independent.
        fault: what is wrong with the scores, for a message that names the place; empty if nothing is. Other metrics of the
            same file may be fine.
    """

    run: str
    task: str
    metric: str
    examples: Sequence[str]
    scores: Array
    contents: Sequence[str] = ()
    seed: str = ""
    learning_rate: float | None = None
    validation: float | None = None
    fault: str = ""
    groups: Sequence[str] = ()

    @property
    def place(self) -> tuple[str, str, str, str, float | None]:
        """The key of a run's scores among all that are read."""
        return self.run, self.task, self.metric, self.seed, self.learning_rate

    @property
    def identities(self) -> list[tuple[str, str]]:
        """The name of each example, and its content, which distinguishes examples of one name."""
        contents = self.contents or [""] * len(self.examples)
        return list(zip(self.examples, contents, strict=True))

    def only(self, identities: Sequence[tuple[str, str]]) -> ScoredRun:
        """Return the scores of some examples, in the given order."""
        positions = {identity: place for place, identity in enumerate(self.identities)}
        scores = np.asarray([self.scores[positions[identity]] for identity in identities])
        names, contents = [name for name, _ in identities], [content for _, content in identities]
        groups = [self.groups[positions[identity]] for identity in identities] if self.groups else ()
        return replace(self, examples=names, scores=scores, contents=contents, groups=groups)

"""Base of all readers of other tools' files, what they return, and the choice of the reader of a file or folder."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mlmclm.errors import UserError, clipped, meant_path
from mlmclm.registry import KINDS, Registry
from mlmclm.results.examples import SCORES, KeptExamples
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


class Reader(ABC):
    """A reader of one format; a subclass in a file of this folder is found by its `name` (`mlmclm.registry`)."""

    name: ClassVar[str]
    title: ClassVar[str]
    """The format's name in messages."""
    unit: ClassVar[str] = "example"
    """The unit that has a score, over which runs are paired."""
    told_by: ClassVar[str] = "contents"
    """The keys of the format that `ScoredRun.contents` is read from, as named in messages."""
    last: ClassVar[bool] = False
    """Whether `reader_of` asks this reader after all others."""

    @abstractmethod
    def recognises(self, path: Path) -> bool:
        """Return whether a file or folder that exists looks like this format; it is not checked for errors."""

    @abstractmethod
    def runs(self, path: Path, only: Collection[str] | None = None) -> list[ScoredRun]:
        """Read the scores example by example.

        Args:
            only: names of runs; the scores of others may be left out to save time. None for all.

        Raises:
            UserError: the files are malformed; the message names file, line and key.
        """

    def names(self, path: Path) -> list[str]:
        """Return the names of the runs."""
        return list(dict.fromkeys(run.run for run in self.runs(path)))

    def results(self, path: Path) -> list[dict[str, Any]]:
        """Read the results of a grid of learning rates and seeds, as `analysis.analyse.analyse` takes them.

        Raises:
            UserError: the format has no such results, or the files are malformed.
        """
        raise UserError(f"{path}: {self.title} have no grid of learning rates and seeds to import.")

    def test_scores(self, result: Mapping[str, Any]) -> Array | None:
        """Return the scores of the test examples of one of the `results`, whose mean is its score; None if they are not known."""
        return None

    def examples(self, result: Mapping[str, Any]) -> KeptExamples:
        """Return the score of each test example of one of the `results`; raise a `UserError` if they are not known."""
        scores = self.test_scores(result)
        if scores is None:
            raise UserError(f"result {result['key']}: the scores of its test examples are not known.")
        return KeptExamples(result, {SCORES: scores}, ())


READERS: Registry[type[Reader]] = KINDS["reader"]
"""The readers by name."""


def reader_of(path: Path, name: str | None = None) -> Reader:
    """Return the reader of a file or folder: the one named `name`, or without a name the first that recognises it.

    Raises:
        UserError: there is no such path or reader, or no reader recognises it.
    """
    if not os.path.exists(path):  # noqa: PTH110 (`Path.exists` raises for a folder that may not be read)
        raise UserError(f"{clipped(str(path))}: there is no such file or folder that can be read.{meant_path(path)}")
    if name is not None:
        return READERS[name]()
    for kind in sorted(READERS.values(), key=lambda kind: kind.last):
        if (reader := kind()).recognises(path):
            return reader
    formats = "; ".join(f"{kind.name} ({kind.title})" for kind in READERS.values())
    raise UserError(f"{path}: no reader recognises it. Formats: {formats}. Name one with --reader.")

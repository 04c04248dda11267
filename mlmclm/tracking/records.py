"""The content of an MLflow run as plain values: key, name, parameters, tags, metric points and files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from mlmclm.storage.files import hash_file, stable_hash

Status = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]
Point = tuple[str, float, int, int]
"""Name, value, step, and time in milliseconds since 1970."""


@dataclass(frozen=True)
class DataSet:
    """A data set that a run has used, as MLflow shows its inputs.

    `digest` identifies the content, `source` says where it is, and `context` says what it was used for.
    """

    name: str
    digest: str
    source: str
    context: str


@dataclass(frozen=True)
class RunRecord:
    """An MLflow run; `key` identifies it, and the other fields are its content.

    `artifacts` are pairs of a local file and the folder in which the run shows it ("" for the top). Times are in
    milliseconds since 1970. They come from the results, so a record built again from the same results is the same
    record.

    `bulk` marks one of very many runs, which are exported after all others.
    """

    key: str
    name: str
    parent_key: str | None = None
    params: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    metrics: Sequence[Point] = ()
    artifacts: Sequence[tuple[Path, str]] = ()
    inputs: Sequence[DataSet] = ()
    bulk: bool = False
    status: Status = "FINISHED"
    start_ms: int | None = None
    end_ms: int | None = None

    def content_hash(self) -> str:
        """Hash the content: records that would give equal runs have equal hashes. Files count by their bytes."""
        return stable_hash(
            {
                "name": self.name,
                "parent": self.parent_key,
                "params": dict(self.params),
                "tags": dict(self.tags),
                "metrics": points_hash(self.metrics),
                "artifacts": [[hash_file(path), path.name, folder] for path, folder in self.artifacts],
                "inputs": [asdict(data) for data in self.inputs],
                "status": self.status,
            }
        )


def points_hash(points: Sequence[Point]) -> str:
    """Hash metric points in order; values as text, because canonical JSON refuses NaN and infinities."""
    return stable_hash([[name, repr(float(value)), step, time] for name, value, step, time in points])

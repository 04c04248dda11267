"""Writers of records to the runs of one MLflow experiment, and what their ways have in common."""

from __future__ import annotations

import getpass
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from mlmclm.tracking.records import RunRecord, Status
from mlmclm.tracking.views import EXPERIMENT_ID

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

KEY_TAG, PARENT_TAG, USER_TAG, CONTEXT_TAG = "mlmclm.key", "mlflow.parentRunId", "mlflow.user", "mlflow.data.context"
LONGEST_PARAM, LONGEST_TAG, LONGEST_DIGEST = 6000, 5000, 36
"""Characters that MLflow stores of a parameter, a tag, and the digest of a data set."""


class Writer(ABC):
    """Writer to the runs of one experiment; a run belongs to the record whose key is its tag `KEY_TAG`.

    What a run has beyond its record, for instance a tag that a user gave it, stays. Methods may raise whatever MLflow,
    its database or the network raises. A call that failed is repeated by calling again.
    """

    at_once: ClassVar[int]
    """Number of records that are best written in one call."""

    def __init__(self, client: MlflowClient, experiment: str) -> None:
        self.client, self.experiment = client, experiment

    @abstractmethod
    def write(self, records: Sequence[RunRecord]) -> int:
        """Create the runs that are missing, change those that differ from their records, and return their number.

        A record that announces a finished run as running again, with nothing new in it, leaves the run as it is: a
        study that is run again announces everything before it finds that nothing is left to do. A run that was killed
        or has failed is running again.

        Args:
            records: parents come before their children, here or in earlier calls.
        """

    @abstractmethod
    def end_running(self, keys: Collection[str], status: Status) -> None:
        """Mark those runs of records that are marked as running, and nothing else of them, with another status."""

    def tags(self, record: RunRecord, parent: str | None, *, new: bool) -> dict[str, str]:
        """Return a record's tags, and those that lead from its run to the record and to the parent's run."""
        tags = {name: text.replace(EXPERIMENT_ID, self.experiment) for name, text in record.tags.items()}
        own = {KEY_TAG: record.key, **({PARENT_TAG: parent} if parent else {}), **(_written_by() if new else {})}
        return cut({**tags, **own}, LONGEST_TAG)

    def write_artifacts(self, run_id: str, record: RunRecord) -> None:
        """Copy a record's files to its run."""
        for path, folder in record.artifacts:
            self.client.log_artifact(run_id, str(path), folder or None)


def cut(values: Mapping[str, Any], longest: int) -> dict[str, str]:
    """Convert values to text, cut to the length that MLflow accepts."""
    texts = {name: str(value) for name, value in values.items()}
    return {name: text if len(text) <= longest else f"{text[: longest - 1]}…" for name, text in texts.items()}


def inputs(record: RunRecord) -> list[Any]:
    """Return the data sets that a run has used, in MLflow's form."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    return [
        DatasetInput(
            Dataset(data.name, data.digest[:LONGEST_DIGEST], "local", json.dumps({"uri": data.source})),
            [InputTag(CONTEXT_TAG, data.context)],
        )
        for data in record.inputs
    ]


def chunks(values: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """Yield so many values at a time, in their order."""
    for start in range(0, len(values), size):
        yield values[start : start + size]


@cache
def _written_by() -> dict[str, str]:
    """Return MLflow's own tags for who creates a run, and by which program."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = str(os.getuid())
    return {USER_TAG: user, "mlflow.source.name": "mlmclm", "mlflow.source.type": "LOCAL"}

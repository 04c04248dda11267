"""Base class of the writers of records to the runs of one MLflow experiment, and conversions that they share."""

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
    """Writer to the runs of one experiment; a run belongs to the record whose key is in the run's tag `KEY_TAG`.

    A writer doesn't remove what a run has beyond its record, for instance a tag that a user gave it. Methods may raise whatever
    MLflow, its database or the network raises; a call that failed can be repeated.
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
            records: parents come before their children, in the same call or in earlier ones.
        """

    @abstractmethod
    def end_running(self, keys: Collection[str], status: Status) -> None:
        """Give the runs of these records that are marked as running another status, and change nothing else."""

    def tags(self, record: RunRecord, parent: str | None, *, new: bool) -> dict[str, str]:
        """Return a record's tags, with those that link its run to the record and to the parent's run."""
        tags = {name: text.replace(EXPERIMENT_ID, self.experiment) for name, text in record.tags.items()}
        identity = {KEY_TAG: record.key, **({PARENT_TAG: parent} if parent else {}), **(_written_by() if new else {})}
        return cut_values({**tags, **identity}, LONGEST_TAG)

    def write_beside(self, run_id: str, record: RunRecord) -> None:
        """Write the parts of a record that are not rows of its run: files, and tags of the experiment."""
        for path, folder in record.artifacts:
            self.client.log_artifact(run_id, str(path), folder or None)
        for tag, value in cut_values(record.experiment, LONGEST_TAG).items():
            self.client.set_experiment_tag(self.experiment, tag, value)


def cut_values(values: Mapping[str, Any], longest: int) -> dict[str, str]:
    """Convert values to text, cut to the length that MLflow accepts."""
    texts = {name: str(value) for name, value in values.items()}
    return {name: text if len(text) <= longest else f"{text[: longest - 1]}…" for name, text in texts.items()}


def inputs(record: RunRecord) -> list[Any]:
    """Return the data sets that a run has used, in MLflow's form."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    used = []
    for data in record.inputs:
        kind, source = (
            ("local", {"uri": data.source}) if isinstance(data.source, str) else ("hugging_face", data.source)
        )
        dataset = Dataset(data.name, data.digest[:LONGEST_DIGEST], kind, json.dumps(dict(source)))
        used.append(DatasetInput(dataset, [InputTag(CONTEXT_TAG, data.context)]))
    return used


def chunks(values: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """Yield consecutive slices of at most `size` values."""
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

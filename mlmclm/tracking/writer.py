"""Base class of the writers of records to the runs of one MLflow experiment, and conversions that they share."""

from __future__ import annotations

import getpass
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from mlmclm.storage.files import stable_hash
from mlmclm.tracking.records import ModelRecord, RunRecord, Status, latest
from mlmclm.tracking.views import EXPERIMENT_ID

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

KEY_TAG, PARENT_TAG, USER_TAG, CONTEXT_TAG = "mlmclm.key", "mlflow.parentRunId", "mlflow.user", "mlflow.data.context"
MODELS_TAG = "mlmclm.logged"
"""Tag that a run gets once all its models are written; its value is a hash of them."""
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
        """Write the parts of a record that are not rows of its run: files, models, and tags of the experiment."""
        for path, folder in record.artifacts:
            self.client.log_artifact(run_id, str(path), folder or None)
        for tag, value in cut_values(record.experiment, LONGEST_TAG).items():
            self.client.set_experiment_tag(self.experiment, tag, value)
        if _models_of(record):
            self._write_models(run_id, record)

    def _write_models(self, run_id: str, record: RunRecord) -> None:
        """Create the models of an ended run. Incomplete or changed ones are replaced, since MLflow's models never change."""
        from mlflow.entities import LoggedModelInput, LoggedModelOutput, LoggedModelStatus, Metric

        data, points = next(iter(inputs(record)), None), latest(record.metrics).values()
        data_set = {} if data is None else {"dataset_name": data.dataset.name, "dataset_digest": data.dataset.digest}
        wanted = {_key_of(model, record): model for model in record.outputs}
        for stored in self._models(f"source_run_id = '{run_id}'"):
            if stored.status != LoggedModelStatus.READY or not wanted.pop(stored.tags.get(KEY_TAG, ""), None):
                self.client.delete_logged_model(stored.model_id)
        for key, model in wanted.items():
            params, tags = (
                cut_values(model.params, LONGEST_PARAM),
                cut_values({**model.tags, KEY_TAG: key}, LONGEST_TAG),
            )
            new = self.client.create_logged_model(
                self.experiment, logged_name(model.name), run_id, tags, params, model.kind
            )
            metrics = [Metric(name, value, when, step, new.model_id, **data_set) for name, value, step, when in points]
            self.client.log_batch(run_id, metrics=metrics)
            self.client.log_outputs(run_id, [LoggedModelOutput(new.model_id, 0)])
            self.client.finalize_logged_model(new.model_id, "READY")
        for name in record.uses:
            used = self._models(f"name = '{logged_name(name)}' AND model_type = 'pretrained'")
            self.client.log_inputs(run_id, models=[LoggedModelInput(model.model_id) for model in used])
        self.client.set_tag(run_id, MODELS_TAG, _models_of(record))

    def _models(self, condition: str) -> list[Any]:
        return list(self.client.search_logged_models([self.experiment], condition))


def has_models(record: RunRecord, tags: Mapping[str, str]) -> bool:
    """Return whether a run with these tags has all models of its record."""
    return record.running or tags.get(MODELS_TAG, "") == _models_of(record)


def _models_of(record: RunRecord) -> str:
    """Return a hash of an ended run's models; empty if it has none."""
    if record.running or not record.outputs:
        return ""
    return stable_hash([*(_key_of(model, record) for model in record.outputs), *record.uses])


def _key_of(model: ModelRecord, record: RunRecord) -> str:
    numbers = [[name, repr(value)] for name, value, *_ in latest(record.metrics).values()]
    return stable_hash([model.name, model.kind, dict(model.params), dict(model.tags), sorted(numbers)])


def logged_name(name: str) -> str:
    """Return the name of a logged model, in which MLflow allows no `/:.%"'`."""
    return "".join("_" if character in "/:.%\"'" else character for character in name)


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

"""Writer of runs, one by one, through MLflow's client, to any MLflow address other than the store's own database."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from mlmclm.tracking.records import Point, RunRecord, Status, latest
from mlmclm.tracking.writer import KEY_TAG, LONGEST_PARAM, LONGEST_TAG, Writer, chunks, cut_values, has_models, inputs

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

POINTS_A_BATCH, VALUES_A_BATCH, RUNS_A_PAGE = 1000, 100, 1000


class ClientWriter(Writer):
    """Writer that sends three requests for a new run. Opening it takes about 2 ms for each existing run."""

    at_once = 20

    def __init__(self, client: MlflowClient, experiment: str) -> None:
        super().__init__(client, experiment)
        self._listed = self._search()
        """Runs as they were when the writer was opened; each is removed when its record is written."""
        self._ids = {key: str(run.info.run_id) for key, run in self._listed.items()}
        self._tried: set[str] = set()
        """Keys of records that this writer has written or tried to: a run may exist although the reply was lost."""

    def write(self, records: Sequence[RunRecord]) -> int:
        """Create or change runs, as `Writer.write` says; an existing parameter doesn't change (`_fill`)."""
        return sum(map(self._write, records))

    def end_running(self, keys: Collection[str], status: Status) -> None:
        """Mark runs, as `Writer.end_running` says."""
        for key, run in self._search("attributes.status = 'RUNNING'").items():
            if key in keys:
                self.client.set_terminated(run.info.run_id, status)

    def _write(self, record: RunRecord) -> bool:
        run = self._listed.pop(record.key, None)
        if record.key in self._tried:
            run = self._search(f"tags.`{KEY_TAG}` = '{record.key}'").get(record.key)
        self._tried.add(record.key)
        params = cut_values(record.params, LONGEST_PARAM)
        tags = self.tags(record, self._ids.get(record.parent_key or ""), new=run is None)
        if run is not None and _is_whole(run, record, params, tags):
            return False
        if run is None:
            run_id = str(self.client.create_run(self.experiment, record.start_ms, tags, record.name).info.run_id)
        else:
            run_id = str(run.info.run_id)
            self.client.update_run(run_id, status="RUNNING", name=record.name)
        self._ids[record.key] = run_id
        self._fill(run_id, record, run, params, tags)
        if not record.running:  # last, because it says that the run is complete
            self.client.set_terminated(run_id, status=record.status, end_time=record.end_ms)
        return True

    def _fill(
        self, run_id: str, record: RunRecord, run: Run | None, params: Mapping[str, str], tags: Mapping[str, str]
    ) -> None:
        """Write what a run lacks. MLflow's parameters never change, so a changed one becomes a tag `changed.NAME`."""
        from mlflow.entities import Metric, Param, RunTag

        if run is not None:
            stored = run.data.params
            changed = {f"changed.{name}": text for name, text in params.items() if stored.get(name, text) != text}
            params = {name: text for name, text in params.items() if name not in stored}
            tags = {**tags, **cut_values(changed, LONGEST_TAG)}
        points = [Metric(name, value, when, step) for name, value, step, when in self._lacking(run, record)]
        batches: Iterator[tuple[Sequence[Any], ...]] = zip_longest(
            chunks(points, POINTS_A_BATCH),
            chunks([Param(*pair) for pair in params.items()], VALUES_A_BATCH),
            chunks([RunTag(*pair) for pair in tags.items()] if run is not None else [], VALUES_A_BATCH),
            fillvalue=[],
        )
        # One request carries a batch of each kind, within MLflow's limits per request.
        for metrics, parameters, run_tags in batches:
            self.client.log_batch(run_id, metrics=metrics, params=parameters, tags=run_tags)
        if record.inputs:
            self.client.log_inputs(run_id, inputs(record))
        self.write_beside(run_id, record)

    def _lacking(self, run: Run | None, record: RunRecord) -> list[Point]:
        """Return the points that a run lacks.

        MLflow keeps points that are written already. A single point whose value has changed gets the present time, which
        makes it the latest.
        """
        if run is None or record.running:  # MLflow ignores a point that it already has
            return list(record.metrics)
        stored, curves, lacking = run.data.metrics, defaultdict[str, list[Point]](list), list[Point]()
        for point in record.metrics:
            curves[point[0]].append(point)
        for name, points in curves.items():
            if name not in stored:
                lacking += points
            elif stored[name] != latest(points)[name][1]:
                lacking += [(*point[:3], round(1000 * time.time())) for point in points] if len(points) == 1 else points
        return lacking

    def _search(self, condition: str = "") -> dict[str, Run]:
        """Return the runs that are not deleted, by their records' keys; `condition` is a filter of MLflow's run search."""
        runs: dict[str, Run] = {}
        token: str | None = None
        while True:
            page = self.client.search_runs([self.experiment], condition, max_results=RUNS_A_PAGE, page_token=token)
            runs |= {run.data.tags[KEY_TAG]: run for run in page if KEY_TAG in run.data.tags}
            token = page.token
            if not token:
                return runs


def _is_whole(run: Run, record: RunRecord, params: Mapping[str, str], tags: Mapping[str, str]) -> bool:
    """Return whether a run has everything of its record, or the record only announces a finished run again (`Writer.write`)."""
    stored_params, stored_tags = run.data.params, run.data.tags
    numbers = all(run.data.metrics.get(name) == point[1] for name, point in latest(record.metrics).items())
    if record.running and run.info.status == "FINISHED":
        return numbers
    return (
        numbers
        and not record.artifacts
        and has_models(record, stored_tags)
        and (run.info.run_name, run.info.status) == (record.name, record.status)
        and tags.items() <= stored_tags.items()
        and all(text in (stored_params.get(name), stored_tags.get(f"changed.{name}")) for name, text in params.items())
    )

"""MLflow tracking of a study: stages while they run, cells as they finish, the sweep and its groups at the end."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from mlmclm.errors import MlmclmError
from mlmclm.plans.plan import Stage
from mlmclm.progress import say
from mlmclm.study.place import Place
from mlmclm.study.prepared_study import PreparedStudy
from mlmclm.study.study_file import StudyFile
from mlmclm.study.sweep_file import SweepFile
from mlmclm.tracking.records import RunRecord
from mlmclm.tracking.tracker import Tracker
from mlmclm.tracking.views import cell_record, group_record, last_finished_ms, stage_record, sweep_record

if TYPE_CHECKING:
    from mlmclm.analysis.analyse import Analysis
    from mlmclm.sweeps.space import Space

SECONDS_TO_FINISH = 120.0
"""Seconds that the end of a study waits for MLflow; the next run of the study writes what is left."""


class StudyTracking:
    """MLflow tracking of one study or sweep.

    A server that doesn't answer is an error at once, before anything is computed. One that stops answering later
    doesn't make the study fail.
    """

    def __init__(self, study: StudyFile | SweepFile, place: Place) -> None:
        from mlmclm.tracking.address import VARIABLE, check_address, chosen_address, default_address, without_password

        self.study = study
        address, source = chosen_address(study.tracking, place.store, os.environ)
        self.elsewhere: str | None = None
        """Address of the server that shows the runs; None if they are in the store's own database."""
        if address != default_address(place.store):
            self.elsewhere = without_password(address)
            try:
                check_address(address)
            except MlmclmError as error:
                remedy = f" Unset {VARIABLE} to write to the store." if source == VARIABLE else ""
                raise type(error)(f"{source}: {error}{remedy}") from error
            say(f"MLflow: runs are written to {self.elsewhere} ({source}).")
        self._tracker = Tracker(place.store, study.name, address=address, close_seconds=SECONDS_TO_FINISH)
        self._results: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        self._rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self._lock = threading.Lock()  # stages that run side by side report from threads of their own

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tracker.__exit__(kind, error, trace)

    def stage_lines(self, prepared: PreparedStudy) -> Callable[[Stage, list[dict[str, Any]]], None]:
        """Return a function that takes new metrics of a running stage and updates the stage's MLflow run."""

        def take(stage: Stage, rows: list[dict[str, Any]]) -> None:
            key = stage.end.key(prepared.fingerprint)
            # A record holds the whole curve of a run, so keep every line seen so far.
            with self._lock:
                self._rows[key] += rows
                everything = _last_of_each_step(self._rows[key])
            self._tracker.put(self._stage(prepared, stage, everything))

        return take

    def pretrained(self, prepared: PreparedStudy) -> None:
        """Record all finished stages, from the metrics in the store."""
        for stage in prepared.plan.stages:
            rows, system = prepared.trained(stage)
            self._tracker.put(self._stage(prepared, stage, rows, system))

    def sweep_begins(self, space: Space) -> None:
        """Record the sweep and its groups, so that cells find their parent runs."""
        self._tracker.put(self._sweep(space, running=True))
        for model in self.study.models:
            for task in space.tasks:
                self._tracker.put(group_record(self.study.name, model, task, status="RUNNING"))

    def cell(self, result: dict[str, Any]) -> None:
        """Record a cell's result."""
        self._results[result["model"], result["task"]].append(result)
        self._tracker.put(cell_record(self.study.name, result))

    def reported(self, space: Space, analysis: Analysis, paths: dict[str, Path], provenance: Mapping[str, str]) -> None:
        """Record the analysis: the metrics of every (model, task), and the report's files and provenance.

        Files and provenance belong to the sweep's run.
        """
        from mlmclm.analysis.results import records
        from mlmclm.analysis.summary import task_metrics

        rates = {(row["model"], row["task"]): row["learning_rates"] for row in records(analysis.best)}
        for (model, task), metrics in task_metrics(analysis).items():
            results = self._results[model, task]
            self._tracker.put(
                group_record(
                    self.study.name,
                    model,
                    task,
                    metric=results[0]["metric"] if results else "",
                    rates=rates[model, task],
                    metrics=metrics,
                    time_ms=last_finished_ms(results),
                )
            )
        everything = [result for results in self._results.values() for result in results]
        artifacts = [(path, "") for path in paths.values()]
        self._tracker.put(
            self._sweep(
                space,
                running=False,
                artifacts=artifacts,
                provenance=provenance,
                time_ms=last_finished_ms(everything),
            )
        )

    def _sweep(self, space: Space, *, running: bool, **outcome: Any) -> RunRecord:
        return sweep_record(
            self.study.name,
            models=tuple(self.study.models),
            tasks=space.tasks,
            learning_rates=space.learning_rates,
            seeds=space.seeds,
            points=sum(len(space.settings_for(task)) for task in space.tasks),
            settings=space.common_settings(),
            main_metrics=space.metrics,
            rule=space.rule,
            grid=space.axes(),
            status="RUNNING" if running else "FINISHED",
            **outcome,
        )

    def _stage(
        self, prepared: PreparedStudy, stage: Stage, rows: list[dict[str, Any]], system: dict[str, Any] | None = None
    ) -> RunRecord:
        """Return the record of a stage; the stage is finished if `system` is given."""
        study = prepared.study
        return stage_record(
            self.study.name,
            stage=stage.end.key(prepared.fingerprint),
            title=stage.title,
            settings={
                "objective": str(stage.objective),
                "size": stage.end.size,
                "steps": f"{stage.start.step} to {stage.end.step}",
                "recipe": study.recipe.model_dump(mode="json"),
                "corpus": study.corpus.model_dump(mode="json"),
                "tokenizer": study.tokenizer.model_dump(mode="json") if study.tokenizer else None,
                **({"initial": prepared.initial[stage.end.size].source} if stage.end.size in prepared.initial else {}),
            },
            rows=rows,
            facts=system,
            models=stage.models,
            status="RUNNING" if system is None else "FINISHED",
        )


def _last_of_each_step(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the last training and the last validation record of each step.

    A restarted worker repeats steps, and its records replace the earlier ones.
    """
    latest = {(row["step"], "validation_loss" in row): row for row in rows}
    return [latest[key] for key in sorted(latest)]

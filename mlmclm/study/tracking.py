"""Tracking of a study in MLflow: stages while they run, cells as they finish, the sweep and its groups at the end."""

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
from mlmclm.tracking.records import RunRecord
from mlmclm.tracking.tracker import Tracker
from mlmclm.tracking.views import cell_record, group_record, last_finished_ms, stage_record, sweep_record

if TYPE_CHECKING:
    from mlmclm.analysis.analyse import Analysis
    from mlmclm.sweeps.space import Space

SECONDS_TO_FINISH = 120.0
"""How long the end of a study waits for MLflow; what is left then is written by the next run."""


class StudyTracking:
    """A study's tracker. An address that doesn't answer is an error at once, before anything is computed; one that stops
    answering later costs the study nothing."""

    def __init__(self, study: StudyFile, place: Place) -> None:
        from mlmclm.tracking.address import VARIABLE, check_address, chosen_address, default_address, without_password

        self.study = study
        address, source = chosen_address(study.tracking, place.store, os.environ)
        self.elsewhere: str | None = None
        """Where the runs are shown, if not in the store's own database."""
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
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tracker.__exit__(kind, error, trace)

    def stage_lines(self, prepared: PreparedStudy) -> Callable[[Stage, list[dict[str, Any]]], None]:
        """A function that takes the lines of a running stage and keeps its run in MLflow up to date."""

        def take(stage: Stage, rows: list[dict[str, Any]]) -> None:
            key = stage.end.key(prepared.fingerprint)
            with self._lock:
                self._rows[key] += rows
                everything = _last_of_each_step(self._rows[key])
            self._tracker.put(self._stage(prepared, stage, everything))

        return take

    def pretrained(self, prepared: PreparedStudy) -> None:
        """All finished stages, from the store's own metrics."""
        for stage in prepared.plan.stages:
            rows, system = prepared.trained(stage)
            self._tracker.put(self._stage(prepared, stage, rows, system))

    def sweep_begins(self, prepared: PreparedStudy, space: Space) -> None:
        """The sweep and its groups, so that cells find their parents."""
        self._tracker.put(self._sweep(space, running=True))
        for model in self.study.models:
            for task in space.tasks:
                self._tracker.put(group_record(self.study.name, model, task, status="RUNNING"))

    def cell(self, result: dict[str, Any]) -> None:
        """A cell that has a result."""
        self._results[result["model"], result["task"]].append(result)
        self._tracker.put(cell_record(self.study.name, result))

    def reported(self, space: Space, analysis: Analysis, paths: dict[str, Path], provenance: Mapping[str, str]) -> None:
        """The analysis: numbers of every (model, task), and at the sweep the report's files and where its numbers come from."""
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
            models=self.study.models,
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
        """The run of a stage, which has ended where `system` is given."""
        return stage_record(
            self.study.name,
            stage=stage.end.key(prepared.fingerprint),
            title=stage.title,
            settings={
                "objective": str(stage.objective),
                "size": stage.end.size,
                "steps": f"{stage.start.step} to {stage.end.step}",
                "recipe": self.study.recipe.model_dump(mode="json"),
                "corpus": self.study.corpus.model_dump(mode="json"),
                "tokenizer": self.study.tokenizer.model_dump(mode="json") if self.study.tokenizer else None,
                **({"initial": prepared.initial[stage.end.size].source} if stage.end.size in prepared.initial else {}),
            },
            rows=rows,
            facts=system,
            models=stage.models,
            status="RUNNING" if system is None else "FINISHED",
        )


def _last_of_each_step(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A restarted worker writes some steps again; its lines take the place of the earlier ones."""
    latest = {(row["step"], "validation_loss" in row): row for row in rows}
    return [latest[key] for key in sorted(latest)]

"""A study whose models are trained or given: one pipeline from its file to its report."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlmclm.errors import MlmclmError, UserError
from mlmclm.storage.files import only_one
from mlmclm.studies.claim_files import claims_of
from mlmclm.studies.last_grid import check_last, remember
from mlmclm.studies.last_run import remember_run
from mlmclm.studies.place import Place
from mlmclm.studies.study_file import AnyFile
from mlmclm.studies.study_plan import StudyPlan
from mlmclm.studies.study_results import StudyResults
from mlmclm.studies.study_sweep import StudySweep
from mlmclm.studies.zero_shot import evaluate, zero_shot_results, zero_shot_tasks
from mlmclm.sweeps.cluster_terms import ClusterTerms
from mlmclm.sweeps.ledger import Ledger

if TYPE_CHECKING:
    from mlmclm.studies.work import StudyWork


class Study(ABC):
    """A study: models, tasks, and the grid over which the models are fine-tuned.

    What the store already has is not computed again: `run` resumes wherever an earlier one stopped.

    Attributes:
        file: its settings.
        place: its folders.
        source: its file or its name, for messages.
        command: the command that computes it again, which the report shows.
    """

    def __init__(self, file: AnyFile, place: Place, *, source: str = "", command: str = "") -> None:
        self.file: AnyFile = file
        self.place, self.source, self.command = place, source or file.name, command

    def __repr__(self) -> str:
        return f"<{self.file.kind} {self.file.name!r}: {len(self.file.models)} models, in {self.place.store}>"

    @property
    def name(self) -> str:
        """Name of the folder in the store and of the MLflow experiment."""
        return self.file.name

    @property
    def folder(self) -> Path:
        """The folder in the store that has the report and the tables."""
        return self.place.study_folder(self.name)

    @property
    def results(self) -> StudyResults:
        """The results so far; nothing is computed or written.

        Raises:
            UserError: something is not prepared yet, or there are no results; the message says what to run.
        """
        return self.results_by(None)

    def results_by(self, rule: str | None) -> StudyResults:
        """Return the results so far, with the best learning rates chosen by a rule.

        Args:
            rule: `mean`, `per_seed` or `on_test`; None for that of the search space.

        Raises:
            UserError: as `results`, or there is no such rule.
        """
        sweep = self._opened()
        # Planned before the rule changes: which cells there are follows from the space's own.
        sweep = sweep.settled()
        if rule is not None:
            from mlmclm.analysis.selection import check_rule

            sweep = replace(sweep, space=sweep.space.model_copy(update={"rule": check_rule(rule)}))
        rows = Ledger(self.place.store).results(sweep.plan().cells)
        if not rows:
            raise UserError(f"{self.file.kind} {self.name!r} has no results yet: {self._remedy}")
        return self._results(sweep, rows)

    @abstractmethod
    def plan(self, *, workers: int | None = None, price: float | None = None) -> StudyPlan:
        """Return what the store has, what would be computed now, and what that would take; nothing is computed.

        The time is estimated from results in the store or, if there are too few, from a few steps of training.

        Args:
            workers: number of cells computed at once; by default as many as this machine can.
            price: of an hour of all workers, in any currency.

        Raises:
            UserError: a name or a setting is wrong.
        """

    def run(
        self,
        *,
        pretrain: bool = True,
        replace: bool = False,
        ray: str | None = None,
        terms: ClusterTerms | None = None,
        check: bool = True,
    ) -> StudyResults:
        """Compute what is missing, and write the tables and the report.

        Args:
            pretrain: whether to train the models; otherwise they must be trained already.
            replace: whether the report of another grid under this name may be replaced.
            ray: address of a running Ray cluster; by default that of the surrounding Ray job, or RAY_ADDRESS, else Ray
                is started on this machine if it is needed.
            terms: how long to wait for nodes.
            check: whether to raise the error of zero-shot evaluations that failed; otherwise the results' `failure` is it.

        Raises:
            UserError: a setting or an input is wrong, the study was last run over another grid, or another process is
                working on it.
            EnvironmentFault: the machine, the network or a server failed. What is finished is kept.
        """
        from mlmclm.studies.work import work_on

        begun = self._begun()
        grid, evaluations = begun.grid(), zero_shot_tasks(self.file, self.place)
        check_last(self.folder, grid, replace=replace)
        claims_of(self.file)  # read again for the report, where an error would come late
        with work_on(self.file, self.place, ray, terms) as work:
            sweep = self._made(begun, work, pretrain=pretrain)
            remember(self.folder, grid)
            remember_run(sweep, self.command)
            work.tracking.sweep(sweep.space, sweep.prepared)
            failure = evaluate(sweep, evaluations, work.session)
            work.tracking.evaluated(zero_shot_results(self.file, self.place))
            rows = sweep.compute(session=work.session, on_plan=work.tracking.cells, terms=terms).results
            found = self._results(sweep.settled(), rows, failure).write(self.folder, work.tracking)
        if failure is not None and check:
            raise failure
        return found

    def report(self, *, rule: str | None = None, to: str | Path | None = None, track: bool = False) -> StudyResults:
        """Write tables and report from the results so far; nothing is computed.

        Args:
            rule: as in `results_by`.
            to: the folder to write; by default the study's own in the store, unless it is read-only.
            track: whether to write to MLflow what it lacks of the study.

        Raises:
            UserError: `track` is given and another process works on the study, which writes its runs itself.
        """
        found = self.results_by(rule)
        there = next(place for place in (self.folder, *self.folder.parents) if place.exists())
        own = self.folder if os.access(there, os.W_OK) else None
        folder = own if to is None else Path(to)
        if not track:
            return found.write(folder)
        from mlmclm.studies.study_tracking import StudyTracking

        working = only_one(self.folder / ".lock", f"{self.file.kind} {self.name!r}")
        with working, StudyTracking(self.file, self.place, niceness=0) as tracking:
            sweep = found.sweep
            if sweep.prepared is not None:
                tracking.stages(sweep.prepared)
            tracking.sweep(sweep.space, sweep.prepared)
            tracking.evaluated(zero_shot_results(self.file, self.place))
            tracking.cells(sweep.plan())
            return found.write(folder, tracking)

    def _results(
        self, sweep: StudySweep, rows: list[dict[str, Any]], failure: MlmclmError | None = None
    ) -> StudyResults:
        return StudyResults(sweep, rows, self.command, failure)

    @property
    def _remedy(self) -> str:
        return f"run `mlmclm {self.file.kind} {self.source}` first."

    @abstractmethod
    def _begun(self) -> StudySweep:
        """Return the sweep as far as it is known without any work; check all settings and names."""

    @abstractmethod
    def _made(self, begun: StudySweep, work: StudyWork, *, pretrain: bool) -> StudySweep:
        """Return the sweep with all models and the tasks' data, making what is missing."""

    @abstractmethod
    def _opened(self) -> StudySweep:
        """Return the sweep with all models and the tasks' data; a `UserError` says what to run if something is missing."""

"""Work on a study: one process at a time, whose phases all share one Ray session and one MLflow tracker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from mlmclm.cli.options import Assumed
from mlmclm.corpora.prepare_corpus import Session
from mlmclm.errors import UserError
from mlmclm.progress import say
from mlmclm.service.private_cluster import sweep_clusters
from mlmclm.service.ray_cluster import check_cluster, cluster_address, ray_session
from mlmclm.storage.files import only_one
from mlmclm.storage.temporary import sweep_unfinished
from mlmclm.studies.last_grid import check_last, remember
from mlmclm.studies.model_folders import export_models
from mlmclm.studies.prepare import prepare
from mlmclm.studies.study_file import StudyFile
from mlmclm.sweeps.cluster_terms import ClusterTerms
from mlmclm.tracking.metric_labels import metrics_labelled

if TYPE_CHECKING:
    from mlmclm.reports.study_facts import StudyFacts
    from mlmclm.studies.place import Place
    from mlmclm.studies.prepared_study import PreparedStudy
    from mlmclm.studies.study_tracking import StudyTracking
    from mlmclm.studies.sweep_file import SweepFile
    from mlmclm.studies.zero_shot import ZeroShotTasks
    from mlmclm.sweeps.cells import SweepModel
    from mlmclm.sweeps.outcome import SweepOutcome
    from mlmclm.sweeps.space import Space
    from mlmclm.tasks.prepared_task import PreparedTask


@dataclass(frozen=True)
class CommandWork:
    """A study, or a sweep of given models, that this process works on; its methods are the phases."""

    file: StudyFile | SweepFile
    place: Place
    tracking: StudyTracking
    session: Session

    def pretrain(self, prepared: PreparedStudy) -> list[SweepModel]:
        """Train the missing stages of a study and export all models."""
        from mlmclm.studies.pretrain_models import pretrain

        if prepared.unfinished():  # else Ray need not start
            self.session()
            pretrain(prepared, self.tracking.stage_lines(prepared))
        models = export_models(prepared)
        self.tracking.pretrained(prepared)
        return models

    def sweep(
        self,
        space: Space,
        models: Sequence[SweepModel],
        tasks: Mapping[str, PreparedTask],
        evaluations: ZeroShotTasks | None,
        compute: Callable[..., SweepOutcome],
        facts: Callable[[list[dict[str, Any]]], StudyFacts],
        *,
        as_json: bool,
    ) -> None:
        """Evaluate the models as they are, fine-tune them over the search space, and write the report.

        Args:
            tasks: the tasks' data, tokenised for the models (for one of them, if their tokenizers differ).
            evaluations: the zero-shot tasks, if there are any.
            compute: computes the missing cells; takes `session` and `on_result`.
            facts: returns the report's facts, given the results.
        """
        from mlmclm.cli.study_report import write_study_report
        from mlmclm.studies.study_sweep import analyse_sweep
        from mlmclm.studies.zero_shot import evaluate, zero_shot_results

        file, place = self.file, self.place
        failure = evaluate(file, place, evaluations, models, cpus=space.cpus_per_cell, session=self.session)
        self.tracking.evaluated(zero_shot_results(file, place))
        results = compute(session=self.session, on_result=self.tracking.cell).results
        analysis = analyse_sweep(tuple(file.models), file.baseline, space, results, tasks=tasks, store=place.store)
        folder = place.study_folder(file)
        write_study_report(analysis, facts(results), space, place, self.tracking, folder=folder, as_json=as_json)
        if failure is not None:
            raise failure


def run_study(
    study: StudyFile,
    place: Place,
    address: str | None,
    *,
    command: str,
    replace: bool,
    dry: Assumed | None,
    as_json: bool,
    pretrain: bool = True,
    terms: ClusterTerms | None = None,
) -> None:
    """Compute what is missing of a study and write its report, or show in a dry run what that would be.

    Args:
        address: a Ray cluster's address, as `--ray` gives it.
        command: the command that computes the study again, which the report shows.
        replace: whether the report of another grid under this name may be replaced.
        dry: what a dry run assumes; None to compute.
        pretrain: whether to train the models; otherwise they must be trained already.
        terms: how long to wait for nodes, and the priority beside other sweeps on the cluster.

    Raises:
        UserError: the study was last run over another grid, another process is working on it, or a model isn't trained.
            Also whatever `prepare` raises.
    """
    # Imported late, because `mlmclm data` and `mlmclm pretrain` need none of these.
    if dry is not None:
        from mlmclm.cli.dry_run import show_dry_run

        show_dry_run(study, place, dry, as_json=as_json)
        return
    from mlmclm.studies.facts import study_facts
    from mlmclm.studies.last_run import copy_of, remember_run
    from mlmclm.studies.study_sweep import plan_sweep, prepare_tasks, study_grid, study_space, sweep
    from mlmclm.studies.zero_shot import zero_shot_tasks

    space, evaluations = study_space(study, place.task_dirs), zero_shot_tasks(study, place)
    folder, grid = place.study_folder(study), study_grid(study, space)
    check_last(folder, grid, replace=replace)
    with work_on(study, place, address, terms) as work:
        prepared = prepared_for(study, place, address, work.session)
        trained = None if pretrain else export_models(prepared)
        tasks = prepare_tasks(prepared, space)  # before training, so that bad data cost no time
        models = work.pretrain(prepared) if trained is None else trained
        remember(folder, grid)
        remember_run(study, copy_of(study), place, command, tasks=space.tasks)
        work.tracking.sweep_begins(space, prepared)
        # A function, because a sweep plans again once the results that choose starting weights are there.
        plan = partial(plan_sweep, space, models, tasks, place)
        compute = partial(sweep, prepared, space, plan, terms=terms)
        facts = partial(study_facts, prepared, space, tasks, command=command)
        work.sweep(space, models, tasks, evaluations, compute, facts, as_json=as_json)


def sweep_given(
    file: SweepFile,
    place: Place,
    address: str | None,
    *,
    command: str,
    replace: bool,
    as_json: bool,
    terms: ClusterTerms | None = None,
) -> None:
    """Fine-tune given models over a search space on Ray Tune, and write the report; arguments as in `run_study`.

    Raises:
        UserError: another process is working on a sweep or study of this name, or one was run over another grid.
            Also whatever `open_sweep` raises.
    """
    from mlmclm.studies.given_sweep import find_sweep, given_facts, with_tasks
    from mlmclm.studies.last_run import remember_run
    from mlmclm.studies.study_sweep import run_plan
    from mlmclm.studies.zero_shot import zero_shot_tasks

    folder = place.study_folder(file)
    if (folder / "models").is_dir():
        raise UserError(
            f"name {file.name!r}: a study of this name is in {place.store}; its report would be overwritten. Choose another name."
        )
    with work_on(file, place, address, terms) as work:
        made = find_sweep(file, place)
        check_last(folder, made.grid(), replace=replace)
        evaluations = zero_shot_tasks(file, place)
        made = with_tasks(made, prepare=True)
        remember(folder, made.grid())
        remember_run(file, made.as_file(), place, command, tasks=made.space.tasks)
        work.tracking.sweep_begins(made.space)
        models = [each.model for each in made.models]
        compute = partial(run_plan, file, place, made.space, made.plan, terms=terms)
        facts = partial(given_facts, made, command=command)
        work.sweep(made.space, models, made.models[0].tasks, evaluations, compute, facts, as_json=as_json)


@contextmanager
def work_on(
    file: StudyFile | SweepFile, place: Place, address: str | None, terms: ClusterTerms | None = None
) -> Iterator[CommandWork]:
    """Lock a study or sweep against other processes for the duration of the block.

    What killed processes left behind, unfinished files in the store and Ray's temporary folders, is removed first.

    Raises:
        UserError: another process is working on it.
    """
    from mlmclm.studies.study_tracking import StudyTracking

    kind = "study" if isinstance(file, StudyFile) else "sweep"
    with only_one(place.study_folder(file) / ".lock", f"{kind} {file.name!r}"):
        sweep_unfinished(place.store)
        sweep_clusters()
        with (
            metrics_labelled(place.store, file.name),
            StudyTracking(file, place) as tracking,
            one_session(place, address, terms) as session,
        ):
            yield CommandWork(file, place, tracking, session)


def prepared_for(study: StudyFile, place: Place, address: str | None, session: Session) -> PreparedStudy:
    """Prepare a study, on the running Ray cluster if there is one.

    Without one, `prepare` opens a session of its own if the study asks for `corpus.workers: ray`.
    """
    return prepare(study, place, session=session if cluster_address(address) is not None else None)


@contextmanager
def one_session(place: Place, address: str | None, terms: ClusterTerms | None = None) -> Iterator[Session]:
    """Yield a function whose first call opens a Ray session, which stays open until the block ends.

    A cluster's address is checked (`check_cluster`) at once.
    """
    # The running cluster that `--ray`, the surrounding Ray job or RAY_ADDRESS names, if any.
    running = cluster_address(address)
    if running is not None:
        check_cluster(running)
    with ExitStack() as stack:
        opened = False

        def session() -> AbstractContextManager[None]:
            nonlocal opened
            if not opened:
                say(f"Ray: {f'connecting to {running}' if running else 'starting on this machine'}")
                _open_session(stack, place, address, terms or ClusterTerms())
                opened = True
            return nullcontext()  # whose end leaves the session open for the next phase

        yield session


def _open_session(stack: ExitStack, place: Place, address: str | None, terms: ClusterTerms) -> None:
    from mlmclm.pretraining.run_stage import prepare_environment
    from mlmclm.service.cluster import cluster_view, wait_for_nodes

    prepare_environment()
    found = stack.enter_context(ray_session(place.store, address=address, dashboard=True))
    if found.dashboard is not None:
        token = f" (it asks for a token, which is in {found.token_file})" if found.token_file is not None else ""
        say(f"Ray dashboard: {found.dashboard}{token}")
    if not found.local:
        wait_for_nodes(cluster_view(), terms.wait_for_nodes)

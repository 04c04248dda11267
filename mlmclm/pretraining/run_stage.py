"""One stage as a Ray Train run: starts it, follows it, and goes on where a killed one stopped."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlmclm.backends.choice import backend_of
from mlmclm.corpora.order import batch_rows
from mlmclm.errors import EnvironmentFault, MlmclmError
from mlmclm.models.warm_up import prepare
from mlmclm.plans.plan import Stage, State
from mlmclm.plans.recipe import Recipe
from mlmclm.pretraining import failures, states
from mlmclm.pretraining.initial import InitialModel, shape
from mlmclm.pretraining.job import StageJob
from mlmclm.pretraining.worker_entry import run_in_worker
from mlmclm.progress import repeated, say, say_once
from mlmclm.service.placement import Device, worker_bundle
from mlmclm.service.ray_cluster import computes_here
from mlmclm.storage.claims import Claims
from mlmclm.storage.files import read_json

if TYPE_CHECKING:
    from mlmclm.corpora.prepared_corpus import PreparedCorpus

Observer = Callable[[list[dict[str, Any]]], None]
"""Called with the lines of metrics that a running stage has written since the last call."""


def missing_states(stage: Stage, store: Path, fingerprint: str) -> tuple[State, tuple[State, ...]]:
    """Return the rest of a stage: the furthest state on its way to start from, and the states still to be made."""
    absent = [state for state in stage.states if not states.exists(store, state.key(fingerprint))]
    if not absent:
        return stage.end, ()
    ready = [state for state in stage.states if state.step < absent[0].step]
    return (ready[-1] if ready else stage.start), tuple(absent)


def stage_claims(stage: Stage, store: Path, fingerprint: str) -> tuple[str, ...]:
    """The claims that whoever trains a stage holds: on each state that is missing, and on the run's folder. Two studies' stages
    can have some of these in common; none is needed where nothing is missing."""
    wanted = missing_states(stage, store, fingerprint)[1]
    states_wanted = tuple(f"states-{state.key(fingerprint)}" for state in wanted)
    return (f"runs-{stage.end.key(fingerprint)}", *states_wanted) if wanted else ()


def run_stage(
    stage: Stage,
    *,
    store: Path,
    corpus: PreparedCorpus,
    recipe: Recipe,
    fingerprint: str,
    device: Device,
    initial: InitialModel | None = None,
    observer: Observer | None = None,
) -> None:
    """Trains what is missing of a stage; needs a Ray session, whose runtime environment the workers share. States that are there are
    not trained again; those that another process trains are waited for.

    Args:
        fingerprint: `plans.plan.fingerprint` of the recipe and the corpus.
        device: what each worker has (`placement.choose_device`). Ray Train waits until the cluster has that for all of them.
        initial: what the model begins with, where that is a given model.

    Raises:
        UserError: a loss or its gradient is no longer finite, the recipe asks for what the workers can't do, or the files of
            `initial` are damaged.
        EnvironmentFault: the workers failed more often than the recipe allows or once for want of memory.
    """

    def waiting(other: str) -> None:
        say(f"{stage.title}: waiting for {other}, which trains it")

    with Claims(store).wait(lambda: stage_claims(stage, store, fingerprint), waiting):
        start, wanted = missing_states(stage, store, fingerprint)
        if not wanted:
            return
        if initial is not None:
            initial.check()
        folder = store / "runs" / stage.end.key(fingerprint)
        job = StageJob(
            title=stage.title,
            size=stage.end.size,
            shape=shape(stage.end.size, initial),
            initial=stage.end.initial,
            store=str(store.resolve()),
            run_folder=str(folder.resolve()),
            model=stage.models[0] if stage.models else stage.title,
            corpus=corpus.key,
            train=corpus.train,
            validation=corpus.validation,
            tokenizer=str(corpus.tokenizer),
            legs=stage.end.legs,
            start=start.step,
            start_key=start.key(fingerprint) if start.legs else None,
            deposits=tuple((state.step, state.key(fingerprint)) for state in wanted),
            recipe=recipe,
            fingerprint=fingerprint,
            device=device,
        )
        _fit(job, folder, observer)
        left = missing_states(stage, store, fingerprint)[1]
        if left:
            raise EnvironmentFault(
                f"pretraining stage {stage.title!r} ended without {', '.join(map(str, left))}; see the worker logs."
            )
        shutil.rmtree(folder, ignore_errors=True)


def _fit(job: StageJob, folder: Path, observer: Observer | None) -> None:
    """Runs a stage's workers until it ends, and raises what a user should know if it ended early.

    Args:
        folder: of the run.
    """
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from mlmclm.pretraining.rendezvous import closed

    recipe, device = job.recipe, job.device
    if device == "cpu" and computes_here():
        prepare([job.model_shape()], say_once)
        say_once(f"pretraining computes with the backend {backend_of(device).name}")
    job.stop_path.unlink(missing_ok=True)
    states.prune_checkpoints(folder, recipe.keep_checkpoints)
    trainer = TorchTrainer(
        run_in_worker,
        train_loop_config={"job": job},
        torch_config=closed("nccl" if device == "cuda" else "gloo", folder / "rendezvous"),
        scaling_config=ScalingConfig(num_workers=recipe.workers, use_gpu=device == "cuda", resources_per_worker=dict(worker_bundle(device))),
        run_config=RunConfig(
            name=_attempt(folder, job.title),
            storage_path=str((folder / "ray_train").resolve()),
            failure_config=FailureConfig(max_failures=recipe.max_failures),
            checkpoint_config=CheckpointConfig(num_to_keep=recipe.keep_checkpoints),
            callbacks=[_stop_at_final_failures()],
        ),
    )  # fmt: skip
    try:
        with _followed(job.metrics_path, observer):
            trainer.fit()
    except MlmclmError:
        raise
    except Exception as error:
        raise failures.explain(error, title=job.title, folder=folder, recipe=recipe) from error
    finally:
        _say_notes(job.notes_path)
    if job.stop_path.is_file():
        stopped = read_json(job.stop_path)
        blocks = batch_rows(len(job.train), recipe.batch, recipe.seed, stopped["step"] - 1).tolist()
        raise failures.not_finite(stopped, blocks, title=job.title, folder=folder, recipe=recipe)


def _stop_at_final_failures() -> Any:
    """A callback of Ray Train's controller, which ends the run at once where that fails."""
    from ray.train import UserCallback

    class Stop(UserCallback):
        def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
            failure = failures.final(worker_exceptions)
            if failure is not None:
                raise failure

    return Stop()


def set_aside_damaged(stages: Sequence[Stage], store: Path, fingerprint: str) -> None:
    """Renames states that are not whole, so that they are trained again, and says which.

    Of all states the sizes of their files are looked at; of those that a stage is about to start from, the checksums.
    """
    for stage in reversed(stages):  # a stage whose start is set aside comes before the one that makes it
        for state in stage.states:
            _set_aside(state, store, fingerprint, read=False)
        while True:
            start, wanted = missing_states(stage, store, fingerprint)
            if not wanted or not start.legs or not _set_aside(start, store, fingerprint, read=True):
                break


def _set_aside(state: State, store: Path, fingerprint: str, *, read: bool) -> bool:
    key = state.key(fingerprint)
    folder = states.state_folder(store, key)

    def damage() -> str | None:
        return states.damage(folder, read=read) if folder.is_dir() else None

    if damage() is None:
        return False
    with Claims(store).wait(
        lambda: [f"states-{key}"], lambda other: say(f"{folder}: waiting for {other}, which makes it")
    ):
        found = damage()  # again, for another process may have set it aside
        if found is None:
            return False
        say(
            f"{folder} ({state}) is not used: {found}. It is kept as {states.set_aside(store, key).name} and trained again."
        )
        return True


def _attempt(folder: Path, title: str) -> str:
    """A name that no earlier Ray Train run of this stage has: Ray would take up its list of checkpoints, which it does not
    write whole or not at all, and fail where one is gone."""
    before = [path.name.rpartition("-")[2] for path in (folder / "ray_train").glob("*")]
    number = 1 + max((int(tail) for tail in before if tail.isdigit()), default=0)
    return f"{title.replace(' ', '-')}-{number}"


def _say_notes(path: Path) -> None:
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            say_once(line)
        path.unlink()


@contextmanager
def _followed(path: Path, observer: Observer | None) -> Iterator[None]:
    """Hands new lines of a metrics file to `observer` twice a second while the body runs, and what is left at its end."""
    if observer is None:
        yield
        return
    seen = 0

    def look() -> None:
        nonlocal seen
        records = states.read_metrics(path)
        if len(records) < seen:  # a restart dropped lines behind its checkpoint
            seen = 0
        if len(records) > seen:
            observer(records[seen:])
            seen = len(records)

    try:
        with repeated(look, seconds=0.5, name="mlmclm-follow"):
            yield
    finally:
        look()


def prepare_environment() -> None:
    """Settings that Ray Train reads in the driver's process; call before the first `run_stage`."""
    os.environ.setdefault("RAY_TRAIN_ENABLE_STATE_TRACKING", "1")  # the dashboard's page of train runs
    # A node takes minutes to start, and Train only asks for the same again.
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "600")
    # The end of a stage is seen at the controller's next look; each look takes the workers' cores for some milliseconds.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")

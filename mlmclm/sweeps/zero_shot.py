"""Zero-shot evaluation of a study's models, with the list of their results; and of single models, in this process."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from mlmclm.arguments import StudyFolders, known_arguments
from mlmclm.backends.device_kinds import Choice
from mlmclm.cluster.placement import cell_bundle, check_place
from mlmclm.cluster.ray_cluster import Session
from mlmclm.configuration import parse_config
from mlmclm.errors import MlmclmError, UserError, for_each, one_line
from mlmclm.evaluation.evaluations import (
    Subject,
    ZeroShotTask,
    chance_scores,
    evaluation_key,
    filed_as,
    find_or_compute,
    under_names,
)
from mlmclm.evaluation.zero_shot_config import ZeroShot, load_model, read_mteb
from mlmclm.progress import Bar, say
from mlmclm.registry import Shipment, shipment
from mlmclm.storage.place import Place, open_place
from mlmclm.sweeps.cells import SweepModel
from mlmclm.sweeps.find_model import find_model
from mlmclm.sweeps.results_store import Evaluations

if TYPE_CHECKING:
    import pandas as pd

SECONDS_BETWEEN_LOOKS = 1.0
ATTEMPTS_AGAIN = 3
"""How often Ray reruns an evaluation whose worker has died."""


@dataclass(frozen=True)
class ZeroShotTasks:
    """The zero-shot tasks of a study: as its file asks for them, with absolute paths (`asked`), and with their data (`tasks`)."""

    asked: ZeroShot
    tasks: list[ZeroShotTask]

    def of_models(self, models: Iterable[SweepModel], results_store: Evaluations) -> list[tuple[Subject, ZeroShotTask]]:
        """Return all pairs of model and task; each model has the hashes under which the store has the result of the pair."""
        from mlmclm.evaluation.language_model import scoring_of

        subjects = [Subject.of(model.name, *scoring_of(model.folder)) for model in models]
        pairs = [(subject, task) for subject in subjects for task in self.tasks]
        return for_each(
            pairs, lambda pair: (filed_as(*pair, results_store), pair[1])
        )  # one error names all damaged ones


def zero_shot_tasks(zero_shot: ZeroShot | None, folder: Path | None, place: Place) -> ZeroShotTasks | None:
    """Read the zero-shot tasks of a study's file in a folder; None if there are none. Raises like `ZeroShot.read`."""
    if zero_shot is None:
        return None
    os.environ.setdefault("TQDM_DISABLE", "1")  # the harness has bars of its own; tqdm reads this when it is imported
    asked = zero_shot.found(folder, place.data_root)
    return ZeroShotTasks(asked, asked.read(place.data_root))


def listed_evaluations(wanted: Sequence[tuple[Subject, ZeroShotTask]]) -> dict[str, Any]:
    """Return pairs of model and task (`ZeroShotTasks.of_models`) as `run.json` lists them, and the tasks' chance levels."""
    return {
        "evaluations": [
            {"model": subject.name, "task": task.name, "key": evaluation_key(subject, task)} for subject, task in wanted
        ],
        "zero_shot_chances": {task.name: chance_scores(task) for _, task in wanted},
    }


def evaluate_models(
    wanted: Sequence[tuple[Subject, ZeroShotTask]],
    asked: ZeroShot,
    place: Place,
    *,
    session: Session,
    device: Choice,
    cpus: float,
) -> MlmclmError | None:
    """Compute the missing evaluations of a study's models, on some CPUs each; open a Ray session only if needed.

    Returns:
        The error if some failed, for the caller to raise once the rest of the study is done.

    Raises:
        UserError: results are damaged; the message names all of them.
    """
    # A study stops at a damaged result, because its report would lack it.
    filed = Evaluations(place.store).find_all(evaluation_key(*pair) for pair in wanted)
    missing = [pair for pair in wanted if evaluation_key(*pair) not in filed]
    if not missing:
        return None
    try:
        with session():
            evaluate_missing(missing, asked, store=place.store, data_root=place.data_root, device=device, cpus=cpus)
    except MlmclmError as error:
        say(f"{error}\nThe study continues, and will end with this error.")
        return error
    return None


def evaluate_missing(
    missing: Sequence[tuple[Subject, ZeroShotTask]],
    zero_shot: ZeroShot,
    *,
    store: Path,
    data_root: Path | None,
    device: Choice,
    cpus: float,
) -> None:
    """Compute and file the results of models on tasks in the current Ray session.

    Args:
        zero_shot: the settings from which the tasks were read; the files that these name must be visible to all nodes.
        cpus: CPUs that an evaluation reserves. It has a GPU too if `device` chooses GPUs.

    Raises:
        MlmclmError: some evaluations failed; the results of all others are filed.
    """
    import ray
    from ray.exceptions import RayError

    from mlmclm.cluster.cluster import cluster_view, wait_for_a_place
    from mlmclm.cluster.ray_cluster import check_node

    view = cluster_view()
    bundle = cell_bundle(cpus, None, device, view())
    check_place("An evaluation", bundle, view(), remedy="Change the space's cpus_per_cell, or add nodes.")
    wait_for_a_place("zero-shot evaluation", bundle, view)
    reserved = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0)}
    remote = ray.remote(**reserved, max_retries=ATTEMPTS_AGAIN)(_evaluate)
    shared = store.resolve(), data_root.resolve() if data_root else None, ray.put(shipment())
    waiting = {
        remote.options(name=f"{subject.name}/{task.name}").remote(
            subject, task.name, evaluation_key(subject, task), zero_shot, *shared
        ): f"{subject.name} on {task.name}"
        for subject, task in missing
    }
    failures = []
    with Bar("zero-shot evaluation", len(missing), unit="evaluations") as bar:
        while waiting:
            check_node()
            for done in ray.wait(list(waiting), num_returns=1, timeout=SECONDS_BETWEEN_LOOKS)[0]:
                title = waiting.pop(done)
                try:
                    failure = ray.get(done)
                except RayError as error:
                    failure = f"{title}: {type(error).__name__}: {one_line(error, 300)}"
                if failure:
                    failures.append(failure)
                bar.update(bar.done + 1)
        bar.complete = not failures
    if failures:
        raise MlmclmError(
            "\n".join([f"{len(failures)} of {len(missing)} evaluations failed; all other results are kept.", *failures])
        )


def _evaluate(
    subject: Subject,
    task: str,
    key: str,
    zero_shot: ZeroShot,
    store: Path,
    data_root: Path | None,
    registered: Shipment,
) -> str | None:
    """Compute and file one result, as a Ray task; return the message of an error that would recur, else None.

    Args:
        registered: the registry members of the driver's process; unpickling this registers them in the worker too.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")  # the harness has bars of its own; tqdm reads this when it is imported
    try:
        chosen = _tasks(zero_shot, data_root)[task]
        if evaluation_key(subject, chosen) != key:
            return (
                f"{subject.name} on {task}: the task's data on {platform.node()} differ from those where the study was started. Use a "
                "folder that all nodes see, and do not change the data while the study runs."
            )
        find_or_compute(subject, chosen, Evaluations(store), lambda: _model(subject))
    except MlmclmError as error:
        return str(error)
    return None


@lru_cache(maxsize=1)
def _tasks(zero_shot: ZeroShot, data_root: Path | None) -> dict[str, ZeroShotTask]:
    """Return a worker process's tasks by name, read once."""
    return {task.name: task for task in zero_shot.read(data_root)}


_model = lru_cache(maxsize=1)(load_model)
"""Returns a worker process's model, loaded once for all its tasks."""


def evaluations_there(models: Iterable[SweepModel], place: Place, evaluations: ZeroShotTasks) -> int:
    """Return how many results of these models on these tasks the store has."""
    results_store = Evaluations(place.store)
    wanted = evaluations.of_models(models, results_store)
    return sum(results_store.find(evaluation_key(*pair)) is not None for pair in wanted)


def zero_shot_results(run: Mapping[str, Any], store: Path) -> list[dict[str, Any]]:
    """Return the results so far of the evaluations that `run.json` lists; compute nothing."""
    results_store, chances = Evaluations(store), run.get("zero_shot_chances", {})
    evaluations = [(entry, results_store.find(entry["key"])) for entry in run.get("evaluations", ())]
    return [
        under_names(result, entry["model"], entry["task"], chances.get(entry["task"], {}))
        for entry, result in evaluations
        if result is not None
    ]


@dataclass(frozen=True)
class ZeroShotScores:
    """Scores of models on zero-shot tasks.

    Attributes:
        results: one for each model and task, as the store keeps them, with `computed`: whether it was computed now.
        failure: the error of the tasks that failed; all others are evaluated.
    """

    results: list[dict[str, Any]]
    failure: UserError | None

    def table(self) -> pd.DataFrame:
        """Return the metrics: model, scoring, task, metric, score, low, high (a 95 % interval), chance and examples."""
        import pandas as pd

        named = ("model", "scoring", "task")
        return pd.DataFrame(
            {**{name: result[name] for name in named}, "metric": metric, **values}
            for result in self.results
            for metric, values in result["metrics"].items()
        )


@known_arguments
def evaluate(
    models: Sequence[str],
    *,
    tasks: Sequence[str] = (),
    winogender: str | Path | None = None,
    winogender_rule: str = "mass",
    mteb: Sequence[str] = (),
    scoring: str | None = None,
    limit: int | None = None,
    check: bool = True,
    **folders: Unpack[StudyFolders],
) -> ZeroShotScores:
    """Evaluate models on zero-shot tasks in this process; what the store has already is not computed again.

    Args:
        models: folders, names in a study of the store, or names on the Hub.
        tasks: names of lm-evaluation-harness, or YAML files in its format.
        winogender: folder with Winogender's files.
        winogender_rule: `mass` or `published`, how an answer is read.
        mteb: tasks or benchmarks of MTEB, or folders with queries, corpus and qrels.
        scoring: `causal`, `masked` or `mntp`; by default as the model's folder says.
        limit: number of documents of each task, its first; None for all.
        check: whether to raise the error of failed tasks after the others are evaluated; otherwise it is the result's `failure`.
        folders: `StudyFolders`.

    Raises:
        UserError: there is nothing to evaluate on, or an argument or a model is wrong.
    """
    place = open_place(**folders)
    os.environ.setdefault("TQDM_DISABLE", "1")  # the harness has bars of its own; tqdm reads this when it is imported
    from mlmclm.evaluation.language_model import scoring_of

    with_harness = bool(tasks) or winogender is not None
    if not with_harness and not mteb:
        raise UserError(
            "nothing to evaluate on: give --task NAME or FILE, --winogender FOLDER, or --mteb NAME or FOLDER."
        )
    for option, is_set, applies, needs in (
        ("--limit", limit is not None, bool(tasks), "--task; Winogender and mteb's tasks are evaluated whole"),
        ("--scoring", scoring is not None, with_harness, "--task and --winogender"),
        ("--winogender-rule", winogender_rule != "mass", winogender is not None, "--winogender"),
    ):
        if is_set and not applies:
            raise UserError(f"{option} belongs to {needs}; leave it out.")
    sweep_models = [find_model(model, place.store, data_root=place.data_root) for model in models]
    scorings = [scoring_of(model.folder, scoring) for model in sweep_models] if with_harness else []
    asked = {"tasks": tasks, "winogender": winogender and str(winogender), "winogender_rule": winogender_rule}
    harness_tasks = (
        parse_config(ZeroShot, {**asked, "limit": limit}, where="evaluate").read(place.data_root)
        if with_harness
        else []
    )
    sentence_tasks = read_mteb(mteb)
    shared = [model.name for model in sweep_models]
    # Folders of several models may have one name.
    names = [name if shared.count(name) == 1 else source for name, source in zip(shared, models, strict=True)]
    subjects = [(Subject.of(name, *scored), harness_tasks) for name, scored in zip(names, scorings, strict=False)]
    if sentence_tasks:
        sentences = (
            Subject.of(name, model.folder, "embedding") for name, model in zip(names, sweep_models, strict=True)
        )
        subjects += [(subject, sentence_tasks) for subject in sentences]
    results_store, failed = Evaluations(place.store), list[UserError]()
    results = [result for subject, tasks in subjects for result in _results(subject, tasks, results_store, failed)]
    failure = UserError("\n".join(dict.fromkeys(map(str, failed)))) if failed else None
    if failure is not None and check:
        raise failure
    return ZeroShotScores(results, failure)


def _results(
    model: Subject, tasks: Sequence[ZeroShotTask], results_store: Evaluations, failed: list[UserError]
) -> list[dict[str, Any]]:
    """Return a model's results, computing those that are missing; the model is loaded only if one is.

    Args:
        failed: receives the errors of tasks; the other tasks are computed all the same.
    """
    load = cache(partial(load_model, model))
    results = []
    for task in tasks:
        try:
            subject = filed_as(model, task, results_store)
            key = evaluation_key(subject, task)
            stored = results_store.find(key)
            with nullcontext() if stored else Bar(f"{subject.name} on {task.name}", unit="sequences") as bar:
                result, computed = find_or_compute(subject, task, results_store, load, bar.update if bar else None)
        except UserError as error:
            failed.append(error)
            continue
        results.append({**result, "computed": computed, "file": str(results_store.path(key))})
    return results

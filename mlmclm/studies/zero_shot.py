"""The zero-shot evaluations of a study or sweep: its models on its tasks, and the list of their results."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mlmclm.cluster.ray_cluster import Session
from mlmclm.errors import MlmclmError
from mlmclm.evaluation.evaluations import Subject, ZeroShotTask, chance_scores, evaluation_key, filed_as, named
from mlmclm.evaluation.zero_shot_config import ZeroShot
from mlmclm.progress import say
from mlmclm.reports.study_facts import ZeroShotFacts
from mlmclm.storage.checksums import read_sealed, sealed
from mlmclm.storage.files import canonical_json, write_atomic
from mlmclm.studies.place import Place
from mlmclm.studies.study_file import AnyFile
from mlmclm.sweeps.cells import SweepModel
from mlmclm.sweeps.ray_evaluation import evaluate_missing
from mlmclm.sweeps.results_store import Evaluations

LISTING = "zero_shot.json"
"""File in a study's folder: what was asked for, the evaluations of the last run, each by model, task and key, and the tasks'
chance levels."""


@dataclass(frozen=True)
class ZeroShotTasks:
    """The tasks that a study asks for, with absolute paths, and with their data."""

    asked: ZeroShot
    tasks: list[ZeroShotTask]

    def of_models(self, models: Iterable[SweepModel], results_store: Evaluations) -> list[tuple[Subject, ZeroShotTask]]:
        """Return each model with each task, with the hashes under which the results store has the result."""
        from mlmclm.evaluation.language_model import scoring_of

        subjects = [Subject.of(model.name, *scoring_of(model.folder)) for model in models]
        return [(filed_as(subject, task, results_store), task) for subject in subjects for task in self.tasks]


def zero_shot_tasks(file: AnyFile, place: Place) -> ZeroShotTasks | None:
    """Read the tasks that a study's models answer without training; None if there are none. Raises like `read_tasks`."""
    if file.zero_shot is None:
        return None
    os.environ.setdefault("TQDM_DISABLE", "1")  # the harness has bars of its own; tqdm reads this when it is imported
    asked = file.zero_shot.found(file.folder, place.data_root)
    return ZeroShotTasks(asked, asked.read(place.data_root))


def evaluate(
    file: AnyFile,
    place: Place,
    models: Iterable[SweepModel],
    evaluations: ZeroShotTasks | None,
    *,
    session: Session,
    cpus: float,
) -> MlmclmError | None:
    """Compute the missing evaluations of a study's models, on some CPUs each; open a Ray session only if needed.

    Returns:
        The error if some failed, for the caller to raise once the rest of the study is done.

    Raises:
        UserError: a model can't be evaluated this way, or results are damaged; the message names all of them.
    """
    if evaluations is None:
        return None
    results_store = Evaluations(place.store)
    wanted = evaluations.of_models(models, results_store)
    keys = [evaluation_key(*each) for each in wanted]
    # A study can't go on with a damaged result, which its report would lack.
    found = results_store.find_all(keys)
    results = [
        {"model": subject.name, "task": task.name, "key": key}
        for (subject, task), key in zip(wanted, keys, strict=True)
    ]
    chances = {task.name: chance_scores(task) for task in evaluations.tasks}
    listing = sealed({"asked": _asked(file), "results": results, "chances": chances})
    write_atomic(place.study_folder(file.name) / LISTING, canonical_json(listing))
    missing = [each for each, key in zip(wanted, keys, strict=True) if key not in found]
    if not missing:
        return None
    try:
        with session():
            evaluate_missing(
                missing,
                evaluations.asked,
                store=place.store,
                data_root=place.data_root,
                device=file.device,
                cpus=cpus,
            )
    except MlmclmError as error:
        say(f"{error}\nThe study continues, and will end with this error.")
        return error
    return None


def evaluations_there(models: Iterable[SweepModel], place: Place, evaluations: ZeroShotTasks) -> int:
    """Return how many results of these models on these tasks the store has."""
    results_store = Evaluations(place.store)
    wanted = evaluations.of_models(models, results_store)
    return sum(results_store.find(evaluation_key(*each)) is not None for each in wanted)


def zero_shot_results(file: AnyFile, place: Place) -> list[dict[str, Any]]:
    """Return a study's results so far, by the list of its last run; compute nothing."""
    path = place.study_folder(file.name) / LISTING
    if file.zero_shot is None or not path.is_file():
        return []
    listing = read_sealed(path, "Run the study again to write it; nothing that is there is computed again.")
    if listing["asked"] != _asked(file):
        say(
            f"{file.name}: its zero-shot results are left out: they belong to other tasks or models than the file now has."
        )
        return []
    results_store = Evaluations(place.store)
    found = [(each, results_store.find(each["key"])) for each in listing["results"]]
    chances = listing["chances"]
    return [
        named(result, each["model"], each["task"], chances.get(each["task"], {}))
        for each, result in found
        if result is not None
    ]


def _asked(file: AnyFile) -> dict[str, Any]:
    """Return what a file asks for, as plain values."""
    assert file.zero_shot is not None
    return {"models": [str(model) for model in file.models], "zero_shot": file.zero_shot.model_dump(mode="json")}


def zero_shot_facts(file: AnyFile, place: Place) -> tuple[ZeroShotFacts, ...]:
    """Return the results so far as the report shows them."""
    return tuple(
        ZeroShotFacts(
            result["model"],
            result["task"],
            result["scoring"],
            result["main"],
            result["metrics"],
            tuple(map(float, _numbers(result["values"].get(result["main"])))),
        )
        for result in zero_shot_results(file, place)
    )


def _numbers(values: Any) -> list[float]:
    """Return the examples' values if all are numbers (a perplexity's are pairs)."""
    known = values or []
    return known if all(isinstance(each, int | float) for each in known) else []

"""The zero-shot evaluations of a study or sweep: its models on its tasks, and the list of their results."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlmclm.errors import MlmclmError
from mlmclm.progress import say
from mlmclm.storage.files import canonical_json, read_json, write_atomic
from mlmclm.study.place import Place

if TYPE_CHECKING:
    from mlmclm.evaluation.config import ZeroShot
    from mlmclm.evaluation.evaluations import Subject, ZeroShotTask
    from mlmclm.reports.study_facts import ZeroShotFacts
    from mlmclm.service.placement import Choice
    from mlmclm.study.study_file import StudyFile
    from mlmclm.study.sweep_file import SweepFile
    from mlmclm.sweeps.cells import SweepModel

LISTING = "zero_shot.json"
"""File in a study's folder: the what was asked for, and the evaluations of the last run, each by model, task and key."""


@dataclass(frozen=True)
class ZeroShotTasks:
    """The tasks that a study asks for, with absolute paths, and with their data."""

    asked: ZeroShot
    tasks: list[ZeroShotTask]


def zero_shot_tasks(file: StudyFile | SweepFile, place: Place) -> ZeroShotTasks | None:
    """Read the tasks that a study's models answer without training; None if there are none.

    Raises:
        UserError: something is wrong with a task, or a package is missing.
    """
    if file.zero_shot is None:
        return None
    os.environ.setdefault("TQDM_DISABLE", "1")  # the harness has bars of its own; tqdm reads this when it is imported
    asked = file.zero_shot.found(file.folder, place.data_root)
    return ZeroShotTasks(asked, asked.read(place.data_root))


def evaluate(
    file: StudyFile | SweepFile,
    place: Place,
    evaluations: ZeroShotTasks | None,
    models: Sequence[SweepModel],
    *,
    device: Choice,
    cpus: float,
    session: Callable[[], AbstractContextManager[Any]],
) -> MlmclmError | None:
    """Compute the missing evaluations of a study's models; `zero_shot_results` returns what is there then.

    Args:
        cpus: CPUs that each reserves.

    Returns:
        The error if some failed, for the caller to raise once the rest of the study is done.

    Raises:
        UserError: a model can't be evaluated so, or results are damaged; the message names all of them.
    """
    if evaluations is None:
        return None
    from mlmclm.evaluation.evaluations import Evaluations
    from mlmclm.evaluation.on_ray import evaluate_models

    subjects = _subjects(models)
    wanted = _listing(subjects, evaluations)
    # A study can't go on beside a damaged result, which would be missing in its report.
    Evaluations(place.store).find_all(each["key"] for each in wanted)
    listing = {"asked": _asked(file), "results": wanted}
    write_atomic(place.study_folder(file) / LISTING, canonical_json(listing))
    try:
        evaluate_models(
            subjects,
            evaluations.asked,
            evaluations.tasks,
            store=place.store,
            data_root=place.data_root,
            device=device,
            cpus=cpus,
            session=session,
        )
    except MlmclmError as error:
        say(f"{error}\nThe study goes on, and ends with this error.")
        return error
    return None


def evaluations_there(evaluations: ZeroShotTasks, place: Place, models: Sequence[SweepModel]) -> int:
    """Return how many results of these models on these tasks the store has."""
    from mlmclm.evaluation.evaluations import Evaluations

    ledger = Evaluations(place.store)
    return sum(ledger.find(each["key"]) is not None for each in _listing(_subjects(models), evaluations))


def _subjects(models: Sequence[SweepModel]) -> list[Subject]:
    from mlmclm.evaluation.evaluations import Subject
    from mlmclm.evaluation.language_model import scoring_of

    return [Subject.of(model.name, *scoring_of(model.folder)) for model in models]


def _listing(subjects: Sequence[Subject], evaluations: ZeroShotTasks) -> list[dict[str, str]]:
    from mlmclm.evaluation.evaluations import evaluation_key

    return [
        {"model": subject.name, "task": task.name, "key": evaluation_key(subject, task)}
        for subject in subjects
        for task in evaluations.tasks
    ]


def zero_shot_results(file: StudyFile | SweepFile, place: Place) -> list[dict[str, Any]]:
    """Return the results that a study has so far, those of its last run's list; compute nothing."""
    path = place.study_folder(file) / LISTING
    if file.zero_shot is None or not path.is_file():
        return []
    from mlmclm.evaluation.evaluations import Evaluations, named

    listing = read_json(path)
    # Earlier versions wrote a list of results only.
    if isinstance(listing, list) or listing["asked"] != _asked(file):
        say(
            f"{file.name}: its zero-shot results are left out: they are of other tasks or models than the file now gives."
        )
        return []
    ledger = Evaluations(place.store)
    found = [(each, ledger.find(each["key"])) for each in listing["results"]]
    return [named(result, each["model"], each["task"]) for each, result in found if result is not None]


def _asked(file: StudyFile | SweepFile) -> dict[str, Any]:
    """Return what a file asks for, as plain values."""
    assert file.zero_shot is not None
    return {"models": [str(model) for model in file.models], "zero_shot": file.zero_shot.model_dump(mode="json")}


def zero_shot_facts(file: StudyFile | SweepFile, place: Place) -> tuple[ZeroShotFacts, ...]:
    """Return the results so far as the report shows them."""
    from mlmclm.reports.study_facts import ZeroShotFacts

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
    """Return the examples' values if all are numbers; those of a perplexity are pairs."""
    known = values or []
    return known if all(isinstance(each, int | float) for each in known) else []

"""Zero-shot evaluation of models that are named one by one, in this process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from mlmclm.arguments import StudyFolders, known_arguments
from mlmclm.errors import UserError
from mlmclm.evaluation.evaluations import Subject, ZeroShotTask, evaluation_key, filed_as, find_or_compute
from mlmclm.evaluation.zero_shot_config import load_model, read_mteb, read_tasks
from mlmclm.progress import Bar
from mlmclm.studies.place import place_of
from mlmclm.sweeps.find_model import find_model
from mlmclm.sweeps.results_store import Evaluations

if TYPE_CHECKING:
    import pandas as pd


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
        limit: evaluate on the first documents of each task only.
        check: whether to raise the error of tasks that failed, once the others are evaluated; else it is the `failure`.
        folders: `StudyFolders`.

    Raises:
        UserError: there is nothing to evaluate on, or an argument or a model is wrong.
    """
    place = place_of(**folders)
    os.environ.setdefault("TQDM_DISABLE", "1")  # the harness has bars of its own; tqdm reads this when it is imported
    from mlmclm.evaluation.language_model import scoring_of

    asked = bool(tasks) or winogender is not None
    if not asked and not mteb:
        raise UserError(
            "nothing to evaluate on: give --task NAME or FILE, --winogender FOLDER, or --mteb NAME or FOLDER."
        )
    for option, given, wanted, needs in (
        ("--limit", limit is not None, bool(tasks), "--task; Winogender and mteb's tasks are evaluated whole"),
        ("--scoring", scoring is not None, asked, "--task and --winogender"),
        ("--winogender-rule", winogender_rule != "mass", winogender is not None, "--winogender"),
    ):
        if given and not wanted:
            raise UserError(f"{option} belongs to {needs}; leave it out.")
    found = [find_model(model, place.store, data_root=place.data_root) for model in models]
    chosen = [scoring_of(each.folder, scoring) for each in found] if asked else []
    read = read_tasks(
        tasks, Path(winogender) if winogender else None, winogender_rule, data_root=place.data_root, limit=limit
    )
    sentence_tasks = read_mteb(mteb)
    shared = [each.name for each in found]
    # Folders of several models may have one name.
    names = [name if shared.count(name) == 1 else given for name, given in zip(shared, models, strict=True)]
    subjects = [(Subject.of(name, *each), read) for name, each in zip(names, chosen, strict=False)]
    if sentence_tasks:
        sentences = (Subject.of_sentences(name, each.folder) for name, each in zip(names, found, strict=True))
        subjects += [(subject, sentence_tasks) for subject in sentences]
    results_store, failed = Evaluations(place.store), list[UserError]()
    results = [result for subject, own in subjects for result in _results(subject, own, results_store, failed)]
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
            there = results_store.find(key)
            with nullcontext() if there else Bar(f"{subject.name} on {task.name}", unit="sequences") as bar:
                result, computed = find_or_compute(subject, task, results_store, load, bar.update if bar else None)
        except UserError as error:
            failed.append(error)
            continue
        results.append({**result, "computed": computed, "file": str(results_store.path(key))})
    return results

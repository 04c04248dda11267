"""Zero-shot evaluation of models that are named one by one, in this process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

from mlmclm.errors import UserError
from mlmclm.evaluation.evaluations import Subject, ZeroShotTask, evaluation_key, find_or_compute
from mlmclm.evaluation.zero_shot_config import load_model, read_mteb, read_tasks
from mlmclm.progress import Bar
from mlmclm.studies.place import Place
from mlmclm.sweeps.find_model import find_model
from mlmclm.sweeps.ledger import Evaluations


def evaluate_models(
    models: Sequence[str],
    place: Place,
    *,
    tasks: Sequence[str] = (),
    winogender: Path | None = None,
    winogender_rule: str = "mass",
    mteb: Sequence[str] = (),
    scoring: str | None = None,
    limit: int | None = None,
) -> tuple[list[dict[str, Any]], UserError | None]:
    """Evaluate models on zero-shot tasks, computing what is missing.

    Args:
        models: folders, names in a study of the store, or names on the Hub.
        tasks: names of lm-evaluation-harness, or YAML files in its format.
        winogender: folder with Winogender's files.
        mteb: tasks or benchmarks of MTEB, or folders with queries, corpus and qrels.
        scoring: `causal`, `masked` or `mntp`; by default as the model's folder says.
        limit: evaluate on the first documents of each task only.

    Returns:
        The results, and one error for the tasks that failed; the other tasks are evaluated all the same.

    Raises:
        UserError: there is nothing to evaluate on, or an argument or a model is wrong.
    """
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
    read = read_tasks(tasks, winogender, winogender_rule, data_root=place.data_root, limit=limit)
    sentence_tasks = read_mteb(mteb)
    shared = [each.name for each in found]
    # Folders of several models may have one name.
    names = [name if shared.count(name) == 1 else given for name, given in zip(shared, models, strict=True)]
    subjects = [(Subject.of(name, *each), read) for name, each in zip(names, chosen, strict=False)]
    if sentence_tasks:
        sentences = (Subject.of_sentences(name, each.folder) for name, each in zip(names, found, strict=True))
        subjects += [(subject, sentence_tasks) for subject in sentences]
    ledger, failed = Evaluations(place.store), list[UserError]()
    results = [result for subject, own in subjects for result in _results(subject, own, ledger, failed)]
    return results, UserError("\n".join(dict.fromkeys(map(str, failed)))) if failed else None


def _results(
    subject: Subject, tasks: Sequence[ZeroShotTask], ledger: Evaluations, failed: list[UserError]
) -> list[dict[str, Any]]:
    """Return a model's results, computing those that are missing; the model is loaded only if one is.

    Args:
        failed: receives the errors of tasks; the other tasks are computed all the same.
    """
    load = cache(partial(load_model, subject))
    results = []
    for task in tasks:
        key = evaluation_key(subject, task)
        try:
            with nullcontext() if ledger.find(key) else Bar(f"{subject.name} on {task.name}", unit="sequences") as bar:
                result, computed = find_or_compute(subject, task, ledger, load, bar.update if bar else None)
        except UserError as error:
            failed.append(error)
            continue
        results.append({**result, "computed": computed, "file": str(ledger.path(key))})
    return results

"""`mlmclm evaluate`: zero-shot tasks, for decoders and encoders alike."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from mlmclm.cli import options
from mlmclm.cli.output import print_json, show_table
from mlmclm.errors import UserError
from mlmclm.progress import Bar

if TYPE_CHECKING:
    from mlmclm.evaluation.evaluations import Evaluations, Subject, ZeroShotTask


def evaluate(
    models: Annotated[
        list[str],
        Argument(
            metavar="MODEL...",
            help="Folders, names in a study of the store (NAME or STUDY/NAME), or names on the Hub (OWNER/NAME).",
        ),
    ],
    task: Annotated[
        list[str] | None,
        Option(
            metavar="NAME|FILE",
            help="A task of lm-evaluation-harness, or a YAML file in its format; may be given several times.",
        ),
    ] = None,
    winogender: Annotated[
        Path | None,
        Option(
            metavar="FOLDER", help="Also evaluate Winogender (pronouns by occupation), from this folder with its files."
        ),
    ] = None,
    winogender_rule: Annotated[
        str,
        Option(
            metavar="mass|published",
            help="How an answer is read: by all probability, or by the published script's rule.",
        ),
    ] = "mass",
    mteb: Annotated[
        list[str] | None,
        Option(
            metavar="NAME|FOLDER",
            help="Also evaluate a task or benchmark of MTEB, or a folder with queries, corpus and qrels; for sentence encoders.",
        ),
    ] = None,
    scoring: Annotated[
        str | None,
        Option(metavar="causal|masked|mntp", help="How tokens are predicted; by default as the model's folder says."),
    ] = None,
    limit: Annotated[int | None, Option(min=1, help="Evaluate on the first documents of each task only.")] = None,
    store: options.Store = options.DEFAULT_STORE,
    data: options.Data = None,
    as_json: options.Json = False,
) -> None:
    """Evaluates models on zero-shot tasks, without training: the model scores each answer or writes one.

    Decoders are scored causally. Encoders are scored from left to right: each token at the first of three masks after the
    true text so far. The harness (lm-eval, in `mlmclm[evaluation]`) builds the prompts and computes the metrics.

    mteb runs its tasks on sentence-transformers folders, such as those that `mlmclm export --task` writes.

    Each result is computed once. It is a file in the store's evaluations/, named by a hash of everything that can change it.

    Example: mlmclm evaluate 1m-clm-1k 1m-mlm40-1k --task last_word.yaml
    """
    os.environ.setdefault("TQDM_DISABLE", "1")  # the harness has bars of its own; tqdm reads this when it is imported
    from mlmclm.evaluation.evaluations import Evaluations, Subject
    from mlmclm.evaluation.language_model import scoring_of
    from mlmclm.evaluation.zero_shot_config import read_mteb, read_tasks
    from mlmclm.sweeps.find_model import find_model

    asked = bool(task) or winogender is not None
    if not asked and not mteb:
        raise UserError(
            "nothing to evaluate on: give --task NAME or FILE, --winogender FOLDER, or --mteb NAME or FOLDER."
        )
    for option, given, wanted, needs in (
        ("--limit", limit is not None, bool(task), "--task; Winogender and mteb's tasks are evaluated whole"),
        ("--scoring", scoring is not None, asked, "--task and --winogender"),
        ("--winogender-rule", winogender_rule != "mass", winogender is not None, "--winogender"),
    ):
        if given and not wanted:
            raise UserError(f"{option} belongs to {needs}; leave it out.")
    place = options.place(store, data)
    found = [find_model(model, place.store, data_root=place.data_root) for model in models]
    chosen = [scoring_of(each.folder, scoring) for each in found] if asked else []
    tasks = read_tasks(task or (), winogender, winogender_rule, data_root=place.data_root, limit=limit)
    sentence_tasks = read_mteb(mteb or ())
    shared = [each.name for each in found]
    # Folders of several models may have one name.
    names = [name if shared.count(name) == 1 else given for name, given in zip(shared, models, strict=True)]
    subjects = [(Subject.of(name, *each), tasks) for name, each in zip(names, chosen, strict=False)]
    if sentence_tasks:
        sentences = (Subject.of_sentences(name, each.folder) for name, each in zip(names, found, strict=True))
        subjects += [(subject, sentence_tasks) for subject in sentences]
    ledger = Evaluations(place.store)
    failed: list[UserError] = []
    results = [result for subject, own in subjects for result in _results(subject, own, ledger, failed)]
    if as_json:
        shown = [{name: each for name, each in result.items() if name != "values"} for result in results]
        print_json({"results": shown})
    elif results:
        _show(results)
    if failed:
        raise UserError("\n".join(dict.fromkeys(map(str, failed))))


def _results(
    subject: Subject, tasks: Sequence[ZeroShotTask], ledger: Evaluations, failed: list[UserError]
) -> list[dict[str, Any]]:
    """Return a model's results, computing those that are missing; the model is loaded only if one is.

    Args:
        failed: receives the errors of tasks; the other tasks are computed all the same.
    """
    from mlmclm.evaluation.evaluations import evaluation_key, find_or_compute
    from mlmclm.evaluation.zero_shot_config import load_model

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


def _show(results: Sequence[Mapping[str, Any]]) -> None:
    rows = []
    for result in results:
        for name, metric in result["metrics"].items():
            score, low, high = (metric[part] for part in ("score", "low", "high"))
            value = "–" if score is None else f"{score:.4f}" if abs(score) < 10_000 else f"{score:.3e}"
            interval = "" if low is None or high is None else f"[{low:.4f}, {high:.4f}]"
            examples = "" if metric["examples"] is None else f"{metric['examples']:,}"
            place = (result[part] for part in ("model", "scoring", "task"))
            chance = "–" if metric["chance"] is None else f"{metric['chance']:.4f}"
            rows.append((*place, name, value, interval, chance, examples, "" if result["computed"] else "(found)"))
    for model in dict.fromkeys(result["model"] for result in results):
        means = [
            result["metrics"][result["main"]]["score"]
            for result in results
            if (result["model"], result["scoring"]) == (model, "embedding")
        ]
        if len(means) > 1:
            mean = f"{sum(means) / len(means):.4f}" if None not in means else "–"
            rows.append((model, "embedding", f"mean of {len(means)} tasks", "main scores", mean, "", "", "", ""))
    columns = ("model", "scoring", "task", "metric", "score", "95 %", "chance", "examples", "")
    show_table(columns, rows, drop=("", "examples"))

"""lm-evaluation-harness's logged samples: `samples_TASK_DATE.jsonl`, one line per document and filter (`--log_samples`).

A line holds `doc_id`, `doc`, the hashes of the document, the prompt and the target, and the document's value of each metric
(harness 0.4). Since 0.4.5 a line also names its metrics and the filter of the answers; before, all lines of one filter are followed
by those of the next, in the order of `results*.json`. Before 0.4.3, samples are a JSON list in `MODELARGS_TASK.jsonl`, without hashes,
beside a `results.json` that names the tasks. Lines of one `doc_id` with different prompts are examples that belong together.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mlmclm.errors import UserError
from mlmclm.readers.reader import Reader, ScoredRun
from mlmclm.readers.rows import Row, columns_of, entry, json_value, named_place, number, read_rows, word
from mlmclm.storage.data_files import kind_of, read_start, read_text
from mlmclm.storage.received_files import files_inside

_FILE = re.compile(r"samples_(?P<task>.+?)(_(?P<date>\d{4}-\d\d-\d\dT[\d.:-]+))?")
_OTHERS = {
    "doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics", "doc_hash", "prompt_hash", "target_hash",
    "prompt_len",
}  # fmt: skip
"""Keys of a line that are no metrics."""
_WORDING = " prompt "
"""Text between a document's id and the number of a prompt, in an example's name."""


class LmEvaluationHarness(Reader):
    """Logged samples, compressed or not: a file, or the folder of a model. Of several files of one task, the newest is read.

    Runs are named by the models' folders. If folders of one name have the same task, such as one model with other settings,
    each is a separate run, named by its path.
    """

    name: ClassVar[str] = "lm-eval"
    title: ClassVar[str] = "lm-evaluation-harness's logged samples"
    told_by: ClassVar[str] = "doc_hash"

    def recognises(self, path: Path) -> bool:
        if path.is_dir():
            return bool(_samples(path))
        return kind_of(path) == ".jsonl" and (path.name.startswith("samples_") or _has_samples(path))

    def runs(self, path: Path, only: Collection[str] | None = None) -> list[ScoredRun]:
        files: dict[tuple[Path, str], Path] = {}
        # Names end in the date, so the newest file of a task in its folder comes last.
        for file in [path] if path.is_file() else _samples(path):
            folder = named_place(file).parent
            model, task = _model_and_task(file)
            files[folder if model is None else folder / model, task] = file
        if not files:
            raise UserError(f"{path}: no samples_TASK_DATE.jsonl in it; lm_eval writes them with --log_samples.")
        names = _names(files, path)
        return [
            run for (folder, task), file in files.items() if only is None or names[folder] in only
            for run in _runs(file, names[folder], task)
        ]  # fmt: skip


def _has_samples(file: Path) -> bool:
    return {"doc_id", "resps"} <= columns_of(file)


def _samples(folder: Path) -> list[Path]:
    """Return the files of samples below a folder; those of versions before 0.4.3 have other names."""
    lines = [file for file in files_inside(folder, "*.jsonl*") if kind_of(file) == ".jsonl"]
    return [file for file in lines if file.name.startswith("samples_")] or list(filter(_has_samples, lines))


def _tasks_beside(file: Path) -> dict[str, Any]:
    """Return the scores by task of the newest results beside a file of samples; empty if there are none."""
    scores_by_task: dict[str, Any] = {}
    for results in files_inside(file.parent, "*.json"):
        try:
            value = json_value(read_text(results), str(results))
        except UserError:
            continue
        scores = value.get("results") if isinstance(value, dict) else None
        scores_by_task |= scores if isinstance(scores, dict) else {}
    return scores_by_task


def _model_and_task(file: Path) -> tuple[str | None, str]:
    """Return the model (None if the folder is the model's) and the task of a file."""
    if _FILE.fullmatch(_stem(file)) or not read_start(file).lstrip().startswith("["):
        return None, _task(file)
    tasks = [task for task in _tasks_beside(file) if _stem(file).endswith(f"_{task}")]
    if not tasks:
        raise UserError(
            f"{file}: samples of lm-evaluation-harness before 0.4.3, whose name ends in the task. Put the results.json that the same "
            "command wrote beside it, or rename it to samples_TASK.jsonl."
        )
    task = max(tasks, key=len)
    return _stem(file).removesuffix(f"_{task}"), task


def _names(folder_tasks: Collection[tuple[Path, str]], root: Path) -> dict[Path, str]:
    """Return the names of the folders' runs."""
    times = Counter((folder.name, task) for folder, task in folder_tasks)
    several = {name for (name, _), count in times.items() if count > 1}
    return {
        folder: folder.relative_to(named_place(root)).as_posix() if folder.name in several else folder.name
        for folder, _ in folder_tasks
    }


def _stem(file: Path) -> str:
    return file.name.rpartition(".jsonl")[0]


def _task(file: Path) -> str:
    stem = _stem(file)
    match = _FILE.fullmatch(stem)
    return match["task"] if match else stem


def _runs(file: Path, model: str, task: str) -> list[ScoredRun]:
    values: dict[str, dict[str, float]] = {}
    hashes: dict[str, str] = {}
    prompts: dict[str, list[str]] = {}
    faults: dict[str, str] = {}
    filters = _unnamed_filters(file, task)
    for place, row in read_rows(file):
        document = word(row, "doc_id", place)
        if filters:
            row["filter"] = filters[document].pop(0)
        example = _example(document, str(row.get("prompt_hash", "")), prompts)
        hashes[example] = str(row.get("doc_hash", ""))
        for metric, key in _metrics(row, place):
            scores = values.setdefault(metric, {})
            if example in scores:
                raise UserError(f"{place}: doc_id {document} is there twice with {metric}.")
            try:
                scores[example] = number(row, key, place)
                if key.partition("_")[0] == "acc" and not 0 <= scores[example] <= 1:
                    raise UserError(f"{place}: {key} is {row[key]!r}; expected a number from 0 to 1.")
            except UserError as error:  # some tasks have no value of some metrics for some documents
                scores[example] = math.nan
                faults.setdefault(metric, str(error))
    if not values:
        fault = (
            f"{file}: no metric with a number per document. Metrics that are computed from all documents at once, such as "
            "F1 or BLEU, cannot be compared document by document."
        )
        return [ScoredRun(model, task, "", [], np.empty(0), fault=fault)]
    return [
        ScoredRun(
            model,
            task,
            metric,
            list(scores),
            np.asarray(list(scores.values())),
            [hashes[name] for name in scores],
            fault=faults.get(metric, ""),
            groups=[name.partition(_WORDING)[0] for name in scores] if len(hashes) > len(prompts) else (),
        )
        for metric, scores in values.items()
    ]


def _example(document: str, prompt: str, prompts: dict[str, list[str]]) -> str:
    """Return the name of a line's example: its document, numbered if the document has several prompts, such as other wordings."""
    seen = prompts.setdefault(document, [])
    if prompt not in seen:
        seen.append(prompt)
    number = seen.index(prompt) + 1
    return document if number == 1 else f"{document}{_WORDING}{number}"


def _unnamed_filters(file: Path, task: str) -> dict[str, list[str]]:
    """Return each document's filters in the order of its lines, for a file that repeats all documents without naming filters.

    Return an empty dictionary for other files. The results beside the file name the filters; without them, filters are numbered.
    """
    times: Counter[str] = Counter()
    for place, row in read_rows(file):
        if "filter" in row:
            return {}
        times[word(row, "doc_id", place)] += 1
    repeats = set(times.values())
    if len(repeats) != 1 or repeats == {1}:
        return {}
    count = repeats.pop()
    scores = _tasks_beside(file).get(task)
    scores = scores if isinstance(scores, dict) else {}
    named = [key.partition(",")[2] for key in scores if "," in key and not key.partition(",")[0].endswith("_stderr")]
    names = list(dict.fromkeys(named))
    names = names if len(names) == count else [f"filter {number + 1}" for number in range(count)]
    return {document: list(names) for document in times}


def _metrics(row: Row, place: str) -> list[tuple[str, str]]:
    """Return the metrics of a line that are numbers, with their keys; METRIC,FILTER where there is a filter."""
    names: Any = row.get("metrics", [name for name in row if name not in _OTHERS])
    if not isinstance(names, list):
        raise UserError(f"{place}: metrics is {names!r}; expected a list of names.")
    chosen = str(row.get("filter", "none"))
    # Values that are lists or pairs are inputs of metrics over all documents at once, such as F1.
    numeric = [str(name) for name in names if not isinstance(entry(row, str(name), place), list | dict)]
    return [(name if chosen == "none" else f"{name},{chosen}", name) for name in numeric]

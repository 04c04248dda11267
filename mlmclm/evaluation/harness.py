"""Tasks of lm-evaluation-harness: reading them, and running them on a `LanguageModel`.

The harness builds the prompts and computes the metrics; `HarnessModel` answers its requests. It is an optional package:
`mlmclm[evaluation]`.
"""

from __future__ import annotations

import difflib
import glob
import inspect
import json
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache, cached_property
from pathlib import Path
from statistics import fmean
from types import FunctionType
from typing import Any

import datasets
import lm_eval.tasks
import numpy as np
import pandas
import pyarrow as pa
from datasets.packaged_modules.csv.csv import CsvConfig
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import METRIC_REGISTRY
from lm_eval.api.task import Task
from lm_eval.config.task import TaskConfig
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from mlmclm.errors import UserError, meant, one_line, unknown
from mlmclm.evaluation.hub_data import cannot_load
from mlmclm.evaluation.language_model import LanguageModel
from mlmclm.evaluation.scores import Scores, over_examples
from mlmclm.member_source import parsed
from mlmclm.progress import say
from mlmclm.results.chance import Chance
from mlmclm.storage.data_files import NO_TABLES, TABLES, kind_of, read_table
from mlmclm.storage.files import first_existing, places_of, stable_hash

SEED = 1234
"""Seed for choosing few-shot examples, the harness's own default."""
MOST_TOKENS = 256
"""Maximum number of tokens to generate if a task sets none, the harness's own default."""
NAMES = ("task", "task_alias", "tag", "dataset_path", "dataset_name", "dataset_kwargs", "metadata")
"""Entries of a task's definition that are not hashed: they only name it or locate its data, whose content is hashed instead."""
FILES = ("parquet", "json", "csv", "text", "arrow")
"""Values of `dataset_path` that mean files rather than a data set of the Hub."""
SHARES = ("acc", "acc_norm", "acc_bytes")
"""Metrics that are the share of examples answered correctly."""
COUNTED = (*SHARES, "f1", "mcc")
"""Metrics that depend on the chosen options alone."""

logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it logs each of its steps as a warning or information
datasets.disable_progress_bars()


class HarnessModel(LM):
    """A language model with the harness's interface; `score_end` is as in `LanguageModel.likelihoods`."""

    def __init__(self, model: LanguageModel, *, score_end: bool = True) -> None:
        super().__init__()
        self._model, self._score_end = model, score_end

    def loglikelihood(self, requests: Sequence[Instance]) -> list[tuple[float, bool]]:
        """Score continuations; each request has a context and a continuation."""
        pairs = [request.args for request in requests]
        scored = self._model.likelihoods(pairs, score_end=self._score_end)
        return [(likelihood.total, likelihood.greedy) for likelihood in scored]

    def loglikelihood_rolling(self, requests: Sequence[Instance]) -> list[float]:
        """Score whole texts, however long; each request has one."""
        return self._model.rolling([request.args[0] for request in requests])

    def generate_until(self, requests: Sequence[Instance]) -> list[str]:
        """Continue texts greedily; each request has a context and settings.

        Raises:
            UserError: the settings ask for sampling.
        """
        outputs = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True, default=str), []).append(number)
        for numbers in groups.values():
            settings = normalize_gen_kwargs(requests[numbers[0]].args[1], MOST_TOKENS)
            if settings.get("do_sample") or settings.get("temperature"):
                raise UserError(
                    f"task {requests[numbers[0]].task_name} samples its answers ({settings}); here they are generated greedily. Set "
                    "generation_kwargs without do_sample and temperature in a task file."
                )
            texts = self._model.generate(
                [requests[number].args[0] for number in numbers],
                stop=[word for word in settings["until"] if word],
                most=settings["max_gen_toks"],
            )
            for number, text in zip(numbers, texts, strict=True):
                outputs[number] = text
        return outputs


@dataclass(frozen=True)
class HarnessTask:
    """A task with its data, for its first `limit` documents."""

    name: str
    task: Task
    limit: int | None
    requests: int
    """Number of its requests."""
    fingerprint: str
    """Hash of the requests, the documents and the metrics: everything that determines the scores of a given model."""
    compares: bool
    """Whether it compares several continuations of a document. Their end tokens are then scored too (arXiv 2406.04823).

    In other tasks, such as a perplexity, the likelihood itself is the result. It must not include an end token inside a
    document, which only masked models score.
    """

    @cached_property
    def chances(self) -> dict[str, Chance]:
        """The chance levels of its metrics, by name."""
        return chances_of(self.task)

    def run(self, model: LanguageModel) -> Scores:
        """Return the metrics, and each document's value of every metric."""
        # Otherwise the choice of few-shot examples would continue from the last run, or from the fingerprint.
        self.task.set_fewshot_seed(seed=SEED)
        # No bootstrap: the harness would start processes for standard errors, and intervals are computed from the values.
        outcome = evaluate(
            HarnessModel(model, score_end=self.compares),
            {"tasks": {self.name: self.task}},
            limit=self.limit,
            bootstrap_iters=0,
        )
        results, samples = outcome["results"][self.name], outcome["samples"][self.name]
        metrics: dict[str, dict[str, float | int | None]] = {}
        values: dict[str, list[Any]] = {}
        for name, value in results.items():
            metric, comma, chosen = name.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            # A task may read the same answers through several filters; "none" is the harness's name for no filter.
            label = metric if chosen == "none" else f"{metric}, {chosen}"
            values[label] = [sample[metric] for sample in samples if sample["filter"] == chosen and metric in sample]
            metrics[label] = over_examples(float(value), values[label])
        return Scores(metrics, values)


def load_tasks(names: Sequence[str], *, data_root: Path | None = None, limit: int | None = None) -> list[HarnessTask]:
    """Read tasks and their data; a group of tasks, or a tag, means all of its tasks.

    Args:
        names: names of the harness's tasks, or YAML files in its format.
        data_root: folder of local data sets, which replace those of the Hub.
        limit: number of documents of each task to evaluate; None for all.

    Raises:
        UserError: a task is unknown or wrong, or its data cannot be loaded.
    """
    tasks: dict[str, HarnessTask] = {}
    for name in names:
        for loaded in _loaded(name, data_root):
            task = _checked(loaded, limit)
            if tasks.setdefault(task.name, task).fingerprint != task.fingerprint:
                raise UserError(f"--task {name}: another task is called {task.name} too; rename one of them.")
    return list(tasks.values())


def _loaded(name: str, data_root: Path | None) -> Iterator[Task]:
    """Yield a task, or those of a group or tag, with their data."""
    local, data = name.endswith((".yaml", ".yml")), [data_root] if data_root else []
    if local and not Path(name).is_file():
        raise UserError(f"--task {name}: no such file.")
    file = Path(name) if local else _file_of(name)
    manager = _no_index() if file else _index()
    places = [*places_of(".", Path(name).parent), *data] if local else data
    if file is None:
        entry = manager.task_index.get(name)
        if entry is None:
            near = difflib.get_close_matches(name, manager.all_tasks, n=5, cutoff=0.5)
            similar = f" Similar names: {', '.join(near)}." if near else ""
            raise UserError(f"--task: unknown task of lm-evaluation-harness {name!r}.{meant(name, near)}{similar}")
        if entry.kind.name == "TAG":
            for member in sorted(entry.tags):
                yield from _loaded(member, data_root)
            return
        file = entry.yaml_path
    path: str | None = None
    spec: Any = name
    # As the harness does: some tasks shuffle their answers while they are read.
    random.seed(0)
    np.random.seed(SEED)
    try:
        if file is not None:
            spec = load_yaml(file)
            path = "/".join(str(spec[part]) for part in ("dataset_path", "dataset_name") if spec.get(part))
            if "class" not in spec and "group" not in spec:
                if local:
                    _check_definition(name, spec)
                spec = _local(spec, places)
        yield from manager.load([spec])["tasks"].values()
    except UserError:
        raise
    except Exception as error:  # the harness and datasets raise errors of all kinds
        raise _fault(name, path, error) from error


def _check_definition(name: str, spec: Mapping[str, Any]) -> None:
    """Refuse an unknown key or metric, and a split without data, on which the harness would fail without a clear message."""
    keys = [*(field.name for field in fields(TaskConfig)), "include"]
    for key in spec:
        if key not in keys:
            raise unknown("key", str(key), keys, where=f"--task {name}")
    # A function `process_results` may compute other metrics; an included file may have it too.
    own_metrics = "process_results" in spec or "include" in spec
    for entry in () if own_metrics else spec.get("metric_list") or ():
        options = entry if isinstance(entry, dict) else {"metric": entry}
        metric = options.get("metric")
        if not (callable(metric) or metric in METRIC_REGISTRY or options.get("hf_evaluate")):
            raise unknown("metric", str(metric), list(METRIC_REGISTRY), where=f"--task {name}: metric_list")
    files = (spec.get("dataset_kwargs") or {}).get("data_files")
    if spec.get("dataset_path") in FILES and isinstance(files, dict):
        for key in ("training_split", "validation_split", "test_split", "fewshot_split"):
            if isinstance(spec.get(key), str) and spec[key] not in files:
                raise unknown("split", spec[key], list(files), where=f"--task {name}: {key}")


def _file_of(name: str) -> Path | None:
    """Return the file of a task of the harness if the file has the task's name; other tasks need the index."""
    files = (file for file in Path(lm_eval.tasks.__file__).parent.rglob(f"{glob.escape(name)}.yaml") if file.is_file())
    return next((file for file in files if load_yaml(file, resolve_func=False).get("task") == name), None)


@cache
def _index() -> TaskManager:
    """Return the index of all tasks of the harness; reading its thousands of files takes half a minute."""
    say("reading lm-evaluation-harness's list of tasks")
    return TaskManager()


@cache
def _no_index() -> TaskManager:
    return TaskManager(include_defaults=False)


def _local(spec: dict[str, Any], places: Sequence[Path]) -> dict[str, Any]:
    """Return a task's definition with the local files or the local folder in place of relative names.

    Files are looked up beside the definition, then in the working directory and under `--data`.
    """

    def resolved(name: str) -> str:
        if "://" in name or any(sign in name for sign in "*?["):
            return name
        file = first_existing([place / name for place in places])
        if file is None:
            raise UserError(
                f"task {spec.get('task')}: data file {name} does not exist (looked in {', '.join(map(str, places))})."
            )
        return str(file.resolve())

    def all_resolved(value: Any) -> Any:
        if isinstance(value, dict):
            return {split: all_resolved(item) for split, item in value.items()}
        return [resolved(str(item)) for item in value] if isinstance(value, list) else resolved(str(value))

    path, kwargs = str(spec.get("dataset_path")), dict(spec.get("dataset_kwargs") or {})
    if path in FILES:
        if "data_files" in kwargs:
            kwargs["data_files"] = all_resolved(kwargs["data_files"])
            if path == "csv":
                kwargs |= _csv_as_written(kwargs)
            elif path == "json" and set(kwargs) == {"data_files"}:
                spec = {**spec, **_json_as_written(kwargs["data_files"])}
        return {**spec, "dataset_kwargs": kwargs}
    subset = spec.get("dataset_name")
    folders = [place / path / part for place in places for part in ([str(subset)] if subset else [""])]
    folder = first_existing(folders)
    if folder is None:
        return spec
    tables = [file for file in folder.rglob("*") if kind_of(file) in TABLES and file.name not in NO_TABLES]
    if tables and all(file.suffix == ".csv" for file in tables):
        kwargs |= _csv_as_written({**kwargs, "data_files": list(map(str, tables))})
    return {**spec, "dataset_path": str(folder.resolve()), "dataset_name": None, "dataset_kwargs": kwargs}


def _csv_as_written(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options by which `datasets` reads CSV files as they are written: only an empty field is a gap, and a column of
    numbers or truth values that would lose characters (007, 1.50) is text."""
    names = {field.name for field in fields(CsvConfig)} & options.keys() - {"data_files"}
    if names & {"features", "converters", "keep_default_na", "na_values", "na_filter"}:
        return {}
    gaps = {"keep_default_na": False, "na_values": [""]}
    reading = CsvConfig(**{name: options[name] for name in names}).pd_read_csv_kwargs | {"chunksize": None}
    lost: set[Any] = set()
    for file in (file for files in _by_split(options["data_files"]).values() for file in files):
        if file.is_file():
            guessed = pandas.read_csv(file, **(reading | gaps))
            written = pandas.read_csv(file, **(reading | {"keep_default_na": False}), dtype=str)
            same = (guessed.astype(str) == written) | (written == "")
            lost |= set(same.columns[~same.all()])
    return gaps | ({"converters": dict.fromkeys(sorted(lost, key=str), str)} if lost else {})


def _json_as_written(data_files: Any) -> dict[str, Any]:
    """Return a `custom_dataset` that reads JSON files as written, if `datasets` takes text for dates or numbers; else {}."""
    files = _by_split(data_files)
    if not all(file.is_file() for part in files.values() for file in part):
        return {}
    written = {
        split: pa.concat_tables(map(read_table, part), promote_options="permissive") for split, part in files.items()
    }
    # A file that `datasets` can't read at all, such as one with numbers of more than 19 digits, is also read as written.
    with suppress(ValueError, OSError, pa.ArrowException, datasets.exceptions.DatasetsError):
        data = datasets.load_dataset("json", data_files={split: list(map(str, part)) for split, part in files.items()})
        if not any(_guesses(dataset.features.arrow_schema, written[split].schema) for split, dataset in data.items()):
            return {}
    splits = datasets.DatasetDict({split: datasets.Dataset(table) for split, table in written.items()})
    return {"custom_dataset": lambda **_: splits}


def _guesses(guessed: pa.Schema, written: pa.Schema) -> bool:
    """Return whether a schema has dates, or numbers where the other one has text."""
    return any(
        "timestamp" in str(field.type)
        or (pa.types.is_string(written.field(field.name).type) and pa.types.is_primitive(field.type))
        for field in guessed
    )


def _by_split(data_files: Any) -> dict[str, list[Path]]:
    """Return the files of each split; files without a split are those of `train`."""
    splits = data_files if isinstance(data_files, dict) else {"train": data_files}
    return {split: [Path(file) for file in (raw if isinstance(raw, list) else [raw])] for split, raw in splits.items()}


def _fault(name: str, path: str | None, error: Exception) -> UserError:
    if not path or path.partition("/")[0] in FILES:
        cause = error.__cause__ or error  # datasets wraps the original error
        return UserError(f"--task {name}: the task cannot be read ({type(cause).__name__}: {one_line(cause, 300)}).")
    remedy = (
        f"; or put the data set's files into FOLDER/{path} and give --data FOLDER; or give a YAML file with dataset_path: parquet and "
        "data_files"
    )
    return cannot_load(f"--task {name}", path, error, remedy)


def _checked(task: Task, limit: int | None) -> HarnessTask:
    name = str(task.config.task)
    for what, wrong in (("needs images or sound", "MULTIMODAL"), ("runs code that a model has written", "UNSAFE_CODE")):
        if getattr(task, wrong, False):
            raise UserError(f"--task {name}: it {what}, which is not supported here.")
    if task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=SEED)
    try:
        task.build_all_requests(limit=limit)
    except Exception as error:  # whatever a task's own functions and templates raise
        raise UserError(
            f"--task {name}: its requests cannot be built ({type(error).__name__}: {one_line(error, 300)})."
        ) from error
    requests = task.instances
    questions = [[request.request_type, request.args, request.doc_id, request.doc] for request in requests]
    config = {key: value for key, value in task.dump_config().items() if key not in NAMES}
    content = json.dumps([questions, config, *_own_code(task)], sort_keys=True, default=_plain)
    continued = [request.doc_id for request in requests if request.request_type == "loglikelihood"]
    compares = len(set(continued)) < len(continued)
    return HarnessTask(name, task, limit, len(requests), stable_hash(content), compares)


def _own_code(task: Task) -> list[str]:
    """Return the syntax of the files with a task's class and functions (`!function`), except files of the harness."""
    paths, left = {inspect.getfile(type(task))}, [vars(task.config)]
    while left:
        value = left.pop()
        if isinstance(value, Mapping):
            left += value.values()
        elif isinstance(value, list):
            left += value
        elif isinstance(value, FunctionType):
            paths.add(value.__code__.co_filename)
    files = (Path(name) for name in paths if not Path(name).is_relative_to(Path(lm_eval.tasks.__file__).parents[1]))
    return sorted(
        parsed(str(file), file.read_text(encoding="utf-8"), False, "").syntax for file in files if file.is_file()
    )


def _plain(value: object) -> str:
    """Return text that identifies a value that JSON cannot represent; an address in memory must not be part of it."""
    text = str(value)
    return type(value).__qualname__ if " at 0x" in text else text


def chances_of(task: Task) -> dict[str, Chance]:
    """Return the chance levels of a task's metrics, by the metrics' names; the requests must be built.

    Only metrics of a choice between continuations have one: the expected score of a uniform guess among each example's
    options. If all examples have the same options and always choosing the best of them scores higher, it is that score.
    """
    if task.OUTPUT_TYPE != "multiple_choice":
        return {}
    docs = list({instance.doc_id: instance.doc for instance in task.instances}.values())
    options = [list(map(str, task.doc_to_choice(doc))) for doc in docs]
    try:
        scored = [
            [_chosen(task, doc, number, len(choices)) for number in range(len(choices))]
            for doc, choices in zip(docs, options, strict=True)
        ]
    except Exception:  # the task's own function needs more than the chosen option: its levels are unknown
        return {}
    chances: dict[str, Chance] = {}
    for metric in (name for name in COUNTED if all(name in choice for row in scored for choice in row)):
        levels = []
        if metric in SHARES:
            expected = fmean(fmean(float(choice[metric]) for choice in row) for row in scored)
            levels.append(Chance(expected, "a guess"))
        if all(choices == options[0] for choices in options):
            levels += _constant(task, metric, scored, options[0])
        if levels:
            # The first of equal levels is kept: a guess.
            chances[metric] = max(levels, key=lambda level: level.score)
    return chances


def _constant(
    task: Task, metric: str, scored: Sequence[Sequence[dict[str, Any]]], options: Sequence[str]
) -> list[Chance]:
    """Return the scores of always choosing one option, for each of them; none if the metric refuses such answers."""
    total = task.aggregation()[metric]
    try:
        scores = [float(total([row[number][metric] for row in scored])) for number in range(len(options))]
    except ValueError:  # scikit-learn's F1 of two classes refuses an answer of a third
        return []
    return [Chance(score, f"always {name!r}") for score, name in zip(scores, options, strict=True)]


def _chosen(task: Task, doc: Any, number: int, options: int) -> dict[str, Any]:
    """Return an example's values of the metrics if the option with this number is chosen."""
    results: Sequence[tuple[float, bool]] = [
        (0.0 if option == number else -1.0, option == number) for option in range(options)
    ]
    # For the mutual information, the harness asks for each option without its context too.
    responses = [*results, *[(0.0, False)] * options] if "acc_mutual_info" in task.aggregation() else results
    values: dict[str, Any] = task.process_results(doc, responses)
    return values

"""Conversion of results to records: how a study appears in MLflow. Pure functions of the store's content.

docs/report.md lists the experiments, runs and columns. Parameters are few, and named so that the learning rate comes
first in MLflow's parallel coordinates plot, which takes the first three in alphabetical order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from mlmclm.numbers import plural, rate_text
from mlmclm.results.metrics import value_of
from mlmclm.seeds import Seed, read_seed, seed_labels
from mlmclm.storage.files import stable_hash
from mlmclm.tracking.records import DataSet, ModelRecord, Point, RunRecord, Status
from mlmclm.tracking.saved_views import OF_CELLS, OF_GROUPS, OF_MODELS, metric_name, runs_page, view_tags

NOTE_TAG, COMMIT_TAG = "mlflow.note.content", "mlflow.source.git.commit"
EXPERIMENT_ID = "{experiment}"
"""Placeholder in tags for the id of the study's experiment, which is known once the experiment exists."""
UNITS = "Points are hundredths of a score; MLflow's columns have scores as fractions of 1."
CURVE_POINTS = 10
"""Points of a cell's loss curve in MLflow; the whole curve is in the result. Each costs 0.2 ms and 250 bytes."""
NAMES = {
    "test_sd": "score_sd",
    "validation_mean": "validation_score",
}
"""MLflow names of numbers of the analysis, by their names there; numbers that are not listed keep their names."""


def sweep_key(study: str) -> str:
    """Return the record key of a study's sweep."""
    return stable_hash(["sweep", study])


def group_key(study: str, model: str, task: str) -> str:
    """Return the record key of a (model, task)."""
    return stable_hash(["group", study, model, task])


def filter_of(model: str, task: str) -> str:
    """Return the filter of MLflow's run search that finds a model's runs on a task."""
    return f"params.model = '{model}' and params.task = '{task}'"


def run_pages(address: str, experiment: str, models: Iterable[str], tasks: Sequence[str]) -> dict[tuple[str, str], str]:
    """Return the pages of a study's models on an MLflow server, by (model, ""), and of their summaries, by (model, task)."""
    filters = {(model, ""): f"{OF_MODELS} and params.model = '{model}'" for model in models}
    filters |= {(model, task): f"{OF_GROUPS} and {filter_of(model, task)}" for model, _ in filters for task in tasks}
    base = address.rstrip("/")
    return {pair: f"{base}/{runs_page(experiment, condition)}" for pair, condition in filters.items()}


def sweep_record(
    study: str,
    *,
    models: Sequence[str],
    tasks: Sequence[str],
    learning_rates: Sequence[float],
    seeds: Sequence[Seed],
    baseline: str | None = None,
    points: int = 0,
    cells: int = 0,
    main_metrics: str = "standard",
    rule: str = "mean",
    grid: Mapping[str, Sequence[Any]] | None = None,
    settings: Mapping[str, Any] | None = None,
    time_ms: int = 0,
    artifacts: Sequence[tuple[Path, str]] = (),
    provenance: Mapping[str, str] | None = None,
    pages: Mapping[str, str] | None = None,
    given: bool = False,
    answer: Sequence[str] = (),
    metrics: Mapping[str, float] | None = None,
    status: Status = "FINISHED",
) -> RunRecord:
    """Build the run that is the parent of all (model, task) runs of a study; reports and tables are its artifacts.

    Its description gives the answer, the size of the grid and, like the last lines of the report, where the numbers come
    from (`provenance`).

    Args:
        answer: what the results advise, in sentences; the first is the verdict.
        pages: links to other programs that show the study, by name.
        baseline: the model that the others must beat.
        given: whether the models are given rather than pretrained by the study; their objectives are unknown, so charts are by model.
        metrics: numbers of the whole study, from `analysis.summary.study_metrics`.
        points: the number of grid points over all tasks, if the grid has axes other than learning rate and seed.
        cells: the number of cells, if learning rates were added to the grid.
        grid: the values of these other axes, by axis.
        settings: nested settings, for instance the search space's protocol, flattened into parameters. What can grow
            between calls (models, seeds, ...) goes into tags, since MLflow's parameters never change.
    """
    size = len(models) * (points or len(tasks)) * len(learning_rates) * len(seeds)
    factors = (
        plural(len(models), "model"),
        ("" if points in (0, len(tasks)) else f"{plural(points, 'setting')} of ") + plural(len(tasks), "task"),
        plural(len(learning_rates), "learning rate"),
        plural(len(seeds), "seed"),
    )
    counted = f"{plural(cells or size, 'cell')}: {' x '.join(factors)}"
    if cells > size:
        counted += f", and {cells - size:,} at learning rates that were added"
    note = "\n\n".join([*answer, f"{counted}. {UNITS}"])
    if provenance:
        note += "\n\n" + "\n".join(f"- **{label}**: {words}" for label, words in provenance.items())
    if links := [f"[{name}]({page})" for name, page in (pages or {}).items()]:
        note += f"\n\nWhile they run, these show the study, too: {', '.join(links)}."
    return RunRecord(
        key=sweep_key(study),
        name=f"sweep {study}",
        params=dict(flatten(settings or {}, "settings.")),
        tags=_tags(
            kind="sweep",
            study=study,
            note=note,
            models=", ".join(models),
            baseline=baseline,
            tasks=", ".join(tasks),
            learning_rates=", ".join(map(rate_text, learning_rates)),
            seeds=", ".join(seed_labels(seeds)),
            metrics=main_metrics,
            rule=rule,
            verdict=answer[0] if answer else None,
            **{f"grid.{axis.replace(': ', '.')}": ", ".join(map(str, values)) for axis, values in (grid or {}).items()},
        ),
        metrics=_single_points(metrics or {}, time_ms),
        artifacts=artifacts,
        experiment={NOTE_TAG: note, **view_tags(tasks, "model" if given else "objective")},
        status=status,
        start_ms=time_ms or None,
        end_ms=time_ms or None,
    )


def model_record(
    study: str,
    model: str,
    *,
    about: Mapping[str, str],
    metrics: Mapping[str, float] | None = None,
    source: str | None = None,
    time_ms: int = 0,
    status: Status = "FINISHED",
) -> RunRecord:
    """Build the run of a model over all tasks, with a column for each task; compare whole models by these runs.

    Args:
        about: as for `group_record`.
        metrics: its numbers, from `analysis.summary.model_metrics`.
        source: where the model is from; None if a stage of the study has trained it: the stage's run then lists the model.
    """
    params = {"model": model, **about}
    outputs = [] if source is None else [ModelRecord(model, "pretrained", params | {"source": source})]
    return RunRecord(
        key=stable_hash(["model", study, model]),
        name=model,
        parent_key=sweep_key(study),
        params=params,
        tags=_tags(kind="model", study=study),
        metrics=_single_points(metrics or {}, time_ms),
        outputs=outputs,
        status=status,
        start_ms=time_ms or None,
        end_ms=time_ms or None,
    )


def group_record(
    study: str,
    model: str,
    task: str,
    *,
    about: Mapping[str, str] | None = None,
    metric: str = "",
    rates: str = "",
    note: str = "",
    verdict: str = "",
    metrics: Mapping[str, float | None] | None = None,
    results: Sequence[Mapping[str, Any]] = (),
    source: str | Mapping[str, str] = "",
    status: Status = "FINISHED",
) -> RunRecord:
    """Build the summary of one (model, task), with the analysis's numbers as metrics; unknown ones are left out.

    Args:
        about: parameters from the study: `objective`, `size`, `mask_ratio`, `tokens`, `pretraining_data` and `family`.
        metric: the name of the main score, to which the numbers refer.
        rates: the best learning rate and the setting as text, with counts if seeds have different rates (`selection.best_rates`).
        note: caveats of the score: no interval, not above chance, not final.
        verdict: how the model compares with the others on the task, in a sentence.
        metrics: the numbers, from `analysis.summary.task_metrics`.
        results: the results of its cells, for the settings, data and commit that all of them share. The run's time is that
            of the last cell to finish, so that the record is the same whenever it is built.
        source: where the task's data are (`DataSet`).
    """
    numbers = {NAMES.get(name, name): value for name, value in (metrics or {}).items() if value is not None}
    notes = []
    if rates and "score" in numbers:
        ends = [f"{100 * numbers[f'score_{end}']:.2f}" for end in ("low", "high") if "score_low" in numbers]
        interval = f" (95 % interval {' to '.join(ends)})" if ends else ""
        score = f"test {metric}".strip()
        notes.append(f"Best learning rate {rates}: {score} {100 * numbers['score']:.2f} points{interval}.")
    if note:
        notes.append(f"{note[0].upper()}{note[1:]}.")
    if verdict:
        notes.append(verdict)
    if results:
        cells = f"{OF_CELLS} and {filter_of(model, task)}"
        # Relative, as the server's address is unknown here.
        notes.append(f"[Its cells]({runs_page(EXPERIMENT_ID, cells)})")
    time_ms = last_finished_ms(results)
    protocols = _shared([dict(flatten(result["protocol"], "settings.")) for result in results])
    commits = {commit for result in results if (commit := result["cost"].get("commit"))}
    chosen = []
    if numbers.keys() >= {"score", "best_learning_rate"}:
        rate = rate_text(numbers["best_learning_rate"])
        params = {"model": model, "task": task, "learning_rate": rate, "metric": metric, **(about or {})}
        # A filter of MLflow's run search.
        cells = f"{OF_CELLS} and {filter_of(model, task)} and params.learning_rate = '{rate}'"
        tags = {"mlmclm.cells": cells, "mlmclm.learning_rates": rates}
        chosen = [ModelRecord(f"{model} on {task}", "fine-tuned", params, tags)]
    return RunRecord(
        key=group_key(study, model, task),
        name=f"{model} {task}",
        parent_key=sweep_key(study),
        params={"model": model, "task": task, **(about or {}), **protocols},
        tags=_tags(
            kind="group",
            study=study,
            metric=metric or None,
            learning_rates=rates or None,
            verdict=verdict or None,
            note="  \n".join(notes) or None,
            commit=commits.pop() if len(commits) == 1 else None,
        ),
        metrics=_single_points(numbers, time_ms),
        inputs=[DataSet(task, data, source, "fine-tuning") for data in sorted({r["task_data"] for r in results})],
        outputs=chosen,
        uses=[model],
        status=status,
        start_ms=time_ms or None,
        end_ms=time_ms or None,
    )


def zero_shot_record(study: str, result: Mapping[str, Any], *, about: Mapping[str, str]) -> RunRecord:
    """Build the run of a model's result on a zero-shot task; in MLflow it is next to the summaries of fine-tuned tasks.

    The task's main metric is recorded as `score`, and every metric under its own name.

    `about` is as for `group_record`; its `family` is replaced.
    """
    model, task, main = str(result["model"]), str(result["task"]), str(result["main"])
    score = result["metrics"][main]
    named = {"score": score["score"], "score_low": score["low"], "score_high": score["high"]}
    # The comma separates a metric from its filter; MLflow allows none in a name.
    named |= {name.replace(",", ""): entry["score"] for name, entry in result["metrics"].items()}
    finished = finished_ms(result)
    return RunRecord(
        # A fine-tuned task may have the same name.
        key=stable_hash(["zero-shot", study, model, task]),
        name=f"{model} {task} zero-shot",
        parent_key=sweep_key(study),
        params={**about, "model": model, "task": task, "family": "zero-shot", "scoring": str(result["scoring"])},
        tags=_tags(
            kind="group",
            study=study,
            metric=main,
            evaluation=result["key"],
            task_data=result["task_data"],  # a tag, since the result does not say where MLflow would load the data
            commit=result["cost"].get("commit"),
        ),
        metrics=_single_points({name: value for name, value in named.items() if value is not None}, finished),
        start_ms=finished - round(1000 * float(result["cost"]["seconds"])),
        end_ms=finished,
    )


def cell_record(study: str, result: Mapping[str, Any], *, about: Mapping[str, str] | None = None) -> RunRecord:
    """Build the run of one cell from its result's JSON: scores, a thinned curve, and cost.

    A diverged cell's run is `FAILED`. The settings that all cells of a (model, task) share are in its summary.

    `about` is as for `group_record`; its empty values are left out.
    """
    finished = finished_ms(result)
    seconds = float(result["cost"]["seconds"])
    start = finished - round(1000 * seconds)
    model, task, metric = str(result["model"]), str(result["task"]), str(result["metric"])
    metrics: list[Point] = []
    for step, loss in _thinned(result["curve"]):
        # Results hold no times of single steps; assume that all steps take equally long.
        time = start + round(1000 * seconds * step / max(1, result["steps"]))
        metrics.append(("loss", float(loss), int(step), time))
    scores = result["scores"] or {}
    main = {"score": "test", "validation_score": "validation"}
    named = {name: value_of(scores[split], metric) for name, split in main.items() if split in scores}
    if "score" in named:
        named[f"{task} score"] = named["score"]
    named |= {f"test_{name}": value for name, value in scores.get("test", {}).items()}
    metrics += _single_points({**named, "cost_seconds": seconds, "steps": result["steps"]}, finished)
    rate, seed = result["learning_rate"], read_seed(result["seed"])
    setting = str(result.get("setting") or "")
    params = {} if isinstance(seed, int) else {f"seed_{name}": str(value) for name, value in asdict(seed).items()}
    if setting:
        params["setting"] = setting
    params |= {name: text for name, text in (about or {}).items() if text}
    seeds = f"s{seed}" if isinstance(seed, int) else str(seed)
    return RunRecord(
        key=stable_hash(["cell", model, result["key"]]),  # two names may be of models with the same weights
        name=" ".join(filter(None, (task, f"lr{rate_text(rate)}", seeds, setting, model))),
        parent_key=group_key(study, model, task),
        params={"learning_rate": rate_text(rate), "model": model, "seed": str(seed), "task": task, **params},
        tags=_tags(
            kind="cell",
            cell=result["key"],
            status=result["status"],
            metric=metric,
            worker=result["cost"]["worker"],
            device=result["cost"].get("device"),
            commit=result["cost"].get("commit"),
            start=result.get("start", {}).get("cell"),
        ),
        metrics=metrics,
        status="FINISHED" if result["status"] == "ok" else "FAILED",
        start_ms=start,
        end_ms=finished,
    )


def stage_record(
    study: str,
    *,
    stage: str,
    title: str,
    settings: Mapping[str, Any],
    models: Sequence[str] = (),
    inputs: Sequence[DataSet] = (),
    outputs: Sequence[ModelRecord] = (),
) -> RunRecord:
    """Build the run of a pretraining stage that is not trained yet.

    Args:
        stage: the key of the checkpoint in which the stage ends.
        title: the stage's title, which becomes the run's name.
        settings: the whole nested configuration, which becomes parameters named `a.b.c`.
        models: the names of the models that share the stage.
        outputs: the models that the stage completes.
    """
    return RunRecord(
        key=stable_hash(["stage", study, stage]),
        name=title,
        params=dict(flatten(settings)),
        tags=_tags(kind="pretraining", study=study, state=stage, models=", ".join(models)),
        inputs=inputs,
        outputs=outputs,
        status="RUNNING",
    )


def trained(record: RunRecord, rows: Iterable[Mapping[str, Any]], facts: Mapping[str, Any] | None = None) -> RunRecord:
    """Return a stage's run with metrics; it has ended if `facts` are given.

    Args:
        rows: lines of `metrics.jsonl`: `step`, `time` (seconds since 1970), and numbers by name.
        facts: machine and software of the stage (`system_facts`). They become tags, since a resumed stage may have
            moved to another machine.
    """
    points = [
        (name, float(value), int(row["step"]), round(1000 * row["time"]))
        for row in rows
        for name, value in row.items()
        if name not in ("step", "time") and isinstance(value, int | float)
    ]
    times = [point[3] for point in points]
    tags = {} if facts is None else {**_tags(commit=facts.get("commit")), **dict(flatten(facts, "system."))}
    return replace(
        record,
        metrics=points,
        tags={**record.tags, **tags},
        status=record.status if facts is None else "FINISHED",
        start_ms=min(times, default=None),
        end_ms=max(times, default=None),
    )


def finished_ms(result: Mapping[str, Any]) -> int:
    """Return when a cell finished, in milliseconds since 1970."""
    return round(1000 * datetime.fromisoformat(result["cost"]["finished"]).timestamp())


def last_finished_ms(results: Iterable[Mapping[str, Any]]) -> int:
    """Return when the last of these cells finished, in milliseconds since 1970; 0 if there are none."""
    return max(map(finished_ms, results), default=0)


def flatten(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield nested settings as pairs of a dotted name and text; None is left out, and lists are joined by commas."""
    for name, item in value.items():
        if isinstance(item, Mapping):
            yield from flatten(item, f"{prefix}{name}.")
        elif isinstance(item, list | tuple):
            yield f"{prefix}{name}", ", ".join(map(str, item))
        elif item is not None:
            yield f"{prefix}{name}", f"{item:g}" if isinstance(item, float) else str(item)


def _tags(
    *, study: str | None = None, note: str | None = None, commit: str | None = None, **prefixed: object
) -> dict[str, str]:
    """Return a run's tags: those of MLflow, and the `prefixed` ones under `mlmclm.`; None is left out."""
    tags = {
        "study": study,
        NOTE_TAG: note,
        COMMIT_TAG: commit,
        **{f"mlmclm.{name}": text for name, text in prefixed.items()},
    }
    return {name: str(text) for name, text in tags.items() if text is not None}


def _thinned(curve: Sequence[Any]) -> Sequence[Any]:
    """Return about `CURVE_POINTS` points of a curve at equal distances, the last one included."""
    stride = math.ceil(len(curve) / CURVE_POINTS)
    return curve[::-1][::stride][::-1] if curve else curve


def _shared(settings: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the entries that are the same in all settings."""
    first, rest = (settings[0], settings[1:]) if settings else ({}, ())
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in rest)}


def _single_points(values: Mapping[str, Any], time_ms: int) -> list[Point]:
    """Return numbers without a curve as points at step 0; values that are not finite numbers are left out."""
    return [
        (metric_name(name), float(value), 0, time_ms)
        for name, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value)
    ]

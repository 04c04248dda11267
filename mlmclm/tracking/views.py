"""Conversion of results to records: how a study appears in MLflow. Pure functions of the store's content.

A study is an experiment. It holds one run per pretraining stage and one run for the sweep, below which there is one run
per (model, task), and below that one run per cell. Parameters are few, and their names put the learning rate first in
MLflow's parallel coordinates plot, which takes the first three in alphabetical order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from mlmclm.seeds import Seed, read_seed, seed_labels
from mlmclm.storage.files import stable_hash
from mlmclm.tracking.records import Point, RunRecord, Status

KIND_TAG, NOTE_TAG = "mlmclm.kind", "mlflow.note.content"
MADE_WITH = ("device", "versions", "commit")
"""Entries of a cell's `cost` that name its machine and software; results of earlier versions lack them."""
LINK_QUERY = "workflowType=machine_learning"
"""Query that selects MLflow's machine learning view; a fresh browser would open the view for generative AI."""


def sweep_key(study: str) -> str:
    """Return the record key of a study's sweep."""
    return stable_hash(["sweep", study])


def group_key(study: str, model: str, task: str) -> str:
    """Return the record key of a (model, task)."""
    return stable_hash(["group", study, model, task])


def cell_record_key(model: str, key: str) -> str:
    """Return the record key of a cell.

    It combines the cell's own key with the model's name, because two names may stand for the same weights.
    """
    return stable_hash(["cell", model, key])


def stage_key(study: str, stage: str) -> str:
    """Return the record key of a pretraining stage; `stage` is the key of the state in which the stage ends."""
    return stable_hash(["stage", study, stage])


def sweep_record(
    study: str,
    *,
    models: Sequence[str],
    tasks: Sequence[str],
    learning_rates: Sequence[float],
    seeds: Sequence[Seed],
    points: int = 0,
    main_metrics: str = "standard",
    rule: str = "mean",
    grid: Mapping[str, Sequence[Any]] | None = None,
    settings: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
    time_ms: int = 0,
    artifacts: Sequence[tuple[Path, str]] = (),
    provenance: Mapping[str, str] | None = None,
    status: Status = "FINISHED",
) -> RunRecord:
    """Build the run that is the parent of all (model, task) runs of a study; reports and tables are its artifacts.

    Its description gives the size of the grid and, like the last lines of the report, where the numbers come from
    (`provenance`).

    Args:
        points: the number of grid points over all tasks, if the grid has axes other than learning rate and seed.
        grid: the values of these other axes, by axis.
        settings: nested settings, for instance the search space's protocol, flattened into parameters. What can grow
            between calls (models, seeds, ...) goes into tags, since MLflow's parameters never change.
    """
    size = len(models) * (points or len(tasks)) * len(learning_rates) * len(seeds)
    axes = {
        "mlmclm.models": ", ".join(models),
        "mlmclm.tasks": ", ".join(tasks),
        "mlmclm.learning_rates": ", ".join(f"{rate:g}" for rate in learning_rates),
        "mlmclm.seeds": ", ".join(seed_labels(seeds)),
        "mlmclm.metrics": main_metrics,
        "mlmclm.rule": rule,
        **{f"mlmclm.grid.{axis.replace(': ', '.')}": ", ".join(map(str, own)) for axis, own in (grid or {}).items()},
    }
    factors = (
        f"{len(models)} models",
        f"{len(tasks)} tasks" if points in (0, len(tasks)) else f"{points} settings of {len(tasks)} tasks",
        f"{len(learning_rates)} learning rates",
        f"{len(seeds)} seeds",
    )
    note = f"{size} cells: {' x '.join(factors)}."
    if provenance:
        note += "\n\n" + "\n".join(f"- **{label}**: {words}" for label, words in provenance.items())
    return RunRecord(
        key=sweep_key(study),
        name=f"sweep {study}",
        params=dict(flatten(settings or {}, "settings.")),
        tags={KIND_TAG: "sweep", "study": study, NOTE_TAG: note, **axes},
        metrics=_single_points(metrics or {}, time_ms),
        artifacts=artifacts,
        status=status,
        start_ms=time_ms or None,
        end_ms=time_ms or None,
    )


def group_record(
    study: str,
    model: str,
    task: str,
    *,
    metric: str = "",
    rates: str = "",
    metrics: Mapping[str, float | None] | None = None,
    time_ms: int = 0,
    artifacts: Sequence[tuple[Path, str]] = (),
    status: Status = "FINISHED",
) -> RunRecord:
    """Build the run of one (model, task), with the analysis' numbers as metrics; unknown ones are left out.

    Args:
        metric: the name of the main score, to which the numbers refer.
        rates: the best learning rate as text, with counts if seeds have different ones (`selection.rates_text`).
        metrics: the numbers, from `analysis.summary.task_metrics`.
        time_ms: when the last of its cells finished (`last_finished_ms`), so that the record is the same whenever it is
            built.
    """
    known = {name: value for name, value in (metrics or {}).items() if value is not None}
    note = ""
    if rates and "test_mean" in known:
        interval = (
            f" (95 % interval {known['test_low']:.4f} to {known['test_high']:.4f})" if "test_low" in known else ""
        )
        score = f"test {metric}".strip()
        note = f"Best learning rate {rates}: {score} {known['test_mean']:.4f}{interval}."
    return RunRecord(
        key=group_key(study, model, task),
        name=f"{model} {task}",
        parent_key=sweep_key(study),
        params={"model": model, "task": task},
        tags={
            KIND_TAG: "group",
            "study": study,
            **({"mlmclm.metric": metric} if metric else {}),
            **({"mlmclm.learning_rates": rates} if rates else {}),
            **({NOTE_TAG: note} if note else {}),
        },
        metrics=_single_points(known, time_ms),
        artifacts=artifacts,
        status=status,
        start_ms=time_ms or None,
        end_ms=time_ms or None,
    )


def cell_record(study: str, result: Mapping[str, Any]) -> RunRecord:
    """Build the run of one cell from its result's JSON: scores, curve, settings and cost.

    A diverged cell's run is `FAILED`.
    """
    finished = finished_ms(result)
    seconds = float(result["cost"]["seconds"])
    start = finished - round(1000 * seconds)
    curve = result["curve"]
    metrics: list[Point] = []
    for step, loss in curve:
        # Results hold no times of single steps; assume that all steps take equally long.
        time = start + round(1000 * seconds * step / max(1, result["steps"]))
        metrics.append(("loss", float(loss), int(step), time))
    for split, scores in (result["scores"] or {}).items():
        metrics += _single_points({f"{split}_{name}": value for name, value in scores.items()}, finished)
    cost = {f"cost_{name}": value for name, value in result["cost"].items() if isinstance(value, int | float)}
    metrics += _single_points({**cost, "steps": result["steps"], "tokens": result["tokens"]}, finished)
    rate, seed = result["learning_rate"], read_seed(result["seed"])
    point = f" {result['setting']}" if result.get("setting") else ""
    own = {} if isinstance(seed, int) else {f"seed_{name}": str(value) for name, value in asdict(seed).items()}
    return RunRecord(
        key=cell_record_key(result["model"], result["key"]),
        name=f"lr{rate:.3g} {f's{seed}' if isinstance(seed, int) else seed}{point}",
        parent_key=group_key(study, result["model"], result["task"]),
        params={
            "learning_rate": f"{rate:g}",
            "model": str(result["model"]),
            "seed": str(seed),
            **own,
            "task": str(result["task"]),
            **dict(flatten(result["protocol"], "settings.")),
        },
        tags={
            KIND_TAG: "cell",
            "study": study,
            "mlmclm.cell": str(result["key"]),
            "mlmclm.status": str(result["status"]),
            "mlmclm.metric": str(result["metric"]),
            "mlmclm.family": str(result["family"]),
            "mlmclm.weights": str(result["weights"]),
            "mlmclm.task_data": str(result["task_data"]),
            "mlmclm.worker": str(result["cost"]["worker"]),
            **dict(flatten({name: result["cost"][name] for name in MADE_WITH if name in result["cost"]}, "system.")),
            **({"mlmclm.start": str(result["start"]["cell"])} if "start" in result else {}),
        },
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
    rows: Iterable[Mapping[str, Any]],
    facts: Mapping[str, Any] | None = None,
    models: Sequence[str] = (),
    status: Status = "FINISHED",
) -> RunRecord:
    """Build the run of one pretraining stage.

    Args:
        stage: the key of the state in which the stage ends.
        title: the stage's title, which becomes the run's name.
        settings: the whole nested configuration, which becomes parameters named `a.b.c`.
        rows: the lines of `metrics.jsonl`: `step`, `time` (seconds since 1970), and numbers by name. For live curves,
            put the same record again with more rows; only the new ones are sent.
        facts: what the stage ran on (`system_facts`). They become tags, since a resumed stage may have moved to another
            machine.
        models: the names of the models that share the stage.
    """
    points: list[Point] = []
    for row in rows:
        time = round(1000 * row["time"])
        points += [
            (name, float(value), int(row["step"]), time)
            for name, value in row.items()
            if name not in ("step", "time") and isinstance(value, int | float)
        ]
    times = [point[3] for point in points]
    return RunRecord(
        key=stage_key(study, stage),
        name=title,
        params=dict(flatten(settings)),
        tags={
            KIND_TAG: "pretraining",
            "study": study,
            "mlmclm.state": stage,
            "mlmclm.models": ", ".join(models),
            **dict(flatten(facts or {}, "system.")),
        },
        metrics=points,
        status=status,
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


def experiment_link(base: str, experiment_id: str | None = None) -> str:
    """Return a link to the runs of an experiment in MLflow's web interface, or to its list of experiments."""
    page = f"experiments/{experiment_id}/runs" if experiment_id else "experiments"
    return f"{base.rstrip('/')}/#/{page}?{LINK_QUERY}"


def _single_points(values: Mapping[str, Any], time_ms: int) -> list[Point]:
    """Return numbers without a curve as points at step 0; what is not a finite number is left out."""
    return [
        # MLflow does not allow @ in names such as ndcg@10.
        (name.replace("@", "_at_"), float(value), 0, time_ms)
        for name, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value)
    ]

"""A small published study, made without a store, and functions that edit it and update its checksums."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mlmclm import versions
from mlmclm.analysis.results import Grid
from mlmclm.answers.outcomes import Outcomes
from mlmclm.answers.record import AnalysisSetting, ComputedStates, StudyRecord
from mlmclm.finetuning.cell import Cell, cell_key
from mlmclm.finetuning.protocol import Protocol
from mlmclm.reports.study_facts import ModelFacts, StudyFacts, TaskFacts
from mlmclm.results.chance import Chance
from mlmclm.results.measures import full_score
from mlmclm.storage.checksums import sealed, unsealed
from mlmclm.storage.files import stable_hash
from mlmclm.tasks.family import family_of

MODELS, RATES, SEEDS = ("one", "two"), (1e-3, 3e-3), (0, 1, 2)
SPACE = {
    "tasks": ["sst2"],
    "learning_rates": list(RATES),
    "seeds": list(SEEDS),
    "protocol": {"max_steps": 2, "max_length": 32, "stride": 8, "batch_size": 8},
}
Rows = list[dict[str, Any]]


def small_record() -> StudyRecord:
    """Return the record of two models on one task, with random outcomes of 40 test examples."""
    weights = {model: stable_hash(model) for model in MODELS}
    data, rows, parts = stable_hash("sst2"), [], []
    for model in MODELS:
        for rate in RATES:
            for seed in SEEDS:
                cell = Cell(model, Path(), weights[model], "sst2", data, Protocol(**SPACE["protocol"]), rate, seed)  # type: ignore[arg-type]
                draws = np.random.default_rng(len(rows))
                gold = np.arange(40) % 2
                right = draws.random(40) < (0.8 if model == "two" else 0.6)
                columns = {"gold": gold, "prediction": np.where(right, gold, 1 - gold), "correct": right}
                row = _row(cell, columns)
                rows.append(row)
                parts.append(pa.table({"key": [row["key"]] * 40, **columns}))
    facts = StudyFacts(
        "record",
        "mlmclm sweep study.yaml",
        tuple(ModelFacts(model, "external") for model in MODELS),
        (TaskFacts("sst2", "SST-2", "sequence-classification", "accuracy"),),
    )
    chances = {"sst2": Chance(0.5, "always positive")}
    states = ComputedStates(None, None, None, weights, {"sst2": data})
    labels: dict[str, tuple[str, ...]] = {row["key"]: ("negative", "positive") for row in rows}
    return StudyRecord(
        name="record",
        rows=rows,
        setting=AnalysisSetting(Grid(MODELS, ("sst2",), RATES, SEEDS), "mean", None, chances, {}),
        kept=Outcomes({"sst2": pa.concat_tables(parts).combine_chunks()}, labels),
        about=lambda: (facts, states),
        claims=tuple,
        study={"name": "record", "space": SPACE, "models": {model: f"folder-{model}" for model in MODELS}},
    )


def _row(cell: Cell, columns: dict[str, Any]) -> dict[str, Any]:
    family = family_of({"family": "sequence-classification"})
    scores = {name: full_score(score, columns) for name, score in family.measures(columns, 2).items()}
    return {
        "schema": versions.RESULTS,
        "key": cell_key(cell),
        "model": cell.model,
        "weights": cell.weights,
        "task": cell.task,
        "family": family.name,
        "task_data": cell.task_data,
        "protocol": cell.identity(),
        "learning_rate": cell.learning_rate,
        "seed": cell.seed,
        "engine": versions.CELLS,
        "status": "ok",
        "metric": "accuracy",
        "scores": {"validation": dict(scores), "test": scores},
        "diverged_step": None,
        "steps": 2,
        "tokens": 512,
        "parameters": 1000,
        "cost": {
            "seconds": 2.0,
            "worker": "ab12/7",
            "device": "a processor",
            "backend": "cpu",
            "finished": "2026-01-02T03:04:05+00:00",
        },
    }


def make_record(folder: Path) -> Path:
    """The folder of `small_record`."""
    small_record().write(folder)
    return folder


def read_rows(folder: Path) -> Rows:
    """The results in a record's cells.parquet."""
    return [unsealed(json.loads(cell)) for cell in pq.read_table(folder / "cells.parquet")["result"].to_pylist()]


def edit_rows(folder: Path, edit: Callable[[Rows], Any]) -> None:
    """Edit the results in a record's cells.parquet, and give each a new checksum."""
    table, rows = pq.read_table(folder / "cells.parquet").to_pylist(), read_rows(folder)
    edit(rows)
    for cell, row in zip(table, rows, strict=False):
        # Like `canonical_json`, but NaN is allowed, so that tests can check that it is refused.
        text = json.dumps(sealed_as_it_is(row), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        cell["result"] = text
    pq.write_table(pa.Table.from_pylist(table[: len(rows)]), folder / "cells.parquet")
    seal(folder)


def sealed_as_it_is(row: Any) -> Any:
    try:
        return sealed(row)
    except (ValueError, TypeError):  # NaN, or no object
        return row


def edit_json(folder: Path, name: str, edit: Callable[[Any], Any]) -> None:
    """Edit the values in one of a record's JSON files."""
    values = json.loads((folder / name).read_text())
    edit(values)
    (folder / name).write_text(json.dumps(values))
    seal(folder)


def seal(folder: Path, **more: str) -> None:
    """Write the checksums of all files but card and checksums, and of the files `more`, by name."""
    names = {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("README.md", "checksums.json")
    }
    names |= {name: folder / path for name, path in more.items()}
    sums = {
        name: {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for name, path in names.items()
    }
    (folder / "checksums.json").write_text(json.dumps(sums))


def copied(folder: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(folder, target, symlinks=True))

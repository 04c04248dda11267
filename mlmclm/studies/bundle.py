"""A published study as a small folder: everything that its report is made of, and what it takes to compute it again.

    study.yaml            the study, with its search space, so that others can run it
    tasks/, protocols/, claims/    the files of the user's own that study.yaml names, if any
    results.csv           one row a cell: model, task, learning rate, seed, scores, key, seconds
    cells.parquet         each cell's result as JSON, by key
    examples/TASK.parquet one row a cell and test example: its outcome
    states.json           hashes of weights, keys of states, corpus and tokenizer, stages with hardware, software and time
    bundle.json           the grid, and facts of the models and tasks
    checksums.json        size and SHA-256 of each of these files

The same store gives the same bytes. Paths are reduced to their last part, and names of machines to a hash.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml
from pydantic import TypeAdapter

from mlmclm.analysis.results import Grid, results_table
from mlmclm.errors import UserError
from mlmclm.reports.provenance import ComputedWork
from mlmclm.reports.study_facts import StudyFacts
from mlmclm.results.chance import Chance
from mlmclm.results.examples import KeptExamples
from mlmclm.seeds import Seeds, read_seed, seed_value
from mlmclm.storage.checksums import CHECKSUMS, sealed
from mlmclm.storage.csv_text import csv_text
from mlmclm.storage.files import canonical_json, check_folder, readable, whole_folder
from mlmclm.storage.received_files import check_names
from mlmclm.studies.received_study import RECORD

if TYPE_CHECKING:
    import pandas as pd

FORMAT = 1
ABOUT, STATES, STUDY, RESULTS, CELLS = RECORD, "states.json", "study.yaml", "results.csv", "cells.parquet"
CARD = "README.md"
"""The only file without a checksum, because people edit it."""
OWN, OUTCOMES = ("tasks", "protocols", "claims"), "examples"
NAMES = re.compile(
    rf"(bundle|states)\.json|study\.yaml|results\.csv|cells\.parquet|{OUTCOMES}/[^/]+\.parquet|({'|'.join(OWN)})/[^/]+"
)
"""The files of a bundle, besides card and checksums: those of the user's own that the study names, and outcomes, in subfolders."""
PATH = re.compile(r"(?<![\w.:/~])~?(?:/[\w.@+ -]*[\w.@+-])+")
FACTS: TypeAdapter[StudyFacts] = TypeAdapter(StudyFacts)


@dataclass(frozen=True)
class ComputedStage:
    """A stage of pretraining as it was computed."""

    key: str
    """Key of its last state."""
    title: str
    models: tuple[str, ...]
    work: ComputedWork


@dataclass(frozen=True)
class ComputedStates:
    """The data and settings that the results were computed from.

    Attributes:
        corpus, tokenizer: their keys; None where models are given.
        shared: the hash of everything that all models of the study share (`plans.stages.fingerprint`); None where models are given.
        weights: the hash of each model's weights and tokenizer, by its name.
        task_data: the hash of each task's data.
        stages: those of pretraining, in the order of the plan.
    """

    corpus: str | None
    tokenizer: str | None
    shared: str | None
    weights: Mapping[str, str]
    task_data: Mapping[str, str]
    stages: tuple[ComputedStage, ...] = ()


STATES_TYPE: TypeAdapter[ComputedStates] = TypeAdapter(ComputedStates)


@dataclass(frozen=True)
class AnalysisSetting:
    """How the results are analysed: the arguments of `analysis.analyse.analyse`."""

    grid: Grid
    rule: str
    baseline: str | None
    chances: Mapping[str, Chance]
    replicate_of: Mapping[str, str]


@dataclass(frozen=True, eq=False)
class Bundle:
    """A published study.

    Attributes:
        study: the values of its file.
        files: other files that belong to it, by their paths in the folder.
        facts: of the models and tasks; without claims, costs and provenance, which follow from the rest.
        rows: the results, each under the names of its model and setting.
        outcomes: those of test examples by task: a table with the column `key` and those of `results.examples`.
        labels: the names of classes or tags by cell, where there are any.
    """

    study: Mapping[str, Any]
    files: Mapping[str, bytes]
    facts: StudyFacts
    setting: AnalysisSetting
    states: ComputedStates
    rows: Sequence[dict[str, Any]]
    outcomes: Mapping[str, pa.Table] = field(default_factory=dict)
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The study's name."""
        return self.facts.name

    @cached_property
    def places(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Return the first row and the number of rows of each cell, by task and key."""
        return {task: _runs(table["key"]) for task, table in self.outcomes.items()}

    def examples(self, result: Mapping[str, Any]) -> KeptExamples:
        """Return the outcome of each test example in a cell; a `UserError` if the bundle has none."""
        key, table = result["key"], self.outcome(result)
        if table is None:
            raise UserError(
                f"result {key} (model {result['model']}, task {result['task']}): the bundle has no examples of it."
            )
        columns = {
            name: table[name].to_numpy()
            for name in table.column_names
            if name != "key" and table[name].null_count < table.num_rows
        }
        texts = {name: column for name, column in columns.items() if column.dtype == object}
        numbers = {name: column for name, column in columns.items() if name not in texts}
        return KeptExamples(result, numbers, self.labels.get(key, ()), texts)

    def outcome(self, result: Mapping[str, Any]) -> pa.Table | None:
        """Return the rows of a cell in its task's table of test examples; None if there are none."""
        place = self.places.get(result["task"], {}).get(result["key"])
        return None if place is None else self.outcomes[result["task"]].slice(*place)

    def contents(self) -> dict[str, bytes]:
        """Return the folder's files by name, without checksums and card; the same bundle gives the same bytes."""
        cells = [
            {
                "key": row["key"],
                "model": row["model"],
                "task": row["task"],
                "labels": list(self.labels.get(row["key"], ())),
                "result": canonical_json(sealed(row)),
            }
            for row in self.rows
        ]
        kinds = {name: pa.string() for name in ("key", "model", "task")}
        schema = pa.schema({**kinds, "labels": pa.list_(pa.string()), "result": pa.string()})
        found = {
            STUDY: str(yaml.safe_dump(dict(self.study), sort_keys=False, allow_unicode=True)).encode(),
            RESULTS: csv_text(self.table()).encode(),
            CELLS: _parquet(pa.Table.from_pylist(cells, schema=schema)),
            STATES: readable(STATES_TYPE.dump_python(self.states, mode="json")).encode(),
            ABOUT: readable(self._about()).encode(),
            **self.files,
        }
        return found | {f"examples/{task}.parquet": _parquet(table) for task, table in self.outcomes.items()}

    def table(self) -> pd.DataFrame:
        """Return the results as a table, one row a cell: `analysis.results.results_table` with the seconds of each."""
        table = results_table(self.rows)
        seconds = {row["key"]: (row.get("cost") or {}).get("seconds") for row in self.rows}
        seeds = {row["key"]: row["seed"] for row in self.rows}
        table["seconds"] = [seconds[key] for key in table["key"]]
        table["seed"] = [str(Seeds.of(read_seed(seeds[key])).simplest()) for key in table["key"]]
        columns = ("model", "task", "setting", "learning_rate", "seed", "status", "metric", "validation", "test")
        return table[[*columns, "diverged_step", "steps", "seconds", "key"]]

    def write(self, folder: Path, card: str) -> None:
        """Write the folder, whole or not at all.

        Args:
            card: the text of README.md.

        Raises:
            UserError: the folder exists and is not empty, or a file of the study has a name that no bundle has.
            EnvironmentFault: the disk is full or not writable.
        """
        if check_folder(folder).exists() and any(folder.iterdir()):
            raise UserError(f"--to {folder}: it exists and is not empty; name a new or an empty folder.")
        contents = self.contents()
        check_names(contents, NAMES, f"the study {self.name}")
        with whole_folder(folder) as made:
            for name, content in contents.items():
                (made / name).parent.mkdir(exist_ok=True)
                (made / name).write_bytes(content)
            (made / CARD).write_text(card, encoding="utf-8")
            sums = {
                name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
                for name, content in contents.items()
            }
            (made / CHECKSUMS).write_text(readable(sums), encoding="utf-8")

    def _about(self) -> dict[str, Any]:
        setting = self.setting
        return {
            "format": FORMAT,
            "facts": FACTS.dump_python(self.facts, mode="json"),
            "grid": _grid_value(setting.grid),
            "rule": setting.rule,
            "baseline": setting.baseline,
            "chances": {task: {"score": each.score, "how": each.how} for task, each in sorted(setting.chances.items())},
            "replicate_of": dict(sorted(setting.replicate_of.items())),
        }


def is_bundle(path: Path) -> bool:
    """Return whether a path is the folder of a bundle, intact or not."""
    return (path / ABOUT).is_file()


def without_paths(value: Any) -> Any:
    """Return a value with each absolute path in its texts reduced to the last part."""
    if isinstance(value, str):
        return PATH.sub(lambda found: found[0].rpartition("/")[2], value)
    if isinstance(value, Mapping):
        return {name: without_paths(each) for name, each in value.items()}
    return [without_paths(each) for each in value] if isinstance(value, list | tuple) else value


def _grid_value(grid: Grid) -> dict[str, Any]:
    return {
        "models": list(grid.models),
        "tasks": list(grid.tasks),
        "learning_rates": list(grid.learning_rates),
        "seeds": list(map(seed_value, grid.seeds)),
        "settings": {task: list(own) for task, own in grid.settings.items()},
        "race": None,  # earlier versions read it
        "added": [[*place, list(rates)] for place, rates in grid.added.items()],
        "grows": grid.grows,
        "allotted": {task: list(map(seed_value, seeds)) for task, seeds in grid.allotted.items()},
    }


def _parquet(table: pa.Table) -> bytes:
    # Cells of a task repeat the same texts and labels, which only a compression over all of them finds.
    sink = io.BytesIO()
    pq.write_table(
        table,
        sink,
        compression="zstd",
        compression_level=9,
        data_page_size=1 << 23,
        row_group_size=1 << 21,
        write_statistics=False,
    )
    return sink.getvalue()


def _runs(keys: pa.ChunkedArray) -> dict[str, tuple[int, int]]:
    """Return the first row and the number of rows of each key; the rows of a key are together."""
    coded = (
        keys.combine_chunks().dictionary_encode() if not pa.types.is_dictionary(keys.type) else keys.combine_chunks()
    )
    codes = np.asarray(pc.fill_null(coded.indices, 0))
    if not len(codes):
        return {}
    first = np.flatnonzero(np.r_[True, codes[1:] != codes[:-1]])
    ends = np.r_[first[1:], len(codes)]
    names = coded.dictionary.to_pylist()
    return {names[codes[start]]: (int(start), int(end - start)) for start, end in zip(first, ends, strict=True)}

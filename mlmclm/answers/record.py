"""The record of a study: everything that its report needs. It is published as a small folder.

    study.yaml            the study, with its search space, so that others can run it
    tasks/, protocols/, claims/    the files of the user's own that study.yaml names, if any
    results.csv           one row a cell: model, task, learning rate, seed, scores, key, seconds
    cells.parquet         each cell's result as JSON, by key
    examples/TASK.parquet one row a cell and test example: its outcome
    states.json           hashes of weights, keys of checkpoints, corpus and tokenizer, stages with hardware, software and time
    bundle.json           the grid, and facts of the models and tasks
    checksums.json        size and SHA-256 of each of these files

The same store gives the same bytes. Paths are reduced to their last part, and names of machines to a hash.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from pydantic import TypeAdapter

from mlmclm.analysis.claim import SourcedClaim
from mlmclm.answers.outcomes import Outcomes, fold_reader
from mlmclm.answers.received_study import RECORD
from mlmclm.errors import UserError
from mlmclm.reports.model_card import hub_task
from mlmclm.reports.provenance import NO_BASIS, ComputedWork
from mlmclm.reports.study_facts import StudyFacts
from mlmclm.results.chance import Chance
from mlmclm.results.examples import ExampleSource
from mlmclm.seeds import Seeds, read_seed, seed_value
from mlmclm.storage.checksums import CHECKSUMS, sealed
from mlmclm.storage.csv_text import csv_text
from mlmclm.storage.files import canonical_json, check_folder, readable, whole_folder
from mlmclm.storage.received_files import check_names
from mlmclm.tasks.family import family_of
from mlmclm.tasks.predictions import predicts_the_same

if TYPE_CHECKING:
    import pandas as pd

    from mlmclm.analysis.analyse import Analysis
    from mlmclm.analysis.results import Grid, Ranges

FORMAT = 1
ABOUT, STATES, STUDY, RESULTS, CELLS = RECORD, "states.json", "study.yaml", "results.csv", "cells.parquet"
CARD = "README.md"
"""The only file without a checksum, because people edit it."""
SIZES = ((10**3, "n<1K"), (10**4, "1K<n<10K"), (10**5, "10K<n<100K"), (10**6, "100K<n<1M"))
"""The Hub's size categories of data sets, each with its upper limit of rows."""
OWN, OUTCOMES = ("tasks", "protocols", "claims"), "examples"
NAMES = re.compile(
    rf"(bundle|states)\.json|study\.yaml|results\.csv|cells\.parquet|{OUTCOMES}/[^/]+\.parquet|({'|'.join(OWN)})/[^/]+"
)
"""The files of a bundle, besides card and checksums; subfolders hold the outcomes and the user's files that study.yaml names."""
PATH = re.compile(r"(?<![\w.:/~])~?(?:/[\w.@+ -]*[\w.@+-])+")
FACTS: TypeAdapter[StudyFacts] = TypeAdapter(StudyFacts)


@dataclass(frozen=True)
class ComputedStage:
    """A stage of pretraining as it was computed."""

    key: str
    """Key of the checkpoint in which the stage ends."""
    title: str
    models: tuple[str, ...]
    work: ComputedWork


@dataclass(frozen=True)
class ComputedStates:
    """The data and settings that the results were computed from.

    Attributes:
        corpus, tokenizer: their keys; None where models are given.
        shared: the hash of everything that all models of the study share (`plans.stages.study_fingerprint`); None where models are given.
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
UNKNOWN_STATES = ComputedStates(None, None, None, {}, {})
"""The value for results of other tools."""


@dataclass(frozen=True)
class AnalysisSetting:
    """How the results are analysed: arguments of `analysis.analyse.analyse`.

    Attributes:
        ranges: the ranges of the main scores if another tool has computed them; None for the ranges that the tasks' families declare.
    """

    grid: Grid
    rule: str
    baseline: str | None
    chances: Mapping[str, Chance]
    replicate_of: Mapping[str, str]
    ranges: Ranges | None = None

    def analyse(self, rows: Sequence[dict[str, Any]], kept: ExampleSource) -> Analysis:
        """Return all tables of results, with the noise of their test examples; cells without a result count as missing."""
        from mlmclm.analysis.analyse import analyse

        by_key = {row["key"]: row for row in rows}

        def constant(row: Mapping[str, Any]) -> bool:
            try:
                return self.ranges is None and predicts_the_same(kept.examples(by_key[row["key"]]))
            except UserError:  # it diverged, or its examples are damaged
                return False

        return analyse(
            rows,
            self.baseline,
            folds=fold_reader(kept, rows),
            ranges={row["task"]: family_of(row).score_range(row["metric"]) for row in rows}
            if self.ranges is None
            else self.ranges,
            chances=self.chances,
            constant=constant,
            grid=self.grid,
            rule=self.rule,
            replicate_of=self.replicate_of,
        )


@dataclass(frozen=True, eq=False)
class StudyRecord:
    """The results of a study and what its report needs besides, from a store, another tool, or a published folder.

    Attributes:
        name: the study's name.
        rows: the results, one a cell, each with the names of its model and setting.
        kept: the source of the outcomes of the cells' test examples.
        about: returns two things: facts about the models and tasks, without claims, costs and provenance; and the data and settings
            that the results were computed from. It is called when one of them is first needed.
        claims: reads the claims that the report tests.
        kind: the kind of the study's file, which is also the command that computes the study: `study` or `sweep`; empty if there is none.
        source: the path of a published study's file, for messages; empty for a study of the user.
        spelled: spells a model's name as the study does.
        study, files: for a published study, the values of study.yaml, and the content of the files that it names, by path in the folder.
    """

    name: str
    rows: Sequence[dict[str, Any]]
    setting: AnalysisSetting
    kept: ExampleSource
    about: Callable[[], tuple[StudyFacts, ComputedStates]]
    claims: Callable[[], tuple[SourcedClaim, ...]]
    kind: str = ""
    source: str = ""
    spelled: Callable[[str], str] = str
    study: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)

    @cached_property
    def _about(self) -> tuple[StudyFacts, ComputedStates]:
        return self.about()

    @property
    def facts(self) -> StudyFacts:
        """Facts of the models and tasks."""
        return self._about[0]

    @property
    def states(self) -> ComputedStates:
        """The data and settings that the results were computed from."""
        return self._about[1]

    @cached_property
    def outcomes(self) -> Outcomes:
        """The outcomes of all test examples, in the form of a published folder."""
        return self.kept if isinstance(self.kept, Outcomes) else Outcomes.of(self.rows, self.kept)

    def contents(self) -> dict[str, bytes]:
        """Return the folder's files by name, without checksums and card; the same bundle gives the same bytes."""
        cells = [
            {
                "key": row["key"],
                "model": row["model"],
                "task": row["task"],
                "labels": list(self.outcomes.labels.get(row["key"], ())),
                "result": canonical_json(sealed(row)),
            }
            for row in self.rows
        ]
        kinds = {name: pa.string() for name in ("key", "model", "task")}
        schema = pa.schema({**kinds, "labels": pa.list_(pa.string()), "result": pa.string()})
        files = {
            STUDY: str(yaml.safe_dump(dict(self.study), sort_keys=False, allow_unicode=True)).encode(),
            RESULTS: csv_text(self.table()).encode(),
            CELLS: _parquet(pa.Table.from_pylist(cells, schema=schema)),
            STATES: readable(STATES_TYPE.dump_python(self.states, mode="json")).encode(),
            ABOUT: readable(about_value(replace(self.facts, basis=NO_BASIS), self.setting)).encode(),
            **self.files,
        }
        return files | {f"examples/{task}.parquet": _parquet(table) for task, table in self.outcomes.tables.items()}

    def table(self) -> pd.DataFrame:
        """Return the results as a table, one row a cell: `analysis.results.results_table` with the seconds of each."""
        from mlmclm.analysis.results import results_table

        table = results_table(self.rows)
        seconds = {row["key"]: (row.get("cost") or {}).get("seconds") for row in self.rows}
        seeds = {row["key"]: row["seed"] for row in self.rows}
        table["seconds"] = [seconds[key] for key in table["key"]]
        table["seed"] = [str(Seeds.of(read_seed(seeds[key])).simplest()) for key in table["key"]]
        columns = ("model", "task", "setting", "learning_rate", "seed", "status", "metric", "validation", "test")
        return table[[*columns, "diverged_step", "steps", "seconds", "key"]]

    def card(self) -> str:
        """Return the README.md of a bundle: a card of a data set on the Hugging Face Hub, which is also readable elsewhere."""
        files = [{"config_name": "results", "data_files": "results.csv", "default": True}]
        files += [
            {"config_name": f"examples-{task}", "data_files": f"examples/{task}.parquet"}
            for task in self.outcomes.tables
        ]
        tasks = self.facts.tasks
        front = {
            # Only the user knows the licence: the outcomes of test examples hold the tasks' answers, which have licences of their own.
            "license": (self.study.get("card") or {}).get("licence") or "unknown",
            "pretty_name": self.name,
            "size_categories": [_size(len(self.rows) + sum(map(len, self.outcomes.tables.values())))],
            "task_categories": list(dict.fromkeys(hub_task(task.family) for task in tasks)),
            "tags": ["mlmclm", "encoder", "evaluation"],
            "configs": files,
        }
        grid, states = self.setting.grid, self.states
        stages = (
            f" Pretraining took {len(states.stages)} stages; `states.json` has their hardware and time."
            if states.stages
            else ""
        )
        examples = (
            "- `examples/TASK.parquet`: the outcome of each test example in each cell.\n"
            if self.outcomes.tables
            else ""
        )
        listed = "\n".join(f"- {task.name}: {task.title}{task.source and f'; {task.source}'}" for task in tasks)
        return f"""---
{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---

# {self.name}

The results of a study by mlmclm: {len(self.rows):,} fine-tuning cells of {len(grid.models)} models on
{", ".join(grid.tasks)}, at {len(grid.learning_rates)} learning rates with {len(grid.seeds)} seeds.{stages}

- `results.csv`: one row a cell, with its scores as fractions of 1, its key and its seconds.
- `cells.parquet`: each cell's result as JSON, by key.
{examples}- `states.json`: hashes of weights, keys of corpus and tokenizer, and what pretraining took.
- `study.yaml`: the study's file, with its search space.

The tasks' data are not in it, and have licences of their own:

{listed}

To see what the results show, and to compute some cells again and compare them:

```bash
mlmclm report FOLDER --to report
mlmclm bundle verify FOLDER --cells 10
```
"""

    def write(self, folder: Path) -> None:
        """Write the folder atomically.

        Raises:
            UserError: the folder exists and is not empty, or a file of the study has a name that no bundle has.
            EnvironmentFault: the disk is full or not writable.
        """
        if check_folder(folder).exists() and any(folder.iterdir()):
            raise UserError(f"--to {folder}: it exists and is not empty; name a new or an empty folder.")
        contents = self.contents()
        check_names(contents, NAMES, f"the study {self.name}")
        with whole_folder(folder) as temporary:
            for name, content in contents.items():
                (temporary / name).parent.mkdir(exist_ok=True)
                (temporary / name).write_bytes(content)
            (temporary / CARD).write_text(self.card(), encoding="utf-8")
            sums = {
                name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
                for name, content in contents.items()
            }
            (temporary / CHECKSUMS).write_text(readable(sums), encoding="utf-8")


def about_value(facts: StudyFacts, setting: AnalysisSetting) -> dict[str, Any]:
    """Return facts of the models and tasks, and how results are analysed, as plain values (`received_values.ReceivedAbout`)."""
    return {
        "format": FORMAT,
        "facts": FACTS.dump_python(facts, mode="json"),
        "grid": _grid_value(setting.grid),
        "rule": setting.rule,
        "baseline": setting.baseline,
        "chances": {task: {"score": chance.score, "how": chance.how} for task, chance in setting.chances.items()},
        "replicate_of": dict(setting.replicate_of),
    }


def _size(rows: int) -> str:
    """Return the Hub's category of a number of rows."""
    return next((name for most, name in SIZES if rows < most), "1M<n<10M")


def is_bundle(path: Path) -> bool:
    """Return whether a path is the folder of a bundle, intact or not."""
    return (path / ABOUT).is_file()


def without_paths(value: Any) -> Any:
    """Return a value with each absolute path in its texts reduced to the last part."""
    if isinstance(value, str):
        return PATH.sub(lambda match: match[0].rpartition("/")[2], value)
    if isinstance(value, Mapping):
        return {name: without_paths(item) for name, item in value.items()}
    return [without_paths(item) for item in value] if isinstance(value, list | tuple) else value


def _grid_value(grid: Grid) -> dict[str, Any]:
    return {
        "models": list(grid.models),
        "tasks": list(grid.tasks),
        "learning_rates": list(grid.learning_rates),
        "seeds": list(map(seed_value, grid.seeds)),
        "settings": {task: list(settings) for task, settings in grid.settings.items()},
        "added": [[*place, list(rates)] for place, rates in grid.added.items()],
        "grows": grid.grows,
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

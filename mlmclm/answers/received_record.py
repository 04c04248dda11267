"""Reading and checking of studies that others have published: a bundle's values have the declared types and agree with each other.

Values that several files of the bundle contain must be equal: scores (results.csv, cells, outcomes of test examples), names, and the
hashes of weights and task data. No result is computed again, so wrong but consistent results pass; `recompute` finds those.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter

from mlmclm.analysis.claim import SourcedClaim
from mlmclm.analysis.pairs import TESTED_ON, check_same_examples
from mlmclm.answers.outcomes import Outcomes
from mlmclm.answers.received_study import check_study, check_texts, texts_in
from mlmclm.answers.received_values import (
    CLOSE,
    ReceivedAbout,
    ReceivedCell,
    check_time,
    naming,
    read_setting,
    received_row,
)
from mlmclm.answers.record import (
    ABOUT,
    CELLS,
    FORMAT,
    NAMES,
    OUTCOMES,
    OWN,
    RESULTS,
    STATES,
    STATES_TYPE,
    STUDY,
    StudyRecord,
    is_bundle,
)
from mlmclm.configuration import parse_yaml
from mlmclm.errors import CONTROLS, UserError, clipped, unknown
from mlmclm.numbers import plural
from mlmclm.progress import say_once
from mlmclm.reports.provenance import asked_for
from mlmclm.reports.study_facts import StudyFacts
from mlmclm.results.examples import KeptExamples
from mlmclm.results.measures import full_score
from mlmclm.results.metrics import metric_parts
from mlmclm.seeds import read_seed
from mlmclm.storage.csv_text import csv_text
from mlmclm.storage.expansion import bounded_groups
from mlmclm.storage.received_files import checked_files, plain_json
from mlmclm.tasks.declaration import FAMILIES
from mlmclm.tasks.family import Family
from mlmclm.tasks.metric import METRICS

LARGEST_TEXT = 1 << 20
"""Maximum size of a YAML file in bytes. A study's file has a few thousand."""
MOST_CELLS = 1_000_000
"""Maximum number of cells of a grid that is read. Each cell takes time and memory, even without a result."""
_CELLS = TypeAdapter(list[ReceivedCell])


class RecordFile(Protocol):
    """The part of a study's file that reading a record needs."""

    @property
    def kind(self) -> str:
        """`study` or `sweep`."""
        ...

    @property
    def models(self) -> Collection[str]:
        """The models' names."""
        ...

    def spelled(self, name: str) -> str:
        """Return a model's name as the file spells it."""
        ...

    def find_claims(self) -> tuple[SourcedClaim, ...]:
        """Return the claims that the report tests."""
        ...


class ReadFile(Protocol):
    """Checks the values of a study's file (`studies.study_file.read_file`)."""

    def __call__(self, values: Any, *, where: str, file: Path) -> RecordFile: ...


def read_record(folder: Path, read_file: ReadFile) -> StudyRecord:
    """Read a published record; check that it names no file outside of its folder and doesn't contradict itself.

    Args:
        read_file: checks the values of the study's file.

    Raises:
        UserError: there is no record, it is damaged, it contradicts itself, it names something outside of its folder, or another
            version of mlmclm wrote it.
    """
    if not is_bundle(folder):
        raise UserError(
            f"{folder}: not a published study: it has no {ABOUT}. `mlmclm bundle STUDY --to FOLDER` writes one."
        )
    files = checked_files(folder, NAMES, (*OWN, OUTCOMES))
    try:
        with naming(folder):
            bundle = _read(folder, files, read_file)
            _check_names(bundle)
            _check_cells(bundle)
            with naming(folder / RESULTS):
                _check_table(bundle, files[RESULTS])
            _check_examples(bundle)
    except UserError as error:
        text = str(error)
        raise UserError(text if text.startswith(str(folder)) else f"{folder}: {text}") from error
    return bundle


def _read(folder: Path, files: Mapping[str, bytes], read_file: ReadFile) -> StudyRecord:
    for name in (ABOUT, STUDY, RESULTS, CELLS, STATES):
        if name not in files:
            raise UserError(f"the checksums do not list {name}.")
    values = plain_json(files[ABOUT], ABOUT)
    version = values.get("format") if isinstance(values, dict) else None
    if version != FORMAT:
        raise UserError(f"{folder / ABOUT}: format {version!r}; this version of mlmclm reads format {FORMAT}.")
    states = plain_json(files[STATES], STATES)
    for name, value in ((ABOUT, values), (STATES, states)):
        for place, text in texts_in(value):
            if CONTROLS.search(text):
                raise UserError(
                    f"{folder / name}: {'.'.join(place)}: {clipped(repr(text))} has characters that control a terminal."
                )
    with naming(folder / ABOUT):
        about = ReceivedAbout.model_validate_json(files[ABOUT])
    with naming(folder / STATES):
        computed = STATES_TYPE.validate_json(files[STATES], strict=True)
    study = _yaml(folder, STUDY, files)
    check_study(study, folder / STUDY, files)
    file = read_file(study, where=str(folder / STUDY), file=folder / STUDY)
    if file.kind == "sweep" and (lacking := set(about.grid.models) - set(file.models)):
        raise UserError(f"{folder / STUDY}: models: {', '.join(sorted(lacking))} of {ABOUT} are not among them.")
    for name in files:
        if name.endswith((".yaml", ".yml")) and name != STUDY:
            _yaml(folder, name, files)
    study_files = {name: content for name, content in files.items() if name.partition("/")[0] in OWN}
    with naming(folder / CELLS):
        cells = _CELLS.validate_python(_table(folder, CELLS, files).to_pylist(), strict=True)
    facts, claims = _own_words(about.facts, file.kind), file.find_claims()
    return StudyRecord(
        name=facts.name,
        rows=[received_row(cell) for cell in cells],
        setting=read_setting(about),
        kept=Outcomes(
            {Path(name).stem: _table(folder, name, files) for name in files if name.startswith(f"{OUTCOMES}/")},
            {cell.key: tuple(cell.labels) for cell in cells if cell.labels},
        ),
        about=lambda: (facts, computed),
        claims=lambda: claims,
        kind=file.kind,
        source=str(folder / STUDY),
        spelled=file.spelled,
        study=study,
        files=study_files,
    )


def _own_words(facts: StudyFacts, kind: str) -> StudyFacts:
    """Return facts without the publisher's links and commands; the command and the basis refer to the bundle's study.yaml."""
    command = f"mlmclm {kind} {STUDY}"
    basis = replace(
        asked_for(command),
        setting=f"{STUDY} of a copy of this bundle",
        again="a store that lacks this study's models and cells computes them too",
    )
    return replace(facts, pages={}, recorded=None, command=command, basis=basis)


def _yaml(folder: Path, name: str, files: Mapping[str, bytes]) -> Any:
    if len(files[name]) > LARGEST_TEXT:
        raise UserError(f"{folder / name}: {len(files[name]):,} bytes; at most {LARGEST_TEXT:,} are read.")
    values = parse_yaml(files[name], folder / name)
    if name != STUDY:
        check_texts(values, folder / name)
    return values


def _table(folder: Path, name: str, files: Mapping[str, bytes]) -> pa.Table:
    with naming(folder / name):
        deque(bounded_groups(pa.BufferReader(files[name]), folder / name), maxlen=0)
        return pq.read_table(pa.BufferReader(files[name]))


def _check_names(bundle: StudyRecord) -> None:
    """Check that facts and states are of the models and tasks of the grid."""
    setting, facts, study = bundle.setting, bundle.facts, bundle.study
    grid, models, tasks = setting.grid, setting.grid.models, setting.grid.tasks
    if "models" not in study:
        raise UserError(f"{STUDY}: key 'models' is missing.")
    if facts.name != study.get("name"):
        raise UserError(
            f"its name is {clipped(facts.name)!r} in {ABOUT}, and {clipped(str(study.get('name')))!r} in {STUDY}."
        )
    for what, ours, theirs in (
        ("models", sorted(model.name for model in facts.models), sorted(models)),
        ("tasks", sorted(task.name for task in facts.tasks), sorted(tasks)),
    ):
        if ours != theirs or len(set(theirs)) < len(theirs):
            raise UserError(f"{ABOUT}: the {what} of its facts and of its grid are not the same, or not unique.")
    added = [[name for name, *_ in grid.added], [name for _, name, _ in grid.added]]
    pairs = setting.replicate_of
    for what, names, allowed in (
        ("grid.added", added[0], models),
        ("grid.added", added[1], tasks),
        ("grid.settings", grid.settings, tasks),
        ("chances", setting.chances, tasks),
        ("baseline", filter(None, [setting.baseline]), models),
        (OUTCOMES, bundle.outcomes.tables, tasks),
        ("replicate_of", pairs, models),
        ("replicate_of", pairs.values(), [name for name in models if name not in pairs]),
    ):
        for name in names:
            if name not in allowed:
                raise unknown(f"name in {what}", name, allowed, where=ABOUT)
    settings = sum(len(grid.settings_of(task)) for task in tasks)
    planned = len(models) * settings * len(grid.learning_rates) * len(grid.seeds)
    if planned > MOST_CELLS:
        raise UserError(f"{ABOUT}: its grid has {planned:,} cells; at most {MOST_CELLS:,} are read.")
    for what, listed in (("learning_rates", grid.learning_rates), ("seeds", grid.seeds)):
        if len({*listed}) < len(listed):
            raise UserError(f"{ABOUT}: grid.{what} has one twice.")
    for stage in bundle.states.stages:
        check_time(stage.work.began)
        check_time(stage.work.ended)
        if not 1 <= stage.work.workers <= 1e6 or not 0 <= stage.work.seconds <= 1e9:
            raise UserError(
                f"{STATES}: stage {clipped(stage.title, 60)!r}: its number of workers or of seconds is not possible."
            )
    for evaluation in facts.zero_shot:
        for metric, values in evaluation.metrics.items():
            for name, value in values.items():
                if isinstance(value, str) and name != "chance_how":
                    raise UserError(
                        f"{ABOUT}: zero_shot {evaluation.task}: {metric}.{name} is {clipped(value)!r}, not a number."
                    )


def _check_cells(bundle: StudyRecord) -> None:
    """Check that each cell is there once, belongs to the grid, and has the weights and data of states.json."""
    grid, states, seen = bundle.setting.grid, bundle.states, set[tuple[str, str]]()
    labels_by_task: dict[str, tuple[str, ...]] = {}
    facts_by_task = {task.name: task for task in bundle.facts.tasks}
    if not bundle.rows:
        raise UserError("it has no cells.")
    for row in bundle.rows:
        model, task = row["model"], row["task"]
        where = f"result {row['key']} (model {model}, task {task})"
        if (model, row["key"]) in seen:
            raise UserError(f"{where}: it is there twice.")
        seen.add((model, row["key"]))
        for what, value, allowed in (
            ("model", model, grid.models),
            ("task", task, grid.tasks),
            ("setting", row.get("setting", ""), grid.settings_of(task)),
            ("learning rate", row["learning_rate"], grid.rates_of(model, task, row.get("setting", ""))),
            ("seed", read_seed(row["seed"]), grid.seeds),
        ):
            if value not in allowed:
                raise UserError(f"{where}: its {what} {value} is not in the grid of {ABOUT}.")
        labels = bundle.outcomes.labels.get(row["key"], ())
        if labels and labels != labels_by_task.setdefault(task, labels):
            raise UserError(f"{where}: its labels are not those of another cell of the task.")
        for what, expected, file in (
            ("weights", states.weights.get(model), STATES),
            ("task_data", states.task_data.get(task), STATES),
            ("family", facts_by_task[task].family, ABOUT),
            ("metric", facts_by_task[task].metric, ABOUT),
        ):
            if row[what] != expected:
                raise UserError(f"{where}: {what} is {clipped(row[what])}, and {clipped(str(expected))} in {file}.")


def _check_table(bundle: StudyRecord, content: bytes) -> None:
    """Check that results.csv is the table of the cells, line by line."""
    pair = (text.replace("\r\n", "\n").split("\n") for text in (content.decode(), csv_text(bundle.table())))
    unlike = [lines for lines in zip_longest(*pair, fillvalue="(none)") if lines[0] != lines[1]]
    if unlike:
        in_table, from_cells = (clipped(line, 300) for line in unlike[0])
        raise UserError(
            f"{RESULTS} and {CELLS} contradict each other in {plural(len(unlike), 'line')} of the table. The first is {in_table!r} in the former, and "
            f"{from_cells!r} by the latter."
        )


def _check_examples(bundle: StudyRecord) -> None:
    """Check that the cells' scores equal those of their test examples, if the bundle has these and scores can be computed from them."""
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for row in bundle.rows:
        rows.setdefault(row["task"], {})[row["key"]] = row
    unlike: list[str] = []
    for task, table in bundle.outcomes.tables.items():
        with naming(f"{OUTCOMES}/{task}.parquet"):
            unlike += _unlike_in_table(bundle, task, table, rows.get(task, {}))
    if unlike:
        raise UserError(
            f"the test examples and {CELLS} contradict each other in {plural(len(unlike), 'cell')}. {unlike[0]}."
        )
    scored = [row for row in bundle.rows if row["status"] == "ok"]
    unchecked = [row for row in scored if bundle.outcomes.table_of(row) is None]
    if unchecked:
        say_once(
            f"{bundle.name}: {len(unchecked):,} of {plural(len(scored), 'scored cell')} have no test examples in the bundle, so nothing but "
            f"computing them again shows whether their scores are right (the first: {unchecked[0]['model']} on {unchecked[0]['task']})"
        )


def _unlike_in_table(
    bundle: StudyRecord, task: str, table: pa.Table, rows: Mapping[str, dict[str, Any]]
) -> Iterable[str]:
    """Yield, in words, how a task's cells contradict their examples; raise an error if cells were tested on different examples."""
    where = f"{OUTCOMES}/{task}.parquet"
    if table.column_names.count("key") != 1 or table["key"].null_count:
        raise UserError(f"{where}: expected a column key, with a key in each row.")
    places = bundle.outcomes.places[task]
    if sum(count for _, count in places.values()) != table.num_rows:
        raise UserError(f"{where}: the rows of each key must be together.")
    firsts: dict[Any, KeptExamples] = {}
    for key in places:
        if key not in rows or rows[key]["status"] != "ok":
            raise UserError(f"{where}: key {clipped(str(key))!r} is not that of a scored cell of the task.")
        family, kept = FAMILIES.find(rows[key]["family"]), bundle.kept.examples(rows[key])
        if family is not None:  # else the package that declares the family is not installed
            yield from _unlike(family, kept)
            limits = tuple(rows[key]["protocol"].get(name) for name in TESTED_ON)
            check_same_examples(firsts.setdefault(limits, kept), kept, family.gold_columns)


def _unlike(family: type[Family], kept: KeptExamples) -> Iterable[str]:
    """Yield, in words, how a cell contradicts its examples, if it does."""
    row = kept.result
    where = f"Result {row['key']} (model {row['model']}, task {row['task']})"
    columns = kept.columns
    if {"gold", "prediction", "correct"} <= set(columns) and not np.array_equal(
        columns["correct"], columns["gold"] == columns["prediction"]
    ):
        yield f"{where}: a prediction is not correct as its row says"
        return
    classes, recorded = len(kept.label_names), row["scores"]["test"]
    for name in family.shown.values():
        numbers = columns.get(name)
        if classes and numbers is not None and numbers.dtype.kind in "iu" and not numbers.max() < classes:
            raise UserError(f"{where}: {name} has a number that is no label's.")
    scores = family.scores({**columns, **kept.predictions}, classes)
    scores |= {
        name: full_score(METRICS[name].measure(columns, classes), columns)
        for name in metric_parts(row["metric"])
        if name in METRICS
    }
    for name, score in scores.items():
        if name in recorded and not abs(score - recorded[name]) <= CLOSE:
            yield f"{where}: test {name} is {recorded[name]:.6g}, and {score:.6g} by its examples"
            return

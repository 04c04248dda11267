"""A user's own task, inferred from a data file.

FOLDER/tasks/NAME.yaml                    its declaration
FOLDER/data/NAME/train.parquet, ...       the rows
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet
import yaml

from mlmclm.errors import UserError, for_each, meant_path, printable
from mlmclm.results.measures import Array
from mlmclm.storage.data_files import COMPRESSED, file_names_in, instead_of, kind_of
from mlmclm.storage.files import write_atomic
from mlmclm.tasks.column_kinds import plain_columns
from mlmclm.tasks.columns import Columns, as_class_names, class_names
from mlmclm.tasks.declaration import FAMILIES, Task
from mlmclm.tasks.declared_tasks import task_names
from mlmclm.tasks.inference import CLASSES, NUMBERS, SEARCH, TAGS, Overrides, Reading, canonical, check_labels, infer
from mlmclm.tasks.layouts import SUFFIXES, read_layout
from mlmclm.tasks.load import task_from

SEED = 0
"""Seed of the division into parts."""
SHARES = (0.1, 0.2)
"""Shares of the rows that become validation and test."""
LEAST_ROWS = 20
"""The fewest rows that can be divided into three parts."""
SKEWED = 0.75
"""If the share of the largest class exceeds this, the main score is the mean F1 of the classes: accuracy would hardly vary."""
_GAPS_ELSEWHERE = ("nan", "na", "n/a", "#n/a", "null", "none", "-", "?")
"""Words that other programs read as missing values, in lower case."""
PARTS = ("train", "validation", "test")
_PAIR = "{text}\n{text_pair}"


@dataclass(frozen=True)
class FileTask:
    """A task made from files.

    Attributes:
        task: its declaration.
        reading: how the files' columns are read.
        tables: the canonical rows by part.
        facts: lines to show before anything is computed, by title.
        notes: sentences about choices that the user may want to change.
    """

    task: Task
    reading: Reading
    tables: Mapping[str, pa.Table]
    facts: Mapping[str, str]
    notes: tuple[str, ...]

    @property
    def name(self) -> str:
        """The task's name."""
        return self.task.name

    @property
    def declaration(self) -> str:
        """The inferences and notes as comments, and then the declaration as YAML."""
        head = [f"{title:<14} {text}" for title, text in self.facts.items()] + [f"- {note}" for note in self.notes]
        values = self.task.model_dump(mode="json", exclude_defaults=True)
        written = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=1000)
        return "".join(f"# {printable(line).replace(chr(10), ' ')}\n" for line in head) + written

    def write(self, folder: Path) -> None:
        """Write the declaration and the rows into a folder of a study."""
        data = folder / "data" / self.name
        data.mkdir(parents=True)
        for name, table in self._split_tables().items():
            pa.parquet.write_table(table, data / f"{name}.parquet")
        write_atomic(folder / "tasks" / f"{self.name}.yaml", self.declaration)

    def _split_tables(self) -> dict[str, pa.Table]:
        """Return the tables that the declaration names."""
        tables: dict[str, pa.Table] = {}
        for part, table in self.tables.items():
            if self.reading.family == SEARCH and part != "train":
                judged = FAMILIES[SEARCH].tables(FAMILIES[SEARCH].held_out(table))
                tables |= {f"{part}-{name}": rows for name, rows in judged.items()}
            else:
                tables[part] = table
        return tables

    def check(self, files: Mapping[str, Path]) -> None:
        """Check the rows as fine-tuning will; a `UserError` names the file of the part, or the single file of all parts."""
        tables = self._split_tables()

        def read(part: str, split: str) -> Columns:
            return Columns(self.task, split, tables[part], str(files.get(part.partition("-")[0], files["train"])))

        task_from(self.task, read)


def read_task(
    data: str | Path, overrides: Overrides, *, test: str | Path | None = None, validation: str | Path | None = None
) -> FileTask:
    """Read a data file, and files with test and validation rows if there are some, as a task.

    Raises:
        UserError: a file can't be read, it isn't clear what is in it, or it has too little; the message says what to do.
    """
    files = {"train": Path(data)} | {
        part: Path(path) for part, path in (("validation", validation), ("test", test)) if path
    }
    read = dict(zip(files, for_each(files.values(), _read), strict=True))
    raw, names = {part: table for part, (table, _) in read.items()}, {part: names for part, (_, names) in read.items()}
    reading = infer(raw["train"], overrides, files["train"])
    raw = _with_class_names(raw, names, reading)
    rows = {part: canonical(table, reading, files[part]) for part, table in raw.items()}
    for part, (table, left_out) in rows.items():
        if not table.num_rows:
            raise UserError(
                f"{files[part]}: no row has all of {', '.join(reading.columns.values())}{_reasons(left_out)}."
            )
    left = sum((left_out for _, left_out in rows.values()), Counter[str]())
    check_labels(rows["train"][0], reading.family, files["train"])
    tables, repeated = _divided({part: table for part, (table, _) in rows.items()}, reading, files)
    task = _declared(_name(files["train"]), files["train"], reading, tables)
    facts = _facts(files, reading, tables, task, left, repeated)
    file_task = FileTask(
        task, reading, tables, facts, (*reading.notes, *_gap_notes(reading, tables["train"]), *_rejected(raw["train"]))
    )
    file_task.check(files)
    return file_task


def _with_class_names(
    raw: Mapping[str, pa.Table], names: Mapping[str, Mapping[str, tuple[str, ...]]], reading: Reading
) -> dict[str, pa.Table]:
    """Return tables with names in place of the numbers of classes and tags; -1 is a missing label, as in `datasets`."""
    column = reading.columns.get("tags" if reading.family == TAGS else "label", "")
    tables = dict(raw)
    for part, classes in names.items() if reading.family in (CLASSES, NUMBERS, TAGS) else ():
        if column in classes and column in tables[part].column_names:
            numbers, index = tables[part][column], tables[part].column_names.index(column)
            values = as_class_names(numbers, classes[column])
            if reading.family != TAGS:
                values = pa.compute.if_else(pa.compute.equal(numbers, -1), None, values)
            tables[part] = tables[part].set_column(index, column, values)
    return tables


def _gap_notes(reading: Reading, train: pa.Table) -> tuple[str, ...]:
    """Return notes on classes whose names other programs read as missing values or numbers."""
    if reading.family != CLASSES:
        return ()
    counts = Counter(train["label"].to_pylist())
    commas = "The classes are numbers with a decimal comma. To predict the number, write 1.5 for 1,5."
    return (commas,) * all(re.fullmatch(r"[+-]?\d+,\d+", name) for name in counts) + tuple(
        f"{counts[name]:,} training rows have the label {name!r}, a class like any other. If it stands for a missing label, leave the field empty."
        for name in sorted(counts)
        if name.lower() in _GAPS_ELSEWHERE
    )


def _rejected(train: pa.Table) -> tuple[str, ...]:
    """Return a note on rows of Prodigy whose label the annotator did not accept."""
    answers = Counter(map(str, train["answer"].to_pylist() if "answer" in train.column_names else ()))
    unaccepted = answers.total() - answers["accept"]
    note = f"answer is not used: in {unaccepted:,} rows it is not 'accept'. Leave them out if their label is wrong."
    return (note,) * ({"accept"} < answers.keys() <= {"accept", "reject", "ignore"})


def _read(path: Path) -> tuple[pa.Table, dict[str, tuple[str, ...]]]:
    if path.is_dir():
        content = ", ".join(file_names_in([path, path / "data"], SUFFIXES)) or "no data file"
        raise UserError(f"{path}: a folder, with {content}. Give one file, and others as --test and --validation.")
    if not path.is_file():
        raise UserError(
            f"{path}: no such file.{meant_path(path)} Give a data file ({', '.join(SUFFIXES)}; compressed or not)."
        )
    if kind_of(path) not in SUFFIXES:
        raise UserError(
            f"{path}: not a kind of data file. Allowed: {', '.join(SUFFIXES)}, each also with {', '.join(COMPRESSED)}.{instead_of([path])}"
        )
    table = read_layout(path, lambda name: name)
    if not table.num_rows:
        raise UserError(f"{path}: it has no rows.")
    return plain_columns(table, path), class_names(table.schema.metadata)


def row_groups(*keys: Sequence[str]) -> Array:
    """Return the number of each row's group, int64 [rows]: the connected components of the rows, linked by equal keys.

    Args:
        keys: for each kind of key (the text, or the query and the document), every row's key.
    """
    rows = len(keys[0])
    parent = list(range(rows))

    def root(row: int) -> int:
        while parent[row] != row:
            parent[row] = parent[parent[row]]
            row = parent[row]
        return row

    for column in keys:
        first: dict[str, int] = {}
        for row, key in enumerate(column):
            parent[root(row)] = root(first.setdefault(key, row))
    return np.array([root(row) for row in range(rows)], dtype=np.int64)


def held_out_rows(groups: Array, keys: Sequence[str], strata: Sequence[str], share: float, *, seed: int) -> Array:
    """Return which rows are held out, bool [rows]: whole groups, about the `share` of the rows of each stratum.

    Groups are chosen in the order of a hash of the seed and their alphabetically first key, so the rows' order doesn't matter.
    At least one group of each stratum is not held out. A group is in the stratum of its first row.
    """
    first: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for row, group in enumerate(groups.tolist()):
        first.setdefault(group, row)
        sizes[group] = sizes.get(group, 0) + 1
    members: dict[str, list[int]] = {}
    for group, row in first.items():
        members.setdefault(strata[row], []).append(group)
    key_of: dict[int, str] = {}
    for key, group in zip(keys, groups.tolist(), strict=True):
        key_of[group] = min(key, key_of.get(group, key))
    held: set[int] = set()
    for stratum in members.values():
        stratum.sort(key=lambda group: hashlib.sha256(f"{seed} {key_of[group]}".encode()).digest())
        quota, taken = round(share * sum(sizes[group] for group in stratum)), 0
        for group in stratum[:-1]:
            # A group that is larger than the rest of the quota is skipped.
            if taken + sizes[group] <= quota:
                held.add(group)
                taken += sizes[group]
    return np.isin(groups, list(held))


def _divided(
    tables: Mapping[str, pa.Table], reading: Reading, files: Mapping[str, Path]
) -> tuple[dict[str, pa.Table], int]:
    """Return the rows by part, and how many training rows are left out because their texts are in the file of another part."""
    train, repeated = tables["train"], 0
    other_parts = {part: table for part, table in tables.items() if part != "train"}
    seen = {key for table in other_parts.values() for column in _keys(table, reading) for key in column}
    if seen:
        is_repeated = pa.array([any(key in seen for key in row) for row in zip(*_keys(train, reading), strict=True)])
        repeated = pa.compute.sum(is_repeated).as_py() or 0
        train = train.filter(pa.compute.invert(is_repeated))
    if train.num_rows < LEAST_ROWS:
        raise UserError(
            f"{files['train']}: it has {train.num_rows:,} rows that can be used; at least {LEAST_ROWS} are needed."
        )
    held_parts = dict(other_parts)
    left = 1.0
    for part, share in zip(PARTS[1:], SHARES, strict=True):
        if part in other_parts:
            continue
        keys = _keys(train, reading)
        strata = train["label"].to_pylist() if reading.family == CLASSES else [""] * train.num_rows
        held = pa.array(held_out_rows(row_groups(*keys), keys[0], strata, share / left, seed=SEED))
        if not pa.compute.any(held).as_py():
            raise UserError(
                f"{files['train']}: no rows can be held out for {part}: they are too few in each class, or share their texts. Give more rows, or "
                f"--{part} FILE."
            )
        held_parts[part], train, left = train.filter(held), train.filter(pa.compute.invert(held)), left - share
    parts = {"train": train} | {part: held_parts[part] for part in PARTS[1:]}
    if reading.family == NUMBERS:
        for part, table in parts.items():
            if len(set(table["label"].to_pylist())) < 2:
                raise UserError(
                    f"{files['train']}: all {part} rows have the same number, so no correlation is defined; give more rows."
                )
    if reading.family == "question-answering":
        parts = {
            part: table.add_column(0, "id", pa.array([f"{part}-{row}" for row in range(table.num_rows)]))
            for part, table in parts.items()
        }
    return parts, repeated


def _labels(table: pa.Table, reading: Reading) -> list[Any]:
    """Return the classes of all rows, or the tags of all words."""
    values = table["label" if reading.family == CLASSES else "tags"].to_pylist()
    return [value for row in values for value in (row if isinstance(row, list) else [row])]


def _keys(table: pa.Table, reading: Reading) -> list[list[str]]:
    """Return the texts by which rows form groups: the first text; the passage; query and document."""
    names = {"question-answering": ("context",), SEARCH: ("query", "positive"), "token-classification": ("tokens",)}
    columns = [table[name].to_pylist() for name in names.get(reading.family, ("text",))]
    return [[" ".join(value if isinstance(value, list) else value.split()) for value in column] for column in columns]


def _name(path: Path) -> str:
    """Return a task's name after its file, with `-file` appended if an installed task has this name."""
    stem = path.name.lower().partition(".")[0] or path.name.lower().strip(".")
    name = re.sub(r"[^a-z0-9_-]+", "-", stem).strip("-_") or "data"
    return f"{name}-file" if name in task_names() else name


def _declared(name: str, path: Path, reading: Reading, tables: Mapping[str, pa.Table]) -> Task:
    family = FAMILIES[reading.family]
    metric = next(iter(family.metrics))
    if reading.family == CLASSES:
        counts = Counter(tables["train"]["label"].to_pylist())
        metric = "f1_macro" if max(counts.values()) > SKEWED * tables["train"].num_rows else "accuracy"
    splits: dict[str, Any] = {part: part for part in PARTS}
    if reading.family == SEARCH:
        splits |= {
            part: {"queries": f"{part}-queries", "corpus": f"{part}-documents", "qrels": f"{part}-judgements"}
            for part in PARTS[1:]
        }
    pair = "text_pair" in reading.columns
    columns = " and ".join(reading.columns.values())
    return Task.model_validate(
        {
            "name": name,
            "family": reading.family,
            "title": f"{path.name}: {columns}",
            "source": "local",
            "folder": name,
            "columns": {"text_pair": "text_pair"} if pair else {},
            "splits": splits,
            "pair_template": _PAIR if pair else None,
            # Rows that share a passage or a first text are in one part, and form one group there.
            "group": "context" if reading.family == "question-answering" else "text" if pair else None,
            "metric": metric,
            "licence": "that of the file",
            "citation": "none",
        }
    )


def _facts(
    files: Mapping[str, Path],
    reading: Reading,
    tables: Mapping[str, pa.Table],
    task: Task,
    left: Mapping[str, int],
    repeated: int,
) -> dict[str, str]:
    facts = {"kind of task": FAMILIES[reading.family].title.lower()}
    facts |= {role.replace("_", " "): f"column {name!r}" for role, name in reading.columns.items()}
    if reading.unused:
        facts["not used"] = ", ".join(name or "(no name)" for name in reading.unused)
    facts["rows"] = ", ".join(f"{tables[part].num_rows:,} {part}" for part in PARTS)
    drawn = [part for part in PARTS[1:] if part not in files]
    if drawn:
        how = ", with each class's share" if reading.family == CLASSES else ""
        facts["held out"] = f"{' and '.join(drawn)}{how}; rows with the same text stay together"
    if left or repeated:
        reasons = [f"{count:,} {why}" for why, count in left.items()]
        reasons += [f"{repeated:,} training rows whose text is held out" for _ in range(bool(repeated))]
        facts["left out"] = ", ".join(reasons)
    if reading.family in (CLASSES, TAGS):
        counts = Counter(_labels(tables["train"], reading))
        total = sum(counts.values())
        commonest = [f"{label} {count:,} ({count / total:.0%})" for label, count in counts.most_common(5)]
        facts["labels"] = f"{len(counts)}: {', '.join(commonest)}{', ...' if len(counts) > len(commonest) else ''}"
    facts["main score"] = FAMILIES[reading.family].metrics[task.metric]
    return facts


def _reasons(left: Mapping[str, int]) -> str:
    listed: Sequence[str] = [f"{count:,} {why}" for why, count in left.items()]
    return f" ({', '.join(listed)})" if listed else ""

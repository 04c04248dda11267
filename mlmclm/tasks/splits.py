"""Reading of a task's splits from their source: a local folder, the Hugging Face Hub, or a generator."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa

from mlmclm.corpora.hub_repository import HubRepository, check_hub_data, error_with_nearest, load_at_commit
from mlmclm.errors import UserError
from mlmclm.storage.data_files import DELIMITERS, file_names_in, files_of, instead_of, kind_of
from mlmclm.storage.files import read_json
from mlmclm.tasks.columns import Columns, as_class_names, class_names
from mlmclm.tasks.declaration import Judged, SourceTable, Task
from mlmclm.tasks.generator import GENERATORS
from mlmclm.tasks.layouts import SUFFIXES, read_layout


def reader(task: Task, store: Path, data_root: Path | None) -> tuple[Callable[[str | SourceTable, str], Columns], bool]:
    """Return a function that reads a table of this task, given the table's declaration and name; and whether it reads the Hub.

    Raises UserError if the folder of a local task is missing.
    """
    generator = GENERATORS.find(task.source)
    if generator is not None:
        return partial(_read_local, task, generator.build(task.name, store)), False
    folder = data_root / task.folder if data_root is not None and task.folder else None
    if folder is not None and folder.is_dir():
        return partial(_read_local, task, folder), False
    if task.source == "local":
        missing = f"there is no folder {folder}" if folder else "no folder of data sets is given"
        raise UserError(
            f"task {task.name}: {missing}. The data set isn't on the Hub: "
            f"give --data the folder that holds {task.folder}/."
        )
    return partial(_read_hub, task, folder), True


def data_source(task: Task, store: Path, data_root: Path | None) -> str | dict[str, str]:
    """Return the origin of a task's data, once they have been read: a folder, or the fields of `hub_source`."""
    generator = GENERATORS.find(task.source)
    folder = data_root / task.folder if data_root is not None and task.folder else None
    if generator is not None:
        folder = generator.find(task.name, store)
    if folder is not None and folder.is_dir():
        return str(folder.resolve())
    return hub_data(task)


def hub_data(task: Task) -> dict[str, str]:
    """Return the data set of the Hub that a task declares, in the form of `hub_source`; empty if there is none."""
    if task.source == "local" or GENERATORS.find(task.source) is not None:
        return {}
    test = task.splits.test.corpus if isinstance(task.splits.test, Judged) else task.splits.test
    config = test.config_name if isinstance(test, SourceTable) else None
    return hub_source(task.source, task.revision, task.config_name or config)


def hub_source(name: str, revision: str | None, config_name: str | None) -> dict[str, str]:
    """Return a data set of the Hub as `load_dataset` takes it: `path`, `revision` and `config_name`, as far as they are known."""
    fields = {"path": name, "revision": revision, "config_name": config_name}
    return {key: value for key, value in fields.items() if value}


def _read_local(task: Task, folder: Path, part: str | SourceTable, name: str) -> Columns:
    """Read a split from a folder: from one file, or from the parts and subfolders of a download from the Hub."""
    part = SourceTable(split=part) if isinstance(part, str) else part
    split = part.file or part.split
    names = [split]
    if split.startswith("validation"):  # GLUE's `dev` and `dev_matched`, for example
        names += [split.replace("validation", alias, 1) for alias in ("dev", "valid", "val")]
    if split.startswith("qrels"):
        names.append(f"qrels/{part.split}")  # BEIR's layout: qrels/test.tsv
    inner = (part.config_name or task.config_name, task.data_dir)
    folders = [folder, folder / "data", *(folder / name for name in inner if name)]
    try:
        # Tables come first in whatever folder they are: a .txt file beside them may be prose.
        files = files_of(folders, names) or files_of(folders, names, SUFFIXES)
        if not files:
            raise UserError(
                f"{folder} has no split {split!r} ({split}{', '.join(SUFFIXES)}, compressed or in the Hub's parts); "
                f"there are: {', '.join(file_names_in(folders, SUFFIXES)) or '(no data files)'}.{instead_of(sorted(folder.iterdir()))}"
            )
        tables = [
            read_layout(
                file,
                lambda name: part.columns.get(name) or task.column(name),
                task.header,
                judged=task.kind.judged,
            )
            for file in files
        ]
    except UserError as error:
        raise UserError(f"task {task.name}: {error}") from error
    by_part = [class_names(table.schema.metadata) for table in tables]
    names_of = dict(by_part[0])
    for column in {column for names in by_part for column in names}:
        if any(names.get(column) != names_of.get(column) for names in by_part):
            # Parts that number their classes in different ways have only the names in common.
            names_of.pop(column, None)
            tables = [
                table.set_column(table.column_names.index(column), column, as_class_names(table[column], names[column]))
                if column in names
                else table
                for table, names in zip(tables, by_part, strict=True)
            ]
    if (folder / "meta.json").is_file():
        generated = tuple(read_json(folder / "meta.json").get("label_names") or ())
        names_of |= {"label": generated, "tags": generated}
    try:
        # Promotion: a column that is null throughout one part has no type there.
        plain = [table.replace_schema_metadata(None) for table in tables]
        table = pa.concat_tables(plain, promote_options="default")
    except pa.ArrowException as error:
        raise UserError(
            f"task {task.name}: the parts of {split!r} in {folder} have different columns: {error}."
        ) from error
    source = str(files[0] if len(files) == 1 else files[0].parent)
    return Columns(task, name, table, source, names_of, part.columns, untyped=kind_of(files[0]) in DELIMITERS)


def _read_hub(task: Task, folder: Path | None, part: str | SourceTable, name: str) -> Columns:
    """Read one split of a Hub data set, without running its code; errors suggest a local copy in `folder`.

    Raises:
        UserError: the data set or the split does not exist, is not public, or would be read from local files.
        EnvironmentFault: the Hub can't be reached.
    """
    import datasets

    part = SourceTable(split=part) if isinstance(part, str) else part
    split, source, config_name, revision, data_dir = part.split, part.source, part.config_name, part.revision, None
    if not source:
        source, data_dir = task.source, task.data_dir
        config_name, revision = config_name or task.config_name, revision or task.revision
    where = "/".join(name for name in (source, config_name, data_dir) if name)
    instead = f"or put a copy of it into {folder}" if folder else "or let a local folder stand in for it (see --data)"
    check_hub_data(source, f"task {task.name}: source")
    repository = HubRepository(source, "dataset", revision, where=f"task {task.name}", instead=instead)
    try:
        data = load_at_commit(source, config_name, split=split, revision=revision, data_dir=data_dir)
    except (OSError, datasets.exceptions.DatasetsError) as error:
        raise repository.trouble(error) from error
    except (ValueError, RuntimeError) as error:
        reason = error_with_nearest(error, config_name, split)
        raise UserError(f"task {task.name}: {where}, split {split!r}: {reason} Or {instead[3:]}.") from error
    table = data.with_format("arrow")[:]
    names = class_names(data.features.arrow_schema.metadata)
    return Columns(task, name, table.replace_schema_metadata(None), f"{where} split {split}", names, part.columns)

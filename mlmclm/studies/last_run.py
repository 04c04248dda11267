"""How a study or sweep was last run: `run.json`, and its file and the user's own tasks, in `store/studies/NAME`.

With them, commands that compute nothing need only its name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import yaml

from mlmclm.errors import UserError, unknown
from mlmclm.storage.checksums import read_sealed, write_sealed
from mlmclm.storage.files import write_atomic
from mlmclm.studies.in_folder import EXAMPLES
from mlmclm.studies.place import Place
from mlmclm.studies.study_file import StudyFile, load_study
from mlmclm.studies.sweep_file import SweepFile, is_sweep_file, load_sweep
from mlmclm.sweeps.ledger import Ledger
from mlmclm.sweeps.manifest import FILE as CELLS
from mlmclm.sweeps.manifest import read_manifest
from mlmclm.sweeps.packaged import names_in
from mlmclm.tasks.declared_tasks import own_files

if TYPE_CHECKING:
    from mlmclm.sweeps.status import Watch

FILE, TASKS = "run.json", "tasks"
Kind = Literal["study", "sweep"]


@dataclass(frozen=True)
class LastRun:
    """A study or sweep that a command names, as it is now in its file or as it was last run.

    Attributes:
        place: with the data folder and the user's own tasks of the last run where the command gives none.
        source: its file, as messages name it.
        command: the command of the last run, if anything was taken from that.
    """

    file: StudyFile | SweepFile
    place: Place
    source: str
    command: str | None = None


@dataclass(frozen=True)
class KnownStudy:
    """A study or sweep of a store, for lists.

    Attributes:
        run: time at which it last listed its cells (UTC, ISO 8601); None if it has none yet.
        done: number of cells that have a result.
    """

    name: str
    kind: Kind
    run: str | None
    models: int
    tasks: int
    cells: int
    done: int


def copy_of(study: StudyFile) -> str:
    """Return a study as YAML; paths in it are still relative to its own file."""
    return str(
        yaml.safe_dump(study.model_dump(mode="json", exclude_defaults=True), sort_keys=False, allow_unicode=True)
    )


def remember_run(file: StudyFile | SweepFile, copy: str, place: Place, command: str, *, tasks: tuple[str, ...]) -> None:
    """Write how a study or sweep is now run.

    Args:
        copy: the file's content, as YAML.
        command: the command that computes it again, as the report shows it.
        tasks: the tasks that it fine-tunes on.
    """
    folder, kind = place.study_folder(file), "study" if isinstance(file, StudyFile) else "sweep"
    write_atomic(folder / f"{kind}.yaml", copy)
    own = own_files(tasks, place.task_dirs)
    for declared in (folder / TASKS).glob("*.yaml"):
        if declared.stem not in own:
            declared.unlink()
    for name, declaration in own.items():
        (folder / TASKS).mkdir(exist_ok=True)
        write_atomic(folder / TASKS / f"{name}.yaml", declaration.read_bytes())
    value = {
        "kind": kind,
        "file": None if file.file is None else str(file.file.absolute()),
        "data": None if place.data_root is None else str(place.data_root),
        "command": command,
    }
    write_sealed(folder / FILE, value)


def is_path(which: str) -> bool:
    """Return whether a command's NAME|FILE is a file rather than a name."""
    return Path(which).is_file() or which.endswith((".yaml", ".yml")) or "/" in which


def find_run(which: str, place: Place) -> LastRun:
    """Return the study or sweep with this file or, in the store, with this name.

    Raises:
        UserError: there is none, its file is wrong, or the store doesn't say how it was run.
    """
    folder = place.store / "studies" / which
    if is_path(which) or (which in names_in(EXAMPLES) and not (folder / FILE).is_file()):
        path = Path(which)
        found = _load(path)
        run = place.study_folder(found) / FILE
        return _completed(found, place, which, _read(run)) if run.is_file() else LastRun(found, place, which)
    if not (folder / FILE).is_file():
        names = [known.name for known in known_studies(place.store)]
        if which not in names:
            raise unknown("study or sweep", which, names, where=str(place.store))
        raise UserError(
            f"{which}: {folder} has no {FILE}: its models are not fine-tuned yet. Give its "
            "file, or run it with `mlmclm study` or `mlmclm sweep`; what is finished is not computed again."
        )
    record = _read(folder / FILE)
    path = folder / f"{record['kind']}.yaml"
    original = None if record["file"] is None else Path(record["file"])
    found = load_sweep(path) if record["kind"] == "sweep" else load_study(path, copy_of=original)
    return replace(_completed(found, place, which, record), source=record["file"] or which, command=record["command"])


def _read(path: Path) -> dict[str, str | None]:
    again = "Run the study or sweep again to write it; what is finished is not computed again."
    record = read_sealed(path, again)
    if not record.keys() >= {"kind", "file", "data", "command"}:
        raise UserError(f"{path}: not the record of a run. {again}")
    return dict(record)


def _completed(file: StudyFile | SweepFile, place: Place, source: str, record: dict[str, str | None]) -> LastRun:
    """Take from the last run what the command does not give, if it is still there."""
    data, own = record["data"], place.study_folder(file) / TASKS
    filled = place
    if place.data_root is None and data is not None and Path(data).is_dir():
        filled = replace(filled, data_root=Path(data))
    if not place.task_dirs and own.is_dir() and any(own.iterdir()):
        filled = replace(filled, task_dirs=(own,))
    return LastRun(file, filled, source, record["command"] if filled != place else None)


def known_studies(store: Path) -> list[KnownStudy]:
    """Return all studies and sweeps of a store, by name; damaged lists of cells count as none."""
    there: set[str] | None = None
    found = []
    for folder in sorted((store / "studies").glob("[!.]*/")):
        models = len([each for each in folder.glob("models/*") if each.name[0] != "."])
        kind: Kind = "sweep" if (folder / "sweep.yaml").is_file() else "study"
        known = KnownStudy(folder.name, kind, None, models, 0, 0, 0)
        try:
            manifest = read_manifest(folder.name, store) if (folder / CELLS).is_file() else None
        except UserError:
            manifest = None
        if manifest is not None:
            there = Ledger(store).keys() if there is None else there
            known = KnownStudy(
                folder.name,
                kind,
                manifest.planned,
                len({cell.model for cell in manifest.cells}),
                len({*(cell.task for cell in manifest.cells), *manifest.waiting}),
                len(manifest.cells) + sum(manifest.waiting.values()),
                sum(cell.key in there for cell in manifest.cells),
            )
        if models or manifest is not None or (folder / FILE).is_file():
            found.append(known)
    return found


def watch_of(which: str, store: Path) -> Watch:
    """Return a look at the cells of a study that is given by its name or its file.

    Raises:
        UserError: there is no such study in the store, or the file is wrong.
    """
    from mlmclm.sweeps.status import Watch

    return Watch(read_manifest(name_of(which), store), Ledger(store))


def name_of(which: str) -> str:
    """Return the name of a study that is given by its name or its file; a `UserError` if the file is missing or wrong."""
    return _load(Path(which)).name if is_path(which) else which


def _load(path: Path) -> StudyFile | SweepFile:
    return load_sweep(path) if is_sweep_file(path) else load_study(path)

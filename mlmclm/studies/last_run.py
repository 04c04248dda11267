"""The last run of a study: `run.json`, with its grid and record, and its file and the user's own tasks, in `store/studies/NAME`.

With these files, commands that compute nothing need only the study's name, and neither models nor data.

A folder holds one report. If another grid under an old name would leave something out of the report, the user must
decide. A grid that only grew replaces nothing. Metrics and rule are not part of a grid: if they change, the same
command reports the same cells again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from mlmclm.answers.claim_files import absolute_claims
from mlmclm.errors import UserError
from mlmclm.models.sources import local_folder
from mlmclm.progress import say
from mlmclm.seeds import seed_value
from mlmclm.storage.checksums import read_sealed, sealed
from mlmclm.storage.files import first_existing, places_of, write_atomic
from mlmclm.studies.place import Place
from mlmclm.studies.study_file import AnyFile, StudyFile, SweepFile, load_file
from mlmclm.studies.study_sweep import StudySweep, study_space
from mlmclm.sweeps.manifest import read_manifest
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.sweeps.space import Space
from mlmclm.tasks.declared_tasks import user_files

if TYPE_CHECKING:
    from mlmclm.sweeps.status import Watch

FILE = "run.json"
AXES = {"models": "model", "tasks": "task", "learning_rates": "learning rate", "seeds": "seed"}
"""Parts of a grid to which items may be added, and the word for one item."""
TASKS = "tasks"
AGAIN = "Run the study or sweep again to write it; what is finished is not computed again."
Kind = Literal["study", "sweep"]


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


def remember_run(sweep: StudySweep, command: str, record: Mapping[str, Any]) -> None:
    """Write the record of a study's run to its folder: `run.json`, its settings and the user's own tasks.

    Args:
        command: the command that computes it again, as the report shows it.
        record: `record_of_study.record_value`.
    """
    file, place = sweep.file, sweep.place
    folder = place.study_folder(file.name)
    write_atomic(folder / f"{file.kind}.yaml", as_yaml(sweep))
    task_files = user_files(sweep.space.tasks, place.task_dirs)
    for declared in (folder / TASKS).glob("*.yaml"):
        if declared.stem not in task_files:
            declared.unlink()
    for name, declaration in task_files.items():
        (folder / TASKS).mkdir(exist_ok=True)
        write_atomic(folder / TASKS / f"{name}.yaml", declaration.read_bytes())
    value = {
        "kind": file.kind,
        "file": None if file.file is None else str(file.file.absolute()),
        "data": None if place.data_root is None else str(place.data_root),
        "command": command,
        "grid": grid_of_study(sweep),
        "choices": _choices(file, sweep.space),
        **record,
    }
    # Not in canonical order: facts are shown in the order of their keys in the file.
    write_atomic(folder / FILE, json.dumps(sealed(value), ensure_ascii=False) + "\n")


def as_yaml(sweep: StudySweep) -> str:
    """Return a study's settings as YAML.

    Paths are still relative to its own file; those of given models are absolute, and models of the Hub have their commits.
    """
    file = sweep.file
    values = file.model_dump(mode="json", exclude_defaults=True)
    if isinstance(file, SweepFile):
        for swept in sweep.models:
            source = values["models"][swept.model.name]
            if local_folder(source, sweep.place.data_root, file.folder) is not None:
                values["models"][swept.model.name] = str(swept.model.folder)
            elif swept.commit is not None:
                values["models"][swept.model.name] = f"{source.partition('@')[0]}@{swept.commit}"
        space = first_existing(places_of(file.space, file.folder)) if isinstance(file.space, str) else None
        if space is not None and space.is_file():
            values["space"] = str(space.resolve())
        if file.claims is not None:
            values["claims"] = [absolute_claims(name, file.folder) for name in file.claims]
    return str(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))


def last_run(folder: Path) -> dict[str, Any]:
    """Return the record of the last run in a study's folder: its `kind`, `file`, `data`, `command`, `grid`, and `record_of_study.record_value`.

    Raises:
        UserError: there is none, or it is damaged.
    """
    path = folder / FILE
    record = read_sealed(path, AGAIN)
    if not record.keys() >= {"kind", "file", "data", "command"}:
        raise UserError(f"{path}: not the record of a run. {AGAIN}")
    return dict(record)


def kept_file(folder: Path, record: Mapping[str, Any]) -> AnyFile:
    """Return a study's file as it was last run, from its copy in the study's folder and the record of that run."""
    # The paths in a sweep's copy are absolute.
    original = record["file"] if record["kind"] == "study" else None
    return load_file(folder / f"{record['kind']}.yaml", copy_of=Path(original) if original else None)


def check_same(file: AnyFile, place: Place, run: Mapping[str, Any]) -> None:
    """Check that a study's file still asks for the results of its last run; a study that is given by name always does.

    Raises:
        UserError: it has changed since; the message says what.
    """
    if file == kept_file(place.study_folder(file.name), run):
        return
    space = study_space(file, place.task_dirs) if isinstance(file, StudyFile) else file.find_space()
    before = run["grid"]
    # Weights are not compared, because models may have been deleted.
    difference = grid_difference(
        before, grid_of(space, {name: (before["models"].get(name, ""),) for name in file.models})
    )
    choices = [
        f"{key} {now} (was {run['choices'][key]})"
        for key, now in _choices(file, space).items()
        if now != run["choices"][key]
    ]
    if changed := "; ".join((*difference.lost, *difference.added, *choices)):
        raise UserError(
            f"{file.kind} {file.name!r}: its file has changed since it was last run: {changed}. Run it again, which computes only what "
            f"is missing; the name {file.name!r} in place of the file stands for the last run."
        )


def _choices(file: AnyFile, space: Space) -> dict[str, Any]:
    """Return the settings that decide what is reported and that are not part of a grid."""
    return {"rule": space.rule, "metrics": space.metrics, "baseline": file.baseline}


def is_path(which: str) -> bool:
    """Return whether a command's NAME|FILE is a file rather than a name."""
    return Path(which).is_file() or which.endswith((".yaml", ".yml")) or "/" in which


def completed(place: Place, folder: Path, record: dict[str, Any]) -> Place:
    """Return the place with the data and task folders of a study's last run, if it has none itself and they still exist."""
    data, tasks = record["data"], folder / TASKS
    if place.data_root is None and data is not None and Path(data).is_dir():
        place = replace(place, data_root=Path(data))
    if not place.task_dirs and tasks.is_dir() and any(tasks.iterdir()):
        place = replace(place, task_dirs=(tasks,))
    return place


def known_studies(store: Path) -> list[KnownStudy]:
    """Return all studies and sweeps of a store, by name; damaged lists of cells count as none."""
    keys: set[str] | None = None
    studies = []
    for folder in sorted((store / "studies").glob("[!.]*/")):
        models = len([path for path in folder.glob("models/*") if path.name[0] != "."])
        study = KnownStudy(
            folder.name, "sweep" if (folder / "sweep.yaml").is_file() else "study", None, models, 0, 0, 0
        )
        with suppress(UserError):
            manifest = read_manifest(folder.name, store)
            keys = ResultsStore(store).keys() if keys is None else keys
            study = replace(
                study,
                run=manifest.planned,
                models=len({cell.model for cell in manifest.cells}),
                tasks=len({*(cell.task for cell in manifest.cells), *manifest.waiting}),
                cells=len(manifest.cells) + sum(manifest.waiting.values()),
                done=sum(cell.key in keys for cell in manifest.cells),
            )
        if models or study.run is not None or (folder / FILE).is_file():
            studies.append(study)
    return studies


def watch_of(which: str, store: Path) -> Watch:
    """Return a watch on the cells of a study, which is given by its name or its file.

    Raises:
        UserError: there is no such study in the store, or the file is wrong.
    """
    from mlmclm.sweeps.status import Watch

    return Watch(read_manifest(name_of(which), store), ResultsStore(store))


def name_of(which: str) -> str:
    """Return the name of a study that is given by its name or its file; a `UserError` if the file is missing or wrong."""
    return load_file(Path(which)).name if is_path(which) else which


def grid_of(space: Space, models: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return a grid as plain values.

    Args:
        models: the models by name, each with its hashes (`SweepModel.hashes`); with "" if the study trains it.
    """
    earlier = {name: hashes[1:] for name, hashes in models.items() if len(hashes) > 1}
    return {
        "models": {name: hashes[0] for name, hashes in models.items()},
        **({"earlier": earlier} if earlier else {}),
        "tasks": {
            task: {
                name: point.model_dump(mode="json", exclude_defaults=True)
                for name, point in space.settings_for(task).items()
            }
            for task in space.tasks
        },
        "learning_rates": list(space.learning_rates),
        **({"extend": space.learning_rates.most} if space.learning_rates.most else {}),
        "seeds": [seed_value(seed) for seed in space.seeds],
        "per_model": space.per_model,
        "start_from": space.start_from,
    }


def grid_of_study(sweep: StudySweep) -> dict[str, Any]:
    """Return the grid of a study; the weights of models that it trains are no part of it."""
    if isinstance(sweep.file, StudyFile):
        return grid_of(sweep.space, dict.fromkeys(sweep.file.models, ("",)))
    return grid_of(sweep.space, {swept.model.name: swept.model.hashes for swept in sweep.models})


@dataclass(frozen=True)
class Difference:
    """Difference of a grid from an earlier one, in words: what was added, and what is lost or changed."""

    added: tuple[str, ...]
    lost: tuple[str, ...]


def grid_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> Difference:
    """Compare two grids (`grid_of`)."""
    added, lost = [], []
    for key, word in AXES.items():
        added += _listed(f"{word} added", (item for item in now[key] if item not in before[key]))
        lost += _listed(f"{word} left out", (item for item in before[key] if item not in now[key]))
    most, most_now = (grid.get("extend", 0) for grid in (before, now))
    if most != most_now:
        (added if most_now > most else lost).append(f"{_extended(most_now)} (was {_extended(most)})")
    changed: dict[str, dict[str, None]] = {}  # what changed -> the tasks or models for which it did, in order
    for model in _both("models", before, now):
        if before["models"][model] not in (now["models"][model], *now.get("earlier", {}).get(model, ())):
            changed.setdefault("other weights", {})[model] = None
        for words in _changed(*(grid["per_model"].get(model, {}) for grid in (before, now))):
            changed.setdefault(words, {})[model] = None
    for task in _both("tasks", before, now):
        old, new = before["tasks"][task], now["tasks"][task]
        added += _listed(f"setting of {task} added", (point for point in new if point not in old))
        lost += _listed(f"setting of {task} left out", (point for point in old if point not in new))
        starts = [{"start_from": grid["start_from"].get(task)} for grid in (before, now)]
        for pair in (starts, *([old[point], new[point]] for point in old if point in new)):
            for words in _changed(*pair):
                changed.setdefault(words, {})[task] = None
    lost += [f"{', '.join(names)}: {words}" for words, names in changed.items()]
    return Difference(tuple(added), tuple(lost))


def _extended(most: int) -> str:
    return f"up to {most} learning rates added at each end" if most else "no learning rates added"


def _both(key: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [name for name in before[key] if name in now[key]]


def _listed(words: str, items: Iterable[Any]) -> list[str]:
    names = ", ".join(str(item) or "the protocol's own" for item in items)
    return [f"{words}: {names}"] if names else []


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [
        f"{key} {now.get(key, 'as by default')} (was {before.get(key, 'as by default')})"
        for key in dict.fromkeys((*before, *now))
        if before.get(key) != now.get(key)
    ]


def since_last(folder: Path, grid: Mapping[str, Any]) -> Difference:
    """Compare a grid with the last one of a study's or sweep's folder, if any; a `UserError` if its record is damaged."""
    if not (folder / FILE).is_file():
        return Difference((), ())
    again = "Delete it, or run with --replace: the report is then replaced, whatever its grid was."
    last = read_sealed(folder / FILE, again).get("grid", {})
    if not {*AXES, "per_model", "start_from"} <= last.keys():
        raise UserError(f"{folder / FILE}: it has no grid. {again}")
    return grid_difference(last, grid)


def check_last(folder: Path, grid: Mapping[str, Any], *, replace: bool) -> None:
    """Raise a `UserError` for a grid that lacks something of the last one in the folder, or if the record of the last
    one is damaged; say if the grid only grew.

    Args:
        replace: whether the user allows this; then there is no error.
    """
    try:
        difference = since_last(folder, grid)
    except UserError as error:
        if not replace:
            raise
        say(f"{error} It is written anew.")
        return
    if difference.lost and not replace:
        raise UserError(
            f"name {folder.name!r}: it was last run over another grid, whose report in {folder} would be replaced.\n"
            + "".join(f"  {line}\n" for line in (*difference.lost, *difference.added))
            + "Give this one another name (--name, or `name` in the file), or add --replace. Results of cells are kept "
            "either way."
        )
    if difference.added and not difference.lost:
        say(f"{folder.name}: the grid has grown: {'; '.join(difference.added)}")

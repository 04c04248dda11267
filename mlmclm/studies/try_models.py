"""Models tried on a data file: a sweep over a small grid, on a task that is made from the file."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import yaml

from mlmclm.arguments import StudyFolders, known_arguments
from mlmclm.configuration import parse
from mlmclm.errors import UserError, for_each
from mlmclm.storage.files import write_atomic
from mlmclm.studies.data_file import FileTask, read_task
from mlmclm.studies.given_study import GivenStudy, expand_studies
from mlmclm.studies.last_run import as_yaml
from mlmclm.studies.place import Place, command_of, place_of
from mlmclm.studies.small_grid import SEEDS, GridModel, GridTask, grid_for
from mlmclm.studies.study_file import SweepFile
from mlmclm.sweeps.find_model import find_model
from mlmclm.tasks.inference import Wishes


class TriedModels(GivenStudy):
    """A study of given models on a data file.

    Attributes:
        data: the task that the file is read as.
    """

    def __init__(self, file: SweepFile, place: Place, data: FileTask, *, command: str) -> None:
        super().__init__(file, place, command=command)
        self.data = data

    def write(self, folder: str | Path) -> list[Path]:
        """Write the study as files to go on from: `sweep.yaml`, `space.yaml`, and the task in `tasks/` and `data/`.

        Raises:
            UserError: one of the files exists.
        """
        folder = Path(folder)
        sweep, space = folder / "sweep.yaml", folder / "space.yaml"
        for path in (sweep, space):
            if path.exists():
                raise UserError(f"--write {folder}: {path} exists and is not overwritten; name another folder.")
        self.data.write(folder)
        values = yaml.safe_load(as_yaml(self._found()))
        if isinstance(values["space"], dict):
            write_atomic(space, yaml.safe_dump(values["space"], sort_keys=False))
            values["space"] = space.name
        write_atomic(sweep, yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
        return [path for path in (sweep, space, folder / "tasks" / f"{self.data.name}.yaml") if path.exists()]


@known_arguments
def try_models(
    rows: str | Path,
    models: str | Sequence[str] | Mapping[str, str],
    *,
    test: str | Path | None = None,
    validation: str | Path | None = None,
    family: str | None = None,
    text_columns: str | Sequence[str] = (),
    label_column: str | None = None,
    space: str | Path | Mapping[str, Any] | None = None,
    seeds: int | None = None,
    name: str | None = None,
    baseline: str | None = None,
    **folders: Unpack[StudyFolders],
) -> TriedModels:
    """Return a study of models on a data file, whose columns are inferred; `run` computes it, and a second one resumes.

    The file's rows, divided into three parts, are written into the store.

    Args:
        rows: a CSV, TSV, JSON, JSON Lines or Parquet file, or one with a word and its tags on each line.
        models: as in `sweep`.
        test: a file with the test rows; by default a fifth of the rows is held out.
        validation: a file with the validation rows; by default a tenth is held out.
        family: the kind of task, such as `sequence-regression`, in place of the inferred one.
        text_columns: the column of text, or two: text and second text, query and positive, question and context.
        label_column: the column of labels, tags or answers.
        space: a search space in place of the small one that is made for the models: a name, a file, or values.
        seeds: seeds at each learning rate; 3 by default.
        name: of the report's folder; by default `try-` and the file's name.
        baseline: the model that the others are compared with.
        folders: `StudyFolders`.

    Raises:
        UserError: a file can't be read, it isn't clear what is in it, or an argument is wrong.
    """
    if seeds is not None and (seeds < 1 or space is not None):
        raise UserError(f"--seeds {seeds}: allowed is a number from 1 on, and no --space, which has its own seeds.")
    wishes = Wishes(family, (text_columns,) if isinstance(text_columns, str) else tuple(text_columns), label_column)
    found = read_task(rows, wishes, test=test, validation=validation)
    place = place_of(**folders)
    listed = [models] if isinstance(models, str) else models
    sources = [f"{own}={source}" for own, source in listed.items()] if isinstance(listed, Mapping) else list(listed)
    values: dict[str, Any] = {
        "name": name or f"try-{found.name}",
        "models": sources,
        "tasks": [found.name],
        "space": "glue",
    }
    given = parse(SweepFile, values | {"baseline": baseline}, where="options")
    if space is None:
        named = expand_studies(given, place.store).models.values()
        folder_of = {source: find_model(source, place.store, data_root=place.data_root).folder for source in named}
        grid: Any = grid_for(
            [GridTask(found.name, found.tables["train"])],
            for_each(folder_of.values(), GridModel.of),
            seeds=seeds or SEEDS,
        )
    else:
        grid = dict(space) | {"tasks": [found.name]} if isinstance(space, Mapping) else space
    file = given.model_copy(update={"space": grid if isinstance(grid, Mapping) else str(grid)})
    options: dict[str, Any] = {
        "--model": sources,
        "--test": test,
        "--validation": validation,
        "--family": family,
        "--text-column": wishes.text,
    }
    options |= {"--label-column": label_column, "--seeds": seeds, "--name": name, "--baseline": baseline}
    options |= {} if isinstance(space, Mapping) else {"--space": space}
    words = [str(rows), *option_words(options)]
    command = command_of("try", *(shlex.quote(word) for word in words), **folders)
    return TriedModels(file, replace(place, task_dirs=(found.keep(place.store),)), found, command=command)


def option_words(options: Mapping[str, Any]) -> list[str]:
    """Return options as words of a command line; those without a value are left out."""
    several = {
        name: [value] if isinstance(value, str | Path | int | float) else value
        for name, value in options.items()
        if value
    }
    return [word for name, own in several.items() for value in own for word in (name, str(value))]

"""A study to edit: a copy of the packaged quickstart, or one of given models on a data file, whose task is inferred."""

from __future__ import annotations

import filecmp
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from mlmclm.configuration import parse
from mlmclm.errors import UserError, for_each
from mlmclm.storage.files import write_atomic
from mlmclm.storage.packaged import SPACES
from mlmclm.studies.data_file import FileTask
from mlmclm.studies.given_study import GivenStudy, expand_studies
from mlmclm.studies.last_run import as_yaml
from mlmclm.studies.packaged_studies import EXAMPLES
from mlmclm.studies.place import Place
from mlmclm.studies.small_grid import SEEDS, grid_for
from mlmclm.studies.study_file import SweepFile
from mlmclm.sweeps.find_model import find_model

STUDY, SPACE = "study.yaml", "space.yaml"
STUDY_HEAD = """\
# A study: which encoders are pretrained on which text, and on which tasks they are fine-tuned.
#   mlmclm study study.yaml --dry-run     says what would be computed
#   mlmclm study study.yaml               computes it; the same command resumes
# Paths are relative to this file. As it is, it takes about seven minutes on two cores, and needs no download.
"""
SPACE_HEAD = """\
# A search space: learning rates x seeds x tasks, and how models are fine-tuned. `mlmclm tasks` lists all tasks.
"""
ON_FILE_HEAD = """\
# A study of given models. The space is made for them and the data: rates by size, steps by rows, lengths by texts.
# `baseline: MODEL` compares the others with one of them; `space` may also be a name, such as glue, or a file.
"""


def new_study(folder: Path) -> list[Path]:
    """Write a commented study file and its search space to a folder, which is created if needed; return their paths.

    Raises:
        UserError: one of the files exists.
    """
    paths = [folder / STUDY, folder / SPACE]
    _check_absent(paths)
    study = re.sub(r"(?m)^name: .*$", f"name: {_name(folder)}", _without_head(EXAMPLES / "quickstart.yaml"))
    study = re.sub(r"(?m)^space: .*$", f"space: {SPACE}             # learning rates x seeds x tasks", study)
    for path, text in zip(
        paths, (STUDY_HEAD + study, SPACE_HEAD + _without_head(SPACES / "quickstart.yaml")), strict=True
    ):
        write_atomic(path, text)
    return paths


def settings_for(
    folder: Path, task: FileTask, models: str | Sequence[str] | Mapping[str, str], place: Place, *, seeds: int = SEEDS
) -> str:
    """Return the YAML of a study of models on a task from a file, which is to be in a folder; errors as of `api.study_on_file`."""
    if not models:
        raise UserError("--model is missing: name at least one model to fine-tune on the file.")
    values = {"name": _name(folder), "models": [models] if isinstance(models, str) else models, "space": "glue"}
    file = expand_studies(parse(SweepFile, values, where="options"), place.store)
    found = for_each(file.models.values(), lambda name: find_model(name, place.store, data_root=place.data_root))
    grid = grid_for(task.name, task.tables["train"], [model.folder for model in found], seeds)
    file = file.model_copy(update={"space": grid})
    with TemporaryDirectory() as declared:
        write_atomic(Path(declared) / f"{task.name}.yaml", task.declaration)
        return ON_FILE_HEAD + as_yaml(GivenStudy(file, replace(place, task_dirs=(Path(declared),))).find_models())


def write_study(folder: Path, task: FileTask, settings: str, *, resume: bool = False) -> None:
    """Write a task from a file and the study on it; a `UserError` names a file that exists.

    With `resume`, files that have just this content stay, and the error names one that has other content.
    """
    if resume and (folder / STUDY).exists():
        with TemporaryDirectory() as again:
            write_study(Path(again), task, settings)
            for path in sorted(each for each in Path(again).rglob("*") if each.is_file()):
                there = folder / path.relative_to(again)
                if not there.is_file() or not filecmp.cmp(path, there, shallow=False):
                    raise UserError(
                        f"{there}: it is not what this command writes. Run `{run_command(folder)}`, or delete {folder}."
                    )
        return
    _check_absent([folder / STUDY, folder / "tasks" / f"{task.name}.yaml", folder / "data" / task.name])
    task.write(folder)
    write_atomic(folder / STUDY, settings)


def run_command(folder: Path) -> str:
    """Return the command that runs the study that `write_study` wrote to a folder."""
    parts = {"study": STUDY, "--task-dir": "tasks", "--data": "data"}
    return shlex.join(["mlmclm", *(word for name, part in parts.items() for word in (name, str(folder / part)))])


def _check_absent(paths: Sequence[Path]) -> None:
    for path in paths:
        if path.exists():
            raise UserError(f"{path}: it exists and is not overwritten; name another folder.")


def _name(folder: Path) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).lstrip("._-") or "study"


def _without_head(path: Path) -> str:
    """Return a file without the comments at its beginning."""
    return re.sub(r"\A(#.*\n)+", "", path.read_text(encoding="utf-8"))

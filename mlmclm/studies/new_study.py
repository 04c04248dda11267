"""A study to edit: a copy of the packaged quickstart, or one of given models on a data file, whose task is inferred; and JSON Schemas for editors."""

from __future__ import annotations

import filecmp
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from safetensors import safe_open

from mlmclm.analysis.claim import ClaimFile
from mlmclm.configuration import parse_config
from mlmclm.errors import UserError, for_each, unknown
from mlmclm.models.folder import context_of, load_tokenizer
from mlmclm.models.sources import weight_files
from mlmclm.storage.files import write_atomic
from mlmclm.storage.packaged import SPACES
from mlmclm.storage.place import EXAMPLES, Place
from mlmclm.studies.study_file import StudyFile, SweepFile
from mlmclm.studies.study_record import as_yaml
from mlmclm.studies.study_sweep import expand_studies, find_given
from mlmclm.sweeps.find_model import find_model
from mlmclm.sweeps.space import ProtocolFile, Space
from mlmclm.tasks.data_file import FileTask

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
LADDER = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3)
BANDS = ((10_000_000, (5e-4, 2e-3)), (60_000_000, (1e-4, 5e-4)), (math.inf, (2e-5, 1e-4)))
"""Number of weights -> lowest and highest learning rate for models with fewer. The published protocols (`tune_spaces/protocols`) cover models
of 150 million weights and more; rates for smaller ones were measured in this project's studies. The sweep adds rates if needed."""
SEEDS = 3
EPOCHS = 3
STEPS = (60, 1_000)
"""The fewest and the most steps of a cell."""
LARGE = 2_000
"""Training rows from which a batch has 32 of them instead of 16."""
LONGEST = 512
LOOKED_AT = 500
"""Number of training rows whose texts are measured."""
COVERED = 0.98
"""Share of these texts that are not truncated."""


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
    """Return the YAML of a study of models on a data file's task, to be written to a folder; errors as of `api.study_on_file`."""
    if not models:
        raise UserError("--model is missing: name at least one model to fine-tune on the file.")
    values = {"name": _name(folder), "models": [models] if isinstance(models, str) else models, "space": "glue"}
    file = expand_studies(parse_config(SweepFile, values, where="options"), place.store)
    resolved = for_each(file.models.values(), lambda name: find_model(name, place.store, data_root=place.data_root))
    grid = grid_for(task.name, task.tables["train"], [model.folder for model in resolved], seeds)
    file = file.model_copy(update={"space": grid})
    with TemporaryDirectory() as declared:
        write_atomic(Path(declared) / f"{task.name}.yaml", task.declaration)
        return ON_FILE_HEAD + as_yaml(find_given(file, replace(place, task_dirs=(Path(declared),))))


def write_study(folder: Path, task: FileTask, settings: str, *, resume: bool = False) -> None:
    """Write a data file's task and the study on it; a `UserError` names a file that exists already.

    With `resume`, files with exactly this content stay, and the error names a file with other content.
    """
    if resume and (folder / STUDY).exists():
        with TemporaryDirectory() as scratch:
            write_study(Path(scratch), task, settings)
            for path in sorted(file for file in Path(scratch).rglob("*") if file.is_file()):
                existing = folder / path.relative_to(scratch)
                if not existing.is_file() or not filecmp.cmp(path, existing, shallow=False):
                    raise UserError(
                        f"{existing}: it is not what this command writes. Run `{run_command(folder)}`, or delete {folder}."
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


def count_weights(folder: Path) -> int:
    """Return the number of weights in a folder's safetensors files, from their headers."""
    total = 0
    for file in weight_files(folder):
        with safe_open(str(file), "pt") as handle:
            total += sum(math.prod(handle.get_slice(name).get_shape()) for name in handle.keys())  # noqa: SIM118
    return total


def rates_for(weights: Sequence[int]) -> list[float]:
    """Return the learning rates to begin with, for models with these numbers of weights."""
    bands = [next(rates for most, rates in BANDS if count < most) for count in weights]
    low, high = min(low for low, _ in bands), max(high for _, high in bands)
    return [rate for rate in LADDER if low <= rate <= high]


def grid_for(task: str, train: pa.Table, models: Sequence[Path], seeds: int = SEEDS) -> dict[str, Any]:
    """Return the values of a search space: rates by the models' sizes, steps by the rows, lengths by the texts.

    Args:
        task: the task's name.
        train: its training rows in canonical columns.
        models: the models' folders.
        seeds: their number.
    """
    batch = 32 if train.num_rows >= LARGE else 16
    steps = math.ceil(EPOCHS * train.num_rows / batch)
    length = length_for(train, models)
    return {
        "tasks": [task],
        "learning_rates": {"values": rates_for([count_weights(folder) for folder in models]), "extend": True},
        "seeds": list(range(seeds)),
        "protocol": {
            "base": "standard",
            "batch_size": batch,
            "max_steps": min(max(steps, STEPS[0]), STEPS[1]),
            "max_length": length,
            "stride": length // 4,
        },
    }


def length_for(train: pa.Table, models: Sequence[Path]) -> int:
    """Return the maximum length in tokens, a multiple of 16: nearly all texts fit, unless that exceeds `LONGEST` or a model's context."""
    wanted = [name for name in train.column_names if name not in ("id", "label", "tags", "answers", "negative")]
    rows = train.select(wanted).slice(0, LOOKED_AT).to_pylist()
    texts = [
        " ".join(" ".join(value) if isinstance(value, list) else value or "" for value in row.values()) for row in rows
    ]
    contexts = [context for folder in models if (context := context_of(folder)) is not None]
    needed = 16
    for folder in models:
        tokenized = load_tokenizer(folder)(texts, add_special_tokens=False, verbose=False)["input_ids"]
        lengths = sorted(map(len, tokenized))
        # 16 more for prompt and special tokens.
        needed = max(needed, lengths[math.ceil(COVERED * len(lengths)) - 1] + 16)
    return min(math.ceil(needed / 16) * 16, LONGEST, *contexts)


KINDS: dict[str, type[BaseModel]] = {
    "study": StudyFile,
    "sweep": SweepFile,
    "space": Space,
    "protocol": ProtocolFile,
    "claims": ClaimFile,
}


class _ForEditors(GenerateJsonSchema):
    """Also accepts whole numbers such as 4_200_000, which YAML 1.1 reads as a number but editors read as a string."""

    def int_schema(self, schema: Any) -> JsonSchemaValue:
        number = super().int_schema(schema)
        return {"anyOf": [number, {"type": "string", "pattern": "^[0-9]+(_[0-9]+)+$"}]}


def schema_of(kind: str) -> dict[str, Any]:
    """Return the JSON Schema of a kind of file; a `UserError` names the `KINDS` if it is none of them."""
    if kind not in KINDS:
        raise unknown("kind of file", kind, KINDS)
    schema = KINDS[kind].model_json_schema(schema_generator=_ForEditors)
    return {"$schema": GenerateJsonSchema.schema_dialect, **schema}

"""A task's data, read, checked, and tokenised as a model would be given them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from mlmclm.arguments import StudyFolders, known_arguments
from mlmclm.errors import UserError
from mlmclm.models.sources import longest
from mlmclm.storage.files import read_json
from mlmclm.studies.place import place_of
from mlmclm.tasks.declaration import Task
from mlmclm.tasks.declared_tasks import get_task

if TYPE_CHECKING:
    from mlmclm.tasks.look import TaskPreview

DEFAULT_LENGTH = 512


@dataclass(frozen=True)
class CheckedTask:
    """A task with a preview of its data.

    Attributes:
        max_length: tokens of the longest sequence.
        fingerprint: hash of the task's data.
    """

    task: Task
    preview: TaskPreview
    max_length: int
    fingerprint: str


@known_arguments
def check_task(
    name: str,
    *,
    tokenizer: str | Path | None = None,
    model: str | Path | None = None,
    max_length: int | None = None,
    examples: int = 3,
    **folders: Unpack[StudyFolders],
) -> CheckedTask:
    """Read and check a task's data, and tokenise a sample of them.

    Args:
        tokenizer: folder of a Hugging Face tokenizer; either this or `model`.
        model: folder of a Hugging Face model, whose tokenizer is used.
        max_length: tokens of the longest sequence; by default 512, or fewer if the model takes fewer.
        examples: number of training examples in the preview.
        folders: `StudyFolders`.

    Raises:
        UserError: a name or a folder is wrong, or the data don't fit the task's declaration.
    """
    place = place_of(**folders)
    task = get_task(name, place.task_dirs)
    if (tokenizer is None) == (model is None):
        raise UserError("tasks check: give the tokens either by --tokenizer FOLDER or by --model FOLDER.")
    folder = Path(model or tokenizer or "")
    from mlmclm.models.folder import check_length, check_model_folder, load_tokenizer, tokenizer_hash
    from mlmclm.tasks.load import load_task
    from mlmclm.tasks.look import look
    from mlmclm.tasks.settings import TaskSettings

    if model is not None:
        check_model_folder(folder)
    tokenizer_hash(folder)
    if max_length is None:
        most = longest(read_json(folder / "config.json")) if (folder / "config.json").is_file() else None
        max_length = min(DEFAULT_LENGTH, most or DEFAULT_LENGTH)
    check_length(folder, max_length)
    stride = min(TaskSettings.model_fields["stride"].default, max_length // 4)
    loaded = load_task(task, store=place.store, data_root=place.data_root)
    settings = TaskSettings(max_length=max_length, stride=stride)
    preview = look(loaded, load_tokenizer(folder), settings, examples=examples)
    return CheckedTask(task, preview, max_length, loaded.fingerprint)

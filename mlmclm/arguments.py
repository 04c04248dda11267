"""Arguments of the functions of `import mlmclm`: the folders that many of them take, and the refusal of unknown arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ParamSpec, TypedDict, TypeVar

from mlmclm.errors import UnknownArgument, unknown

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")

SECONDS_FOR_NODES = 3600.0
"""Default seconds for which work waits for nodes: booting a machine takes minutes, replacing a reclaimed one takes longer."""


class StudyFolders(TypedDict, total=False):
    """Folders of a study, and its wait for storage; arguments that are None or omitted come from the environment or the store."""

    store: str | Path | None
    """Folder or address (`s3://bucket/prefix`) that keeps everything; by default MLMCLM_STORE, else `store` in the working
    directory."""
    data: str | Path | None
    """Folder of local data sets that replaces the Hugging Face Hub; by default MLMCLM_DATA, if it is set."""
    task_dirs: Sequence[str | Path] | None
    """Folders of your own tasks, one YAML file each; by default those of MLMCLM_TASK_DIR."""
    wait_for_storage: float | None
    """Seconds to wait during an outage of the object store, for a store at an address; the store saves the number."""


def known_arguments(function: Callable[Arguments, Returned]) -> Callable[Arguments, Returned]:
    """Make a function refuse unknown arguments and name the nearest known one; its `**folders` are `StudyFolders`.

    Python itself would accept any name as one of `**folders`.
    """
    parameters = inspect.signature(function).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    allowed = [parameter.name for parameter in parameters if parameter.kind in kinds and parameter.name != "self"]
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        allowed += StudyFolders.__annotations__
    title = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: Arguments.args, **named: Arguments.kwargs) -> Returned:
        for name in named:
            if name not in allowed:
                raise UnknownArgument(str(unknown("argument", name, allowed, where=f"{title}()")))
        return function(*args, **named)

    return checked

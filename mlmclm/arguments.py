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
"""How long work waits for nodes by default: booting a machine takes minutes, getting a reclaimed one back longer."""


class StudyFolders(TypedDict, total=False):
    """Arguments that say where a study works; what is None or not given comes from the environment, or the store."""

    store: str | Path | None
    """Folder or address (`s3://bucket/prefix`) that keeps everything; by default MLMCLM_STORE, else `store` in the working
    directory."""
    data: str | Path | None
    """Folder of local data sets that stand in for the Hugging Face Hub; by default MLMCLM_DATA, if it is set."""
    task_dirs: Sequence[str | Path] | None
    """Folders of your own tasks, one YAML file each; by default those of MLMCLM_TASK_DIR."""
    wait_for_storage: float | None
    """Seconds for which an outage of the object store of a store at an address is waited for; the store remembers it."""


def known_arguments(function: Callable[Arguments, Returned]) -> Callable[Arguments, Returned]:
    """Let a function refuse unknown arguments, with the nearest known name; `**folders` are the `StudyFolders`.

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

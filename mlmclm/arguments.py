"""Arguments of the functions of `import mlmclm`: the folders that many take, and the refusal of those that one doesn't have."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ParamSpec, TypedDict, TypeVar

from mlmclm.errors import UnknownArgument, unknown

Given = ParamSpec("Given")
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


def known_arguments(function: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """Let a function refuse arguments that it does not have, with the nearest; `**folders` are the `StudyFolders`.

    Python itself would take any name for one of the folders.
    """
    parameters = inspect.signature(function).parameters.values()
    named_ones = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = [each.name for each in parameters if each.kind in named_ones and each.name != "self"]
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        known += StudyFolders.__annotations__
    title = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*given: Given.args, **named: Given.kwargs) -> Returned:
        for name in named:
            if name not in known:
                raise UnknownArgument(str(unknown("argument", name, known, where=f"{title}()")))
        return function(*given, **named)

    return checked

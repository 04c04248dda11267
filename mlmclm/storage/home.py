"""The user's home folder, which a process in a container or a service may lack."""

from __future__ import annotations

import getpass
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mlmclm.progress import say
from mlmclm.storage.temporary import swept_folder


def find_home() -> Path | None:
    """Return the home folder from HOME or the system's user database, or None if neither has one."""
    try:
        return Path.home()
    except RuntimeError:
        return None


@contextmanager
def some_home() -> Iterator[None]:
    """Provide a home folder and a user name, temporary ones if there are none, to this process and its children.

    Without them, libraries fail (Ray Tune, and MLflow on import) or write to a folder called `~`.
    """
    with ExitStack() as stack:
        stand_ins = {}
        try:
            getpass.getuser()
        except (KeyError, OSError):
            stand_ins["USER"] = f"uid{os.getuid()}"
        if find_home() is None:
            stand_ins["HOME"] = str(stack.enter_context(swept_folder(Path(tempfile.gettempdir()), "mlmclm-home-")))
            say(
                f"there is no home folder (HOME is not set, and no user has the id {os.getuid()}): {stand_ins['HOME']} "
                "stands in for it and is removed at the end. Set HOME to keep caches."
            )
        os.environ.update(stand_ins)
        try:
            yield
        finally:
            for name in stand_ins:
                del os.environ[name]

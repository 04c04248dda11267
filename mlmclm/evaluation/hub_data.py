"""The error for a data set of the Hub that cannot be loaded."""

from __future__ import annotations

from pathlib import Path

import datasets

from mlmclm.errors import UserError, one_line


def cannot_load(where: str, path: str, error: Exception, remedy: str = "") -> UserError:
    """Return the error for a data set of the Hub (OWNER/NAME); its message says whether the cache has a part of it.

    Args:
        where: beginning of the message.
        remedy: end of the message, another remedy, which begins with "; or".
    """
    cause = error.__cause__ or error  # datasets wraps the original error
    cache = Path(datasets.config.HF_DATASETS_CACHE) / "___".join(path.split("/")[:2])
    if isinstance(cause, ImportError):
        return UserError(
            f"{where}: its data set {path} needs a package that is not installed ({one_line(cause, 300)})."
        )
    state = "does not hold all of it" if cache.exists() else "is missing"
    return UserError(
        f"{where}: its data set {path} cannot be loaded ({type(cause).__name__}: {one_line(cause, 300)}). Without a network it is taken "
        f"from the cache {cache}, which {state}. Run the command once where the Hub can be reached, and copy that cache{remedy}."
    )

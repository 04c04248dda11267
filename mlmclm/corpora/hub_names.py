"""Names of data sets on the Hugging Face hub. `datasets` takes some of them for local files."""

from __future__ import annotations

import re
from pathlib import Path

from mlmclm.errors import UserError

HUB_DATA = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
"""NAME or OWNER/NAME."""


def check_hub_data(name: str, where: str) -> None:
    """Check that `datasets.load_dataset` will look on the hub for a data set, and nowhere else.

    `load_dataset` also reads a folder of this name in the working directory, and takes words such as `csv` or `text` for
    the files of the working directory.

    Raises:
        UserError: the name is not one of the hub, or means local files; the message begins with `where`.
    """
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES  # the list that `load_dataset` goes by

    if HUB_DATA.fullmatch(name) is None:
        raise UserError(f"{where}: {name!r} is not the name of a data set on the Hub, which is NAME or OWNER/NAME.")
    if name in _PACKAGED_DATASETS_MODULES:
        raise UserError(
            f"{where}: {name!r} stands for local files, not for a data set on the Hub, which is NAME or OWNER/NAME. Give a local "
            "data set by its folder."
        )
    if Path(name).exists():
        raise UserError(
            f"{where}: {name!r} would be read from {Path(name).resolve()} and not from the Hub. Run this in another folder; or give "
            "the folder that holds the local data set as --data."
        )

"""Pinning of a store's `pydocs` to the documentation installed at its first use, not any later one.

    corpora/sources/pydocs.json      the fingerprint of that documentation
    corpora/pydocs-FINGERPRINT/      its text, from which every later corpus and task of the store is made

To switch to the documentation that is installed now, delete `pydocs.json` but keep the folder `sources`. If the folder was
deleted because the file was damaged, the store's existing documentation is pinned again. If the store has several, the user
must choose, because nothing else records which of them the store's results are based on.
"""

from __future__ import annotations

import re
from pathlib import Path

from mlmclm.corpora.documents import StoredText
from mlmclm.errors import UserError
from mlmclm.storage.addresses import is_local, send_file
from mlmclm.storage.checksums import read_sealed, sealed
from mlmclm.storage.files import whole_folder, write_json

PYDOCS = "pydocs"
_PREFIX = f"{PYDOCS}-"
_FINGERPRINT = re.compile(r"[0-9a-f]{16}")


def pin_file(store: Path) -> Path:
    """Return the file with the fingerprint of the store's documentation."""
    return store / "corpora" / "sources" / f"{PYDOCS}.json"


def documentation(store: Path, fingerprint: str) -> StoredText:
    """Return the text of a documentation, which may not exist yet."""
    return StoredText(store, f"{_PREFIX}{fingerprint}")


def resolved(store: Path) -> str | None:
    """Return the fingerprint of a store's documentation; None if the store has none yet.

    Raises:
        UserError: the file is damaged, or its folder is missing and the store has several documentations.
    """
    file = pin_file(store)
    if not is_local(file):
        return None if file.parent.is_dir() else _only(store)
    again = f"Delete the folder {file.parent}: the documentation that the store has is then taken."
    text = read_sealed(file, again).get("fingerprint")
    if not isinstance(text, str) or _FINGERPRINT.fullmatch(text) is None:
        raise UserError(f"{file}: 'fingerprint' is not 16 hexadecimal digits. {again}")
    return text


def write_pin(store: Path, fingerprint: str) -> None:
    """Write the file. A new folder is created with the file in it: a folder without the file means that a user deleted the file."""
    file = pin_file(store)
    content = sealed({"source": PYDOCS, "fingerprint": fingerprint})
    if file.parent.is_dir():
        write_json(file, content)
    else:
        with whole_folder(file.parent) as folder:
            write_json(folder / file.name, content)
    send_file(file)


def _only(store: Path) -> str | None:
    texts = [text for text in StoredText.all(store) if text.key.startswith(_PREFIX)]
    if len(texts) > 1:
        raise UserError(
            f"{pin_file(store)} is missing, and the store has several documentations: {', '.join(text.key for text in texts)}. "
            f"Move all of these folders out of {store / StoredText.part} but the one that the store's results are made of."
        )
    return texts[0].key.removeprefix(_PREFIX) if texts else None

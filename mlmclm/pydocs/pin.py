"""The documentation that a store's `pydocs` is: settled at its first use, whatever is installed later.

    corpora/sources/pydocs.json      the fingerprint of that documentation
    corpora/pydocs-FINGERPRINT/      its text, of which every later corpus and task of the store is made

Delete `pydocs.json`, and leave the folder, to have the documentation of the environment taken anew. A store without the
folder is of a version that settled nothing: what its models were trained on is adopted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from mlmclm.corpora.shelf import INDEX
from mlmclm.errors import UserError
from mlmclm.storage.checksums import read_sealed, sealed
from mlmclm.storage.claims import Claims
from mlmclm.storage.files import whole_folder, write_json

PYDOCS = "pydocs"
_PREFIX = f"{PYDOCS}-"
_FINGERPRINT = re.compile(r"[0-9a-f]{16}")


def pin_file(store: Path) -> Path:
    """The file that says which documentation the store's `pydocs` is."""
    return store / "corpora" / "sources" / f"{PYDOCS}.json"


def documents_folder(store: Path, fingerprint: str) -> Path:
    """Where the text of a documentation lies, or will."""
    return store / "corpora" / f"{_PREFIX}{fingerprint}"


def settled(store: Path) -> str | None:
    """The fingerprint that a store's `pydocs` has; None where it was never used. Writes nothing.

    Raises:
        UserError: the file that says so is damaged.
    """
    file = pin_file(store)
    if not file.is_file():
        return None if file.parent.is_dir() else _adopted(store)
    again = f"Delete the folder {file.parent}: what the store's models were trained on is then taken."
    text = read_sealed(file, again).get("fingerprint")
    if not isinstance(text, str) or _FINGERPRINT.fullmatch(text) is None:
        raise UserError(f"{file}: 'fingerprint' is not 16 hexadecimal digits. {again}")
    return text


def settle(store: Path, make: Callable[[], str], waiting: Callable[[str], None]) -> str:
    """`settled`, after noting it in the store.

    Args:
        make: extracts the environment's documentation into the store and returns its fingerprint; called where nothing is settled.
        waiting: called with who is at it, where another process is.
    """
    if not pin_file(store).is_file():
        with Claims(store).wait(lambda: [f"corpora-{PYDOCS}"], waiting):
            if not pin_file(store).is_file():
                _note(pin_file(store), settled(store) or make())
    known = settled(store)
    assert known is not None
    return known


def _note(file: Path, fingerprint: str) -> None:
    """Writes the file; the folder appears with it, because a folder without it means that the user has deleted it."""
    content = sealed({"source": PYDOCS, "fingerprint": fingerprint})
    if file.parent.is_dir():
        write_json(file, content)
    else:
        with whole_folder(file.parent) as folder:
            write_json(folder / file.name, content)


def _adopted(store: Path) -> str | None:
    """The documentation that most trained states of the store come from, else that of most corpora, else the oldest one."""
    origins: dict[str, str] = {}  # of corpora, by key
    for file in [*store.glob(f"corpora/*/{INDEX}"), *store.glob("corpora/*/meta.json")]:
        facts = read_sealed(file, f"Delete {file.parent}: the corpus is then prepared anew.")
        if facts.get("corpus", {}).get("source") == PYDOCS:
            origins[file.parent.name] = facts["source_fingerprint"]
    trained = (
        read_sealed(file, f"Delete {file.parent}: the state is then trained anew.")
        for file in store.glob("states/*/state.json")
        if "." not in file.parent.name  # set aside as damaged
    )
    states = Counter(origins.get(facts.get("corpus", "")) for facts in trained)
    corpora = Counter(origins.values())
    texts = {folder.name.removeprefix(_PREFIX): folder for folder in store.glob(f"corpora/{_PREFIX}*")}
    texts = {name: folder for name, folder in texts.items() if _FINGERPRINT.fullmatch(name)}  # others were set aside
    ages = {name: folder.stat().st_mtime for name, folder in texts.items()}
    return min(
        {*origins.values(), *texts},
        key=lambda name: (-states[name], -corpora[name], ages.get(name, 0.0), name),
        default=None,
    )

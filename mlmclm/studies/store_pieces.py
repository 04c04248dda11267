"""The files of a store that can be verified, each with its check and with what makes it again; nothing is changed.

Every kind of file has one of three checksums (docs/store.md): in the `checksums.json` of its folder, in its own entry
`checksum`, or in the file beside it that describes it. `UNCOVERED` have none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mlmclm.corpora.documents import TRAIN, VALIDATION
from mlmclm.corpora.prepared_corpus import ELSEWHERE, read_index
from mlmclm.corpora.shelf import Shelf
from mlmclm.errors import UserError, one_line
from mlmclm.evaluation.evaluations import Evaluations
from mlmclm.finetuning.kept import RESULT, WEIGHTS
from mlmclm.storage.checksums import CHECKSUM, CHECKSUMS, damage, noted, unsealed
from mlmclm.storage.files import hash_file, parse_json
from mlmclm.storage.objects import ObjectPath
from mlmclm.studies.last_grid import FILE as GRID
from mlmclm.studies.last_run import FILE as LAST_RUN
from mlmclm.studies.store_scope import WHOLE_STORE, Scope, studies_in
from mlmclm.studies.zero_shot import LISTING
from mlmclm.sweeps.ledger import EXAMPLES, Ledger
from mlmclm.sweeps.manifest import FILE as MANIFEST
from mlmclm.sweeps.unfiled import EXAMPLES as UNFILED_EXAMPLES
from mlmclm.sweeps.unfiled import Unfiled

NO_CHECKSUM = "it has no checksum: an earlier version wrote it"
MISSING, DIFFERS = "it is missing", "it is not what was written: its checksum differs"
KEY = re.compile(r"[0-9a-f]{16,64}")

Check = Callable[[], str | None]
"""Returns what is wrong with a file, `NO_CHECKSUM`, or None for an intact one."""

DATA, PRETRAIN, SWEEP = "`mlmclm data`", "`mlmclm pretrain`", "`mlmclm study` or `mlmclm sweep`"
AGAIN = {
    "corpora": f"{DATA} on its study, after an index is deleted; a shard is set aside and made again where it is used",
    "tokenizers": f"{DATA} on its study sets it aside and makes it again",
    "tasks": f"{SWEEP} sets it aside and makes it again",
    "states": f"{PRETRAIN} on its study sets it aside and trains it again",
    "checkpoints": f"{PRETRAIN} on its study resumes from an earlier one",
    "revisions": f"{PRETRAIN} on its study, after it is deleted",
    "models": f"{SWEEP} or {PRETRAIN} on its study sets it aside and exports it again",
    "given models": f"{PRETRAIN} on its study, after it is deleted",
    "results": "`mlmclm sweep retry SWEEP --status damaged --yes` sets it aside, and the next run computes it again",
    "examples": "`mlmclm sweep retry SWEEP --status damaged --yes` sets them aside with their result, and the next run computes it again",
    "unfiled results": f"{SWEEP} sets it aside and computes it again",
    "kept encoders": f"{SWEEP} sets it aside and trains it again",
    "evaluations": "the study or `mlmclm evaluate`, after it is deleted",
    "studies": "the next run of the study or sweep, after it is deleted",
    "MLflow's index": "`mlmclm tracking sync` on its study",
}
"""Kind of file -> what makes a damaged one again."""
UNCOVERED = (
    "reports", "model cards", "logs", "MLflow's database", "notes of failures (cells/failed)", "measured speeds (calibrations)",
    "what was set aside", "ledger.json",
)  # fmt: skip
"""Files without a checksum: written again from what has one, for people, or, like `ledger.json`, by the user's command."""


@dataclass(frozen=True)
class Piece:
    """A file that is verified as a whole."""

    kind: str
    """One of `AGAIN`."""
    path: str
    """Path or address."""
    size: int
    """Bytes that the check reads, as far as known: for progress."""
    check: Check


def pieces_of(store: Path, scope: Scope = WHOLE_STORE) -> Iterator[Piece]:
    """Yield the files of a store that can be verified; of a study, its own and what all studies share.

    Raises:
        EnvironmentFault: the object store of results or shards cannot be reached.
    """

    def chosen(part: str, names: frozenset[str] | None) -> list[Path]:
        folders = _folders(store / part)
        return folders if names is None else [folder for folder in folders if folder.name in names]

    for folder in chosen("tokenizers", scope.tokenizers):
        yield from _in_folder("tokenizers", folder)
    yield from _sealed_in("corpora", store / "corpora")
    yield from _sealed_in("corpora", store / "corpora" / "sources")
    for folder in chosen("corpora", scope.corpora):
        yield from _corpus(folder)
    for folder in sorted(store.glob("corpora/pydocs-*")):
        if "." not in folder.name:
            yield from _in_folder("corpora", folder)
    for folder in (*chosen("tasks", None), *chosen("prepared", None)):
        yield from _in_folder("tasks", folder)
    yield from _sealed_in("tasks", store / "task-data")
    for folder in chosen("states", scope.states):
        if noted(folder) or (folder / "state.safetensors").is_file():  # an untrained model has no state of training
            yield from _in_folder("states", folder)
        yield from _in_folder("models", folder / "model")
        yield from _in_folder("models", folder / "model" / "decoder")
        yield from _sealed_in("models", folder, "*.weights.json")
    for folder in (*chosen("initial", None), *chosen("initial/sources", None)):
        yield from _in_folder("given models", folder)
    yield from _sealed_in("given models", store / "initial" / "sources")
    if scope.study is None:
        for folder in chosen("revisions", None):
            yield from _in_folder("revisions", folder)
        for folder in sorted(store.glob("runs/*/ray_train/*/checkpoint_[0-9]*")):
            yield from _in_folder("checkpoints", folder)
    for part in sorted(store.glob("tuned/??")):
        for folder in chosen(f"tuned/{part.name}", scope.cells):
            yield from _kept(folder)
    ledger, evaluations = Ledger(store), Evaluations(store)
    for key in sorted(_among(ledger.keys(), scope.cells)):
        yield from _result(ledger, key)
    for key in sorted(_among(evaluations.keys(), scope.evaluations)):
        yield _filed("evaluations", evaluations, key)
    for own, keys in ((ledger, scope.cells), (evaluations, scope.evaluations)):
        unfiled = Unfiled(store, own.part)
        for key in sorted(_among(set(unfiled.keys()), keys)):
            yield from _unfiled(unfiled.folder / f"{key}.json")
    for name in studies_in(store) if scope.study is None else [scope.study]:
        yield from _study(store, name)
    yield from _index(store / "mlflow" / "index.jsonl")


def _folders(folder: Path) -> list[Path]:
    """Return the folders named by a key; others are set aside, unfinished, or no key's."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if KEY.fullmatch(path.name) and path.is_dir())


def _among(keys: set[str], chosen: frozenset[str] | None) -> set[str]:
    return keys if chosen is None else keys & chosen


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0


def _in_folder(kind: str, folder: Path) -> Iterator[Piece]:
    """Yield the files that a folder's `checksums.json` lists, and that file.

    Without it, an earlier version wrote the folder, and none of its files has a checksum.
    """
    if not folder.is_dir():
        return
    if not noted(folder):
        for path in sorted(folder.iterdir()):
            if path.is_file() and not path.name.endswith(".weights.json"):
                yield Piece(kind, str(path), 0, lambda: NO_CHECKSUM)
        return
    sums = folder / CHECKSUMS
    try:
        names = sorted(json.loads(sums.read_bytes()))
    except (OSError, ValueError, TypeError):
        names = []
    yield Piece(kind, str(sums), _size(sums), partial(damage, folder, names=()))
    for name in names:
        yield Piece(kind, str(folder / name), _size(folder / name), partial(damage, folder, names=(name,)))


def _sealed_in(kind: str, folder: Path, pattern: str = "*.json") -> Iterator[Piece]:
    """Yield the JSON files of a folder, each of which has its own checksum."""
    for path in sorted(folder.glob(pattern)):
        if not path.name.startswith("."):
            yield Piece(kind, str(path), _size(path), partial(_sealed, path.read_bytes))


def _sealed(read: Callable[[], bytes | None]) -> str | None:
    """Verify the checksum inside a JSON file."""
    found = _parsed(read)
    if isinstance(found, str):
        return found
    return None if CHECKSUM in found else NO_CHECKSUM


def _parsed(read: Callable[[], bytes | None]) -> dict[str, Any] | str:
    """Return the object of a JSON file with its checksum, or what is wrong with it."""
    try:
        content = read()
        if content is None:
            return MISSING
        value = parse_json(content, "it")
        unsealed(value)
    except FileNotFoundError:
        return MISSING
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    except UserError as error:
        return one_line(error, 200)
    except ValueError as error:
        return str(error)
    return dict(value)


def _corpus(folder: Path) -> Iterator[Piece]:
    """Yield the JSON files of a corpus, wherever its shards are, and the shards, of an unfinished corpus too."""
    yield from _sealed_in("corpora", folder)
    shelf = Shelf(str(folder))
    if (folder / ELSEWHERE).is_file():
        place = _parsed((folder / ELSEWHERE).read_bytes)
        if isinstance(place, str):
            return
        shelf = Shelf(place["folder"], place["address"])
        for name in shelf.sizes():
            if name.endswith(".json"):
                yield Piece("corpora", shelf.where(name), 0, partial(_sealed, partial(shelf.read, name)))
    with suppress(UserError):  # a damaged index is one of the JSON files
        index = read_index(shelf)
        made = index is not None
        shards = [shard for part in (TRAIN, VALIDATION) for shard in index[part]["shards"]] if index is not None else []
        for name in () if made else sorted(shelf.sizes()):
            if re.fullmatch(rf"({TRAIN}|{VALIDATION})-\d+\.json", name):
                record = _parsed(partial(shelf.read, name))
                shards += [record] if isinstance(record, dict) else []
        for shard in shards:
            check = partial(_shard, shelf, shard["file"], shard["sha256"])
            yield Piece("corpora", shelf.where(shard["file"]), shard["bytes"], check)


def _shard(shelf: Shelf, file: str, sha256: str | None) -> str | None:
    try:
        if sha256 is None:
            return NO_CHECKSUM
        return None if shelf.checksum(file, lambda size: None) == sha256 else DIFFERS
    except FileNotFoundError:
        return MISSING


def _kept(folder: Path) -> Iterator[Piece]:
    """Yield a kept encoder's weights, and the result that has their checksum."""
    result, weights = folder / RESULT, folder / WEIGHTS
    yield Piece("kept encoders", str(result), _size(result), partial(_sealed, result.read_bytes))
    yield Piece("kept encoders", str(weights), _size(weights), partial(_described, result, weights, "encoder"))


def _result(ledger: Ledger, key: str) -> Iterator[Piece]:
    yield _filed("results", ledger, key)
    yield examples_of(ledger, key)


def examples_of(ledger: Ledger, key: str) -> Piece:
    """Return the examples of a result, whose checksum is in the result."""
    path, examples = ledger.path(key), ledger.examples_path(key)
    size = _size(examples) if isinstance(examples, Path) else 0
    return Piece("examples", str(examples), size, partial(_described, path, examples, EXAMPLES))


def _unfiled(path: Path) -> Iterator[Piece]:
    """Yield a result that is not in the ledger yet, and its examples."""
    kind, examples = "unfiled results", path.with_suffix(".parquet")
    yield Piece(kind, str(path), _size(path), partial(_sealed, path.read_bytes))
    if examples.is_file():
        yield Piece(kind, str(examples), _size(examples), partial(_described, path, examples, UNFILED_EXAMPLES))


def _filed(kind: str, ledger: Ledger, key: str) -> Piece:
    path = ledger.path(key)

    def check() -> str | None:
        found = _sealed(path.read_bytes)
        value = None if found else _parsed(path.read_bytes)
        other = isinstance(value, dict) and value.get("key") != key
        return "it holds the result of another key" if other else found

    return Piece(kind, str(path), _size(path) if isinstance(path, Path) else 0, check)


def _described(by: Path | ObjectPath, path: Path | ObjectPath, entry: str) -> str | None:
    """Verify a file whose checksum is an entry of the JSON file beside it."""
    described = _parsed(by.read_bytes)
    if isinstance(described, str):
        return f"it cannot be verified: {by.name}, which has its checksum, is damaged"
    if described.get("status") == "diverged" and not path.exists():
        return None
    if entry not in described:
        return NO_CHECKSUM
    try:
        return None if hash_file(path) == described[entry] else DIFFERS
    except FileNotFoundError:
        return MISSING
    except OSError as error:
        return f"it cannot be read ({error.strerror})"


def _study(store: Path, name: str) -> Iterator[Piece]:
    """Yield the lists that a study's commands read, and those files of its models that are no links to the states'."""
    folder = store / "studies" / name
    for file in (MANIFEST, GRID, LISTING, LAST_RUN):
        if (folder / file).is_file():
            yield Piece(
                "studies", str(folder / file), _size(folder / file), partial(_sealed, (folder / file).read_bytes)
            )
    linked = {_inode(path) for path in store.glob("states/*/model/**/*")}
    for model in sorted((folder / "models").glob("*")):
        if not model.exists():  # an earlier version made links to the states' folders
            yield Piece("models", str(model), 0, lambda: "the model that it links to is missing")
        elif not model.is_symlink():
            for part in (model, model / "decoder"):
                yield from (piece for piece in _in_folder("models", part) if _inode(Path(piece.path)) not in linked)


def _inode(path: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        status = path.stat()
        return status.st_dev, status.st_ino
    return None


def _index(path: Path) -> Iterator[Piece]:
    """Yield the index of MLflow's runs, whose lines have a checksum each; the last may be being written."""

    def check() -> str | None:
        lines = path.read_bytes().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        found = [_sealed(partial(bytes, line)) for line in whole]
        wrong = sum(each not in (None, NO_CHECKSUM) for each in found)
        return f"{wrong:,} of its {len(whole):,} lines are damaged" if wrong else None

    if path.is_file():
        yield Piece("MLflow's index", str(path), _size(path), check)

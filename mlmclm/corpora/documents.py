"""Sources of documents: local files, Hugging Face data sets, and sources that installed packages provide."""

from __future__ import annotations

import math
import mimetypes
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from lzma import LZMAError
from pathlib import Path
from typing import Any, Protocol, Required, TypedDict, Unpack

from mlmclm.configuration import Role
from mlmclm.corpora.corpus_config import CorpusConfig
from mlmclm.corpora.hub_repository import HUB_DATA, HubRepository, check_hub_data, error_with_nearest, load_at_commit
from mlmclm.corpora.text_files import SUFFIXES, TEXT, check_column, has_column, read_documents, text_of
from mlmclm.errors import UserError
from mlmclm.progress import say
from mlmclm.registry import KINDS
from mlmclm.storage.addresses import names_at
from mlmclm.storage.arrow_files import ARROW, without_caches
from mlmclm.storage.artifact import KEY, FolderArtifact
from mlmclm.storage.checksums import read_sealed, set_aside, write_sealed
from mlmclm.storage.data_files import COMPRESSED, NO_TABLES, TABLES, instead_of, is_compressed, kind_of, open_bytes
from mlmclm.storage.files import first_existing, nearest, places_of, stable_hash
from mlmclm.storage.unchanged import Mark, as_hashed, check_hashed, mark_of, marked_hash

_VALIDATION_NAMES = ("validation", "valid", "val", "dev")
_SPLITS = ("train", "test", *_VALIDATION_NAMES)
_INSIDE = re.compile(rf"[-_.](({'|'.join(_SPLITS)})([-_.\d].*)?)$")
"""A split's name within a file's, as in C4: `c4-train.00000-of-01024.json.gz`."""
LONGEST_DOCUMENT = 16 << 20
"""Maximum size in bytes of a text file that is one document: tokenising it takes about 120 times as much memory in one
process (measured)."""
PIECE_BYTES = 4 << 20
"""Bytes of text files that one task of a cluster reads."""
FIRST = (".parquet", ARROW, ".jsonl", ".json", ".txt", ".md")
"""Suffixes of files that take precedence over copies in another format (CSV, TSV, compressed)."""
CARDS = ("readme", "license", "licence", "changelog", "citation", "datasheet", "dataset_card")
"""Names, without suffix, of Markdown files that are about the tables beside them."""
OTHER_KIND, OTHER_SPLIT, COPY = "of a kind that is not read", "of another split", "that repeat another file"
ABOUT, NO_COLUMN = "about the data set", "without a column {!r}"
"""Reasons for which files are not read."""
NO_TEXT = ("image", "audio", "video", "font")
"""Media types of files that are not read and hold no text."""
_ALLOWED = f"{', '.join(SUFFIXES)}, each also with {', '.join(COMPRESSED)}"
SHOWN_FILES = 5
"""Maximum number of left-out files that are named."""


TRAIN, VALIDATION = "train", "validation"
"""The parts of a corpus."""

Piece = Callable[[], Iterator[str]]
"""Callable that reads some of a source's documents, in order; picklable."""


class Source(Protocol):
    """A source of documents; picklable. Subclasses define at least `fingerprint` and `pieces`."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a hash (hex) that changes when the documents do."""

    @abstractmethod
    def pieces(self, part: str) -> Sequence[Piece]:
        """Divide the documents of a part, in a fixed order and including empty ones, into pieces that can each be read
        alone, on this machine.

        If the validation part has no pieces, its documents are to be held out of the training part.
        """

    def train(self) -> Iterator[str]:
        """Read the documents to train on."""
        return _texts(self.pieces(TRAIN))

    def validation(self) -> Iterator[str] | None:
        """Read the documents to validate on; None if they are to be held out of `train`."""
        pieces = self.pieces(VALIDATION)
        return _texts(pieces) if pieces else None

    def settle(self) -> None:
        """Pin the source's documents in the store, if later changes of the source must not change corpora."""
        return

    def left_out(self) -> str:
        """Describe the source's files that are not read; empty if there are none."""
        return ""

    def check_unchanged(self) -> None:
        """Raise a `UserError` if the documents have changed since `fingerprint`, as far as this is visible without reading them."""
        return

    def check(self) -> None:
        """Check that the source exists, where opening it has not checked that; reads no document.

        Raises:
            UserError: there is no such source.
            EnvironmentFault: the source's server cannot be reached.
        """
        return


def _texts(pieces: Iterable[Piece]) -> Iterator[str]:
    return chain.from_iterable(piece() for piece in pieces)


class StoredText(FolderArtifact):
    """Text that a source keeps in the store, so that later corpora read the same text; its key is `SOURCE-FINGERPRINT`."""

    kind = part = "corpora"
    again = "`mlmclm data` on its study sets it aside and makes it again"

    @classmethod
    def all(cls, store: Path) -> Iterator[StoredText]:
        """Yield the stored texts of a store."""
        local = {folder.name for folder in store.glob(f"{cls.part}/*-*") if folder.is_dir()}
        for key in sorted(local | {folder.name for folder in names_at(store / cls.part)}):
            if KEY.fullmatch(key.rpartition("-")[2]) and "-" in key:  # other folders were set aside
                yield cls(store, key).brought()


class Folders(TypedDict, total=False):
    """The folders in which sources are found and corpora are kept."""

    store: Required[Path]
    """The study's folder. Blocks go to `corpora/` unless `corpus.shards` is set, tokenizers to `tokenizers/`."""
    data_root: Path | None
    """Another folder in which the name of a local source is looked up."""
    beside: Path | None
    """The study file's folder, in which the name is looked up first."""


def open_source(config: CorpusConfig, **folders: Unpack[Folders]) -> Source:
    """Return the source that a configuration names; no document is read yet.

    The name is looked up in this order: among the sources of installed packages (`pydocs`), as a path (in `beside`, then in
    the working directory, then in `data_root`), and on the Hugging Face hub. A path that does not exist, or a
    folder without files of a known kind, is a UserError.
    """
    installed = KINDS["corpus"].find(config.source)
    if installed is not None:
        source: Source = installed(folders["store"])
        return source
    tried = places_of(config.source, folders.get("beside"), folders.get("data_root"))
    path = first_existing(tried)
    if path is not None:
        return FileSource(path, config, folders["store"])
    if HUB_DATA.fullmatch(config.source) is None or kind_of(Path(config.source)) in SUFFIXES:
        places = " nor ".join(str(path) for path in tried)
        raise UserError(f"corpus source {config.source!r}: there is no file or folder {places}.{nearest(tried)}")
    return HubSource(config, tried, folders["store"])


def _known_hashes(path: Path) -> dict[str, Any]:
    """Return the recorded content hash of each file by its path, with the file's `Mark` when it was hashed.

    Empty if nothing is recorded yet, or if the record is damaged.
    """
    if not path.exists():
        return {}
    try:
        return read_sealed(path, "")
    except UserError as error:
        say(f"{error} It is kept as {set_aside(path).name}; the source's files are hashed again.".replace("  ", " "))
        return {}


class FileSource(Source):
    """A local file, or the files of a folder. The name of a split's file or folder starts with the split's name.

    Tables (Parquet, JSON, CSV, TSV) have a column of text. A text file is one document, or one per paragraph
    (`text_documents`). Hidden files (except Parquet, JSON and files of paragraphs) and other kinds are not read. In a folder
    with other files, those are also left out that describe them (`CARDS`), that repeat one (`a.jsonl.gz` beside `a.jsonl`,
    `a.csv` beside `a.parquet`), or that are tables without the column, such as a list of the texts.
    """

    def __init__(self, path: Path, config: CorpusConfig, store: Path) -> None:
        """Find the files of both splits; raise UserError for none, or a text file that is too long for one document."""
        self._path, self._column, self._store = path, config.text_column, store
        self._paragraphs = config.text_documents == "paragraph"
        if path.is_file() and kind_of(path) not in SUFFIXES:
            raise UserError(f"{path}: not a kind of file that can be read. Allowed: {_ALLOWED}.{instead_of([path])}")
        paths = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
        files, reasons = self._of_text(paths)
        if not files:
            raise UserError(f"{path}: there is no file of text in this folder. Allowed: {_ALLOWED}.{instead_of(paths)}")
        parts = {file: self._part_of(file) for file in files}
        if not any(self._begins(file, part, _SPLITS) for file, part in parts.items()):
            inside = {
                file: match[1] for file in files if not self._is_document(file) and (match := _INSIDE.search(file.name))
            }
            parts |= inside if any(part.startswith("train") for part in inside.values()) else {}
        train = self._of_split(config.split, parts)
        if config.validation_split is not None:
            validation = self._of_split(config.validation_split, parts)
        else:
            names = tuple(name for name in _VALIDATION_NAMES if name != config.split)
            # A file that belongs to the training split is not used for validation too.
            others = {file: part for file, part in parts.items() if file not in set(train)}
            validation = [file for file, part in others.items() if self._begins(file, part, names)]
        self._files = {TRAIN: train, VALIDATION: validation}
        self._hashed: dict[Path, tuple[Mark, str]] = {}
        self._documents = list(filter(self._is_document, [*train, *validation]))
        for file in self._documents:
            size = _text_size(file)
            if size > LONGEST_DOCUMENT:
                raise UserError(
                    f"{file}: {size / 2**20:,.0f} MiB are too long for one document, which is read and tokenised as a whole (at most "
                    f"{LONGEST_DOCUMENT >> 20} MiB). Write 'text_documents: paragraph' under corpus in the study file: each paragraph is then a "
                    "document, and the file is read piece by piece. Or divide it into a file for each document."
                )
        read = {*train, *validation}
        self._most_left_out = config.max_left_out
        self._reasons = {
            file: reasons.get(file, OTHER_SPLIT if file in parts else OTHER_KIND)
            for file in paths
            if file not in read and not _hidden(file.relative_to(path))
        }

    def _of_text(self, paths: list[Path]) -> tuple[list[Path], dict[Path, str]]:
        """Return the files that hold the text, and the reason why each other readable file is left out; see the class."""
        readable = [
            file
            for file in without_caches(paths)
            if kind_of(file) in SUFFIXES
            and not (_hidden(file.relative_to(self._path)) and (self._is_document(file) or file.suffix not in FIRST))
        ]
        # `dataset_info.json` and the like describe a data set, unless such a file itself is named as the text.
        files = [file for file in readable if file.name not in NO_TABLES or file == self._path]
        reasons = {file: ABOUT for file in readable if file not in set(files)}
        if any(kind_of(file) in TABLES for file in files):
            reasons |= {file: ABOUT for file in files if kind_of(file) == ".md" and file.stem.lower() in CARDS}
        reasons |= dict.fromkeys(_copies([file for file in files if file not in reasons]), COPY)
        files = [file for file in files if file not in reasons]
        # If there are only tables of one kind, they are the corpus, and reading them reports a missing column.
        if len({file.suffix in FIRST or kind_of(file) for file in files}) > 1 or any(map(self._is_text, files)):
            tables = [file for file in files if not self._is_text(file)]
            without = [file for file in tables if not has_column(file, self._column)]
            if len(without) < len(files):
                reasons |= dict.fromkeys(without, NO_COLUMN.format(self._column))
        return [file for file in files if file not in reasons], reasons

    @staticmethod
    def _is_text(file: Path) -> bool:
        return kind_of(file) in TEXT

    def _of_split(self, split: str, parts: dict[Path, str]) -> list[Path]:
        """Return the files of a split; for `train`, all files if there is only one or none is named after a split."""
        named = [file for file, part in parts.items() if self._begins(file, part, (split,))]
        if not named:  # `trainA.jsonl`, `heldout.jsonl` for a split "held"
            named = [file for file, part in parts.items() if not self._is_document(file) and part.startswith(split)]
        if (
            not named
            and split == "train"
            and (len(parts) == 1 or not any(self._begins(file, part, _SPLITS) for file, part in parts.items()))
        ):
            named = list(parts)
        if not named:
            names = ", ".join(sorted(set(parts.values())))
            raise UserError(
                f"{self._path}: no file of split {split!r} (a name that starts with it). There are: {names}."
            )
        return named

    def _part_of(self, file: Path) -> str:
        """Return the name that decides a file's split: its own, or that of the folder directly under the root."""
        if file == self._path:
            return file.name
        first = file.relative_to(self._path).parts[0]
        # A split named by the file itself takes precedence over one named by its folder.
        by_folder = self._begins(file, first, _SPLITS) and not self._begins(file, file.name, _SPLITS)
        return first if by_folder else file.name

    def _is_document(self, file: Path) -> bool:
        """Return whether a file is one document."""
        return kind_of(file) in TEXT and not self._paragraphs

    def _begins(self, file: Path, name: str, splits: tuple[str, ...]) -> bool:
        """Return whether a name, of a file or of its folder, begins with the name of one of these splits.

        The split's name must be a whole word: `valley.txt` is not in `val`. A file of several documents may also be
        called `training.jsonl` or `testset.csv`; the name of a file that is one document may be its title.
        """
        for split in splits:
            # With "x", a name that doesn't start with the split's passes neither test below.
            rest = name[len(split) :] if name.startswith(split) else "x"
            if not rest[:1].isalpha():
                return True
            if not self._is_document(file) and re.fullmatch(r"(ing|set|data)([-_.]?\d[^.]*)?(\..*)?", rest):
                return True
        return False

    def left_out(self) -> str:
        """Return the number of files that are not read, the reason, and the first of their names; hidden ones don't count."""
        groups: dict[str, list[str]] = {}
        for file, reason in self._reasons.items():
            groups.setdefault(reason, []).append(str(file.relative_to(self._path)))
        return ", ".join(f"{len(files):,} {reason} ({_first(files)})" for reason, files in groups.items())

    def check(self) -> None:
        """Raise UserError if too large a share of a folder's text would not be read (`CorpusConfig.max_left_out`)."""
        lost = [file for file, reason in self._reasons.items() if _is_lost(file, reason)]
        left, read = (sum(file.stat().st_size for file in files) for files in (lost, set(chain(*self._files.values()))))
        share = left / (left + read) if left else 0.0
        if share > self._most_left_out:
            raise UserError(
                f"{self._path}: {100 * share:.0f} % of its bytes would not be read: {self.left_out()}. Allowed kinds: {_ALLOWED}. Convert "
                "or remove these files, set text_column, or write max_left_out: 1 under corpus in the study file."
            )

    def fingerprint(self) -> str:
        """Return a hash of the files' content; later reads check that the files still have it (`storage.unchanged`).

        A file is hashed again only if its stat has changed.
        """
        hashes_path = self._store / "corpora" / "hashes.json"
        hashes = _known_hashes(hashes_path)
        parts, changed = [], False
        for part, files in self._files.items():
            for file in files:
                entry = hashes.get(str(file.resolve()))
                if entry is None or entry[0] != [*mark_of(file.stat())]:
                    mark, digest = marked_hash(file)
                    entry = hashes[str(file.resolve())] = [[*mark], digest]
                    changed = True
                self._hashed[file] = tuple(entry[0]), entry[1]
                # A file's suffix decides how its documents are read; the rest of its name does not.
                suffix = f"{kind_of(file)}{file.suffix}" if is_compressed(file) else file.suffix
                parts.append([part, suffix, entry[0][0], entry[1]])
        if changed:
            write_sealed(hashes_path, hashes)
        # `text_documents` changes the documents of text files only: a folder of tables keeps its fingerprint.
        return stable_hash([self._column, parts, *(["file"] if self._documents else [])])[:16]

    def pieces(self, part: str) -> Sequence[Piece]:
        """Return one piece per file; files that are one document each are grouped up to `PIECE_BYTES`."""
        groups: list[list[Path]] = []
        room = 0.0
        for file in self._files[part]:
            # An infinite size gives a table, or a file of paragraphs, a piece of its own.
            size = file.stat().st_size if self._is_document(file) else math.inf
            if size > room or not groups:
                groups.append([])
                room = PIECE_BYTES
            groups[-1].append(file)
            room -= size
        return [partial(self._read, group) for group in groups]

    def _read(self, files: Sequence[Path]) -> Iterator[str]:
        for file in files:
            texts = read_documents(file, self._column, paragraphs=self._paragraphs)
            hashed = self._hashed.get(file)
            yield from texts if hashed is None else as_hashed(texts, partial(check_hashed, file, *hashed))

    def check_unchanged(self) -> None:
        """Compare all files with what `fingerprint` has hashed; see `Source.check_unchanged`."""
        for file, hashed in self._hashed.items():
            check_hashed(file, *hashed)


class HubSource(Source):
    """A data set of the Hugging Face hub, or of its local cache, at the commit that the store has pinned."""

    def __init__(self, config: CorpusConfig, tried: Sequence[Path], store: Path) -> None:
        """Keep the data set's name, and its commit if the store has pinned one; nothing is downloaded yet."""
        self._config, self._store = config, store
        installed = " nor ".join(map(repr, KINDS["corpus"]))
        installed = installed or "a source of an installed package (there is none: run `make install` again)"
        near = nearest(tried)
        places = ", ".join(map(str, tried)) + (f".{near}" if near else "")
        neither = f"corpus source {config.source!r} is neither {installed} nor a file or folder ({places})"
        self._repository = HubRepository(
            config.source,
            "dataset",
            config.revision,
            where=neither,
            instead="or name a local folder",
            local="/" not in config.source or any(path.parent.is_dir() for path in tried),
        )
        self._commit = self._repository.pinned(store)

    def fingerprint(self) -> str:
        """Return a hash of the name, commit, splits and column: a commit's content never changes on the hub.

        Until the store has pinned a commit, the revision takes its place. No corpus is made with such a fingerprint.
        """
        # The order of the class's fields is part of the hash.
        config = self._config.model_copy(update={"revision": self._commit or self._config.revision})
        return stable_hash([config.source, *config.keyed(Role.SOURCE).values()])[:16]

    def check(self) -> None:
        """Ask the hub, with few retries, whether it has the data set; see `Source.check`."""
        if self._commit is None:
            self._repository.commit()

    def settle(self) -> None:
        """Pin the revision's commit in the store, so that the text stays the same when the revision moves."""
        if self._commit is None:
            self._commit = self._repository.pin(self._store)
            branch = self._config.revision or "main"
            say(
                f"corpus source {self._config.source}: {branch} is the commit {self._commit}, which this store keeps to."
            )

    def pieces(self, part: str) -> Sequence[Piece]:
        """Return one piece: the `datasets` library reads a split from its beginning."""
        split = self._config.split if part == TRAIN else self._config.validation_split
        return [] if split is None else [partial(self._read, split)]

    def _read(self, split: str) -> Iterator[str]:
        import datasets

        config = self._config
        check_hub_data(config.source, "corpus source")
        try:
            data = load_at_commit(
                config.source, config.config_name, split=split, revision=self._commit, streaming=config.streaming
            )
            if data.column_names is not None:
                check_column(config.source, config.text_column, data.column_names)
                data = data.select_columns([config.text_column])  # Other columns would be decoded for nothing.
            # The columns of a stream may be unknown until its first row.
            for row in data:
                check_column(config.source, config.text_column, row)
                yield text_of(row[config.text_column], config.source, config.text_column)
        except ValueError as error:
            reason = error_with_nearest(error, config.config_name, split)
            raise UserError(f"corpus source {config.source!r}, split {split!r}: {reason}") from error
        except (OSError, RuntimeError, ImportError, datasets.exceptions.DatasetsError) as error:
            raise replace(self._repository, where=f"corpus source {config.source!r}").trouble(error) from error


def _text_size(file: Path) -> int:
    """Return the decompressed size of a text file in bytes; for a truncated one, the bytes that can be read."""
    if not is_compressed(file):
        return file.stat().st_size
    size = 0
    with suppress(EOFError, LZMAError, OSError), open_bytes(file) as content:
        while block := content.read(1 << 20):
            size += len(block)
    return size


def _first(files: Sequence[str]) -> str:
    """Return the first of some files' names, and the number of the others."""
    more = f" and {len(files) - SHOWN_FILES:,} more" if len(files) > SHOWN_FILES else ""
    return f"{', '.join(files[:SHOWN_FILES])}{more}"


def _copies(files: Sequence[Path]) -> list[Path]:
    """Return the files that repeat another one: its compressed copy, or the same table as CSV, TSV or compressed."""
    seen: set[object] = set()
    copies = []
    for file in sorted(files, key=lambda file: file.suffix not in FIRST):
        original = file.with_suffix("") if is_compressed(file) else file
        marks: list[object] = [original]
        if kind_of(file) in TABLES:
            marks.append((file.parent, original.stem))
        if file.suffix not in FIRST and not seen.isdisjoint(marks):
            copies.append(file)
        seen.update(marks)
    return copies


def _is_lost(file: Path, reason: str) -> bool:
    """Return whether a file that is not read may hold text of the corpus."""
    media = (mimetypes.guess_type(file.name)[0] or "").partition("/")[0]
    return reason not in (OTHER_SPLIT, COPY, ABOUT) and media not in NO_TEXT


def _hidden(file: Path) -> bool:
    """Return whether a path, relative to the source's folder, has a part that begins with a full stop."""
    return any(part.startswith(".") for part in file.parts)

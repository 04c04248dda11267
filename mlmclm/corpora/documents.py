"""The documents of a source, one at a time: local files, a Hugging Face data set, or what an installed package gives."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from lzma import LZMAError
from pathlib import Path
from typing import Any, Protocol

from mlmclm.corpora.config import CorpusConfig
from mlmclm.corpora.process_map import Progress, silent
from mlmclm.corpora.text_files import SUFFIXES, TEXT, check_column, read_documents, text_of
from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.plugins import CORPORA, plugin, plugin_names
from mlmclm.progress import say
from mlmclm.storage.checksums import read_sealed, set_aside, write_sealed
from mlmclm.storage.data_files import COMPRESSED, NO_TABLES, TABLES, is_compressed, kind_of, open_bytes
from mlmclm.storage.files import first_there, hash_file, places_of, stable_hash

_VALIDATION_NAMES = ("validation", "valid", "val", "dev")
_SPLITS = ("train", "test", *_VALIDATION_NAMES)
LONGEST_DOCUMENT = 16 << 20
"""Bytes of a text file that is one document: tokenising takes about 120 times its size of memory in one process, measured."""
PIECE_BYTES = 4 << 20
"""Text files that are read by one task of a cluster."""
FIRST = (".parquet", ".jsonl", ".json", ".txt", ".md")
"""Files of text beside which others are not."""
SHOWN_FILES = 5
"""How many of the files that are left out are named."""


TRAIN, VALIDATION = "train", "validation"
"""The parts of a corpus."""

Piece = Callable[[], Iterator[str]]
"""Reads some of a source's documents, in order; picklable."""


class Source(Protocol):
    """Where documents come from; picklable."""

    def fingerprint(self) -> str:
        """Changes when the documents do (hex)."""

    def settle(self) -> str | None:
        """Note in the store which documents the source has from now on, and return their fingerprint; None where nothing can change
        them."""

    def train(self) -> Iterator[str]:
        """The documents to train on, in a fixed order; empty ones included."""

    def validation(self) -> Iterator[str] | None:
        """The documents to validate on, or None where they are to be held out of `train`."""

    def pieces(self, part: str) -> Sequence[Piece] | None:
        """What `train` or `validation` reads, in pieces that can be read alone, on this machine; None as `validation`."""

    def left_out(self) -> str:
        """Describe the files beside the documents that are not read; empty for nothing."""


def open_source(
    config: CorpusConfig,
    *,
    store: Path,
    data_root: Path | None = None,
    beside: Path | None = None,
    workers: int | None = None,
    progress: Progress = silent,
) -> Source:
    """The source that a configuration names; nothing is read yet.

    A name is looked up among the sources of installed packages (`pydocs`), as a path
    (below `beside`, from here, below `data_root`), and last on the Hugging Face hub.

    Raises:
        UserError: a path that does not exist, or a folder without files of a known kind.
    """
    installed = plugin(CORPORA, config.source)
    if installed is not None:
        source: Source = installed(store, workers, progress)
        return source
    tried = places_of(config.source, beside, data_root)
    path = first_there(tried)
    if path is not None:
        return FileSource(path, config, store)
    if _looks_like_a_path(config.source):
        places = " nor ".join(str(path) for path in tried)
        raise UserError(f"corpus source {config.source!r}: there is no file or folder {places}.")
    return HubSource(config, tried)


def _known_hashes(path: Path) -> dict[str, Any]:
    """By file its size and times with the hash of its content; empty where there is none yet, or the note of them is damaged."""
    if not path.exists():
        return {}
    try:
        return read_sealed(path, "")
    except UserError as error:
        say(f"{error} It is kept as {set_aside(path).name}; the source's files are hashed again.".replace("  ", " "))
        return {}


class FileSource:
    """A local file, or the files of a folder: those of a split start with its name, or lie in a folder of its name.

    Tables (Parquet, JSON, CSV, TSV) have a column of text. A text file is one document, or one a paragraph (`text_documents`).
    Markdown beside tables is about them, and no part of the text; nor are hidden files. CSV, TSV and compressed files are
    read where there are no others: beside them they are lists of the texts, or the same once more.
    """

    def __init__(self, path: Path, config: CorpusConfig, store: Path) -> None:
        """Finds the files.

        Raises:
            UserError: there are none, or none of the split, or a text file is too long for one document.
        """
        self._path, self._column, self._store = path, config.text_column, store
        self._paragraphs = config.text_documents == "paragraph"
        if path.is_file() and kind_of(path) not in SUFFIXES:
            raise UserError(f"{path}: not a kind of file that can be read. Allowed: {_allowed()}.")
        there = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
        files = self._of_text(there)
        if not files:
            raise UserError(f"{path}: there is no file of text in this folder. Allowed: {_allowed()}.")
        parts = {file: self._part_of(file) for file in files}
        self._train = self._of_split(config.split, parts)
        if config.validation_split is not None:
            self._validation = self._of_split(config.validation_split, parts)
        else:
            names = tuple(name for name in _VALIDATION_NAMES if name != config.split)
            self._validation = [file for file, part in parts.items() if self._begins(file, part, names)]
            training = set(self._train)
            self._validation = [file for file in self._validation if file not in training]
        self._check_lengths()
        read = {*self._train, *self._validation}
        self._left_out = _named([file.relative_to(path) for file in there if file not in read])

    def _of_text(self, there: list[Path]) -> list[Path]:
        """The files that hold the text; see the class."""
        known = [
            file
            for file in there
            if kind_of(file) in SUFFIXES
            and not (_hidden(file.relative_to(self._path)) and (self._is_document(file) or file.suffix not in FIRST))
        ]
        known = [file for file in known if file.name not in NO_TABLES] or known
        first = [file for file in known if file.suffix in FIRST]
        tables = any(kind_of(file) in TABLES for file in known)
        if tables and all(file.suffix == ".md" for file in first):  # the card of a data set in other files
            first = []
        files = first or known
        tables = any(kind_of(file) in TABLES for file in files)
        return [file for file in files if not (tables and kind_of(file) == ".md")]

    def _of_split(self, split: str, parts: dict[Path, str]) -> list[Path]:
        """The files of a split; all files where none is named after any split and the training split is asked for."""
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
            found = ", ".join(sorted(set(parts.values())))
            raise UserError(
                f"{self._path}: no file of split {split!r} (a name that starts with it). There are: {found}."
            )
        return named

    def _part_of(self, file: Path) -> str:
        """Return the word that decides a file's split: its name, or the folder directly under the root."""
        if file == self._path:
            return file.name
        first = file.relative_to(self._path).parts[0]
        by_folder = self._begins(file, first, _SPLITS) and not self._begins(file, file.name, _SPLITS)
        return first if by_folder else file.name

    def _is_document(self, file: Path) -> bool:
        """Whether a file is one document."""
        return kind_of(file) in TEXT and not self._paragraphs

    def _begins(self, file: Path, name: str, splits: tuple[str, ...]) -> bool:
        """Whether a file's name, or its folder's, is that of one of these splits.

        The split's name ends where a word does: `valley.txt` is no validation split. Only a file that is no document, which has
        a title, may be called `training.jsonl` or `testset.csv`.
        """
        for split in splits:
            rest = name[len(split) :] if name.startswith(split) else "x"
            if not rest[:1].isalpha():
                return True
            if not self._is_document(file) and re.fullmatch(r"(ing|set|data)([-_.]?\d[^.]*)?(\..*)?", rest):
                return True
        return False

    def _check_lengths(self) -> None:
        """Raises UserError for a text file that is too long for one document."""
        for file in filter(self._is_document, [*self._train, *self._validation]):
            size = _text_size(file)
            if size > LONGEST_DOCUMENT:
                raise UserError(
                    f"{file}: {size / 2**20:,.0f} MiB are too long for one document, which is read and tokenised as a whole (at most "
                    f"{LONGEST_DOCUMENT >> 20} MiB). Write 'text_documents: paragraph' under corpus in the study file: each paragraph is a document "
                    "then, and the file is read bit by bit. Or divide it into a file for each document."
                )

    def left_out(self) -> str:
        """How many files of the folder are not read, and the first of them; empty where there are none. Hidden ones don't count."""
        return self._left_out

    def fingerprint(self) -> str:
        """Of the files' content; a hash is taken again only when size or time of a file has changed."""
        known_path = self._store / "corpora" / "hashes.json"
        known = _known_hashes(known_path)
        parts, changed = [], False
        for kind, files in (("train", self._train), ("validation", self._validation)):
            for file in files:
                stat = file.stat()
                mark = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
                entry = known.get(str(file.resolve()))
                if entry is None or entry[0] != mark:
                    entry = known[str(file.resolve())] = [mark, hash_file(file)]
                    changed = True
                suffix = f"{kind_of(file)}{file.suffix}" if is_compressed(file) else file.suffix
                parts.append([kind, suffix, stat.st_size, entry[1]])
        if changed:
            write_sealed(known_path, known)
        whole = any(map(self._is_document, [*self._train, *self._validation]))
        return stable_hash([self._column, parts, *(["file"] if whole else [])])[:16]

    def settle(self) -> None:
        """Nothing to note: the fingerprint is final."""

    def train(self) -> Iterator[str]:
        """The documents of the split's files."""
        return self._read(self._train)

    def validation(self) -> Iterator[str] | None:
        """The documents of the validation files, if there are any."""
        return self._read(self._validation) if self._validation else None

    def pieces(self, part: str) -> Sequence[Piece] | None:
        """One a file; of files that are one document each, some MiB."""
        groups: list[list[Path]] = []
        room = 0.0
        for file in self._train if part == TRAIN else self._validation:
            size = file.stat().st_size if self._is_document(file) else math.inf
            if size > room:
                groups.append([])
                room = PIECE_BYTES
            groups[-1].append(file)
            room -= size
        return [partial(self._read, group) for group in groups] or None

    def _read(self, files: Sequence[Path]) -> Iterator[str]:
        """The documents of files, in the order of their paths."""
        for file in files:
            yield from read_documents(file, self._column, paragraphs=self._paragraphs)


class HubSource:
    """A data set of the Hugging Face hub (or of its local cache)."""

    def __init__(self, config: CorpusConfig, tried: Sequence[Path]) -> None:
        """Names the data set; nothing is downloaded yet."""
        self._config, self._tried = config, tried

    def fingerprint(self) -> str:
        """Of the name and the revision: the hub keeps a revision's content."""
        config = self._config
        return stable_hash(
            [
                config.source,
                config.config_name,
                config.revision,
                config.split,
                config.validation_split,
                config.text_column,
            ]
        )[:16]

    def settle(self) -> None:
        """Nothing to note: the fingerprint is final."""

    def train(self) -> Iterator[str]:
        """The documents of the split."""
        return self._read(self._config.split)

    def validation(self) -> Iterator[str] | None:
        """The documents of the validation split, if one is named."""
        split = self._config.validation_split
        return None if split is None else self._read(split)

    def pieces(self, part: str) -> Sequence[Piece] | None:
        """One: the library reads a split from its beginning."""
        split = self._config.split if part == TRAIN else self._config.validation_split
        return None if split is None else [partial(self._read, split)]

    def left_out(self) -> str:
        """Nothing."""
        return ""

    def _read(self, split: str) -> Iterator[str]:
        """The texts of a split."""
        import datasets

        config = self._config
        try:
            data = datasets.load_dataset(
                config.source, config.config_name, split=split, revision=config.revision, streaming=config.streaming
            )
            if data.column_names is not None:
                check_column(config.source, config.text_column, data.column_names)
                data = data.select_columns([config.text_column])
            for row in data:
                check_column(config.source, config.text_column, row)
                yield text_of(row[config.text_column], config.source, config.text_column)
        except datasets.exceptions.DatasetNotFoundError as error:
            raise self._not_found(error) from error
        except ValueError as error:
            raise UserError(
                f"corpus source {config.source!r}, split {split!r}: {' '.join(str(error).split())}"
            ) from error
        except (OSError, RuntimeError, ImportError) as error:
            raise self._unreachable(error) from error

    def _not_found(self, error: Exception) -> UserError | EnvironmentFault:
        """The hub answers that there is no such data set, or could not be asked."""
        import huggingface_hub.constants

        if huggingface_hub.constants.HF_HUB_OFFLINE or "offline" in str(error).lower():
            return self._unreachable(error)
        return UserError(
            f"corpus source {self._config.source!r} is neither {_installed()}, nor a file or folder ({self._places()}), "
            f"nor a data set that the Hugging Face hub shows to you ({' '.join(str(error).split())})."
        )

    def _unreachable(self, error: Exception) -> EnvironmentFault:
        """The hub cannot be reached."""
        return EnvironmentFault(
            f"corpus source {self._config.source!r} is neither {_installed()} nor a file or folder ({self._places()}), and "
            "it cannot be loaded as a data set of the Hugging Face hub "
            f"({type(error).__name__}: {' '.join(str(error).split())[:300]}). "
            "Check the name and the network, or name a local folder."
        )

    def _places(self) -> str:
        """The paths that were looked at."""
        return ", ".join(str(path) for path in self._tried)


def _installed() -> str:
    """The sources of installed packages, for messages."""
    return (
        " nor ".join(map(repr, plugin_names(CORPORA)))
        or "a source of an installed package (there is none: run `make install` again)"
    )


def _looks_like_a_path(source: str) -> bool:
    """Whether a name can only be meant as a path: a hub name is `name` or `owner/name`."""
    return source.startswith((".", "/", "~")) or source.count("/") > 1 or kind_of(Path(source)) in SUFFIXES


def _text_size(file: Path) -> int:
    """Bytes of a text file, decompressed; of one that is cut short those that can be read."""
    if not is_compressed(file):
        return file.stat().st_size
    size = 0
    with suppress(EOFError, LZMAError, OSError), open_bytes(file) as content:
        while block := content.read(1 << 20):
            size += len(block)
    return size


def _allowed() -> str:
    return f"{', '.join(SUFFIXES)}, each also with {', '.join(COMPRESSED)}"


def _named(files: Sequence[Path]) -> str:
    """The number of files that are not hidden, and the first of them."""
    shown = [str(file) for file in files if not _hidden(file)]
    more = f" and {len(shown) - SHOWN_FILES:,} more" if len(shown) > SHOWN_FILES else ""
    return f"{len(shown):,} ({', '.join(shown[:SHOWN_FILES])}{more})" if shown else ""


def _hidden(file: Path) -> bool:
    """Whether a file or a folder that it lies in begins with a full stop; relative to the source's folder."""
    return any(part.startswith(".") for part in file.parts)

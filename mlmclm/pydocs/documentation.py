"""The corpus that is always there: the documentation of this Python environment.

Docstrings of the standard library and of every installed package, and the documentation topics of `pydoc`, read from
sources with `ast`; nothing is imported or executed, so docstrings of C extensions are out of reach. Copies are
removed, and packages are divided into train, validation and test so that no text is in two of them
(`splits`). A store extracts them once and keeps them, whatever is installed later (`pin`).
"""

from __future__ import annotations

import ast
import gc
import hashlib
import inspect
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mlmclm.corpora.process_map import Progress, ordered_map, silent, worker_count
from mlmclm.errors import UserError
from mlmclm.pydocs.pin import documents_folder, pin_file, settle
from mlmclm.pydocs.splits import Group, drop_copies, split_groups
from mlmclm.storage.checksums import whole_cache, write_checksums
from mlmclm.storage.files import hash_file, read_json, stable_hash, whole_folder, write_json

EXTRACTOR_VERSION = 2
"""Part of the fingerprint: raise it when what is extracted changes. A store that has its documentation keeps it."""

OWN_PACKAGE = "mlmclm"
"""Left out, so that the corpus does not change with this project's own sources."""

SKIPPED_FOLDERS = frozenset(
    # Copies of other packages would carry the same text into two splits; tests document nothing.
    [
        "__pycache__",
        "site-packages",
        "lib-dynload",
        "test",
        "tests",
        "_vendor",
        "vendored",
        "_vendored",
        "thirdparty_files",
    ]
)
MINIMUM_WORDS = 3
_FILES_A_CHUNK = 48
_DOCUMENTS = Path("documents.parquet")

Style = Literal["numpydoc", "google", "sphinx", "plain"]


@dataclass(frozen=True)
class Root:
    """A folder of top-level packages and modules: the standard library, installed distributions, or any folder."""

    path: Path
    origin: Literal["stdlib", "site", "folder"]


class Docstring(NamedTuple):
    """One docstring as a worker finds it; `module` and `name` are dotted, `name` empty for a module's own."""

    package: str
    module: str
    name: str
    kind: str
    style: Style
    text: str


def installed_roots() -> list[Root]:
    """The standard library and the site-packages folders of the running interpreter."""
    paths = sysconfig.get_paths()
    site = [Path(paths["purelib"]), *({Path(paths["platlib"])} - {Path(paths["purelib"])})]
    return [Root(Path(paths["stdlib"]), "stdlib"), *(Root(path, "site") for path in site)]


def fingerprint(roots: Sequence[Root] | None = None) -> str:
    """Return a hash of what the text of an environment depends on: Python's version, the installed distributions, the extractor's version (16 hex)."""
    parts: list[Any] = [EXTRACTOR_VERSION, list(sys.version_info[:3])]
    for root in installed_roots() if roots is None else roots:
        if root.origin == "site":
            distributions = {item.name for item in root.path.glob("*.dist-info")}
            parts.append(sorted(name for name in distributions if not name.startswith(f"{OWN_PACKAGE}-")))
        elif root.origin == "folder":
            parts.append([[_module_of(file, root.path), hash_file(file)] for file in source_files(root)])
    return stable_hash(parts)[:16]


def settle_pydocs(
    store: Path, *, roots: Sequence[Root] | None = None, workers: int | None = None, progress: Progress = silent
) -> str:
    """The fingerprint of the store's documentation (`pin`); extracts this environment's where the store has none.

    Raises:
        UserError: there is no docstring in the sources.
        EnvironmentFault: the disk is full, or a worker was killed.
    """

    def make() -> str:
        own = fingerprint(roots)
        _extract(documents_folder(store, own), roots, workers, progress)
        return own

    return settle(store, make, lambda other: progress(f"waiting for {other}, which reads the documentation", 0, None))


def prepare_pydocs(
    store: Path, *, roots: Sequence[Root] | None = None, workers: int | None = None, progress: Progress = silent
) -> Path:
    """The folder with `documents.parquet` and `meta.json`, extracted on first use and the same from then on.

    Columns, all strings: package (top level), module, name, kind (module, class, function, method, property, topic),
    style (numpydoc, google, sphinx, plain), split (train, validation, test), text. Rows are in the order of package,
    module and line.

    Raises:
        UserError: there is no docstring in the sources, or the store's documentation is lost and is no longer the environment's.
        EnvironmentFault: the disk is full, or a worker was killed.
    """
    known = settle_pydocs(store, roots=roots, workers=workers, progress=progress)
    folder = documents_folder(store, known)
    if not whole_cache(folder, _DOCUMENTS.name):
        if fingerprint(roots) != known:
            raise UserError(
                f"{folder}: no such folder. It held the documentation that this store's pydocs corpus and tasks are made of, and what is "
                f"installed now is not what was installed then. Restore the folder; or delete {pin_file(store)} to use the documentation "
                "of what is installed now: it makes another corpus, and all models and cells anew."
            )
        _extract(folder, roots, workers, progress)
    return folder


def read_texts(folder: Path, split: str) -> Iterator[str]:
    """The texts of a split, in the order of the file."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(folder / _DOCUMENTS) as file:
        for batch in file.iter_batches(columns=["split", "text"]):
            for own, text in zip(batch["split"].to_pylist(), batch["text"].to_pylist(), strict=True):
                if own == split:
                    yield text


def read_groups(folder: Path) -> int:
    """The number of row groups of the documents' file."""
    import pyarrow.parquet

    return int(pyarrow.parquet.read_metadata(folder / _DOCUMENTS).num_row_groups)


def read_group(folder: Path, number: int) -> list[dict[str, str]]:
    """The documents of one row group, as dictionaries of the columns of `prepare_pydocs`."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(folder / _DOCUMENTS) as file:
        rows: list[dict[str, str]] = file.read_row_group(number).to_pylist()
    return rows


def read_facts(folder: Path) -> dict[str, Any]:
    """What was found: numbers of files, docstrings and copies; documents, characters and packages of each split."""
    facts: dict[str, Any] = read_json(folder / "meta.json")
    return facts


def source_files(root: Root) -> list[Path]:
    """The Python sources under a root, in a fixed order; tests, vendored copies and this project's own are left out."""
    found = []
    for folder, folders, names in os.walk(root.path):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        if Path(folder) == root.path:
            folders[:] = [name for name in folders if name != OWN_PACKAGE]
        found += [Path(folder) / name for name in names if name.endswith(".py")]
    return sorted(found, key=lambda file: file.relative_to(root.path).parts)


def docstrings(source: bytes, module: str) -> list[Docstring]:
    """The docstrings of a source file in the order of the lines; those inside functions are left out.

    Raises:
        SyntaxError, ValueError: not a Python source.
    """
    if b'"""' not in source and b"'''" not in source:
        return []  # A short docstring in single quotes is rare, and parsing is what takes the time.
    package = module.partition(".")[0]
    found: list[Docstring] = []

    def visit(node: ast.AST, name: str, kind: str) -> None:
        body: list[ast.stmt] = getattr(node, "body", [])
        text = _documentation(body)
        if text is not None:
            found.append(Docstring(package, module, name, kind, style_of(text), text))
        for child in _definitions(body):
            inner = f"{name}.{child.name}" if name else child.name
            if isinstance(child, ast.ClassDef):
                visit(child, inner, "class")
            else:
                text = _documentation(child.body)
                if text is not None:
                    kind_here = _kind(child, in_class=kind == "class")
                    found.append(Docstring(package, module, inner, kind_here, style_of(text), text))

    visit(ast.parse(source), "", "module")
    return found


def topics(source: bytes) -> list[Docstring]:
    """The documentation topics in the source of `pydoc_data.topics`: a literal dictionary of texts."""
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            entries: dict[str, str] = ast.literal_eval(statement.value)
            return [
                Docstring("pydoc_data", "pydoc_data.topics", name, "topic", "plain", inspect.cleandoc(text))
                for name, text in sorted(entries.items())
            ]
    return []


def style_of(text: str) -> Style:
    """The convention that the sections of a docstring follow."""
    if "\n---" in text and any(f"{title}\n---" in text for title in ("Parameters", "Returns", "Attributes", "Yields")):
        return "numpydoc"
    if any(f"\n{title}:\n" in text for title in ("Args", "Arguments", "Parameters", "Returns", "Attributes")):
        return "google"
    if ":param " in text or ":return" in text:
        return "sphinx"
    return "plain"


def _documentation(body: list[ast.stmt]) -> str | None:
    """The cleaned docstring that a body starts with, if it has at least three words."""
    if not body or not isinstance(body[0], ast.Expr) or not isinstance(body[0].value, ast.Constant):
        return None
    text = body[0].value.value
    if not isinstance(text, str) or len(text.split(maxsplit=MINIMUM_WORDS)) < MINIMUM_WORDS:
        return None
    # A lone surrogate is a valid Python string but not valid UTF-8.
    return inspect.cleandoc(text).encode("utf-8", "replace").decode("utf-8")


def _definitions(body: Iterable[ast.stmt]) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Classes and functions defined in a body, also under `if` and `try`."""
    for statement in body:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement
        elif isinstance(statement, ast.If):
            yield from _definitions([*statement.body, *statement.orelse])
        elif isinstance(statement, ast.Try):
            yield from _definitions(
                [*statement.body, *(s for h in statement.handlers for s in h.body), *statement.orelse]
            )


def _kind(node: ast.FunctionDef | ast.AsyncFunctionDef, *, in_class: bool) -> str:
    """function, method or property."""
    if not in_class:
        return "function"
    names = [item.attr if isinstance(item, ast.Attribute) else getattr(item, "id", "") for item in node.decorator_list]
    return "property" if any(name.endswith("property") or name == "setter" for name in names) else "method"


def _module_of(file: Path, root: Path) -> str:
    """The dotted name of a source file; `package/__init__.py` is the package."""
    parts = list(file.relative_to(root).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def _read_files(files: list[tuple[str, str]]) -> tuple[list[Docstring], int]:
    """A worker's work: the docstrings of (path, module) pairs, and how many files could not be parsed."""
    found: list[Docstring] = []
    failed = 0
    collecting = gc.isenabled()
    gc.disable()  # Syntax trees are freed by reference counts; the cycle collector costs a third of the time.
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Invalid escape sequences in other people's sources.
            for path, module in files:
                try:
                    source = Path(path).read_bytes()
                    found += topics(source) if module == "pydoc_data.topics" else docstrings(source, module)
                except (SyntaxError, ValueError, RecursionError, OSError):
                    failed += 1
    finally:
        if collecting:
            gc.enable()
    return found, failed


def _extract(target: Path, roots: Sequence[Root] | None, workers: int | None, progress: Progress) -> None:
    """Makes the folder of a documentation where it isn't there."""
    if not target.is_dir():
        with whole_folder(target) as folder:
            _write(folder, installed_roots() if roots is None else roots, worker_count(workers), progress)
            write_checksums(folder)


def _write(folder: Path, roots: Sequence[Root], workers: int, progress: Progress) -> None:
    """Reads all sources, removes copies, divides packages and writes the Parquet file."""
    import pyarrow
    import pyarrow.parquet

    files = [(str(file), _module_of(file, root.path)) for root in roots for file in source_files(root)]
    chunks = [files[start : start + _FILES_A_CHUNK] for start in range(0, len(files), _FILES_A_CHUNK)]
    found: list[Docstring] = []
    failed = 0
    for number, (docs, unreadable) in enumerate(
        ordered_map(_read_files, chunks, workers=min(workers, len(chunks) or 1))
    ):
        found += docs
        failed += unreadable
        progress(
            "reading the installed packages' documentation", min((number + 1) * _FILES_A_CHUNK, len(files)), len(files)
        )
    kept = _without_exact_copies(found)
    if not kept:
        raise UserError(
            f"there is no docstring under {', '.join(str(root.path) for root in roots)}: a corpus needs text."
        )
    owners = _owners(roots)
    splits = split_groups(_groups(kept, owners))
    rows = [(doc, splits[owners.get(doc.package, doc.package)]) for doc in kept]
    copies = drop_copies([(split, doc.text) for doc, split in rows])
    rows = [row for row, copied in zip(rows, copies, strict=True) if not copied]
    columns = {name: [getattr(doc, name) for doc, _ in rows] for name in Docstring._fields}
    table = pyarrow.table({**columns, "split": [split for _, split in rows]})
    pyarrow.parquet.write_table(table, folder / _DOCUMENTS, compression="zstd", row_group_size=8192)
    facts: dict[str, Any] = {
        "files": len(files),
        "unparsable_files": failed,
        "found": len(found),
        "distinct": len(kept),
    }
    facts["copies_of_training_text"] = sum(copies)
    for split in ("train", "validation", "test"):
        texts = [doc for doc, own in rows if own == split]
        facts[split] = {
            "documents": len(texts),
            "characters": sum(len(doc.text) for doc in texts),
            "packages": sorted({doc.package for doc in texts}),
        }
    write_json(folder / "meta.json", facts)


def _without_exact_copies(docs: list[Docstring]) -> list[Docstring]:
    """The first of each text, after normalising white space."""
    seen: set[bytes] = set()
    kept = []
    for doc in docs:
        key = hashlib.blake2b(" ".join(doc.text.split()).encode(), digest_size=12).digest()
        if key not in seen:
            seen.add(key)
            kept.append(doc)
    return kept


def _owners(roots: Sequence[Root]) -> dict[str, str]:
    """Top-level package -> the distribution that installed it, so that `attr` and `attrs` are never divided."""
    owners: dict[str, str] = {}
    for root in roots:
        for record in sorted(root.path.glob("*.dist-info/RECORD")) if root.origin == "site" else []:
            distribution = record.parent.name.partition("-")[0].lower()
            for line in record.read_text(encoding="utf-8", errors="replace").splitlines():
                path = line.partition(",")[0]
                if path.endswith(".py"):
                    owners.setdefault(path.partition("/")[0].removesuffix(".py"), distribution)
    return owners


def _groups(docs: list[Docstring], owners: dict[str, str]) -> list[Group]:
    """Size and prevailing style of what each distribution (or single module) documents."""
    sizes: dict[str, int] = {}
    styles: dict[str, dict[Style, int]] = {}
    for doc in docs:
        name = owners.get(doc.package, doc.package)
        sizes[name] = sizes.get(name, 0) + len(doc.text)
        counts = styles.setdefault(name, {})
        counts[doc.style] = counts.get(doc.style, 0) + (doc.style != "plain") * len(doc.text)
    return [
        Group(name, size, max(sorted(styles[name]), key=lambda style: styles[name][style]), name == "pydoc_data")
        for name, size in sizes.items()
    ]

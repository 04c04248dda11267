"""A corpus that needs no download: the documentation of this Python environment.

It holds the docstrings of the standard library and of every installed package, and the documentation topics of
`pydoc`. They are read from sources with `ast`; nothing is imported or executed, so docstrings of C extensions are
missing. Copies are removed, and packages are divided into train, validation and test so that no text is in two of
them (`package_splits`). A store extracts the documentation once and keeps it, whatever is installed later (`pin`).
"""

from __future__ import annotations

import ast
import gc
import inspect
import os
import sys
import sysconfig
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mlmclm.corpora.documents import StoredText
from mlmclm.corpora.process_map import ordered_map
from mlmclm.errors import UserError
from mlmclm.progress import bars
from mlmclm.pydocs.documented import distinct
from mlmclm.pydocs.outlines import outline
from mlmclm.pydocs.package_splits import PackageGroup, are_copies, split_groups
from mlmclm.pydocs.pin import PYDOCS, documentation, pin_file, resolved, write_pin
from mlmclm.storage.files import stable_hash, write_json

EXTRACTOR_VERSION = 2
"""Part of the fingerprint: raise it when the extractor's output changes. A store keeps the documentation it has."""

OWN_PACKAGE = "mlmclm"
"""This project's package, left out so that the corpus does not change with its sources."""

SKIPPED_FOLDERS = frozenset((
    "__pycache__", "site-packages", "lib-dynload", "test", "tests", "_vendor", "vendored", "_vendored", "thirdparty_files",
))  # fmt: skip
"""Folders not to read: copies of other packages would put the same text into two splits, and tests document nothing."""
MINIMUM_WORDS = 3
_FILES_A_CHUNK = 48
_DOCUMENTS = Path("documents.parquet")

Style = Literal["numpydoc", "google", "sphinx", "plain"]
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Docstring(NamedTuple):
    """A docstring as a worker finds it. `module` and `name` are dotted; `name` is empty for a module's docstring."""

    package: str
    module: str
    name: str
    kind: str
    style: Style
    text: str


def installed_roots() -> list[Path]:
    """Return the folders of packages and modules: the standard library's, and the site-packages folders."""
    paths = sysconfig.get_paths()
    # On most systems the two folders are one, which must not be read twice.
    site = [Path(paths["purelib"]), *({Path(paths["platlib"])} - {Path(paths["purelib"])})]
    return [Path(paths["stdlib"]), *site]


def environment_fingerprint() -> str:
    """Return a hash (16 hex digits) of everything that decides an environment's text.

    That is Python's version, the installed distributions, and the extractor's version.
    """
    parts: list[Any] = [EXTRACTOR_VERSION, list(sys.version_info[:3])]
    for site in installed_roots()[1:]:
        # Folder names such as `numpy-2.1.0.dist-info` have the versions; no file needs to be read.
        distributions = {item.name for item in site.glob("*.dist-info")}
        parts.append(sorted(name for name in distributions if not name.startswith(f"{OWN_PACKAGE}-")))
    return stable_hash(parts)[:16]


def settle_pydocs(store: Path) -> str:
    """Pin the store's documentation and return its fingerprint; extract this environment's if the store has none.

    Raises UserError if there is no docstring in the sources, EnvironmentFault if the disk is full or a worker was killed.
    """
    if not pin_file(store).is_file():
        with StoredText(store, PYDOCS).leased(title="the documentation"):
            if not pin_file(store).is_file():  # The process that held the lease before may have written it.
                pinned = resolved(store)
                if pinned is None:
                    pinned = environment_fingerprint()
                    _extract(documentation(store, pinned))
                write_pin(store, pinned)
    pinned = resolved(store)
    assert pinned is not None
    return pinned


def prepare_pydocs(store: Path) -> Path:
    """Return the folder with `documents.parquet` and `meta.json`, extracted on first use and the same from then on.

    `meta.json` counts files, docstrings and copies, and documents, characters and packages per split. The table's
    columns, all strings: package (top level), module, name, kind (module, class, function, method, property, topic),
    style (numpydoc, google, sphinx, plain), split (train, validation, test), text. Rows are in the order of package,
    module and line.

    Raises:
        UserError: there is no docstring in the sources, or the store's documentation is lost and the environment's has
            changed.
        EnvironmentFault: the disk is full, or a worker was killed.
    """
    pinned = settle_pydocs(store)
    text = documentation(store, pinned)
    if not text.find():
        if environment_fingerprint() != pinned:
            raise UserError(
                f"{text.folder}: no such folder. It held the documentation that this store's pydocs corpus and tasks are made of, and what is "
                f"installed now is not what was installed then. Restore the folder; or delete {pin_file(store)} to use the documentation "
                "of what is installed now: this gives another corpus, with which all models and cells are computed again."
            )
        _extract(text)
    return text.folder


def read_texts(folder: Path, split: str) -> Iterator[str]:
    """Yield the texts of a split, in the order of the file."""
    for number in range(read_groups(folder)):
        yield from (row["text"] for row in read_group(folder, number) if row["split"] == split)


def read_groups(folder: Path) -> int:
    """Return the number of row groups of the documents' file."""
    import pyarrow.parquet

    return int(pyarrow.parquet.read_metadata(folder / _DOCUMENTS).num_row_groups)


def read_group(folder: Path, number: int) -> list[dict[str, str]]:
    """Read the documents of one row group, as dictionaries of the columns of `prepare_pydocs`."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(folder / _DOCUMENTS) as file:
        rows: list[dict[str, str]] = file.read_row_group(number).to_pylist()
    return rows


def source_files(root: Path) -> list[Path]:
    """List the Python sources under a root in a fixed order, without tests, vendored copies and this project's own."""
    files = []
    for folder, folders, names in os.walk(root):
        # `os.walk` doesn't descend into folders that are removed from its list.
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
        if Path(folder) == root:
            folders[:] = [name for name in folders if name != OWN_PACKAGE]
        files += [Path(folder) / name for name in names if name.endswith(".py")]
    return sorted(files, key=lambda file: file.parts)


def docstrings(source: bytes, module: str) -> list[Docstring]:
    """Return the docstrings of a source file in line order, without those of definitions inside functions.

    Raises SyntaxError or ValueError for what is no Python source. Errors inside the bodies of functions may go unnoticed.
    """
    if b'"""' not in source and b"'''" not in source:
        return []  # A short docstring in single quotes is rare, and parsing is what takes the time.
    package = module.partition(".")[0]
    docs: list[Docstring] = []

    def visit(node: ast.Module | Definition, name: str, kind: str) -> None:
        text = ast.get_docstring(node) or ""
        if len(text.split(maxsplit=MINIMUM_WORDS)) >= MINIMUM_WORDS:
            # A lone surrogate is a valid Python string but not valid UTF-8.
            text = text.encode("utf-8", "replace").decode("utf-8")
            docs.append(Docstring(package, module, name, kind, style_of(text), text))
        # Definitions inside a function are not documentation for its users.
        if isinstance(node, ast.Module | ast.ClassDef):
            for child in _definitions(node.body):
                visit(child, f"{name}.{child.name}" if name else child.name, _kind(child, in_class=kind == "class"))

    visit(_tree(source), "", "module")
    return docs


def _tree(source: bytes) -> ast.Module:
    try:
        return ast.parse(outline(source))
    except (SyntaxError, ValueError):
        return ast.parse(source)


def topics(source: bytes) -> list[Docstring]:
    """Return the documentation topics in the source of `pydoc_data.topics`, which is a literal dictionary of texts."""
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            entries: dict[str, str] = ast.literal_eval(statement.value)
            return [
                Docstring("pydoc_data", "pydoc_data.topics", name, "topic", "plain", inspect.cleandoc(text))
                for name, text in sorted(entries.items())
            ]
    return []


def style_of(text: str) -> Style:
    """Return the convention that a docstring's sections follow."""
    # The first test is cheap and settles most docstrings.
    if "\n---" in text and any(f"{title}\n---" in text for title in ("Parameters", "Returns", "Attributes", "Yields")):
        return "numpydoc"
    if any(f"\n{title}:\n" in text for title in ("Args", "Arguments", "Parameters", "Returns", "Attributes")):
        return "google"
    if ":param " in text or ":return" in text:
        return "sphinx"
    return "plain"


def _definitions(body: Iterable[ast.stmt]) -> Iterator[Definition]:
    """Yield the classes and functions defined in a body, also under `if` and `try`."""
    for statement in body:
        if isinstance(statement, Definition):
            yield statement
        elif isinstance(statement, ast.If):
            yield from _definitions([*statement.body, *statement.orelse])
        elif isinstance(statement, ast.Try):
            yield from _definitions(
                [*statement.body, *(s for h in statement.handlers for s in h.body), *statement.orelse]
            )


def _kind(node: Definition, *, in_class: bool) -> str:
    if isinstance(node, ast.ClassDef):
        return "class"
    if not in_class:
        return "function"
    names = [item.attr if isinstance(item, ast.Attribute) else getattr(item, "id", "") for item in node.decorator_list]
    return "property" if any(name.endswith("property") or name == "setter" for name in names) else "method"


def _module_of(file: Path, root: Path) -> str:
    """Return the dotted module name of a source file; `package/__init__.py` is the package."""
    parts = file.with_suffix("").parts[len(root.parts) :]
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def _read_files(files: list[tuple[str, str]]) -> tuple[list[Docstring], int]:
    """Read the docstrings of (path, module) pairs, in a worker; also return how many files could not be parsed."""
    docs: list[Docstring] = []
    failed = 0
    collecting = gc.isenabled()
    gc.disable()  # Syntax trees are freed by reference counts; the cycle collector costs a third of the time.
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Invalid escape sequences in other people's sources.
            for path, module in files:
                try:
                    source = Path(path).read_bytes()
                    docs += topics(source) if module == "pydoc_data.topics" else docstrings(source, module)
                except (SyntaxError, ValueError, RecursionError, OSError):
                    failed += 1
    finally:
        if collecting:
            gc.enable()
    return docs, failed


def _extract(text: StoredText) -> None:
    def make(folder: Path) -> None:
        _write(folder)
        if environment_fingerprint() != text.key.rpartition("-")[2]:
            raise UserError(
                "the installed packages have changed while their documentation was read; run the same command again."
            )

    text.ensure(make, title="the documentation")


def _write(folder: Path) -> None:
    """Read all sources, remove copies, divide packages into splits and write the Parquet file."""
    import pyarrow
    import pyarrow.parquet

    roots = installed_roots()
    files = [(str(file), _module_of(file, root)) for root in roots for file in source_files(root)]
    chunks = [files[start : start + _FILES_A_CHUNK] for start in range(0, len(files), _FILES_A_CHUNK)]
    documents: list[Docstring] = []
    failed = 0
    with bars() as report:
        for number, (docs, unreadable) in enumerate(ordered_map(_read_files, chunks), start=1):
            documents += docs
            failed += unreadable
            read = min(number * _FILES_A_CHUNK, len(files))
            report("reading the installed packages' documentation", read, len(files), "files")
    # Keep the first of copies that differ in white space only.
    kept = distinct(documents, key=lambda doc: " ".join(doc.text.split()))
    if not kept:
        raise UserError(f"there is no docstring under {', '.join(map(str, roots))}: a corpus needs text.")
    owners = _owners(roots)
    splits = split_groups(_groups(kept, owners))
    rows = [(doc, splits[owners.get(doc.package, doc.package)]) for doc in kept]
    copies = are_copies([(split, doc.text) for doc, split in rows])
    rows = [row for row, copied in zip(rows, copies, strict=True) if not copied]
    columns = {name: [getattr(doc, name) for doc, _ in rows] for name in Docstring._fields}
    table = pyarrow.table({**columns, "split": [split for _, split in rows]})
    # A row group is the unit that `pydocs.tasks` parses in one worker.
    pyarrow.parquet.write_table(table, folder / _DOCUMENTS, compression="zstd", row_group_size=8192)
    facts: dict[str, Any] = {"files": len(files), "unparsable_files": failed, "found": len(documents)}
    facts |= {"distinct": len(kept), "copies_of_training_text": sum(copies)}
    for split in ("train", "validation", "test"):
        texts = [doc for doc, assigned in rows if assigned == split]
        facts[split] = {
            "documents": len(texts),
            "characters": sum(len(doc.text) for doc in texts),
            "packages": sorted({doc.package for doc in texts}),
        }
    write_json(folder / "meta.json", facts)


def _owners(roots: Sequence[Path]) -> dict[str, str]:
    """Map each top-level package to the distribution that installed it, so that `attr` and `attrs` stay together."""
    owners: dict[str, str] = {}
    for root in roots:
        for record in sorted(root.glob("*.dist-info/RECORD")):
            distribution = record.parent.name.partition("-")[0].lower()
            # A line of RECORD is: path,hash,size.
            for line in record.read_text(encoding="utf-8", errors="replace").splitlines():
                path = line.partition(",")[0]
                if path.endswith(".py"):
                    owners.setdefault(path.partition("/")[0].removesuffix(".py"), distribution)
    return owners


def _groups(docs: list[Docstring], owners: dict[str, str]) -> list[PackageGroup]:
    """Return the size and prevailing docstring style of each distribution (or single module)."""
    sizes = Counter[str]()
    styles = defaultdict[str, Counter[Style]](Counter)
    for doc in docs:
        name = owners.get(doc.package, doc.package)
        sizes[name] += len(doc.text)
        # A plain docstring shows no convention, so it has no weight.
        styles[name][doc.style] += (doc.style != "plain") * len(doc.text)
    return [
        PackageGroup(name, size, max(sorted(styles[name]), key=styles[name].__getitem__), name == "pydoc_data")
        for name, size in sizes.items()
    ]

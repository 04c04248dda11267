"""The user's own modules: which they are, where their sources are, and how a process imports those of another one."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import re
import sys
import tokenize
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

MAIN = ("__main__", "__mp_main__")
"""Names of the module of a notebook or script."""
_read: dict[str, tuple[Any, str]] = {}
"""The text of each loaded module as it was first read, with the module's specification, which a reload replaces."""


class SourceFile(NamedTuple):
    """The source of an own module."""

    path: str
    is_package: bool
    text: str


def is_own(module: str) -> bool:
    """Return whether a module is the user's own: `__main__`, or one with a file outside the folders of packages."""
    root = module.partition(".")[0]
    if root in MAIN:
        return True
    if root in ("", "mlmclm") or root in sys.stdlib_module_names:
        return False
    spec = find_source(root)
    if spec is not None and not spec.has_location:  # a folder without __init__.py, which several packages may share
        spec = find_source(module)
    places = [] if spec is None else [spec.origin] if spec.has_location else [*(spec.submodule_search_locations or ())]
    return any(place and not {"site-packages", "dist-packages"} & {*Path(place).parts} for place in places)


def find_source(module: str) -> importlib.machinery.ModuleSpec | None:
    """Return where a module is, without importing the packages that it is in."""
    if module in MAIN:
        return None
    loaded = getattr(sys.modules.get(module), "__spec__", None)
    if isinstance(loaded, importlib.machinery.ModuleSpec):
        return loaded
    parent, places = module.rpartition(".")[0], None
    if parent:
        above = find_source(parent)
        places = None if above is None else above.submodule_search_locations
        if places is None:
            return None
    finders = (find for finder in sys.meta_path if (find := getattr(finder, "find_spec", None)) is not None)
    return next((spec for find in finders if (spec := find(module, places)) is not None), None) if module else None


def last_change(path: str) -> float:
    """Return the time at which a file was last changed; 0 if there is none."""
    with suppress(OSError):
        return Path(path).stat().st_mtime
    return 0.0


def read_source(module: str, spec: importlib.machinery.ModuleSpec) -> str:
    """Return the source of a module.

    Raises:
        ValueError: it has none, it cannot be read, or it isn't what it was when the module was loaded.
    """
    origin = str(spec.origin)
    if not origin.endswith(".py"):
        raise ValueError(
            f"the module {module} ({origin}) has no source in Python: install it as a package, whose version is its key"
        )
    try:
        with tokenize.open(origin) as file:
            text = file.read()
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise ValueError(f"the source of the module {module} ({origin}) cannot be read: {error}") from error
    if module in sys.modules:
        first, known = _read.setdefault(module, (spec, text))
        if first is not spec:
            _read[module] = spec, text
        elif known != text:
            raise ValueError(
                f"{origin} has changed since it was loaded: load it again (importlib.reload), or start Python anew"
            )
    return text


@cache
def distribution_of(package: str) -> importlib.metadata.Distribution | None:
    """Return the installed distribution that a top-level package is from; None if there is none."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.distribution(package)
    names = importlib.metadata.packages_distributions().get(package)
    return importlib.metadata.distribution(names[0]) if names else None


@cache
def version_of(package: str) -> str:
    """Return a package's distribution and version; empty for Python's own, and for those that built-in members stand on."""
    found = None if package in (*sys.stdlib_module_names, *MAIN) else distribution_of(package)
    return "" if found is None or _canonical(found.name) in _required() else f"{found.name} {found.version}"


@cache
def _required() -> set[str]:
    """Return the distributions that this package requires, and itself: its versions say when results change with them."""
    needs = importlib.metadata.requires("mlmclm") or []
    return {_canonical(re.split(r"[^\w.-]", each)[0]) for each in ("mlmclm", *needs) if "extra ==" not in each}


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def serve(modules: Mapping[str, SourceFile]) -> None:
    """Let this process import modules from these sources, whatever its own files are, and forget others of their names."""
    for name, own in modules.items():
        if _Served.sources.get(name, own) != own:
            sys.modules.pop(name, None)
    _Served.sources.update(modules)
    if not any(isinstance(finder, _Served) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Served())


class _Served(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):  # type: ignore[misc]  # typeshed's own clash
    """A finder and loader of modules whose sources another process has sent."""

    sources: ClassVar[dict[str, SourceFile]] = {}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        own = self.sources.get(fullname)
        if own is None:
            return None
        places = [str(Path(own.path).parent)] if own.is_package else None
        return importlib.util.spec_from_file_location(
            fullname, own.path, loader=self, submodule_search_locations=places
        )

    def get_filename(self, fullname: str) -> str:
        return self.sources[fullname].path

    def get_data(self, path: str | bytes) -> bytes:
        return next(own.text for own in self.sources.values() if own.path == path).encode()

"""The user's own modules: which they are, where their sources are, and how a process imports those of another one."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import re
import sys
import sysconfig
import tokenize
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

MAIN = ("__main__", "__mp_main__")
"""Names of the module of a notebook or script."""
_PYTHON = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}


class SourceFile(NamedTuple):
    """The source of an own module."""

    path: str
    is_package: bool
    text: str


def is_own(module: str) -> bool:
    """Return whether a module is the user's own: `__main__`, or one with a file outside the folders of packages and of Python."""
    root = module.partition(".")[0]
    if root in MAIN:
        return True
    spec = find_source(root) if root not in ("", "mlmclm") else None
    if spec is not None and not spec.has_location:  # a folder without __init__.py, which several packages may share
        spec = find_source(module)
    places = [] if spec is None else [spec.origin] if spec.has_location else [*(spec.submodule_search_locations or ())]
    return any(place and is_own_file(place) for place in places)


@cache
def is_own_file(path: str) -> bool:
    """Return whether a file is in no folder of packages, nor in Python's own."""
    folders = Path(path).parents
    return Path(path).is_absolute() and not (
        {"site-packages", "dist-packages"} & {each.name for each in folders} or _PYTHON & {*folders}
    )


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


def read_source(module: str, spec: importlib.machinery.ModuleSpec) -> str:
    """Return the source of a module, whether it is in a folder or in a zip file.

    Raises:
        ValueError: it has none, or it cannot be read.
    """
    try:
        get_source = getattr(spec.loader, "get_source", None)
        if get_source is not None:
            text = get_source(spec.name)
        else:
            with tokenize.open(str(spec.origin)) as file:
                text = file.read()
    except (OSError, ImportError, SyntaxError, UnicodeDecodeError) as error:
        raise ValueError(f"the source of the module {module} ({spec.origin}) cannot be read: {error}") from error
    if text is None:
        raise ValueError(
            f"the module {module} ({spec.origin}) has no source in Python: install it as a package, whose version is its key"
        )
    return str(text)


@cache
def distribution_of(package: str) -> importlib.metadata.Distribution | None:
    """Return the installed distribution that a top-level package is from; None if there is none."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.distribution(package)
    names = importlib.metadata.packages_distributions().get(package)
    return importlib.metadata.distribution(min(names)) if names else None


@cache
def version_of(package: str) -> str:
    """Return a package's distribution and version; empty for Python's own, and for those that built-in members stand on."""
    found = None if package in ("", *sys.stdlib_module_names, *MAIN) else distribution_of(package)
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


class _Served(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
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

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> Any:  # type: ignore[override]
        # A text's own declaration of an encoding no longer holds.
        return compile(data.decode(), path, "exec", dont_inherit=True, optimize=_optimize)

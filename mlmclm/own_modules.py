"""The user's own modules: which modules these are, the sources that this process loads, and how other processes get these sources."""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import re
import sys
import sysconfig
import tokenize
import types
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

MAIN = ("__main__", "__mp_main__")
"""Names of the module of a notebook or script."""
_PYTHON = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
_LARGEST_COPIED = 1000


class SourceFile(NamedTuple):
    """The source of one of the user's modules."""

    path: str
    text: str
    is_package: bool


def is_own(module: str) -> bool:
    """Return whether a module is the user's own: `__main__`, or one with a file outside the folders of packages and of Python."""
    root = module.partition(".")[0]
    if root in MAIN or module in _TEXTS.received:
        return True
    spec = find_source(root) if root not in ("", "mlmclm") else None
    if spec is not None and not spec.has_location:  # a folder without __init__.py, which several packages may share
        spec = find_source(module)
    places = [] if spec is None else [spec.origin] if spec.has_location else [*(spec.submodule_search_locations or ())]
    return any(place and _is_own_file(place) for place in places)


def _is_own_file(path: str) -> bool:
    return _is_own_folder(path.rpartition(os.sep)[0])


@cache
def _is_own_folder(path: str) -> bool:
    folders = {Path(path), *Path(path).parents}
    packages = {"site-packages", "dist-packages"} & {folder.name for folder in folders}
    return Path(path).is_absolute() and not packages and not _PYTHON & folders


def find_source(module: str) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of a module, without importing the packages that it is in."""
    if module in ("", *MAIN):
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
    return _TEXTS.find_spec(module) if module in _TEXTS.received else _search(module, places)


def _search(module: str, places: Any) -> importlib.machinery.ModuleSpec | None:
    finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path if finder is not _TEXTS)
    return next((spec for find in finders if find is not None and (spec := find(module, places)) is not None), None)


def read_source(module: str, spec: importlib.machinery.ModuleSpec | None = None) -> SourceFile:
    """Return the source of a module as its file has it now, in a folder or in a zip file.

    Args:
        spec: the module's spec; by default `find_source` finds it.

    Raises:
        ValueError: the module has no source, or the source cannot be read.
    """
    spec = spec or find_source(module)
    assert spec is not None, module
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
    return SourceFile(str(spec.origin), str(text), spec.submodule_search_locations is not None)


def module_source(module: str, *, anew: bool = False) -> SourceFile:
    """Return the source that a module was loaded from, or from which this process will load it.

    Args:
        anew: whether to read again the file of a module that isn't loaded yet, so that an edit counts.

    Raises:
        ValueError: the module has no source, or the source cannot be read.
    """
    files = _TEXTS.loaded if module in sys.modules else _TEXTS.fixed
    if module not in files or (anew and files is _TEXTS.fixed):
        files[module] = read_source(module)
    return files[module]


def live_values(module: str) -> dict[str, Any]:
    """Return the values of a loaded module's names, and those of attributes of its classes and functions as NAME.ATTRIBUTE."""
    values = {name: value for name, value in vars(sys.modules[module]).items() if not name.startswith("__")}
    for name, value in [*values.items()]:
        if isinstance(value, types.FunctionType):
            values[f"{name}.__code__"] = value.__code__
        elif isinstance(value, type) and value.__module__ == module:
            for attribute, part in vars(value).items():
                if not attribute.startswith("__") or isinstance(part, types.FunctionType):
                    values[f"{name}.{attribute}"] = part
    return values


def loaded_values(module: str) -> dict[str, Any]:
    """Return `live_values` as of the end of the module's loading, or as of the first call if another loader has loaded it."""
    if module not in _TEXTS.values:
        _TEXTS.values[module] = {name: _copied(value) for name, value in live_values(module).items()}
    return _TEXTS.values[module]


def _copied(value: Any) -> Any:
    """Return a copy of a value if it is a small list, dict or set of numbers and strings, else the value itself."""
    if type(value) in (list, dict, set) and len(value) <= _LARGEST_COPIED:
        with suppress(Exception):  # whatever the `repr` of what is in it raises
            return ast.literal_eval(repr(value))
    return value


def receive(modules: Mapping[str, SourceFile]) -> None:
    """Make this process import modules from these sources rather than from files; a module that another source gave is unloaded."""
    for name, source in modules.items():
        if _TEXTS.fixed.get(name, source) != source:
            sys.modules.pop(name, None)
    _TEXTS.fixed.update(modules)
    _TEXTS.received |= {
        ".".join(parts[:n]) for parts in (module.split(".") for module in modules) for n in range(1, len(parts) + 1)
    }


class _Texts(importlib.abc.MetaPathFinder):
    """A finder that keeps the sources of the user's modules: `loaded` for loaded modules, `fixed` for those that are loaded later.

    A source is fixed when a key is made of it, or when another process has sent it. `importlib.reload` reads the file.
    """

    def __init__(self) -> None:
        self.loaded: dict[str, SourceFile] = {}
        self.fixed: dict[str, SourceFile] = {}
        self.received: set[str] = set()
        self.values: dict[str, dict[str, Any]] = {}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if target is None and fullname in self.fixed:
            source = self.loaded[fullname] = self.fixed[fullname]
            places = [str(Path(source.path).parent)] if source.is_package else None
            loader = _OwnLoader(fullname, source.path)
            return importlib.util.spec_from_file_location(
                fullname, source.path, loader=loader, submodule_search_locations=places
            )
        spec = _search(fullname, path)
        if spec is None and fullname in self.received:
            return importlib.machinery.ModuleSpec(fullname, None, is_package=True)  # a folder without __init__.py
        if spec is not None and spec.has_location and _is_own_file(str(spec.origin)) and fullname[:7] != "mlmclm.":
            self.fixed.pop(fullname, None)
            with suppress(ValueError):  # raised again if a key needs the source
                self.loaded[fullname] = read_source(fullname, spec)
                if type(spec.loader) is importlib.machinery.SourceFileLoader:
                    spec.loader = _OwnLoader(fullname, str(spec.origin))
        return spec


class _OwnLoader(importlib.machinery.SourceFileLoader):
    """A loader that runs the source that keys contain: Python's cached bytecode can be from an older source of the same size and time."""

    def get_data(self, path: str) -> bytes:
        source = _TEXTS.fixed.get(self.name)
        return super().get_data(path) if source is None or source.path != path else source.text.encode()

    def exec_module(self, module: types.ModuleType) -> None:
        _TEXTS.values.pop(module.__name__, None)
        super().exec_module(module)
        loaded_values(module.__name__)

    def get_code(self, fullname: str) -> types.CodeType:
        return compile(_TEXTS.loaded[fullname].text, self.path, "exec", dont_inherit=True)


_TEXTS = _Texts()
sys.meta_path.insert(0, _TEXTS)


@cache
def distribution_of(package: str) -> importlib.metadata.Distribution | None:
    """Return the installed distribution that a top-level package is from; None if there is none."""
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.distribution(package)
    names = importlib.metadata.packages_distributions().get(package)
    return importlib.metadata.distribution(min(names)) if names else None


@cache
def version_of(package: str) -> str:
    """Return a package's distribution and version; empty for the standard library, and for packages that mlmclm requires."""
    dist = None if package in ("", *sys.stdlib_module_names, *MAIN) else distribution_of(package)
    return "" if dist is None or _canonical(dist.name) in _required() else f"{dist.name} {dist.version}"


@cache
def _required() -> set[str]:
    """Return mlmclm's distribution and those that it requires; if a change of these changes results, `mlmclm.versions` changes."""
    needs = importlib.metadata.requires("mlmclm") or []
    return {_canonical(re.split(r"[^\w.-]", need)[0]) for need in ("mlmclm", *needs) if "extra ==" not in need}


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()

"""The code of a class or function, as far as it is the user's own: a hash for keys, and the modules that it is in.

Own code is that of a notebook, of a script, or of modules that are not installed. A hash follows the names that it uses
into other own functions, classes and values, so that a changed helper gives another hash.
"""

from __future__ import annotations

import ast
import dis
import functools
import hashlib
import importlib.util
import inspect
import linecache
import pickle
import sys
import textwrap
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

_PLAIN = (int, float, complex, str, bytes, bool, type(None), type(...))
_CONTAINERS = (tuple, list, dict, set, frozenset)
_WRAPPERS = (staticmethod, classmethod, property, functools.cached_property, functools.partial, MethodType)
_WRAPPED = ("__wrapped__", "__func__", "__self__", "fget", "fset", "func", "args", "keywords")


def is_own(module: str) -> bool:
    """Return whether a module is the user's own: `__main__`, or one with a file outside the folders of packages."""
    root = module.partition(".")[0]
    if root == "__main__":
        return True
    if root in ("", "mlmclm") or root in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None and root not in sys.modules:
        spec = importlib.util.find_spec(root)
        file = None if spec is None else spec.origin
    return file is not None and not {"site-packages", "dist-packages"} & set(Path(file).parts)


def code_hash(value: Any) -> str:
    """Return a hash (16 hex digits) that changes with the code of a class or function.

    Raises:
        ValueError: a part of its source cannot be read, or it uses a value of which no key can be made.
    """
    walk = _Walk()
    walk.visit(value)
    return hashlib.sha256("\0".join(walk.parts).encode()).hexdigest()[:16]


def own_modules(value: Any) -> set[str]:
    """Return the names of the own modules that the code of a class or function is in, as far as it can be read."""
    walk = _Walk()
    with suppress(ValueError):
        walk.visit(value)
    return walk.modules


class _Walk:
    """A walk over the code and the values that a class or function depends on, in an order that is always the same."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.modules: set[str] = set()
        self._seen: set[int] = set()
        self._kept: list[Any] = []

    def visit(self, value: Any, inside: str = "") -> None:
        """Add a value; a function whose name begins with `inside` is part of that class's source."""
        if type(value) in _PLAIN:
            self.parts.append(repr(value))
            return
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._kept.append(value)  # or another object could get its id
        if type(value) in _CONTAINERS:
            self.parts.append(type(value).__name__)
            items: Iterable[Any] = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
            for item in value.items() if isinstance(value, dict) else items:
                self.visit(item)
        elif isinstance(value, ModuleType):
            self._module(value)
        elif isinstance(value, type | FunctionType | BuiltinFunctionType):
            self._code(value, inside)
        elif isinstance(value, _WRAPPERS) or hasattr(value, "__wrapped__"):
            for name in _WRAPPED:
                self.visit(getattr(value, name, None), inside)
        else:
            self._object(value)

    def _module(self, module: ModuleType) -> None:
        if is_own(module.__name__):
            self.modules.add(module.__name__)
            try:
                self.parts.append(hashlib.sha256(Path(getattr(module, "__file__", "")).read_bytes()).hexdigest())
            except OSError as error:
                raise ValueError(f"the module {module.__name__} cannot be read") from error
            for _, value in sorted(vars(module).items()):
                name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or ""
                if isinstance(name, str) and is_own(name) and name in sys.modules:
                    self.visit(sys.modules[name])
        else:
            self.parts.append(module.__name__)

    def _code(self, value: Any, inside: str) -> None:
        module = value.__module__ or ""
        if not is_own(module):
            self.parts.append(f"{module}.{value.__qualname__}")
            return
        self.modules.add(module)
        if isinstance(value, type):
            self.parts.append(_source(value))
            for base in value.__mro__[1:]:
                self.visit(base)
            for name, part in sorted(vars(value).items()):
                # Other special names are what Python and `dataclass` keep there.
                if name != "_abc_impl" and (not name.startswith("__") or isinstance(part, FunctionType)):
                    self.visit(part, value.__qualname__)
        # `dataclass` makes functions without a file, from what the class's source says.
        elif value.__code__.co_filename != "<string>":
            if not inside or not value.__qualname__.startswith(f"{inside}."):
                self.parts.append(_source(value))
            closure = [cell.cell_contents for cell in value.__closure__ or () if not _is_empty(cell)]
            for each in (*closure, value.__defaults__, value.__kwdefaults__):
                self.visit(each)
            for name, imported in _names(value.__code__):
                if imported and is_own(name):
                    self.visit(importlib.import_module(name))
                elif name in value.__globals__:
                    self.visit(value.__globals__[name])

    def _object(self, value: Any) -> None:
        self.visit(type(value))
        if is_own(type(value).__module__):
            self.visit(getattr(value, "__dict__", None))
        try:
            self.parts.append(hashlib.sha256(pickle.dumps(value, protocol=4)).hexdigest())
        except Exception as error:  # whatever the object raises
            raise ValueError(f"it uses a {type(value).__qualname__} ({error}), of which no key can be made") from error


def _is_empty(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def _names(code: CodeType) -> list[tuple[str, bool]]:
    """Return the names that a function's code and the functions inside it look up, and whether they import them."""
    inner = [found for each in code.co_consts if isinstance(each, CodeType) for found in _names(each)]
    imported = {each.argval for each in dis.get_instructions(code) if each.opname == "IMPORT_NAME"}
    return sorted({*((name, name in imported) for name in code.co_names), *inner})


@lru_cache(maxsize=1024)
def _source(value: Any) -> str:
    """Return the source of a class or function; a ValueError if it cannot be read."""
    try:
        return textwrap.dedent(inspect.getsource(value))
    except (OSError, TypeError):
        pass
    # Python finds no class of a notebook, which has no file. Its methods know their cell; without any, it is the last one
    # that has a class of this name.
    if isinstance(value, type):
        codes = [getattr(getattr(part, "__func__", part), "__code__", None) for part in vars(value).values()]
        own = [code.co_filename for code in codes if isinstance(code, CodeType)]
        for name in own or [name for name in reversed(linecache.cache) if not Path(name).exists()]:
            text = "".join(linecache.getlines(name))
            with suppress(SyntaxError):
                for node in ast.walk(ast.parse(text)):
                    if isinstance(node, ast.ClassDef) and node.name == value.__name__:
                        return ast.get_source_segment(text, node) or ""
    raise ValueError(f"the source of {value.__qualname__} cannot be read")

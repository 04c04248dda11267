"""A comparison of own modules as this process has loaded them with their sources, of which keys are made."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import marshal
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from mlmclm.member_source import Source, absolute, dotted
from mlmclm.own_modules import is_own, is_own_file

PLAIN = (int, float, complex, str, bytes, bool, type(None), type(...))
_CONTAINERS = (list, tuple, dict, set, frozenset)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_BINDERS = (*_DEFINITIONS, ast.Assign, ast.AnnAssign, ast.Import, ast.ImportFrom)
_LITERAL = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.Load)  # fmt: skip
_CHANGE = {
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "reverse",
    "setdefault", "sort", "update",
}  # fmt: skip


def is_plain(value: Any) -> bool:
    """Return whether a value is a number or text, or a tuple of these."""
    return all(type(each) in PLAIN for each in (value if type(value) is tuple else (value,)))


def _same(one: Any, other: Any) -> bool:
    """Return whether two values are alike: numbers, texts, and containers of these."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return _same([*one], [*other]) and _same([*one.values()], [*other.values()])
    return bool(one == other) if isinstance(one, set | frozenset) else type(one) in PLAIN and repr(one) == repr(other)


@lru_cache(maxsize=4096)
def fingerprint(code: CodeType) -> tuple[Any, ...]:
    """Return what a piece of compiled code does, without its place."""
    constants = [
        fingerprint(each) if isinstance(each, CodeType) else (type(each), sorted(map(repr, each)) if isinstance(each, frozenset) else repr(each))
        for each in code.co_consts
    ]  # fmt: skip
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    names = code.co_name, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return (*counts, *names, code.co_code, code.co_exceptiontable, constants)


@lru_cache(maxsize=1024)
def compiled(source: Source) -> dict[str, list[tuple[Any, ...]]]:
    """Return the fingerprints of a source's pieces of code by qualified name, in the order of the text."""
    found: dict[str, list[tuple[Any, ...]]] = {}
    left = [compile(source.text, source.path, "exec", dont_inherit=True)]
    while left:
        code = left.pop()
        found.setdefault(code.co_qualname, []).append(fingerprint(code))
        left += reversed([each for each in code.co_consts if isinstance(each, CodeType)])
    return found


def is_hooked(module: str) -> bool:
    """Return whether a module was loaded by other means than Python's own, such as pytest's, which compile another text."""
    kind = type(getattr(getattr(sys.modules.get(module), "__spec__", None), "loader", None))
    return kind.__module__.partition(".")[0] not in ("importlib", "_frozen_importlib_external", "zipimport", "mlmclm")


@lru_cache(maxsize=1024)
def changed_names(source: Source) -> frozenset[str]:
    """Return the names whose values a source's code changes when it runs, such as those of counters and caches."""
    found = set[str]()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global):
            found |= {*node.names}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGE:
            found |= {*_changed(node.func.value, inside=True)}
        elif isinstance(node, ast.Call) and dotted(node.func) in (("setattr",), ("delattr",)):
            found |= {str(each.value) for each in node.args if isinstance(each, ast.Constant)}
        elif isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            found |= {*_changed(node, inside=isinstance(node, ast.Subscript))}
    return frozenset(found)


def _changed(node: ast.AST, *, inside: bool) -> Iterator[str]:
    """Yield the name of what changes: `a` of `a[0]`, `b` of `a.b`. A new value of `self.b` isn't the class's."""
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Attribute) and (inside or dotted(node.value) != ("self",)):
        yield node.attr
    elif isinstance(node, ast.Name):
        yield node.id


class LiveCheck:
    """A check that the modules which this process has loaded are those of their sources.

    Args:
        modules: the sources by module.
        keyed: classes whose numbers and texts are themselves in the key.
    """

    def __init__(self, modules: Mapping[str, Source], keyed: Collection[type]) -> None:
        self.changing = {name for source in modules.values() for name in changed_names(source)}
        self._modules, self._keyed = modules, keyed
        self._literals: dict[ast.AST, Any] = {}

    def check(self, module: str, *, first: bool) -> None:
        """Check a module.

        Args:
            first: whether it is the first time since it was loaded: then the compiled code that Python has kept is read too.

        Raises:
            ValueError: it was loaded from another text, or other code has changed it.
        """
        live, source = sys.modules.get(module), self._modules[module]
        if live is not None and not is_hooked(module):
            if first and not _is_compiled_from(live, source):
                raise self._old(module)
            self._names(module, source.tree.body, vars(live), "", None)

    def _old(self, module: str) -> ValueError:
        return ValueError(
            f"{self._modules[module].path} has changed since it was loaded: load it again (importlib.reload), or start Python anew"
        )

    def _names(
        self, module: str, body: Sequence[ast.stmt], live: Mapping[str, Any], prefix: str, owner: type | None
    ) -> None:
        """Check the names of a module, or of a class in it, whose values its own code does not change."""
        starts = getattr(getattr(sys.modules[module], "__spec__", None), "_initializing", False)
        for name, value in [*live.items()]:
            if name not in self.changing:
                self._code(module, f"{prefix}{name}", value)
        for name, node in _bound_once(body, lambda node: _public_names(self._home(module, node))).items():
            if name in self.changing:
                continue
            private = owner is not None and name.startswith("__") and not name.endswith("__")
            place = f"_{owner.__name__.lstrip('_')}{name}" if owner is not None and private else name
            if place not in live:
                if owner is None and not starts:
                    raise self._old(module)
            elif isinstance(node, _DEFINITIONS):
                self._definition(module, node, live[place], f"{prefix}{name}", owner)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                self._literal(f"{prefix}{name} of {module}", node, live[place], owner)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                self._import(module, node, name, live[place])

    def _home(self, module: str, node: ast.ImportFrom) -> str:
        return absolute("." * node.level + (node.module or ""), self._modules[module].inner)

    def _code(self, module: str, name: str, value: Any) -> None:
        """Check a function against the source of the module that it is from, wherever it is found."""
        function = function_of(value)
        if function is None:
            return
        home, code = str(function.__globals__.get("__name__", "")), function.__code__
        if home in self._modules and (is_hooked(home) or not is_own_file(code.co_filename)):
            return  # made by `dataclass` or the like
        if home in self._modules and code.co_filename == self._modules[home].path:
            if fingerprint(code) not in compiled(self._modules[home]).get(code.co_qualname, ()):
                raise self._old(home)
        elif is_own(home):
            raise _replaced(f"{name} of {module}")

    def _definition(self, module: str, node: ast.stmt, value: Any, name: str, owner: type | None) -> None:
        if (
            isinstance(node, ast.ClassDef)
            and isinstance(value, type)
            and (value.__module__, value.__qualname__) == (module, name)
        ):
            self._names(module, node.body, vars(value), f"{name}.", value)
        elif not node.decorator_list:  # type: ignore[attr-defined]
            function = function_of(value)
            place = (
                ("", "") if function is None else (function.__globals__.get("__name__"), function.__code__.co_qualname)
            )
            # A base class may wrap the methods of those derived from it.
            wrapped = owner is not None and ("<locals>" in place[1] or not is_own(str(place[0])))
            if isinstance(node, ast.ClassDef) or function is None or (place != (module, name) and not wrapped):
                raise _replaced(f"{name} of {module}")

    def _literal(self, name: str, node: ast.Assign | ast.AnnAssign, value: Any, owner: type | None) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if not all(isinstance(each, _LITERAL) for each in ast.walk(node.value or node)) or not isinstance(
            targets[0], ast.Name
        ):
            return
        if node not in self._literals:
            self._literals[node] = value
            with suppress(Exception):  # whatever computing it raises
                self._literals[node] = eval(ast.unparse(node.value), {"__builtins__": {}})
        # `dataclass`, `Enum` and the like make something else of a class's values.
        kept = owner is None or (
            type(value) in (*PLAIN, *_CONTAINERS) and not (owner in self._keyed and is_plain(value))
        )
        if kept and not _same(wanted := self._literals[node], value):
            raise ValueError(
                f"{name} is {value!r} here, and {wanted!r} in its source, of which the key is made: write it there, "
                "or let a function make the member from it"
            )

    def _import(self, module: str, node: ast.Import | ast.ImportFrom, name: str, value: Any) -> None:
        each = next(
            each for each in node.names if name in (each.asname or each.name.partition(".")[0], "*") or each.name == "*"
        )
        if isinstance(node, ast.Import):
            home = original = each.name if each.asname else name
            wanted = sys.modules.get(home, value)
        else:
            home, original = self._home(module, node), name if each.name == "*" else each.name
            wanted = vars(sys.modules.get(home, ast)).get(original, sys.modules.get(f"{home}.{original}", value))
        if value is wanted or _same(wanted, value) or original in self.changing:
            return
        # Libraries may change their own names. Functions are compared by their code.
        if home not in self._modules:
            wrong = is_plain(value) or (isinstance(wanted, ModuleType) and not isinstance(value, ModuleType))
        else:
            wrong = function_of(value) is None or function_of(wanted) is None
        if wrong:
            raise _replaced(f"{name} of {module}")


def _public_names(module: str) -> list[str]:
    """Return the names that a star import takes from a module that is loaded; none of others."""
    names = vars(sys.modules[module]) if module in sys.modules else {}
    return [*names.get("__all__", (name for name in names if not name.startswith("_")))]


def _replaced(name: str) -> ValueError:
    return ValueError(
        f"{name} isn't what its source says, of which the key is made: other code has replaced it, or only a part was loaded again. "
        "Write it in the source, or start Python anew"
    )


def function_of(value: Any, stop: Callable[[Any], bool] | None = None) -> FunctionType | None:
    """Return the function in a method, a property or the wrappers of a decorator, up to one at which to stop."""
    if isinstance(value, property | staticmethod | classmethod | MethodType):
        value = value.fget if isinstance(value, property) else value.__func__
    found = inspect.unwrap(value, stop=stop) if callable(value) and not isinstance(value, type) else None
    return found if isinstance(found, FunctionType) else None


def _is_compiled_from(live: ModuleType, source: Source) -> bool:
    """Return whether the compiled code that Python has kept is this source's, as far as loading it has written any."""
    spec = live.__spec__
    cached = str(getattr(spec, "cached", None))
    if not sys.dont_write_bytecode and type(getattr(spec, "loader", None)) is SourceFileLoader:
        with suppress(OSError, ValueError, EOFError, TypeError):
            data = Path(cached).read_bytes()
            if data[:4] == importlib.util.MAGIC_NUMBER and os.access(cached, os.W_OK):
                return fingerprint(marshal.loads(data[16:])) in compiled(source)["<module>"]
    return True


def _bound_once(body: Sequence[ast.stmt], starred: Callable[[ast.ImportFrom], Collection[str]]) -> dict[str, ast.stmt]:
    """Return the names of a module or class that one of its statements binds, under no condition and only once, with that statement."""
    counts, found = Counter[str](), dict[str, ast.stmt]()
    for statement in body:
        left: list[ast.AST] = [statement]
        while left:
            node, names = left.pop(), list[str]()
            if isinstance(node, ast.alias):
                star = starred(statement) if node.name == "*" and isinstance(statement, ast.ImportFrom) else ()
                name = node.asname or node.name.partition(".")[0]
                again = node.asname is None and isinstance(statement, ast.Import) and isinstance(found.get(name), ast.Import)
                names = [*star] if node.name == "*" else [] if again else [name]  # `import a.b` and `import a.c` bind one `a`
            elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                names = [node.id]
            elif isinstance(
                name := getattr(node, "name", None), str
            ):  # a definition, the error of a handler, a pattern
                names = [name]
            counts.update(names)
            found |= dict.fromkeys(names, statement)
            left += () if isinstance(node, (*_DEFINITIONS, ast.Lambda)) else ast.iter_child_nodes(node)
    return {name: node for name, node in found.items() if counts[name] == 1 and isinstance(node, _BINDERS)}

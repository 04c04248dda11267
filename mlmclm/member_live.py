"""A comparison of own modules as this process has loaded them with their sources, of which keys are made."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import marshal
import math
import os
import sys
from abc import ABCMeta
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib.machinery import SourceFileLoader
from itertools import islice
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from mlmclm.member_source import ModuleSource, absolute, dotted
from mlmclm.own_modules import is_own, is_own_file

PLAIN = (int, float, complex, str, bytes, bool, type(None), type(...))
_CONTAINERS = (list, tuple, dict, set, frozenset)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_BINDERS = (*_DEFINITIONS, ast.Assign, ast.AnnAssign, ast.Import, ast.ImportFrom)
_LITERAL = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.Load)  # fmt: skip
_MISSING = object()
_CHANGE = {
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "reverse",
    "setdefault", "sort", "update",
}  # fmt: skip


def is_plain(value: Any) -> bool:
    """Return whether a value is a number or text, or a tuple of these."""
    return all(type(each) in PLAIN for each in (value if type(value) is tuple else (value,)))


def _same(one: Any, other: Any) -> bool:
    """Return whether two values are alike: numbers, texts, and containers of these."""
    if type(one) is not type(other) or type(one) not in (*PLAIN, *_CONTAINERS):
        return False
    return bool(one == other) if isinstance(one, set | frozenset) else repr(one) == repr(other)


@lru_cache(maxsize=4096)
def fingerprint(code: CodeType) -> tuple[Any, ...]:
    """Return what a piece of compiled code does, without its place."""
    constants = [
        fingerprint(each) if isinstance(each, CodeType) else (type(each), sorted(map(repr, each)) if isinstance(each, frozenset) else repr(each))
        for each in code.co_consts
    ]  # fmt: skip
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & 0xFFFF
    names = code.co_name, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return (*counts, *names, code.co_code, code.co_exceptiontable, constants)


@lru_cache(maxsize=1024)
def compiled(source: ModuleSource) -> dict[str, list[tuple[int, tuple[Any, ...]]]]:
    """Return the first lines and fingerprints of a source's pieces of code by qualified name, in the order of the text."""
    found: dict[str, list[tuple[int, tuple[Any, ...]]]] = {}
    # A notebook's cell may wait at its top level.
    left = [compile(source.text, source.path, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)]
    while left:
        code = left.pop()
        found.setdefault(code.co_qualname, []).append((code.co_firstlineno, fingerprint(code)))
        left += reversed([each for each in code.co_consts if isinstance(each, CodeType)])
    return found


def order_of(code: CodeType, source: ModuleSource, first: int = 0, last: float = math.inf) -> int | None:
    """Return which of the pieces of its name a piece of code is, in some lines of a source; None if it is none of them."""
    found = [known for line, known in compiled(source).get(code.co_qualname, ()) if first <= line <= last]
    return found.index(fingerprint(code)) if fingerprint(code) in found else None


def is_hooked(module: str) -> bool:
    """Return whether a module was loaded by other means than Python's own, such as pytest's, which compile another text."""
    kind = type(getattr(getattr(sys.modules.get(module), "__spec__", None), "loader", None))
    return kind.__module__.partition(".")[0] not in ("importlib", "_frozen_importlib_external", "zipimport", "mlmclm")


@lru_cache(maxsize=1024)
def changed_names(source: ModuleSource) -> frozenset[str]:
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

    def __init__(self, modules: Mapping[str, ModuleSource], keyed: Collection[type]) -> None:
        self.changing = {name for source in modules.values() for name in changed_names(source)}
        self._modules, self._keyed = modules, keyed
        self._literals: dict[ast.AST, Any] = {}
        self._bound: dict[int, dict[str, ast.stmt]] = {}

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
        path = self._modules[module].path
        return ValueError(
            f"{path} has changed since it was loaded: load it and what imports it again (importlib.reload), or start Python anew"
        )

    def _names(self, module: str, body: Sequence[ast.stmt], live: Mapping[str, Any], prefix: str, owner: Any) -> None:
        """Check the names of a module, or of a class in it."""
        for name, value in [*live.items()]:
            if name == "__builtins__":
                continue
            parts = value.values() if type(value) is dict else value if type(value) in _CONTAINERS else (value,)
            for part in [*islice(parts, 1000)]:  # a cache may be longer
                self._code(f"{prefix}{name} of {module}", part, changing=name in self.changing)
        starts = getattr(sys.modules[module].__spec__, "_initializing", False)
        bound = self._bound.get(id(body)) or _bound_once(body, self._modules[module].inner)
        if not starts:
            self._bound[id(body)] = bound
        for name, node in bound.items():
            private = owner is not None and name.startswith("__") and not name.endswith("__")
            value = live.get(f"_{owner.__name__.lstrip('_')}{name}" if private else name, _MISSING)
            if name in self.changing or (value is _MISSING and (owner is not None or starts)):
                continue
            if value is _MISSING:
                raise self._old(module)
            if isinstance(node, _DEFINITIONS):
                self._definition(module, node, value, f"{prefix}{name}", owner)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                self._assigned(f"{prefix}{name} of {module}", node, value, owner)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                self._import(module, node, name, value)

    def _code(self, name: str, value: Any, *, changing: bool) -> None:
        """Check a function against the source of the module that it is from, wherever it is found."""
        function = function_of(value)
        if function is None:
            return
        home, code = str(function.__globals__.get("__name__", "")), function.__code__
        source = self._modules.get(home)
        if source is not None and code.co_filename == source.path:
            if not is_hooked(home) and order_of(code, source) is None:
                raise self._old(home)
        # `dataclass` and the like make functions with a module's names, and no file.
        elif not changing and is_own(home) and (source is None or is_own_file(code.co_filename)):
            raise replaced(name)

    def _definition(self, module: str, node: Any, value: Any, name: str, owner: Any) -> None:
        function = function_of(value)
        if isinstance(node, ast.ClassDef):
            right = isinstance(value, type) and (value.__module__, value.__qualname__) == (module, name)
            if right:
                self._names(module, node.body, vars(value), f"{name}.", value)
        elif right := function is not None:
            file, place = function.__code__.co_filename, function.__code__.co_qualname
            if (file, place) == (self._modules[module].path, name):
                nodes = [each for each in (*node.args.defaults, *node.args.kw_defaults) if each is not None]
                values = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
                for default, part in zip(nodes, values, strict=False):
                    self._same(f"a default of {name} of {module}", default, part if is_plain(part) else _MISSING)
            else:  # a base class may wrap the methods of those derived from it
                right = owner is not None and ("<locals>" in place or not is_own_file(file))
        if not right and not node.decorator_list and (owner is None or type(owner) in (type, ABCMeta)):
            raise replaced(f"{name} of {module}")

    def _assigned(self, name: str, node: ast.Assign | ast.AnnAssign, value: Any, owner: Any) -> None:
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        # `dataclass`, and metaclasses such as that of `Enum`, make something else of a class's values.
        kept = type(owner) in (type, ABCMeta) and type(value) in (*PLAIN, *_CONTAINERS)
        keyed = owner in self._keyed and is_plain(value)
        if node.value is not None and isinstance(target, ast.Name) and (owner is None or (kept and not keyed)):
            self._same(name, node.value, value)

    def _same(self, name: str, node: ast.expr, value: Any) -> None:
        """Check that a value is that of an expression, if this is written in numbers and texts."""
        if node not in self._literals:
            self._literals[node] = _MISSING
            if all(isinstance(each, _LITERAL) for each in ast.walk(node)):
                with suppress(Exception):  # whatever computing it raises
                    self._literals[node] = eval(ast.unparse(node), {"__builtins__": {}})
        wanted = self._literals[node]
        if wanted is not _MISSING and value is not _MISSING and not _same(wanted, value):
            raise ValueError(
                f"{name} is {value!r} here, and {wanted!r} in its source, of which the key is made: write it there, "
                "or let a function make the member from it"
            )

    def _import(self, module: str, node: ast.Import | ast.ImportFrom, name: str, value: Any) -> None:
        """Check that a name which is imported from an own module is what it is there."""
        named = {each.asname or each.name.partition(".")[0]: each for each in node.names}
        each = named.get(name, ast.alias(name))
        if isinstance(node, ast.Import):
            home = original = each.name if each.asname else name
            wanted = sys.modules.get(home, value)
        else:
            home, original = absolute("." * node.level + (node.module or ""), self._modules[module].inner), each.name
            wanted = _names_of(home).get(original, sys.modules.get(f"{home}.{original}", value))
        one, other = function_of(value), function_of(wanted)
        again = one and other and fingerprint(one.__code__) == fingerprint(other.__code__)  # after it was loaded again
        alike = again or value is wanted or _same(wanted, value)
        if home in self._modules and original not in self.changing and not alike:
            raise replaced(f"{name} of {module}")


def _names_of(module: str) -> Mapping[str, Any]:
    return getattr(sys.modules.get(module), "__dict__", {})


def replaced(name: str) -> ValueError:
    """Return the error that a name of a module is not what its source says."""
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


def _is_compiled_from(live: ModuleType, source: ModuleSource) -> bool:
    """Return whether the compiled code that Python has kept is this source's, as far as loading it has written any."""
    spec = live.__spec__
    cached = str(getattr(spec, "cached", None))
    if not sys.dont_write_bytecode and type(getattr(spec, "loader", None)) is SourceFileLoader:
        with suppress(OSError, ValueError, EOFError, TypeError):
            data = Path(cached).read_bytes()
            if data[:4] == importlib.util.MAGIC_NUMBER and os.access(cached, os.W_OK):
                return order_of(marshal.loads(data[16:]), source) is not None
    return True


def _bound_once(body: Sequence[ast.stmt], inner: str) -> dict[str, ast.stmt]:
    """Return the names of a module or class that one of its statements binds, under no condition and only once, with that statement."""
    counts, found = Counter[str](), dict[str, ast.stmt]()
    for statement in body:
        left: list[ast.AST] = [statement]
        while left:
            node = left.pop()
            name = (
                node.id
                if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
                else getattr(node, "name", None)
            )
            names = [name] if isinstance(name, str) else []  # definitions and patterns have a `name` too
            if isinstance(node, ast.alias):
                names = [node.asname or node.name.partition(".")[0]]
                if isinstance(statement, ast.Import) and isinstance(found.get(names[0]), ast.Import):
                    names = []  # `import a.b` and `import a.c` bind one `a`
                elif node.name == "*" and isinstance(statement, ast.ImportFrom):
                    theirs = _names_of(absolute("." * statement.level + (statement.module or ""), inner))
                    names = [*theirs.get("__all__", (name for name in theirs if not name.startswith("_")))]
            counts.update(names)
            found |= dict.fromkeys(names, statement)
            if isinstance(node, _COMPREHENSIONS):  # its variables are its own; what `:=` binds in it is not
                left += (each for each in ast.walk(node) if isinstance(each, ast.NamedExpr))
            elif not isinstance(node, (*_DEFINITIONS, ast.Lambda)):
                left += ast.iter_child_nodes(node)
    return {name: node for name, node in found.items() if counts[name] == 1 and isinstance(node, _BINDERS)}

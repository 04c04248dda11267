"""The source of a module, a script or a notebook's cell: its top-level statements, with what each binds, uses and imports.

It is read from the text alone. No code runs, and no module is imported.
"""

from __future__ import annotations

import ast
import importlib.util
import textwrap
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import NamedTuple

Names = tuple[str, ...]
"""A name, and names of attributes: `("numpy", "linalg", "norm")`."""
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_IMPORTS = (ast.Import, ast.ImportFrom)
_UNKNOWN = {"exec_module", "load_module", "run_module", "run_path", "spec_from_file_location"}
_UNKNOWN_BUILTINS = {"__import__", "eval", "exec"}


class Import(NamedTuple):
    """An import: `alias` stands for `name` in `module`, or for the module if the name is None; both are "*" for all names."""

    alias: str
    module: str
    name: str | None


class Statement:
    """A top-level statement.

    Args:
        inner: the package that relative imports start from.
    """

    def __init__(self, node: ast.stmt, lines: Sequence[str], inner: str) -> None:
        self.node, self._inner = node, inner
        self.first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
        self.last = node.end_lineno or node.lineno
        self.text = textwrap.dedent("\n".join(lines[self.first - 1 : self.last]))

    @property
    def is_import(self) -> bool:
        """Whether it is an import."""
        return isinstance(self.node, _IMPORTS)

    @cached_property
    def binds(self) -> frozenset[str]:
        """Names that it gives a value, also by `global` in a function; without those of imports."""
        found = {name for node in ast.walk(self.node) if isinstance(node, ast.Global) for name in node.names}
        for node in _outside_functions(self.node):
            if isinstance(node, _DEFINITIONS):
                found.add(node.name)
            elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                found.add(node.id)
        return frozenset(found)

    @cached_property
    def uses(self) -> tuple[Names, ...]:
        """All names in it, those of functions' own variables included, in the order of the text."""
        return tuple(dict.fromkeys(_names(self.node)))

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        """Imports anywhere in it."""
        return tuple(each for node in ast.walk(self.node) if isinstance(node, _IMPORTS) for each in self._imports(node))

    @cached_property
    def executed(self) -> tuple[Import, ...]:
        """Imports that run when its module is imported."""
        nodes = _outside_functions(self.node)
        return tuple(each for node in nodes if isinstance(node, _IMPORTS) for each in self._imports(node))

    def _imports(self, node: ast.Import | ast.ImportFrom) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for each in node.names:
                root = each.name.partition(".")[0]
                yield Import(each.asname or root, each.name if each.asname else root, None)
                if not each.asname and root != each.name:
                    yield Import("", each.name, None)  # it is loaded too, and found as an attribute
            return
        module = self._absolute("." * node.level + (node.module or ""))
        yield from (Import(each.asname or each.name, module, each.name) for each in node.names)

    def _absolute(self, module: str) -> str:
        try:
            return importlib.util.resolve_name(module, self._inner)
        except ImportError:  # relative, outside a package: running it fails
            return ""

    @cached_property
    def variables(self) -> tuple[str, ...]:
        """Variables of the environment that it reads by their names."""
        found = []
        for node in ast.walk(self.node):
            if (
                isinstance(node, ast.Subscript)
                and isinstance(node.ctx, ast.Load)
                and _dotted(node.value)[-1:] == ("environ",)
            ):
                found.append(_literal(node.slice))
            elif isinstance(node, ast.Call) and node.args:
                called = _dotted(node.func)
                if called[-1:] == ("getenv",) or called[-2:] == ("environ", "get"):
                    found.append(_literal(node.args[0]))
        return tuple(name for name in found if name is not None)

    @cached_property
    def computed(self) -> tuple[str, ...]:
        """Modules that it imports by `import_module` with a name that is written there.

        Raises:
            ValueError: it runs or finds code in a way that a source doesn't tell.
        """
        found = []
        for node in (each for each in ast.walk(self.node) if isinstance(each, ast.Call)):
            called = _dotted(node.func)
            if called[-1:] == ("import_module",):
                name = _literal(node.args[0]) if node.args else None
                if name is None:
                    raise ValueError(
                        f"line {node.lineno} imports a module whose name it computes: import each that it may be by its name"
                    )
                found.append(self._absolute(name))
            elif called[-1:] and (called[-1] in _UNKNOWN or (len(called) == 1 and called[0] in _UNKNOWN_BUILTINS)):
                raise ValueError(
                    f"line {node.lineno} calls {'.'.join(called)}, which may run any code: import that code by its name"
                )
        if ("sys", "modules") in {each[:2] for each in self.uses}:
            raise ValueError(f"line {self.first} looks for modules in sys.modules: import them by their names")
        return tuple(found)

    @cached_property
    def constant(self) -> int | float | str | bool | None:
        """The number or text that it gives its only name; None for any other value."""
        single = isinstance(self.node, ast.AnnAssign) or (
            isinstance(self.node, ast.Assign) and len(self.node.targets) == 1
        )
        given = getattr(self.node, "value", None) if single and len(self.binds) == 1 else None
        with suppress(ValueError):
            value = None if given is None else ast.literal_eval(given)
            return value if isinstance(value, int | float | str) else None
        return None

    @cached_property
    def is_open(self) -> bool:
        """Whether it may find any name of its module, or classes that nothing names."""
        calls = (each for each in ast.walk(self.node) if isinstance(each, ast.Call))
        looked = any(
            _dotted(each.func) == ("globals",) or (_dotted(each.func) == ("vars",) and not each.args) for each in calls
        )
        hooks = {"__init_subclass__", "__subclasses__"}
        return (
            looked
            or any(hooks & {*each} for each in self.uses)
            or any(getattr(each, "name", "") in hooks for each in ast.walk(self.node))
        )

    def acts(self, own: Collection[str], ours: Collection[str]) -> bool:
        """Return whether it may do more than define names: it calls something, or sets what is no name.

        Args:
            own: names of the user's own code, as whose decorators other code may do more than define.
            ours: names of this package's code, which changes nothing for another member.
        """
        if isinstance(self.node, ast.Expr) and isinstance(self.node.value, ast.Constant):
            return False
        for node in _outside_functions(self.node):
            if isinstance(node, _DEFINITIONS):
                if any(_head(each) in own for each in node.decorator_list):
                    return True
            elif isinstance(node, ast.Attribute | ast.Subscript):
                if not isinstance(node.ctx, ast.Load):
                    return True
            elif isinstance(node, ast.Call | ast.Raise | ast.Assert | ast.Delete) and _head(node) not in ours:
                return True
        return False


class ParsedSource:
    """A source as its top-level statements. Those for type checking only, and those of a module run as a script, are left out.

    Attributes:
        binds: by name, the statements that give it its value.
        imports: by name, the imports that do so.
        stars: modules of which all names are imported.
    """

    def __init__(self, text: str, inner: str) -> None:
        lines = text.split("\n")  # as Python counts them, unlike `splitlines`
        self.every = [Statement(node, lines, inner) for node in _leaves(ast.parse(text).body)]
        self.statements = [each for each in self.every if not _is_script(each.node)]
        self.binds: dict[str, list[Statement]] = {}
        self.imports: dict[str, list[Import]] = {}
        for each in self.statements:
            for name in each.binds:
                self.binds.setdefault(name, []).append(each)
            for found in each.executed:
                self.imports.setdefault(found.alias, []).append(found)
        self.stars = [each.module for each in self.imports.get("*", ())]

    def has(self, name: str) -> bool:
        """Return whether a statement gives a name its value."""
        return name in self.binds or name in self.imports

    def at(self, line: int) -> Statement | None:
        """Return the statement at a line, counted from 1."""
        return next((each for each in self.every if each.first <= line <= each.last), None)

    def defining(self, name: str) -> Statement | None:
        """Return the last definition of a class or function."""
        return next((each for each in reversed(self.every) if name in each.binds), None)


def _leaves(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.If) and _dotted(node.test)[-1:] == ("TYPE_CHECKING",):
            yield from _leaves(node.orelse)
        else:
            yield node


def _is_script(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Compare) and _dotted(node.test.left) == ("__name__",)


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run with a statement itself, and definitions without what is in them."""
    yield node
    if not isinstance(node, (*_DEFINITIONS, ast.Lambda)):
        for each in ast.iter_child_nodes(node):
            yield from _outside_functions(each)


def _dotted(node: ast.AST) -> Names:
    """Return the names of `a.b.c`; empty for anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return (node.id, *reversed(names)) if isinstance(node, ast.Name) else ()


def _names(node: ast.AST) -> Iterator[Names]:
    found = _dotted(node)
    if found:
        yield found
    else:
        for each in ast.iter_child_nodes(node):
            yield from _names(each)


def _head(node: ast.AST) -> str:
    """Return the name that an expression of attributes and calls begins with."""
    while isinstance(node, ast.Attribute | ast.Call):
        node = node.value if isinstance(node, ast.Attribute) else node.func
    return node.id if isinstance(node, ast.Name) else ""


def _literal(node: ast.AST) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None

"""Analysis of the source of the user's own modules: its syntax for keys, its imports, and uses of code that no source names.

Only the text is read. No code runs, and no module is imported.
"""

from __future__ import annotations

import ast
import importlib.util
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from mlmclm.own_modules import MAIN, find_source, is_own, module_source

_RUNS_CODE = {
    "__builtins__", "__import__", "__subclasses__", "_gcd_import", "entry_points", "exec_module", "import_module", "load_module",
    "module_from_spec", "resolve_name", "run_module", "run_path", "spec_from_file_location", "spec_from_loader",
}  # fmt: skip
_RUNS_CODE_BY_NAME = {"eval", "exec"}  # not as attributes, which are methods of models and tables
_RUNS_CODE_INSIDE = {"builtins", "pydoc", "runpy"}
_CATCH_MISSING = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException", "suppress"}
_CHANGE = {
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "reverse",
    "setdefault", "sort", "update",
}  # fmt: skip


class Import(NamedTuple):
    """An import that binds `alias` to `name` in `module`, or to the module if `name` is None; both are "*" for all names."""

    alias: str
    module: str
    name: str | None
    line: int
    may_fail: bool


@dataclass(frozen=True)
class ModuleSource:
    """The text of one of the user's modules, or of a definition in a notebook or script.

    Attributes:
        path: its file.
        inner: the package that relative imports start from.
    """

    path: str
    text: str
    is_package: bool
    inner: str

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax tree.

        Raises:
            ValueError: it isn't Python.
        """
        try:
            return ast.parse(self.text)
        except SyntaxError as error:
            raise ValueError(f"{self.path}, line {error.lineno}: {error.msg}") from error

    @cached_property
    def syntax(self) -> str:
        """The tree as text, without comments and layout, and equal in all versions of Python."""
        parts, left = list[str](), list[Any]([self.tree])
        while left:  # a recursive walk would fail at long chains of `elif`
            node = left.pop()
            if isinstance(node, ast.AST):
                parts.append(f"<{type(node).__name__}")
                fields = [(name, getattr(node, name, None)) for name in node._fields if name != "kind"]
                items = [field for field in fields if field[1] is not None and field[1] != []]
                left += [_Mark(">"), *(part for name, value in reversed(items) for part in (value, _Mark(f" {name}=")))]
            elif isinstance(node, list):
                left += [_Mark("]"), *reversed(node), _Mark("[")]
            else:
                parts.append(str(node) if isinstance(node, _Mark) else repr(node))
        return "".join(parts)

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        """Imports anywhere in the source, and modules that `import_module` imports by a literal name.

        Raises:
            ValueError: it can run or find code that the source doesn't name.
        """
        listed, named = list[Import](), set[int]()
        for node, may_fail in _nodes(self.tree):  # a call comes before the names in it
            line = getattr(node, "lineno", 0)
            if id(node) not in named and (used := _unknown(node)):
                raise ValueError(
                    f"{self.path}, line {line} uses {used}, which can run code that the source doesn't name: import that code by its name"
                )
            if isinstance(node, ast.Import):
                for name in node.names:
                    root = name.name.partition(".")[0]
                    listed.append(Import(name.asname or root, name.name if name.asname else root, None, line, may_fail))
                    if name.name != root and not name.asname:
                        listed.append(Import("", name.name, None, line, may_fail))
            elif isinstance(node, ast.ImportFrom):
                module = self.absolute(node)
                listed += [Import(name.asname or name.name, module, name.name, line, may_fail) for name in node.names]
            elif isinstance(node, ast.Call) and dotted(node.func)[-1:] == ("import_module",):
                module = self._computed(node)
                if module:
                    named.add(id(node.func))
                    listed.append(Import("", module, None, line, may_fail))
        return tuple(listed)

    def absolute(self, node: ast.ImportFrom) -> str:
        """Return the full name of the module from which a statement imports; empty if it leads out of the package."""
        return _absolute("." * node.level + (node.module or ""), self.inner)

    def _computed(self, call: ast.Call) -> str:
        """Return the module that a call of `import_module` imports; empty unless its name is a literal."""
        arguments = dict(zip(("name", "package"), call.args, strict=False)) | {
            keyword.arg: keyword.value for keyword in call.keywords
        }
        name, package = (_text(arguments.get(argument)) for argument in ("name", "package"))
        base = dotted(arguments.get("package", call))
        inside = base == ("__package__",) or (base == ("__name__",) and self.is_package)
        return _absolute(name, self.inner if inside else package) if name.startswith(".") else name

    @cached_property
    def computes_all(self) -> bool:
        """Whether its `__all__` is computed, rather than a list of literals and of other modules' `__all__`."""
        return any(
            isinstance(part, ast.comprehension | ast.JoinedStr)
            or (isinstance(part, ast.Call) and dotted(part.func)[:1] != ("__all__",))
            or (isinstance(part, ast.BinOp) and isinstance(part.left, ast.Constant))
            for node in self.tree.body
            if any(isinstance(name, ast.Name) and name.id == "__all__" for name in ast.walk(node))
            for part in ast.walk(node)
        )

    @cached_property
    def chains(self) -> tuple[tuple[str, ...], ...]:
        """Names with their attributes, such as ("numpy", "linalg", "norm")."""
        return tuple(sorted({names for node in ast.walk(self.tree) if len(names := dotted(node)) > 1}))

    @cached_property
    def changing(self) -> frozenset[str]:
        """Names, and attributes as `.NAME`, whose values the code changes when it runs, such as counters and caches."""
        names, left = set[str](), list[tuple[Any, set[str]]]([(self.tree, set())])
        while left:
            node, local = left.pop()
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                local = local | _bound(node)
            left += [(child, local) for child in ast.iter_child_nodes(node)]
            inside = isinstance(node, ast.Subscript)
            if isinstance(node, ast.Global):
                names |= {*node.names}
            elif isinstance(node, ast.Call):
                if dotted(node.func) in (("setattr",), ("delattr",)):
                    names |= {f".{_text(argument)}" for argument in node.args}
                inside = isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGE
                node = node.func.value if inside else node  # type: ignore[attr-defined]
            elif isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
                continue
            while isinstance(node, ast.Subscript):
                node = node.value
            if isinstance(node, ast.Attribute) and (inside or dotted(node.value) != ("self",)):  # not an instance's
                names.add(f".{node.attr}")
            elif isinstance(node, ast.Name) and inside and node.id not in local:
                names.add(node.id)
        return frozenset(names)

    @cached_property
    def taken(self) -> dict[str, tuple[str, str]]:
        """Names that only one statement binds, a `from` import at the top level; for each, the module and the imported name."""
        counts = Counter(
            getattr(node, "asname", None) or getattr(node, "name", None) or getattr(node, "id", None)
            for node in _in_scope(self.tree)
            if not isinstance(getattr(node, "ctx", None), ast.Load)
        )
        aliases = [(node, alias) for node in self.tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
        named = {alias.asname or alias.name: (self.absolute(node), alias.name) for node, alias in aliases}
        return {name: origin for name, origin in named.items() if counts[name] == 1}


class _Mark(str):
    """Text that `ModuleSource.syntax` adds, such as brackets; a plain `str` is a string in the source."""


parsed = lru_cache(maxsize=1024)(ModuleSource)


def dotted(node: ast.AST) -> tuple[str, ...]:
    """Return the names of `a.b.c`; empty for anything else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return (node.id, *reversed(names)) if isinstance(node, ast.Name) else ()


def _text(node: ast.AST | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _absolute(module: str, inner: str) -> str:
    try:
        return importlib.util.resolve_name(module, inner)
    except ImportError:  # relative, outside a package: running it fails
        return ""


def _in_scope(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _in_scope(child)


def _bound(function: ast.AST) -> set[str]:
    """Return the names that belong to a function rather than to its module."""
    bound, free = set[str](), set[str]()
    for child in _in_scope(function):
        if isinstance(child, ast.arg):
            bound.add(child.arg)
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            bound.add(child.id)
        elif isinstance(child, ast.Global):
            free |= {*child.names}
    return bound - free


def _nodes(tree: ast.AST) -> Iterator[tuple[ast.AST, bool]]:
    """Yield all nodes, each with whether an import in it may fail: it is below a condition, or its failure is caught."""
    left = [(tree, False)]
    while left:
        node, may_fail = left.pop()
        yield node, may_fail
        if isinstance(node, ast.Try):
            caught = [handler.type for handler in node.handlers]
        else:
            caught = [item.context_expr for item in node.items] if isinstance(node, ast.With) else []
        names = {name for expr in caught if expr for part in ast.walk(expr) for name in dotted(part)}
        may_fail = may_fail or isinstance(node, ast.If) or None in caught or bool(names & _CATCH_MISSING)
        left += [(child, may_fail) for child in reversed([*ast.iter_child_nodes(node)])]


def _unknown(node: ast.AST) -> str:
    """Return the name in a node that can find or run any code, such as `exec`; empty if there is none."""
    if isinstance(node, ast.Name):
        return node.id if node.id in _RUNS_CODE | _RUNS_CODE_BY_NAME else ""
    if isinstance(node, ast.Attribute):
        names = dotted(node)
        if names == ("sys", "modules"):
            return "sys.modules"
        return node.attr if node.attr in _RUNS_CODE and names[:1] not in (("self",), ("cls",)) else ""
    if isinstance(node, ast.Import):
        modules = [name.name for name in node.names if name.name in _RUNS_CODE_INSIDE and not is_own(name.name)]
        modules += [
            f"sys as {name.asname}" for name in node.names if name.name == "sys" and name.asname not in (None, "sys")
        ]
        return next(iter(modules), "")
    if isinstance(node, ast.ImportFrom) and node.module and not node.level and not is_own(node.module):
        for name in node.names:
            plain = name.name == "import_module" and name.asname in (None, name.name)
            if (name.name in _RUNS_CODE and not plain) or (node.module, name.name) == ("sys", "modules"):
                return f"{node.module}.{name.name}"
        return node.module if node.module in _RUNS_CODE_INSIDE else ""
    return ""


def follow(start: Iterable[str], *, anew: bool) -> tuple[dict[str, ModuleSource], set[str]]:
    """Return the user's modules among `start` and their imports, recursively, and the top-level names of other packages.

    Args:
        anew: whether to read again the files of modules that aren't loaded.

    Raises:
        ValueError: a source cannot be read, an import finds nothing, or code is run that no source names.
    """
    modules, packages, left, seen = dict[str, ModuleSource](), set[str](), list(start), set[str]()
    while left:
        module = left.pop()
        if not module or module in seen:
            continue
        seen.add(module)
        left.append(module.rpartition(".")[0])
        if not is_own(module):
            packages.add(module.partition(".")[0])
            continue
        spec = find_source(module)
        if spec is not None and spec.has_location:  # a folder without __init__.py has no source
            modules[module] = parsed_source(module, anew=anew)
            left += imported(modules[module])
    return modules, packages


def parsed_source(module: str, *, anew: bool = False) -> ModuleSource:
    """Return the source of one of the user's modules (`own_modules.module_source`)."""
    file = module_source(module, anew=anew)
    return parsed(*file, module if file.is_package else module.rpartition(".")[0])


def imported(source: ModuleSource) -> Iterator[str]:
    """Yield the modules that a source imports, or uses as attributes of imported modules.

    Raises:
        ValueError: an import finds nothing, or code is run that no source names.
    """
    names: dict[str, set[str]] = {}
    for entry in source.imports:
        root = entry.module.partition(".")[0]
        if root in MAIN:
            raise ValueError(f"{source.path}, line {entry.line} imports {root}: move what it uses there into a module")
        own, spec = is_own(entry.module), find_source(entry.module)
        if find_source(root) is None or (spec is None and (own or is_own(root))):
            if not entry.may_fail:
                raise ValueError(
                    f"{source.path}, line {entry.line} imports {entry.module or entry.name}, which cannot be found: install it, "
                    "or import it in `try`, with `except ImportError`"
                )
        elif not own or spec is None:
            yield root
        elif entry.name is None:
            yield entry.module
            names.setdefault(entry.alias, set()).add(entry.module)
        else:
            yield entry.module
            below = {entry.name: entry.alias}
            if entry.name == "*" and spec.has_location and spec.submodule_search_locations is not None:
                package = parsed_source(entry.module)
                if package.computes_all:
                    raise ValueError(
                        f"{package.path}: {source.path} imports * from it, and its __all__ is computed: write its names as texts"
                    )
                constants = (part.value for part in ast.walk(package.tree) if isinstance(part, ast.Constant))
                below = {name: name for name in constants if isinstance(name, str) and name.isidentifier()}  # __all__
            for name, alias in below.items():
                if name != "*" and find_source(f"{entry.module}.{name}") is not None:
                    yield f"{entry.module}.{name}"
                    names.setdefault(alias, set()).add(f"{entry.module}.{name}")
    for alias, *attributes in source.chains:
        for module in sorted(names.get(alias, ())):
            for attribute in attributes:
                module = f"{module}.{attribute}"
                if find_source(module) is None:
                    break
                yield module

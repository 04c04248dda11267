"""The source of the user's own modules: its syntax as keys say it, what it imports, and code that no source names.

It is read from the text alone. No code runs, and no module is imported.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from mlmclm.own_modules import MAIN, find_source, is_own, read_source

_RUNS_CODE = {
    "__builtins__", "__import__", "__subclasses__", "_gcd_import", "entry_points", "exec_module", "import_module", "load_module",
    "module_from_spec", "resolve_name", "run_module", "run_path", "spec_from_file_location", "spec_from_loader",
}  # fmt: skip
_RUNS_CODE_BY_NAME = {"eval", "exec"}  # as attributes, these are methods of models and tables
_RUNS_CODE_INSIDE = {"builtins", "pydoc", "runpy"}
_CATCH_MISSING = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException", "suppress"}


class Import(NamedTuple):
    """An import: `alias` stands for `name` in `module`, or for the module if the name is None; both are "*" for all names."""

    alias: str
    module: str
    name: str | None
    line: int
    may_fail: bool


@dataclass(frozen=True)
class ModuleSource:
    """The text of an own module, or the syntax of a definition in a notebook or script.

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
        """The tree as text: without comments and layout, and alike in all versions of Python."""
        parts, left = list[str](), list[Any]([self.tree])
        while left:  # a recursive walk would fail at long chains of `elif`
            node = left.pop()
            if isinstance(node, ast.AST):
                parts.append(f"<{type(node).__name__}")
                fields = [(name, getattr(node, name, None)) for name in node._fields if name != "kind"]
                given = [each for each in fields if each[1] is not None and each[1] != []]
                left += [_End(), *(part for name, value in reversed(given) for part in (value, _End(f" {name}=")))]
            elif isinstance(node, list):
                left += [_End("]"), *reversed(node), _End("[")]
            else:
                parts.append(str(node) if isinstance(node, _End) else repr(node))
        return "".join(parts)

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        """Imports anywhere in it, and modules that `import_module` imports by a name that is written there.

        Raises:
            ValueError: it runs or finds code in a way that a source doesn't tell.
        """
        found, system, named = list[Import](), {"sys"}, set[int]()
        for node, may_fail in _nodes(self.tree):
            line = getattr(node, "lineno", 0)
            if isinstance(node, ast.Import):
                for each in node.names:
                    root = each.name.partition(".")[0]
                    found.append(Import(each.asname or root, each.name if each.asname else root, None, line, may_fail))
                    if each.name != root and not each.asname:
                        found.append(Import("", each.name, None, line, may_fail))
                    if each.name == "sys":
                        system.add(each.asname or "sys")
            elif isinstance(node, ast.ImportFrom):
                module = absolute("." * node.level + (node.module or ""), self.inner)
                found += [Import(each.asname or each.name, module, each.name, line, may_fail) for each in node.names]
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id in system:
                system |= {each.id for each in node.targets if isinstance(each, ast.Name)}
            elif isinstance(node, ast.Call) and dotted(node.func)[-1:] == ("import_module",):
                module = self._computed(node)
                if module:
                    named.add(id(node.func))
                    found.append(Import("", module, None, line, may_fail))
        for node in ast.walk(self.tree):
            used = "" if id(node) in named else _unknown(node, system)
            if used:
                raise ValueError(
                    f"{self.path}, line {getattr(node, 'lineno', 0)} uses {used}, by which code can run that no source names: "
                    "import that code by its name"
                )
        return tuple(found)

    def _computed(self, call: ast.Call) -> str:
        """Return the module of a call of `import_module`; empty unless it is written there."""
        given = dict(zip(("name", "package"), call.args, strict=False)) | {
            str(each.arg): each.value for each in call.keywords
        }
        name, package = (_text(given.get(each)) for each in ("name", "package"))
        if not name.startswith("."):
            return name
        here = dotted(given.get("package", call))
        inside = here == ("__package__",) or (here == ("__name__",) and self.is_package)
        return absolute(name, self.inner if inside else package)

    @cached_property
    def chains(self) -> tuple[tuple[str, ...], ...]:
        """Names with their attributes, such as ("numpy", "linalg", "norm")."""
        return tuple(sorted({found for node in ast.walk(self.tree) if len(found := dotted(node)) > 1}))


class _End(str):
    """A piece of the syntax's text, unlike a text that is in the source."""

    def __new__(cls, text: str = ">") -> _End:
        return super().__new__(cls, text)


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


def absolute(module: str, inner: str) -> str:
    """Return the full name of a module that is imported inside a package; empty if a relative one leads out of it."""
    try:
        return importlib.util.resolve_name(module, inner)
    except ImportError:  # relative, outside a package: running it fails
        return ""


def _nodes(tree: ast.AST) -> Iterator[tuple[ast.AST, bool]]:
    """Yield all nodes, with whether an import there may fail: below a condition, or where the failure is caught."""
    left = [(tree, False)]
    while left:
        node, may_fail = left.pop()
        yield node, may_fail
        if isinstance(node, ast.Try):
            caught = [each.type for each in node.handlers]
        else:
            caught = [each.context_expr for each in node.items] if isinstance(node, ast.With) else []
        names = {name for each in caught if each for part in ast.walk(each) for name in dotted(part)}
        may_fail = may_fail or isinstance(node, ast.If) or None in caught or bool(names & _CATCH_MISSING)
        left += [(each, may_fail) for each in reversed([*ast.iter_child_nodes(node)])]


def _unknown(node: ast.AST, system: set[str]) -> str:
    """Return the name in a node by which any code can be found or run; empty if there is none."""
    if isinstance(node, ast.Name):
        return node.id if node.id in _RUNS_CODE | _RUNS_CODE_BY_NAME else ""
    if isinstance(node, ast.Attribute):
        names = dotted(node)
        if names[-2:-1] and names[-2] in system and node.attr == "modules":
            return "sys.modules"
        return node.attr if node.attr in _RUNS_CODE and names[:1] not in (("self",), ("cls",)) else ""
    if isinstance(node, ast.Constant):
        return text if (text := _text(node)) in ("__builtins__", "__import__", "import_module") else ""
    if isinstance(node, ast.Import):
        return next((each.name for each in node.names if _is_runner(each.name)), "")
    if isinstance(node, ast.ImportFrom):
        for each in node.names:
            plain = each.name == "import_module" and each.asname in (None, each.name)
            if (each.name in _RUNS_CODE and not plain) or (node.module == "sys" and each.name in ("modules", "*")):
                return f"{node.module}.{each.name}"
        return node.module if node.module and not node.level and _is_runner(node.module) else ""
    return ""


def _is_runner(module: str) -> bool:
    return module in _RUNS_CODE_INSIDE and not is_own(module)


def follow(start: Iterable[str], known: Mapping[str, ModuleSource]) -> tuple[dict[str, ModuleSource], set[str]]:
    """Return the own modules that some own modules import, with these, and the top-level names of other packages.

    Args:
        known: sources that were read before, which count in the place of the files'.

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
            modules[module] = find(module, known)
            left += imported(modules[module])
    return modules, packages


def find(module: str, known: Mapping[str, ModuleSource]) -> ModuleSource:
    """Return the source of an own module, from `known` or else from its file."""
    spec = find_source(module)
    if module in known or spec is None:
        return known[module]
    is_package = spec.submodule_search_locations is not None
    inner = module if is_package else module.rpartition(".")[0]
    return parsed(str(spec.origin), read_source(module, spec), is_package, inner)


def imported(source: ModuleSource) -> Iterator[str]:
    """Yield the modules that a source imports, or finds as attributes of those.

    Raises:
        ValueError: an import finds nothing, or code is run that no source names.
    """
    names: dict[str, set[str]] = {}
    for each in source.imports:
        root = each.module.partition(".")[0]
        if root in MAIN:
            raise ValueError(f"{source.path}, line {each.line} imports {root}: move what it uses there into a module")
        own, spec = is_own(each.module), find_source(each.module)
        if find_source(root) is None or (spec is None and (own or is_own(root))):
            if not each.may_fail:
                raise ValueError(
                    f"{source.path}, line {each.line} imports {each.module or each.name}, which cannot be found: install it, "
                    "or import it in `try`, with `except ImportError`"
                )
        elif not own or spec is None:
            yield root
        elif each.name is None:
            yield each.module
            names.setdefault(each.alias, set()).add(each.module)
        else:
            yield each.module
            below = {each.name: each.alias}
            if each.name == "*" and spec.has_location and spec.submodule_search_locations is not None:
                constants = (
                    part.value for part in ast.walk(find(each.module, {}).tree) if isinstance(part, ast.Constant)
                )
                below = {name: name for name in constants if isinstance(name, str) and name.isidentifier()}  # __all__
            for name, alias in below.items():
                if name != "*" and find_source(f"{each.module}.{name}") is not None:
                    yield f"{each.module}.{name}"
                    names.setdefault(alias, set()).add(f"{each.module}.{name}")
    for alias, *attributes in source.chains:
        for module in sorted(names.get(alias, ())):
            for attribute in attributes:
                module = f"{module}.{attribute}"
                if find_source(module) is None:
                    break
                yield module

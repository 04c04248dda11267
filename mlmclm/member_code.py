"""The user's own code as keys say it: a hash made of source, and the modules that a worker may lack.

Own code is that of a notebook, of a script, or of modules that are not installed. From a member on, every name is followed
that a statement uses: to the statements of its module that define it, and through each import, one inside a function
included. The hash is that of the texts of these statements, with the versions of the installed packages that they use. Of
each own module that is imported on the way, the statements that may do more than define names count too.

Live objects are asked only for what is in no module's source: the values of a notebook or script, and those that a factory
gave to a class or function that it made.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import io
import linecache
import os
import pickle
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from mlmclm.member_source import Import, Names, ParsedSource, Statement
from mlmclm.own_modules import MAIN, SourceFile, find_source, is_own, last_change, read_source, version_of

_PLAIN = (int, float, complex, str, bytes, bool, type(None), type(...))
_CONTAINERS = (tuple, list, dict, set, frozenset)
_WRAPPERS = (staticmethod, classmethod, property, functools.cached_property, functools.partial, MethodType)
_WRAPPED = ("__wrapped__", "__func__", "__self__", "fget", "fset", "func", "args", "keywords")
_sources = lru_cache(maxsize=1024)(ParsedSource)


@dataclass(frozen=True)
class OwnCode:
    """The own code of a member."""

    hash: str
    """16 hex digits."""
    modules: Mapping[str, SourceFile]
    """The own modules that it is in or imports, by name."""
    has_values: bool
    """Whether it is made of values of a notebook or script, which may change without another registration."""
    constants: Mapping[tuple[str, str], Any]
    """Numbers and texts in the source by module and name, which other code could change in this process."""
    attributes: Mapping[str, Any]
    """Numbers and texts of its class and own base classes, by CLASS.NAME; a program may set others than their source says."""
    unloaded: dict[str, float]
    """The modules that this process hasn't loaded since, with the times when their files were last changed."""

    def check(self, member: Any) -> None:
        """Check that what this process runs as the member is still this code.

        Raises:
            ValueError: a value of a notebook or script is another one now, one of a module isn't as in its source, or a module
                was loaded after its file had changed.
        """
        if self.has_values and own_code(member).hash != self.hash:
            raise ValueError(
                "what it uses in this notebook or script has changed since a key first said it: register it again"
            )
        if (attributes := _attributes(member)) != self.attributes:
            changed = next(
                name for name in {**attributes, **self.attributes} if attributes.get(name) != self.attributes.get(name)
            )
            raise ValueError(f"{changed} has been set to another value since it was registered: register it again")
        for name in self.unloaded.keys() & sys.modules.keys():
            path = self.modules[name].path
            if last_change(path) != self.unloaded[name]:
                raise ValueError(f"{path} has changed since it was registered: register it again")
            del self.unloaded[name]
        for (module, name), constant in self.constants.items():
            found = getattr(sys.modules.get(module), name, constant)
            if type(found) is not type(constant) or found != constant:
                raise ValueError(
                    f"{name} of {module} is {found!r} here, and {constant!r} in its source, of which the key is made: write it there, "
                    "or let a function make the member from it"
                )


def own_code(value: Any) -> OwnCode:
    """Return the code of a class, function or instance.

    Raises:
        ValueError: a part of its source cannot be read or followed, or it uses a value of which no key can be made.
    """
    walk = _Walk(getattr(value, "__module__", None) or type(value).__module__)
    walk.value(value)
    walk.finish()
    attributes = _attributes(value)
    own = [f"{name.rpartition('.')[2]}={each!r}" for name, each in attributes.items()]
    parts = [*walk.parts, *filter(None, map(version_of, sorted(walk.packages))), *own]
    unloaded = {name: last_change(own.path) for name, own in walk.modules.items() if name not in sys.modules}
    return OwnCode(
        hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16],
        walk.modules,
        walk.has_values,
        walk.constants,
        attributes,
        unloaded,
    )


def _attributes(value: Any) -> dict[str, Any]:
    """Return the numbers and texts, and tuples of these, that a class (or an instance's) and its own bases have now."""
    kind = value if isinstance(value, type) else type(value)
    return {
        f"{base.__qualname__}.{name}": found
        for base in reversed(kind.__mro__)
        if is_own(base.__module__)
        for name, found in sorted(vars(base).items())
        if not name.startswith("__")
        and all(type(each) in _PLAIN for each in (found if type(found) is tuple else (found,)))
    }


class _Scope(NamedTuple):
    """A place where names are looked up."""

    module: str
    source: ParsedSource
    is_package: bool = False
    values: Mapping[str, Any] | None = None
    """The values of a notebook's or script's names, which take the place of the source."""


class _Walk:
    """A walk over the statements and values that a member depends on, in an order that is always the same.

    Args:
        home: the member's own module, whose name is not part of the hash.
    """

    def __init__(self, home: str) -> None:
        self.parts: list[str] = []
        self.modules: dict[str, SourceFile] = {}
        self.packages: set[str] = set()
        self.constants: dict[tuple[str, str], Any] = {}
        self.has_values = False
        self._home = home
        self._left: deque[Callable[[], None]] = deque()
        self._scopes: dict[str, _Scope | None] = {}
        self._seen: set[Any] = set()
        self._kept: list[Any] = []
        self._inside: set[int] = set()

    def finish(self) -> None:
        """Follow all that has been found, and what is found on the way."""
        while self._left:
            self._left.popleft()()

    def _is_new(self, *what: Any) -> bool:
        """Return whether something is met for the first time. What is named by its id must live as long as the walk."""
        new = what not in self._seen
        self._seen.add(what)
        return new

    def _enter(self, module: str) -> _Scope | None:
        """Return where the names of an own module are looked up, and add what its import does; None for another's."""
        if module in self._scopes:
            return self._scopes[module]
        self._scopes[module] = None
        parent = module.rpartition(".")[0]
        if parent:
            self._enter(parent)
        spec = find_source(module) if is_own(module) else None
        if spec is None:
            return None
        is_package = spec.submodule_search_locations is not None
        text = read_source(module, spec) if spec.has_location else ""  # a folder without __init__.py has no source
        try:
            source = _sources(text, module if is_package else parent)
        except SyntaxError as error:
            raise ValueError(f"{spec.origin}, line {error.lineno}: {error.msg}") from error
        scope = self._scopes[module] = _Scope(module, source, is_package)
        if spec.has_location:
            self.modules[module] = SourceFile(str(spec.origin), is_package, text)
        own, ours = _names_by_owner(source)
        for each in source.statements:
            for found in each.executed:
                self._execute(found)
            if each.acts(own, ours):
                self._left.append(partial(self._statement, scope, each))
        return scope

    def _execute(self, found: Import) -> None:
        scope = self._enter(found.module)
        if scope is not None and scope.is_package and found.name not in (None, "*"):
            self._enter(f"{found.module}.{found.name}")

    def _statement(self, scope: _Scope, statement: Statement) -> None:
        """Add a statement, and follow what it uses."""
        if not self._is_new(scope.module, id(statement)):
            return
        self._kept.append(statement)
        try:
            computed = statement.computed
        except ValueError as error:
            raise ValueError(f"{scope.module}: {error}") from error
        if not statement.is_import:
            self.parts.append(f"{'' if scope.module == self._home else scope.module}: {statement.text}")
        self.parts += (f"${name} = {os.environ.get(name)}" for name in statement.variables)
        inside: dict[str, list[Import]] = {}
        for found in statement.imports:
            self._execute(found)
            inside.setdefault(found.alias, []).append(found)
        for names in statement.uses:
            if names[:2] == ("sys", "argv"):
                self.parts.append(f"sys.argv = {sys.argv[1:]}")
            for found in inside.get(names[0], ()):
                self._import(found, names)
            self._use(scope, names)
        for module in computed:
            self._attributes(module, ())
        if statement.is_open:
            self._everything(scope)

    def _everything(self, scope: _Scope) -> None:
        """Add all of a module."""
        if scope.values is not None:
            raise ValueError(
                "it looks up names of a notebook or script that it computes: write the names, or use a module"
            )
        for statement in scope.source.statements:
            self._left.append(partial(self._statement, scope, statement))
        for found in (each for every in scope.source.imports.values() for each in every):
            self._import(found, (found.alias,))

    def _use(self, scope: _Scope, names: Names) -> None:
        """Follow a name, and those of attributes after it, from where it is used."""
        if not self._is_new(scope.module, id(scope.source), names):
            return
        name, source = names[0], scope.source
        if scope.values is not None:
            self.has_values = True
            if name in scope.values:
                self._left.append(partial(self._live, scope.values[name], names))
            return
        for found in source.imports.get(name, ()):
            self._import(found, names)
        bound = source.binds.get(name, ())
        if len(bound) == 1 and not source.imports.get(name) and bound[0].constant is not None:
            self.constants[scope.module, name] = bound[0].constant
        for statement in bound:
            self._left.append(partial(self._statement, scope, statement))
        if not source.has(name):
            if source.has("__getattr__"):
                self._use(scope, ("__getattr__",))
            for module in source.stars:
                self._left.append(partial(self._attributes, module, names))

    def _live(self, value: Any, names: Names) -> None:
        """Follow a name of a notebook or script to its value."""
        if isinstance(value, ModuleType):
            self._import(Import(names[0], value.__name__, None), names)
        else:
            self.parts.append(f"{names[0]} =")
            self.value(value)

    def _import(self, found: Import, names: Names) -> None:
        if found.alias and found.name != "*":
            self.parts.append(f"{names[0]} = {found.module} {found.name or ''}")
            attributes = names[1:] if found.name is None else (found.name, *names[1:])
            self._left.append(partial(self._attributes, found.module, attributes))

    def _attributes(self, module: str, names: Names) -> None:
        """Follow names in a module; without any, all of it is used."""
        if not self._is_new(module, names):
            return
        scope = self._enter(module)
        if scope is None:
            self.packages.add(module.partition(".")[0])
        elif not names:
            self._everything(scope)
        else:
            self._use(scope, names)
            below = f"{module}.{names[0]}"
            if scope.is_package and find_source(below) is not None:
                self._attributes(below, names[1:])

    def value(self, value: Any) -> None:
        """Add a value."""
        if type(value) in _PLAIN:
            self.parts.append(repr(value))
        elif type(value) in _CONTAINERS:
            self._container(value)
        elif isinstance(value, ModuleType):
            self._attributes(value.__name__, ())
        elif self._is_new(id(value)):
            self._kept.append(value)
            if isinstance(value, type | FunctionType | BuiltinFunctionType):
                self._code(value)
            elif isinstance(value, _WRAPPERS) or hasattr(value, "__wrapped__"):
                for name in _WRAPPED:
                    self.value(getattr(value, name, None))
            else:
                self._object(value)

    def _container(self, value: Any) -> None:
        self.parts.append(f"{type(value).__name__} of {len(value)}")
        if id(value) in self._inside:  # it contains itself
            return
        self._inside.add(id(value))
        items: Iterable[Any] = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        for item in value.items() if isinstance(value, dict) else items:
            self.value(item)
        self._inside.remove(id(value))

    def _code(self, value: Any) -> None:
        module, name = value.__module__ or "", value.__qualname__
        if not is_own(module):
            self.parts.append(f"{module}.{name}")
            self.packages.add(module.partition(".")[0])
            return
        # Libraries wrap functions, and torch those of a class when it is first used.
        given = inspect.unwrap(value)
        place = _in_main(given, module) if module in MAIN else self._in_module(given, module)
        if place is None:
            raise ValueError(f"the source of {name} cannot be read: define it by that name in a file, or in a notebook")
        self._statement(*place)
        if isinstance(value, type):
            for base in value.__mro__[1:]:
                self.value(base)
        if "<locals>" in name:
            self._made(given)

    def _made(self, value: Any) -> None:
        """Add what a factory gave a class or function that it made, which the factory's source doesn't say."""
        if isinstance(value, type):
            for name, part in sorted(vars(value).items()):
                part = inspect.unwrap(part.__func__ if isinstance(part, classmethod | staticmethod) else part)
                if isinstance(part, FunctionType) and part.__qualname__.startswith(f"{value.__qualname__}."):
                    self._made(part)
                elif not name.startswith("__") and name != "_abc_impl":
                    self.value(part)
            return
        closure = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
        for name, cell in closure.items():
            with suppress(ValueError):  # it is still empty
                if name != "__class__":
                    self.value(cell.cell_contents)
        for defaults in (value.__defaults__, value.__kwdefaults__):
            self.value(defaults)

    def _in_module(self, value: Any, module: str) -> tuple[_Scope, Statement] | None:
        scope = self._enter(module)
        if scope is None:
            return None
        name = value.__qualname__.partition(".")[0]
        self._use(scope, (name,))
        found = scope.source.binds.get(name, [None])[0]
        if (
            found is None
            and isinstance(value, FunctionType)
            and value.__code__.co_filename == self.modules[module].path
        ):
            found = scope.source.at(value.__code__.co_firstlineno)  # a lambda
        return None if found is None else (scope, found)

    def _object(self, value: Any) -> None:
        kind = type(value)
        self.value(kind)
        if hasattr(value, "__dict__") and (is_own(kind.__module__) or hasattr(value, "model_fields_set")):
            self.value(vars(value))
            return
        written = io.BytesIO()
        pickler = pickle.Pickler(written, protocol=4)
        pickler.fast = True  # equal values then have equal bytes, whether or not parts of them are one object
        try:
            pickler.dump(value)
        except Exception as error:  # whatever the object raises
            raise ValueError(f"it uses a {kind.__qualname__} ({error}), of which no key can be made") from error
        self.parts.append(hashlib.sha256(written.getvalue()).hexdigest())


def _in_main(value: Any, module: str) -> tuple[_Scope, Statement] | None:
    """Return the statement of a notebook or script that defines a class or function, and where its names are looked up."""
    parts = [value] if isinstance(value, FunctionType) else vars(value).values()
    functions = [inspect.unwrap(each) for part in parts if callable(each := getattr(part, "__func__", part))]
    own = [each for each in functions if isinstance(each, FunctionType) and each.__module__ == module]
    main, name = sys.modules[module], value.__qualname__.partition(".")[0]
    names = own[0].__globals__ if own else vars(main)
    lines = {each.__code__.co_filename: each.__code__.co_firstlineno for each in own}
    if "__dataclass_fields__" in vars(value):
        lines.pop("<string>", None)  # methods that `dataclass` made
    # Without a method, nothing says which cell a class of a notebook is from: it is the last one that has its name.
    cells = [file for file in reversed(linecache.cache) if not Path(file).exists()]
    for file in lines or [getattr(main, "__file__", None) or "", *cells]:
        linecache.checkcache(file)
        with suppress(SyntaxError):
            source = _sources("".join(linecache.getlines(file)), names.get("__package__") or "")
            found = source.defining(name)
            if found is None and isinstance(value, FunctionType):
                found = source.at(lines[file])  # a lambda
            if found is not None:
                return _Scope(module, source, values=names), found
    return None


def _names_by_owner(source: ParsedSource) -> tuple[set[str], set[str]]:
    """Return a source's names for the user's own code, and those for code of this package alone."""
    own, ours = {*source.binds}, set[str]()
    for alias, every in source.imports.items():
        if any(is_own(each.module) for each in every):
            own.add(alias)
        elif all(each.module.partition(".")[0] == "mlmclm" for each in every):
            ours.add(alias)
    return own, ours - own

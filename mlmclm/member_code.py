"""The user's own code of a member of a registry: its hash, which keys contain, and the sources of its modules, which workers get.

Own code is code in a notebook, in a script, or in modules that are not installed. The hash covers whole modules, with all own modules
that they import, so that no rule has to decide which parts are used. A notebook or script changes with each line that is added, so the
hash covers only the definitions in it that the member uses, with the values of the names in these.
"""

from __future__ import annotations
import __future__

import ast
import copyreg
import functools
import hashlib
import inspect
import linecache
import symtable
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from mlmclm.member_source import ModuleSource, follow, imported, parsed, parsed_source
from mlmclm.own_modules import (
    MAIN,
    SourceFile,
    is_own,
    live_values,
    loaded_values,
    module_source,
    read_source,
    version_of,
)

_PLAIN = (int, float, complex, str, bytes, bool, type(None), type(...))
_WRAPPERS = (staticmethod, classmethod, property, functools.cached_property, functools.partial, types.MethodType)
_WRAPPED = ("__wrapped__", "__func__", "__self__", "fget", "fset", "func", "args", "keywords")
_SLOTS = (types.GetSetDescriptorType, types.MemberDescriptorType)


@dataclass(frozen=True)
class OwnCode:
    """The user's own code of a member."""

    hash: str
    """16 hex digits."""
    sources: Mapping[str, ModuleSource]
    """The user's modules that contain the code or that it imports, by name."""
    has_values: bool
    """Whether the hash covers values of a notebook or script, which can change without a new registration."""
    attributes: dict[str, Any]
    """Numbers and strings that its class and the user's base classes have as attributes, by CLASS.NAME; a program can change them."""

    @property
    def modules(self) -> dict[str, SourceFile]:
        """The sources of these modules, for a process that imports them."""
        return {name: SourceFile(source.path, source.text, source.is_package) for name, source in self.sources.items()}

    def check(self, member: Any) -> None:
        """Check that the member's code in this process is still this code.

        Raises:
            ValueError: a value of a notebook or script has changed, or a module was reloaded or has other values.
        """
        for name, source in self.sources.items():
            if name in sys.modules and module_source(name).text != source.text:
                raise ValueError(f"{source.path} has been loaded again since it was registered: register it again")
        now = own_code(member, anew=False) if self.has_values else self
        if now.hash != self.hash:
            raise ValueError(
                "what it uses in this notebook or script has changed since its first key was made: register it again"
            )
        attributes = _attributes(member, self.sources)
        for name in attributes | self.attributes:
            if attributes.get(name) != self.attributes.get(name):
                raise ValueError(f"{name} has been set to another value since it was registered: register it again")
        _check_values(self.sources, self.attributes)


def keep_script() -> None:
    """Read the running script into `linecache`, so that a key made later contains the script as it is now."""
    script = str(getattr(sys.modules["__main__"], "__file__", ""))
    linecache.checkcache(script)
    linecache.getlines(script)


def own_code(value: Any, *, anew: bool = True) -> OwnCode:
    """Return the code of a class, function or instance.

    Args:
        anew: whether to read files again: of modules that aren't loaded, to use them, and of loaded modules, to detect changes.

    Raises:
        ValueError: a part of its source cannot be read, runs code that no source names, or differs from what is loaded; or the code
            uses a value of which no key can be made.
    """
    home = getattr(value, "__module__", None) or type(value).__module__
    walk = _Walk(home)
    try:
        walk.value(value)
    except RecursionError as error:
        raise ValueError("it uses values that are nested too deep for a key: move them into a module") from error
    sources, packages = follow(walk.modules, anew=anew)
    for name, source in sources.items() if anew else ():
        now = read_source(name)
        if now.text != source.text and parsed(*now, source.inner).syntax != source.syntax:
            raise ValueError(
                f"{source.path} has changed since it was loaded: load it and what imports it again (importlib.reload), or start "
                "Python anew"
            )
    attributes = _attributes(value, sources)
    _check_values(sources, attributes)
    texts = [f"{'' if name == home else name}: {source.syntax}" for name, source in sources.items()]
    values = [f"{name.rpartition('.')[2]}={setting!r}" for name, setting in attributes.items()]
    versions = filter(None, map(version_of, sorted(packages | walk.packages)))
    return OwnCode(_hash([*walk.parts, *sorted(texts), *versions, *values])[:16], sources, walk.has_values, attributes)


def _attributes(value: Any, sources: Mapping[str, ModuleSource]) -> dict[str, Any]:
    """Return the current numbers, strings and tuples of these that a class (or an instance's class) and the user's bases have as attributes."""
    changing = _changing(sources.values())
    return {
        f"{base.__qualname__}.{name}": part
        for base in reversed((value if isinstance(value, type) else type(value)).__mro__)
        if is_own(base.__module__) and base.__module__ not in MAIN  # the key has values of `__main__` already
        for name, part in sorted(vars(base).items())
        if not name.startswith("__")
        and name not in changing
        and all(type(item) in _PLAIN for item in (part if type(part) is tuple else (part,)))
    }


def _check_values(sources: Mapping[str, ModuleSource], attributes: Collection[str]) -> None:
    """Check that names of loaded modules, and attributes of their classes, still have the values from when the modules were loaded.

    Args:
        attributes: names of attributes whose values the key contains; these are not checked.

    Raises:
        ValueError: other code has set another value, or only a part of the modules was loaded again.
    """
    changing = _changing(sources.values())
    for module in sources.keys() & sys.modules.keys():
        before, now, taken = loaded_values(module), live_values(module), sources[module].taken
        pairs = [(name, value, before.get(name, value)) for name, value in now.items()]
        pairs += [
            (name, now[name], getattr(sys.modules.get(home), original, now[name]))
            for name, (home, original) in taken.items()
            if home in sources and name in now
        ]
        for name, value, wanted in pairs:
            allowed = value is wanted or name in attributes or not changing.isdisjoint(name.split("."))
            if not allowed and not _same(value, wanted):
                raise _replaced(f"{name} of {module}")


def _changing(sources: Iterable[ModuleSource]) -> set[str]:
    return {name.removeprefix(".") for source in sources for name in source.changing}


def _same(one: Any, another: Any) -> bool:
    """Return whether two values are one object, one function that was reloaded, or equal numbers, strings or containers of these."""
    if one is another or (one := _own_function(one) or one) is (another := _own_function(another) or another):
        return True
    if isinstance(one, types.FunctionType) and isinstance(another, types.FunctionType):
        return one.__code__ == another.__code__ and one.__closure__ is another.__closure__
    if type(one) is not type(another) or type(one) not in (*_PLAIN, list, tuple, dict, set, frozenset):
        return False
    return bool(one == another) if isinstance(one, set | frozenset) else repr(one) == repr(another)


def _replaced(name: str) -> ValueError:
    return ValueError(
        f"{name} isn't what its source says, of which the key is made: other code has replaced it, or only a part was loaded again. "
        "Write it in the source, or start Python anew"
    )


class _Walk:
    """A walk over the values that a member is made of, in an order that is the same in every process.

    Args:
        home: the member's own module, whose name is not part of the hash.
    Attributes:
        parts: the values as text, to be hashed.
        modules: the user's modules that define the values.
        packages: the top-level names of other packages that define them.
        has_values: whether any value is from a notebook or script.
    """

    def __init__(self, home: str) -> None:
        self.parts: list[str] = []
        self.modules: set[str] = set()
        self.packages: set[str] = set()
        self.has_values = False
        self._home = home
        self._seen: dict[Any, tuple[int, Any]] = {}  # keeps the values alive, so that no id is reused
        self._inside: set[int] = set()

    def value(self, value: Any) -> None:
        """Add a value.

        Raises:
            ValueError: no key can be made of it.
        """
        kind = type(value)
        if kind in _PLAIN:
            self.parts.append(repr(value))
        elif kind in (tuple, list, dict, types.MappingProxyType, set, frozenset):
            self.parts.append(f"{kind.__name__} of {len(value)}")
            if id(value) not in self._inside:  # it may contain itself
                self._inside.add(id(value))
                self._items(value)
                self._inside.remove(id(value))
        elif self._is_new(id(value), value):
            if isinstance(value, types.ModuleType):
                self.parts.append(value.__name__)
                self._uses(value.__name__)
            elif isinstance(value, type):
                self._class(value)
            elif isinstance(value, types.FunctionType):
                self._function(value)
            elif isinstance(value, _WRAPPERS) or hasattr(value, "__wrapped__"):
                self.parts.append(kind.__name__)
                self._each(getattr(value, name, None) for name in _WRAPPED)
            else:
                self._object(value)

    def _is_new(self, what: Any, value: Any = None) -> bool:
        if what in self._seen:
            self.parts.append(f"again {self._seen[what][0]}")
            return False
        self._seen[what] = len(self._seen), value
        return True

    def _each(self, values: Iterable[Any]) -> None:
        for value in values:
            self.value(value)

    def _items(self, value: Any) -> None:
        if isinstance(value, dict | types.MappingProxyType):
            self._each(part for item in value.items() for part in item)
        elif isinstance(value, set | frozenset):
            parts, seen, hashes = self.parts, self._seen, list[str]()
            for item in value:  # the order varies, so no item may refer to an earlier one
                self.parts, self._seen = [], dict(seen)
                self.value(item)
                hashes.append(_hash(self.parts))
            self.parts, self._seen = [*parts, *sorted(hashes)], seen
        else:
            self._each(value)

    def _uses(self, module: str) -> bool:
        """Add a module whose code the hash must cover, and return whether it is the user's own."""
        own = is_own(module)
        if own and module not in MAIN:
            self.modules.add(module)
        elif not own:
            self.packages.add(module.partition(".")[0])
        return own

    def _name(self, module: str, name: str) -> bool:
        self.parts.append(f"{'' if module == self._home else module}.{name}")
        return self._uses(module)

    def _class(self, value: type) -> None:
        module = value.__module__
        if not self._name(module, value.__qualname__):
            return
        self._each(value.__mro__[1:])
        changing = set[str]()
        if module in MAIN:
            changing = _changing([self._define(value, _methods(value)).source])
        elif "<locals>" not in value.__qualname__ and value.__qualname__ in _compiled(parsed_source(module)):
            with suppress(AttributeError):
                current = attrgetter(value.__qualname__)(sys.modules.get(module))
                if current is not value and isinstance(current, type) and str(current) == str(value):
                    raise _replaced(f"{value.__qualname__} of {module}")  # its module was reloaded
            return  # the module's source defines it completely, unless a function created it
        for name, part in sorted(vars(value).items()):
            function = _own_function(part)
            if function is not None and not _is_generated(value, function):
                self.parts.append(name)
                self.value(function)
            elif function is None and not (
                name.startswith("__") or name == "_abc_impl" or name in changing or isinstance(part, _SLOTS)
            ):
                self.parts.append(name)
                self.value(part)

    def _function(self, value: types.FunctionType) -> None:
        code, module = value.__code__, str(value.__globals__.get("__name__", ""))
        own = self._name(module, code.co_qualname)
        if own:
            if module in MAIN:
                first, last, _, _, whole = self._define(value, [value])
                codes = _compiled(whole, code.co_flags & __future__.annotations.compiler_flag).get(code.co_qualname, [])
                codes = [part for part in codes if first <= part.co_firstlineno <= last]
            else:
                codes = _compiled(parsed_source(module)).get(code.co_qualname, [])
            if code not in codes:
                raise _replaced(f"{code.co_qualname} of {module}")
            self.parts.append(str(codes.index(code)))  # as functions can share a name: lambdas do
        if hasattr(value, "registry") and hasattr(value, "dispatch"):  # `singledispatch`: its closure has a cache
            self.value(value.registry)
        else:
            for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
                if name != "__class__" and cell != types.CellType():
                    self.parts.append(name)
                    self.value(cell.cell_contents)
        if own and (module in MAIN or "<locals>" in code.co_qualname):
            self._each((value.__defaults__, value.__kwdefaults__))
            self.value({name: part for name, part in vars(value).items() if name != "__wrapped__"})
        self.value(getattr(value, "__wrapped__", None))

    def _define(self, value: Any, functions: list[types.FunctionType]) -> _Statement:
        """Add the notebook's or script's statement that defines a value, with the values of the names that it uses; return the statement."""
        self.has_values = True
        names = functions[0].__globals__ if functions else vars(sys.modules[value.__module__])
        statement = _definition(value, functions, names)
        if self._is_new((statement.whole.path, statement.first)):
            self.parts.append(statement.source.syntax)
            for module in imported(statement.source):
                self._uses(module)
            used = sorted(_names(symtable.symtable(statement.source.text, "", "exec")))
            if "globals" in used:
                raise ValueError(
                    "it looks up names of a notebook or script that it computes (globals): write them out, or use a module"
                )
            for name in used:
                if name in names and name not in statement.source.changing and not name.startswith("__"):
                    self.parts.append(f"{name} =")
                    self.value(names[name])
        return statement

    def _object(self, value: Any) -> None:
        kind = type(value)
        self.value(kind)
        torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
        try:
            if torch is not None and isinstance(value, torch.Tensor):
                data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
                facts = value.dtype, tuple(value.shape), value.requires_grad
                self.parts += [str(facts), hashlib.sha256(data).hexdigest()]
            elif numpy is not None and isinstance(value, numpy.ndarray | numpy.generic) and not value.dtype.hasobject:
                self.parts += [f"{value.dtype} {value.shape}", hashlib.sha256(value.tobytes()).hexdigest()]
            elif hasattr(value, "model_fields_set"):  # pydantic: which fields were given doesn't matter
                self.value(vars(value))
            elif isinstance(value, set | frozenset):
                self._items(value)
            else:
                reduce = copyreg.dispatch_table.get(kind)
                reduced: Any = reduce(value) if reduce is not None else value.__reduce_ex__(4)
                if isinstance(reduced, str):
                    self.parts.append(f"{getattr(value, '__module__', None)}.{reduced}")
                else:
                    self._each(list(part) if isinstance(part, Iterator) else part for part in reduced)
        except ValueError:
            raise
        except Exception as error:  # whatever the object raises
            raise ValueError(
                f"it uses a {kind.__qualname__} ({error}), of which no key can be made: move it into a module"
            ) from error


def _hash(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode(errors="surrogatepass")).hexdigest()


def _own_function(part: Any) -> types.FunctionType | None:
    """Return the function of a method without wrappers of libraries, such as the one that torch adds when a class is first used."""
    if isinstance(part, property | staticmethod | classmethod | types.MethodType):
        part = part.fget if isinstance(part, property) else part.__func__
    if not callable(part) or isinstance(part, type):
        return None
    function = inspect.unwrap(part, stop=lambda f: is_own(str(getattr(f, "__globals__", {}).get("__name__", ""))))
    # From Python 3.14 on, a class has a function that computes its annotations; its source has them already.
    return function if isinstance(function, types.FunctionType) and function.__name__ != "__annotate__" else None


def _methods(value: type) -> list[types.FunctionType]:
    """Return the functions in a class's definition in a notebook or script."""
    functions = filter(None, map(_own_function, vars(value).values()))
    return [method for method in functions if method.__qualname__.startswith(f"{value.__qualname__}.")
            and method.__globals__.get("__name__") in MAIN and not _is_generated(value, method)]  # fmt: skip


def _is_generated(kind: type, function: types.FunctionType) -> bool:
    """Return whether `dataclass` generated a method; the class's source determines such a method."""
    return "__dataclass_fields__" in vars(kind) and function.__code__.co_filename == "<string>"


class _Statement(NamedTuple):
    """A statement of a notebook's cell or of a script: its first and last line in the whole text, and the names that it binds."""

    first: int
    last: int
    names: set[str]
    source: ModuleSource
    whole: ModuleSource


def _definition(value: Any, functions: list[types.FunctionType], names: Mapping[str, Any]) -> _Statement:
    """Return the statement of a notebook or script that defines a class or function; raise a `ValueError` if none is found."""
    # A notebook's class without methods doesn't tell which cell defines it: the last one that binds its name does.
    cells = [file for file in reversed(linecache.cache) if not Path(file).exists()]
    files = [function.__code__.co_filename for function in functions[:1]] or [str(names.get("__file__") or ""), *cells]
    name, line = value.__qualname__.partition(".")[0], functions[0].__code__.co_firstlineno if functions else 0
    for file in files:
        text = "".join(linecache.getlines(file))
        whole = parsed(file, text, False, "")
        for statement in reversed(_statements(whole, str(names.get("__package__") or ""))):
            if statement.first <= line <= statement.last or (not line and name in statement.names):
                return statement
    raise ValueError(
        f"the source of {value.__qualname__} cannot be read: define it by that name in a file, or in a notebook"
    )


@lru_cache(maxsize=256)
def _statements(whole: ModuleSource, package: str) -> list[_Statement]:
    statements = []
    with suppress(ValueError):  # it isn't Python
        for node in whole.tree.body:
            first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
            bound = {
                name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
            }
            names = {node.name} if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) else bound
            source = parsed(whole.path, ast.unparse(node), False, package)
            statements.append(_Statement(first, node.end_lineno or first, names, source, whole))
    return statements


def _names(table: symtable.SymbolTable) -> Iterator[str]:
    """Yield the module's names that a definition uses, also in functions inside it."""
    top = table.get_type() == "module"
    yield from (
        symbol.get_name()
        for symbol in table.get_symbols()
        if (top and symbol.is_referenced()) or (not top and symbol.is_global())
    )
    for child in table.get_children():
        yield from _names(child)


@lru_cache(maxsize=1024)
def _compiled(source: ModuleSource, flags: int = 0) -> dict[str, list[types.CodeType]]:
    """Return a source's code objects by qualified name, in the order of the text."""
    by_name: dict[str, list[types.CodeType]] = {}
    # A notebook's cell may use `await` at its top level.
    left = [compile(source.text, source.path, "exec", flags=flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)]
    while left:
        code = left.pop()
        by_name.setdefault(code.co_qualname, []).append(code)
        left += reversed([part for part in code.co_consts if isinstance(part, types.CodeType)])
    return by_name

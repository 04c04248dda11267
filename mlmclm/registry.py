"""The registries of everything that can be added: in a file of this package, in another package, or in a notebook.

    @mlmclm.register("objective")
    class Even(Objective):
        name = "even"

A member is built in, named by an entry point of an installed package (its group is in `KINDS`), or registered in this
process. All are looked up by name in the same way (`Registry`). A launcher sends registered members to its workers
(`Shipment`). If a member can change a result, the result's key identifies the member's code (`Registry.keyed`).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import FunctionType
from typing import Any, Generic, TypeVar, get_args, overload

from pydantic import AfterValidator, ConfigDict, GetCoreSchemaHandler, TypeAdapter, ValidationError

from mlmclm.errors import UserError, unknown
from mlmclm.member_code import OwnCode, keep_script, own_code
from mlmclm.own_modules import MAIN, SourceFile, distribution_of, is_own, receive

Value = TypeVar("Value")
Result = TypeVar("Result")
_ANY_TYPE = ConfigDict(arbitrary_types_allowed=True)


@dataclass(frozen=True)
class RegistryEntry:
    """A member of a registry."""

    name: str
    value: Any
    """The class, function or other object; of an entry point, None until it is loaded."""
    origin: str
    """Where it comes from, as messages show it."""
    point: importlib.metadata.EntryPoint | None = None
    code: str | None = None
    """Its code as keys contain it, if another process registered it; None if this process did, and for built-in members."""
    by_name: bool = False
    """Whether this process has imported it by its name, from the source of which `code` is the hash."""
    place: tuple[str, str] = ("", "")
    """Module and name of its definition. A later definition with the same two replaces it, as when a notebook's cell runs again."""


class Registry(Generic[Value]):
    """The members of a kind, by name.

    Args:
        kind: the kind, as in messages and in `register`.
        group: the entry points' group, without "mlmclm.".
        base: MODULE:NAME of the class that members are subclasses of; empty for any callable. It is imported when the
            first member is checked.
        package: the module, or the package of modules, that defines the built-in members; empty for none.
        instances: whether members are instances of `base`, which may be a protocol.
        folders: whether entry points name packages with files, rather than members.
        ships: whether workers need what a driver registers.
    """

    def __init__(
        self, kind: str, group: str, base: str = "", package: str = "", *, instances: bool = False, folders: bool = False, ships: bool = True
    ) -> None:  # fmt: skip
        self.kind, self.group, self._base, self._package = kind, f"mlmclm.{group}", base, package
        self._instances, self._folders, self.ships = instances, folders, ships
        self.registered: dict[str, RegistryEntry] = {}
        """The members that were registered in this process."""
        self._values: dict[str, Value] = {}
        self._codes: dict[str, OwnCode] = {}
        """The user's own code of members by name, as of their registration, or of the first key that contained it."""
        self._broken: dict[str, UserError] = {}
        self._listeners: list[Callable[[], object]] = []

    def on_change(self, listener: Callable[[], object]) -> None:
        """Add a function to call whenever the members may have changed, such as one that clears a cached choice of a member."""
        self._listeners.append(listener)

    def find(self, name: str) -> Value | None:
        """Return the member with a name, or None.

        Raises:
            UserError: another package's member fails to load, is of another kind, or two members share a name.
        """
        if name not in self._values:
            member = self._members.get(name)
            if member is None:
                return None
            if name in self._broken:
                raise self._broken[name]
            try:
                self._values[name] = self._loaded(member)
            except UserError as error:
                self._broken[name] = error
                raise
        return self._values[name]

    def __getitem__(self, name: str) -> Value:
        """Return the member with a name; raise UserError for an unknown one, with the nearest and all names."""
        member = self.find(name)
        if member is None:
            raise unknown(self.kind, name, [known for known, _ in self.items()])
        return member

    def __contains__(self, name: object) -> bool:
        return name in self._members

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def each(self, work: Callable[[str, Value], Result]) -> tuple[dict[str, Result], list[str]]:
        """Return the result of `work` for each member, by name, and the reasons why others are left out, each printed once.

        A member is left out if it cannot be loaded, or if it is not of this package and `work` fails.
        """
        results, reasons = dict[str, Result](), list[str]()
        for name in self._members:
            try:
                results[name] = work(name, self[name])
            except (Exception, SystemExit) as error:  # whatever the member raises
                if name in self._broken:
                    reasons.append(str(error))
                    report_left_out(reasons[-1])
                    continue
                if self.is_built_in(name):
                    raise
                said = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
                reasons.append(f"{self.kind} {name!r}: {said}")
                report_left_out(f"{self.described(name)}: {said}")
        return results, reasons

    def items(self) -> Iterable[tuple[str, Value]]:
        """Return all members by name: built in, of other packages (which this loads), and registered in this process.

        A member that cannot be loaded is left out, and a message says so once.
        """
        return self.each(lambda name, member: member)[0].items()

    def values(self) -> Iterator[Value]:
        """Yield the members of `items`."""
        return (member for _, member in self.items())

    def is_built_in(self, name: str) -> bool:
        """Return whether there is such a member, and it is of this package."""
        member = self._members.get(name)
        return member is not None and _is_built_in(member)

    def described(self, name: str) -> str:
        """Return a member's kind, name and origin, for people."""
        return f"{self.kind} {name!r} from {self._members[name].origin}"

    def built_in(self) -> list[Value]:
        """Return the members of this package."""
        return [self[name] for name in self if self.is_built_in(name)]

    @property
    def extended(self) -> bool:
        """Whether there are members besides those of this package."""
        return not all(map(self.is_built_in, self))

    def points(self) -> list[importlib.metadata.EntryPoint]:
        """Return the entry points of installed packages, sorted by name."""
        return sorted(importlib.metadata.entry_points(group=self.group), key=lambda point: (point.name, point.value))

    def keyed(self, name: str) -> str:
        """Return a member's entry in keys: its name if it is built in (`mlmclm.versions` covers its code), else NAME@CODE.

        CODE is the distribution and version if the member is of an installed package. Otherwise it is a hash of the source,
        because a notebook, a script or a checkout can change without a new version.
        """
        member = self._members.get(name)
        code = None if member is None else self._code(member)
        return name if code is None else f"{name}@{code}"

    def add(self, member: RegistryEntry) -> None:
        """Add a member, or replace the one of its name that was defined in the same `place`.

        Raises:
            UserError: there is another member with its name, or it is of another kind.
        """
        earlier = self._members.get(member.name)
        if earlier is not None and (earlier.place != member.place or earlier.name not in self.registered):
            raise self._twice(earlier, member)
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", member.name):
            raise UserError(f"{self.kind} {member.name!r}: a name is letters, digits, '.', '_' and '-'.")
        self._check(member)
        self.remove(member.name)
        self.registered[member.name] = member
        self.forget()
        # A notebook may define later what its member uses, so this code is hashed later. Elsewhere, an error waits until a key needs the hash.
        if member.code is None and _module_of(member.value) in MAIN:
            keep_script()
        elif member.code is None:
            with suppress(UserError):
                self._code(member)

    def remove(self, name: str) -> None:
        """Remove a member that was registered in this process, if there is one."""
        self.registered.pop(name, None)
        self._codes.pop(name, None)
        self.forget()

    def forget(self) -> None:
        """Clear the cached members, so that the next access looks for them again, as after the installation of a package."""
        self._values.clear()
        self._broken.clear()
        self.__dict__.pop("_members", None)
        for listener in self._listeners:
            listener()

    def shipped(self) -> tuple[list[RegistryEntry], dict[str, SourceFile]]:
        """Return the members that were registered in this process, with their code as in keys, and the user's modules of that code.

        A member that enters no key, such as a callback that only observes, may have code of which no key can be made. The modules
        include those of editable packages, whose members workers find by entry points and load from these modules.
        """
        members = list[RegistryEntry]()
        for member in self.registered.values() if self.ships else ():
            with suppress(UserError):
                member = replace(member, code=self._code(member))
            own = self._codes.get(member.name)
            kind = member.value if isinstance(member.value, type) else type(member.value)
            own_by_name = own is not None and not own.has_values and "<locals>" not in kind.__qualname__
            if own_by_name and member.code is not None:
                member = replace(member, by_name=True)  # others are pickled by value
            members.append(member)
        return members, {name: f for code in self._codes.values() if self.ships for name, f in code.modules.items()}

    @cached_property
    def _members(self) -> dict[str, RegistryEntry]:
        items = _defined_in(self._package, self._type if self._base else None) if self._package else ()
        members = [RegistryEntry(_name_of(item), item, f"{item.__module__}.{item.__qualname__}") for item in items]
        points = () if self._folders else self.points()
        members += [RegistryEntry(point.name, None, describe_entry_point(point), point) for point in points]
        by_name: dict[str, RegistryEntry] = {}
        for member in (*members, *self.registered.values()):
            earlier = by_name.setdefault(member.name, member)
            if earlier is not member and _is_built_in(earlier):
                report_left_out(str(self._twice(earlier, member)))
            elif earlier is not member:
                # Two members of one name are an error only for a caller that asks for this name.
                self._broken[member.name] = self._twice(earlier, member)
        return by_name

    def _twice(self, earlier: RegistryEntry, member: RegistryEntry) -> UserError:
        return UserError(
            f"{self.kind} {member.name!r}: there are two of this name, from {earlier.origin} and from {member.origin}; rename one."
        )

    def _loaded(self, member: RegistryEntry) -> Any:
        if member.by_name:
            self._same_here(member)
        if member.point is None:
            return member.value
        try:
            value = member.point.load()
        except (Exception, SystemExit) as error:  # whatever the other package raises
            raise UserError(f"{member.origin} cannot be loaded: {type(error).__name__}: {error}.") from error
        self._check(replace(member, value=value))
        return value

    @property
    def _type(self) -> Any:
        return pkgutil.resolve_name(self._base)

    def _check(self, member: RegistryEntry) -> None:
        value = member.value
        if not self._base:
            wrong, wanted = not callable(value), "something that can be called"
        elif self._instances:
            wrong, wanted = not isinstance(value, self._type), f"a {self._base.replace(':', '.')}"
        else:
            wrong = not (isinstance(value, type) and issubclass(value, self._type))
            wanted = f"a subclass of {self._base.replace(':', '.')}"
        if wrong:
            raise UserError(f"{self.kind} {member.name!r} from {member.origin} is {value!r}; expected {wanted}.")
        lacks = _lacks(self._type, value) if self._base and not self._instances else []
        if lacks:
            raise UserError(f"{self.kind} {member.name!r} from {member.origin} {'; '.join(lacks)}.")
        name = getattr(value, "name", None)
        if isinstance(name, str) and name != member.name:
            raise UserError(f"{self.kind} {member.name!r} from {member.origin} has another name, {name!r}; use one.")

    def _same_here(self, member: RegistryEntry) -> None:
        """Check that a member sent by another process has the code hash in its key here too, with this process's package versions."""
        try:
            code, said = own_code(member.value).hash, ""
        except ValueError as error:
            code, said = "", f": {error}"
        if code != member.code:
            raise UserError(
                f"{self.kind} {member.name!r} from {member.origin} is other code in a worker than where it was registered{said}. "
                "Install the same packages on all nodes. What your program changes in its module, write into the module."
            )

    def _code(self, member: RegistryEntry) -> str | None:
        if _is_built_in(member) or member.code is not None:
            return member.code
        value = self._loaded(member)
        module = _module_of(value)
        try:
            if not is_own(module):
                dist = member.point.dist if member.point is not None else distribution_of(module.partition(".")[0])
                if dist is None:
                    raise ValueError(f"its module {module} has no file, and is of no installed package")
                return f"{dist.name} {dist.version}"
            if member.name not in self._codes:
                self._codes[member.name] = own_code(value)
            self._codes[member.name].check(value)
        except ValueError as error:
            raise UserError(
                f"{self.kind} {member.name!r} from {member.origin}: {error}. No key could tell it from another one of this name."
            ) from error
        return self._codes[member.name].hash


def report_left_out(reason: str) -> None:
    """Print, once for each reason, that something from outside this package is left out, and why."""
    from mlmclm.progress import say_once

    say_once(f"left out: {reason}")


def _lacks(base: type, value: type) -> list[str]:
    """Return the abstract methods and class attributes of `base` that a subclass lacks or has with another type.

    They are reported before anything is computed, rather than by the later step that needs them.
    """

    def undefined(kind: type) -> str:
        return ", ".join(sorted(getattr(kind, "__abstractmethods__", ())))

    faults = [f"does not define {undefined(value)}"] if undefined(value) else []
    for owner in reversed(base.__mro__):
        for name, hint in vars(owner).get("__annotations__", {}).items():
            if not str(hint).startswith("ClassVar"):
                continue
            attribute = getattr(value, name, None)
            if not hasattr(value, name):
                faults.append(f"has no {name!r}")
            elif isinstance(attribute, type) and undefined(attribute):
                faults.append(f"has a {name!r} that does not define {undefined(attribute)}")
            elif not isinstance(attribute, property):
                (kind,) = get_args(eval(hint, vars(sys.modules[owner.__module__])))
                try:
                    TypeAdapter(kind, config=_ANY_TYPE).validate_python(attribute)
                except ValidationError as error:
                    faults.append(f"has {name} = {attribute!r}: {error.errors()[0]['msg']}")
    return [*faults, *(getattr(value, "lacks", list)())]


def _defined_in(package: str, base: type | None) -> Iterator[Any]:
    """Yield the members that a module defines, or the modules of a package, in the order of their names.

    They are the subclasses of `base`, or without one the public functions.
    """
    root = importlib.import_module(package)
    names = [f"{package}.{submodule.name}" for submodule in pkgutil.iter_modules(getattr(root, "__path__", ()))]
    for module in map(importlib.import_module, names or [package]):
        for name, value in vars(module).items():
            is_member = (
                isinstance(value, FunctionType) and not name.startswith("_")
                if base is None
                else isinstance(value, type) and issubclass(value, base) and value is not base
            )
            if is_member and value.__module__ == module.__name__:  # not one that it only imports
                yield value


def _is_built_in(member: RegistryEntry) -> bool:
    point = member.point
    return member.place == ("", "") and (point is None or point.value.partition(".")[0] == "mlmclm")


def _module_of(value: Any) -> str:
    return str(getattr(value, "__module__", None) or type(value).__module__)


def _name_of(value: Any) -> str:
    name = getattr(value, "name", None)
    return name if isinstance(name, str) else str(getattr(value, "__name__", ""))


def describe_entry_point(point: importlib.metadata.EntryPoint) -> str:
    """Return an entry point's name, group, value and distribution, for people."""
    package = "" if point.dist is None else f" of {point.dist.name} {point.dist.version}"
    return f"entry point {point.name!r} of the group {point.group} ({point.value}){package}"


_REGISTRIES: tuple[Registry[Any], ...] = (
    Registry("objective", "objectives", "mlmclm.objectives.objective:Objective", "mlmclm.objectives"),
    Registry("schedule", "schedules", "mlmclm.schedules.decay:Decay", "mlmclm.schedules"),
    Registry(
        "optimizer", "optimizers", "mlmclm.backends.optimizers.optimizer:Optimizer", "mlmclm.backends.optimizers.rules"
    ),
    Registry("callback", "callbacks", "mlmclm.pretraining.callbacks.callback:Callback", "mlmclm.pretraining.callbacks"),
    Registry("backend", "backends", "mlmclm.backends.reference:Reference", "mlmclm.backends"),
    Registry("family", "families", "mlmclm.tasks.family:Family", "mlmclm.tasks.families"),
    # An entry point names a package whose folder holds declarations in YAML.
    Registry("task", "tasks", "mlmclm.tasks.declaration:Task", instances=True, folders=True),
    Registry("generator", "generators", "mlmclm.tasks.generator:Generator", instances=True, ships=False),
    Registry("corpus", "corpora", ships=False),  # (store) -> corpora.documents.Source
    Registry("metric", "metrics", "mlmclm.tasks.metric:Metric"),
    # (analysis.analyse.Analysis) -> pandas.DataFrame
    Registry("statistic", "statistics", "", "mlmclm.analysis.statistics", ships=False),
    Registry("figure", "figures", "mlmclm.reports.drawing:FigureGroup", "mlmclm.reports.figures", ships=False),
    Registry("reader", "readers", "mlmclm.readers.reader:Reader", "mlmclm.readers", ships=False),
    # (study's name, Sequence[tracking.records.RunRecord], an empty folder) -> how to see them
    Registry("sink", "sinks", "", "mlmclm.tracking.sinks", ships=False),
)
KINDS: Mapping[str, Registry[Any]] = {registry.kind: registry for registry in _REGISTRIES}
"""The registry of each kind. An entry point of the group `mlmclm.GROUP` gives a class or function the name that settings
refer to."""


@overload
def register(kind: str, name: str | None = None) -> Callable[[Value], Value]: ...
@overload
def register(kind: str, name: str | None, member: Value) -> Value: ...
def register(kind: str, name: str | None = None, member: Any = None) -> Any:
    """Register a member of a kind in this process: a function, and without `member` a decorator.

    A changed member may be registered again from the same module under the same name, as by a notebook's cell.

    Args:
        kind: one of `KINDS`.
        name: the name; None for the member's attribute `name`, or the name of the class or function.

    Returns:
        The member, or a decorator that returns it.

    Raises:
        UserError: there is no such kind, the member is of another kind, or one of this name is defined elsewhere.
    """
    if kind not in KINDS:
        raise unknown("kind of member", kind, KINDS)
    frame = sys._getframe(1)
    module, line = str(frame.f_globals.get("__name__")), f"{frame.f_code.co_filename}, line {frame.f_lineno}"

    def add(value: Any) -> Any:
        place = module, getattr(value, "__qualname__", "")
        KINDS[kind].add(
            RegistryEntry(name or _name_of(value), value, f"{'.'.join(filter(None, place))} ({line})", place=place)
        )
        return value

    return add if member is None else add(member)


@dataclass(frozen=True)
class Shipment:
    """The members that this process has registered, for its workers: a worker that unpickles a shipment registers them too.

    A launcher must include it in the data that it sends, and serialise it like them. `modules` are the user's modules with
    the members' code, and their sources. A worker imports these sources rather than its own files, so that it has the code
    as it was when it was registered.
    """

    members: tuple[tuple[str, RegistryEntry], ...]
    modules: Mapping[str, SourceFile] = field(default_factory=dict)

    def __reduce__(self) -> Any:
        return _with_modules, (self.modules,), self.members

    def __setstate__(self, members: tuple[tuple[str, RegistryEntry], ...]) -> None:
        object.__setattr__(self, "members", members)
        for kind, member in members:
            KINDS[kind].add(member)


def _with_modules(modules: Mapping[str, SourceFile]) -> Shipment:
    """Register the sources of modules, from which members pickled by name are then imported; return a shipment without members."""
    receive(modules)
    return Shipment((), modules)


def shipment() -> Shipment:
    """Return the members that are registered in this process."""
    shipped = {kind: registry.shipped() for kind, registry in KINDS.items()}
    modules = {name: source for _, sources in shipped.values() for name, source in sources.items()}
    return Shipment(tuple((kind, member) for kind, (members, _) in shipped.items() for member in members), modules)


@dataclass(frozen=True)
class MemberName:
    """Annotation of a setting that names a member of a kind, or several: `decay: Annotated[str, MemberName("schedule")]`.

    An unknown name is an error. Keys contain `Registry.keyed` of the name in its place.
    """

    kind: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return AfterValidator(self._checked).__get_pydantic_core_schema__(source, handler)

    def _checked(self, value: Any) -> Any:
        return self._name(value) if isinstance(value, str) else type(value)(map(self._name, value))

    def _name(self, value: str) -> str:
        # In a result, a name has the form that it has in keys: NAME@CODE.
        name, registry = value.partition("@")[0], KINDS[self.kind]
        if name not in registry:
            raise ValueError(str(unknown(self.kind, name, registry)).rstrip("."))
        if name != value != registry.keyed(name):
            raise ValueError(f"it was made with another {self.kind} {name!r} than the one here, {registry.keyed(name)}")
        return name

    def keyed(self, value: Any) -> Any:
        """Return a setting's value as a key contains it."""
        registry = KINDS[self.kind]
        return registry.keyed(value) if isinstance(value, str) else [registry.keyed(name) for name in value]

"""Frozen typed configuration read from YAML, with errors that name the file, the key, the value and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from enum import Enum
from functools import cache
from pathlib import Path, PurePosixPath
from types import UnionType
from typing import Annotated, Any, Literal, Protocol, TypeVar, Union, get_args, get_origin, runtime_checkable

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, ValidationInfo, field_validator

from mlmclm.errors import UserError, clipped, meant_path, one_line, unknown

MOST_NODES = 100_000
"""Maximum number of values in a YAML file whose aliases (`*name`) are expanded. A few lines of aliases can expand to more
values than fit into memory."""
LONGEST_MESSAGE = 2_000
"""Maximum number of characters in the message about one key; the longest of our own messages list the allowed values."""
MOST_MESSAGES = 20
"""Maximum number of a file's wrong keys that are reported."""


class Role(Enum):
    """Effect of a field of settings: `batch: Annotated[int, Role.WEIGHTS]`. A field has one role or several.

    The keys under which results are found again follow from the roles (`Frozen.keyed`).
    """

    WEIGHTS = "the weights that a training ends with"
    SHAPE = "a model's configuration, before any training"
    SOURCE = "which data are read"
    TEXT = "which documents are for training, and which for validation"
    TOKENS = "the tokens that a model is trained or evaluated on"
    EVALUATION = "the scores of trained weights"
    CHOICE = "which results there are; each has a key of its own"
    WORK = "where and how fast results are computed"
    DISPLAY = "names, records and reports"


class Enters(Enum):
    """How a field enters the keys of its roles, unless it always does: `rows: Annotated[Rows, Role.WEIGHTS, Enters.IF_CHANGED]`."""

    IF_CHANGED = (
        "only where it differs from its default, so that a new field leaves the keys of existing results as they are"
    )
    INDIRECTLY = "through what is computed from it, which the code that makes the key adds"


@runtime_checkable
class KeyedMark(Protocol):
    """An annotation that determines what keys contain in place of a field's value, such as `registry.MemberName`."""

    def keyed(self, value: Any) -> Any: ...


class Frozen(BaseModel):
    """Base of all configuration objects: immutable; unknown keys are errors, as are fractions given for integers
    and infinite numbers. Each field declares its `Role`."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,  # they describe keys in JSON Schemas
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **more: Any) -> None:
        """Check the roles of a new class's fields.

        Raises:
            TypeError: a field has no role, or enters keys only if it differs from its default, but has none.
        """
        super().__pydantic_init_subclass__(**more)
        for name, field in cls.model_fields.items():
            if not any(isinstance(mark, Role) for mark in field.metadata):
                raise TypeError(
                    f"{cls.__module__}.{cls.__qualname__}.{name}: a field of settings declares what it changes, such as "
                    f"`{name}: Annotated[..., Role.WEIGHTS]`; allowed: {', '.join(map(str, Role))}"
                )
            if Enters.IF_CHANGED in field.metadata and field.is_required():
                raise TypeError(f"{cls.__module__}.{cls.__qualname__}.{name}: {Enters.IF_CHANGED} needs a default")

    @classmethod
    def fields_with(cls, mark: Any) -> tuple[str, ...]:
        """Return the names of the fields whose annotation has a role or another mark, in the order of the class."""
        return tuple(name for name, field in cls.model_fields.items() if mark in field.metadata)

    def keyed(self, *roles: Role) -> dict[str, Any]:
        """Return the fields with one of these roles as a key contains them: JSON values by name.

        A field of nested settings is included if it has one of these roles itself.
        """
        plain, fields = self.model_dump(mode="json"), type(self).model_fields
        entries: dict[str, Any] = {}
        for name in _entering(type(self), roles):
            value = _keyed(getattr(self, name), plain[name], roles)
            for mark in _marks(type(self)).get(name, ()):
                value = mark.keyed(value)
            if Enters.IF_CHANGED not in fields[name].metadata or value != _defaults(type(self), roles)[name]:
                entries[name] = value
        return entries

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        # pydantic would accept true as 1.
        if isinstance(value, bool):
            kinds = _kinds(cls.model_fields[str(info.field_name)].annotation)
            if kinds & {int, float} and bool not in kinds:
                raise ValueError("expected a number")
        return value


@cache
def _entering(settings: type[Frozen], roles: tuple[Role, ...]) -> tuple[str, ...]:
    """Return the names of the fields that enter a key of these roles directly."""
    indirect = settings.fields_with(Enters.INDIRECTLY)
    wanted = {name for role in roles for name in settings.fields_with(role)}
    return tuple(name for name in settings.model_fields if name in wanted and name not in indirect)


@cache
def _marks(settings: type[Frozen]) -> dict[str, tuple[KeyedMark, ...]]:
    """Return the `KeyedMark` annotations by field; cached, because finding them takes longer than making a key."""
    marks = {
        name: tuple(mark for mark in field.metadata if isinstance(mark, KeyedMark))
        for name, field in settings.model_fields.items()
    }
    return {name: declared for name, declared in marks.items() if declared}


@cache
def _defaults(settings: type[Frozen], roles: tuple[Role, ...]) -> dict[str, Any]:
    """Return the defaults of the fields that enter a key only if they differ from these, in the form of `Frozen.keyed`."""
    base = settings.model_construct()
    plain = base.model_dump(mode="json")
    return {name: _keyed(getattr(base, name), plain[name], roles) for name in settings.fields_with(Enters.IF_CHANGED)}


def _keyed(value: Any, plain: Any, roles: tuple[Role, ...]) -> Any:
    """Return a field's value as a key contains it; `plain` is the value as JSON."""
    if isinstance(value, Frozen):
        return value.keyed(*roles)
    if isinstance(value, Mapping) and isinstance(plain, Mapping):
        return {name: _keyed(item, plain[name], roles) for name, item in value.items()}
    if isinstance(value, tuple) and isinstance(plain, list):
        return [_keyed(item, plain_item, roles) for item, plain_item in zip(value, plain, strict=True)]
    return plain


def _kinds(form: Any) -> set[Any]:
    """Return the types that an annotation allows; for a literal, those of its values."""
    if get_origin(form) is Annotated:
        return _kinds(get_args(form)[0])
    if get_origin(form) in (Union, UnionType):
        return set().union(*map(_kinds, get_args(form)))
    return {type(value) for value in get_args(form)} if get_origin(form) is Literal else {form}


Config = TypeVar("Config", bound=BaseModel)


def described_as(form: Any) -> BeforeValidator:
    """Return an annotation that gives a field the JSON Schema of `form`; another validator checks or converts the value."""
    return BeforeValidator(lambda value: value, json_schema_input_type=form)


def _inside(value: Any) -> Any:
    """Reject a string that, as a path, could lead outside the folder it is resolved in."""
    if isinstance(value, str) and (value.startswith(("/", "~")) or ".." in PurePosixPath(value).parts or "\0" in value):
        raise ValueError("must not be an absolute path, begin with '~' or contain '..'")
    return value


Inside = BeforeValidator(_inside)
"""Validator for strings that become part of a path below `--data` or below a cache of the Hub, such as the name of a
configuration, split or revision. A declaration may come from someone else, so it can only name paths below these
folders. The folders themselves belong to the user, so links in them are followed."""


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, which also refuses duplicate keys; by default the last one wins silently.

    A file whose aliases expand to more than `MOST_NODES` values is refused before any value is constructed.
    """

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if node is not None and _expanded(node, {}) > MOST_NODES:
            raise UserError(
                f"it stands for more than {MOST_NODES:,} values, with what its aliases (*name) repeat; write a smaller file."
            )
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Not in construct_mapping: by then a merge (<<) may have added keys that the mapping's own keys legitimately
        # override.
        node = super().compose_mapping_node(anchor)
        first: dict[Any, yaml.Mark] = {}
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.tag != "tag:yaml.org,2002:merge":
                key = self.construct_object(key_node)
                if key in first:
                    lines = f"lines {first[key].line + 1} and {key_node.start_mark.line + 1}"
                    raise UserError(f"key {key!r} is there twice, in {lines}; write one, with the content of both.")
                first[key] = key_node.start_mark
        return node


def _expanded(node: yaml.Node, sizes: dict[int, float]) -> float:
    """Return the number of nodes in the tree of a node, the node included, with aliases expanded.

    A node that contains itself has infinitely many. `sizes` caches the numbers by id, so that each node is visited once.
    """
    if id(node) in sizes:
        return sizes[id(node)]
    sizes[id(node)] = math.inf  # until it is known, for an alias inside the node itself
    children: list[yaml.Node] = []
    if isinstance(node, yaml.SequenceNode):
        children = node.value
    elif isinstance(node, yaml.MappingNode):
        children = [child for pair in node.value for child in pair]
    sizes[id(node)] = 1 + sum(_expanded(child, sizes) for child in children)
    return sizes[id(node)]


def read_yaml(path: Path) -> Any:
    """Read a YAML file.

    Raises:
        UserError: it is missing or malformed (`parse_yaml`); the message names the file, and the line or lines.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file.{meant_path(path)}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from error
    return parse_yaml(content, path)


def parse_yaml(content: bytes, where: object) -> Any:
    """Parse the content of a YAML file.

    Raises:
        UserError: it is malformed, a mapping has a duplicate key, or its aliases expand to too many values; the message
            starts with `where`.
    """
    try:
        return yaml.load(content.decode("utf-8"), _Loader)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    except RecursionError as error:
        raise UserError(f"{where}: not valid YAML: nested too deep.") from error
    # ValueError: not UTF-8, an impossible date, or a number with too many digits.
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{where}: not valid YAML: {one_line(error)}") from error


def with_overrides(values: Any, changes: Sequence[str], *, where: str) -> Any:
    """Return the values of a file with some of them changed.

    Args:
        changes: KEY=VALUE each, with a dotted key and a YAML value, such as `recipe.batch=32` or `seeds=[0, 1]`.
        where: the file, for messages.

    Raises:
        UserError: a change is not of this form, or its key is below a value that is no mapping.
    """
    changed = deepcopy(values)
    for change in changes if isinstance(changed, dict) else ():
        key, equals, text = change.partition("=")
        *outer, last = key.split(".")
        if not equals or not all((*outer, last)):
            raise UserError(f"{change!r}: write KEY=VALUE, such as recipe.batch=32.")
        place = changed
        for part in outer:
            place[part] = {} if place.get(part) is None else place[part]
            place = place[part]
            if not isinstance(place, dict):
                raise UserError(f"{change}: {part} is {clipped(repr(place))} in {where}, which has no keys of its own.")
        place[last] = parse_yaml(text.encode(), change)
    return changed


def parse_config(model: type[Config], value: Any, *, where: str, context: dict[str, Any] | None = None) -> Config:
    """Build `model` from plain values.

    Args:
        value: the plain values; anything but a mapping is an error.
        where: a file or an option, which starts each message.
        context: passed to the model's validators.

    Raises:
        UserError: one message for everything that is wrong.
    """
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected a mapping of keys to values, got {type(value).__name__}.")
    try:
        return model.model_validate(value, context=context)
    except ValidationError as error:
        wrong = [item for item in error.errors() if not _follows(item)]
        lines = [_explain(model, item, where) for item in wrong[:MOST_MESSAGES]]
        if len(wrong) > MOST_MESSAGES:
            lines.append(f"{where}: {len(wrong) - MOST_MESSAGES:,} more keys or values are wrong.")
        raise UserError("\n".join(lines)) from error


def load_config(model: type[Config], path: Path, *, context: dict[str, Any] | None = None) -> Config:
    """Build `model` from a YAML file; see `parse_config`."""
    return parse_config(model, read_yaml(path), where=str(path), context=context)


def _follows(item: Any) -> bool:
    """Return whether an error only follows from others: a list is too short because its wrong items were not counted."""
    return item["type"] == "too_short" and len(item["input"]) >= item["ctx"]["min_length"]


def _explain(model: type[BaseModel], item: Any, where: str) -> str:
    """Return one line for one pydantic error."""
    # pydantic adds the names of validator functions and a union's tags to the location, which mean nothing to the user.
    location = [part for part in item["loc"] if not (isinstance(part, str) and part.startswith(("function-", "<")))]
    key = clipped(".".join(str(part) for part in location))
    if item["type"] == "extra_forbidden":
        return str(unknown("key", key, _keys_at(model, location[:-1]), where=where))
    if item["type"] == "missing":
        return f"{where}: key {key!r} is missing."
    message = clipped(item["msg"].removeprefix("Value error, "), LONGEST_MESSAGE)
    if item["type"] == "tuple_type":  # YAML knows lists only
        message = "expected a list"
    elif item["type"] == "string_type" and not isinstance(item["input"], list | dict):
        message = "expected text. YAML reads no, yes, on, off, null, numbers and dates as something else; put them in quotes, such as 'no'"
    elif isinstance(item["input"], dict | BaseModel):  # about a whole object, whose value is too long to show
        return f"{where}: {': '.join(part for part in (key, message.rstrip('.')) if part)}."
    return f"{where}: {key}: {message} (got {clipped(repr(item['input']))})."


def _keys_at(model: type[BaseModel], location: list[Any]) -> list[str]:
    """Return the allowed keys of the nested model at `location`, with their full dotted names."""
    current = [model]
    for part in location:
        fields = [nested.model_fields[part] for nested in current if part in nested.model_fields]
        # In a union, the keys of every alternative are allowed.
        current = [nested for field in fields for nested in _models_in(field.annotation)] or current
    prefix = "".join(f"{part}." for part in location)
    return list(dict.fromkeys(f"{prefix}{name}" for model in current for name in model.model_fields))


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the pydantic models in a type: the type itself, or those among its arguments."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]

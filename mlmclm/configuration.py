"""Frozen typed configuration read from YAML, with errors that name the file, the key, the value and what is allowed."""

from __future__ import annotations

from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, ValidationInfo, field_validator

from mlmclm.errors import UserError, one_line, unknown


class Frozen(BaseModel):
    """Base of all configuration objects: immutable; unknown keys are errors, as are fractions given for integers
    and infinite numbers."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,  # they describe keys in JSON Schemas
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        # pydantic takes true for 1.
        if isinstance(value, bool):
            kinds = _kinds(cls.model_fields[str(info.field_name)].annotation)
            if kinds & {int, float} and bool not in kinds:
                raise ValueError("expected a number")
        return value


def _kinds(form: Any) -> set[Any]:
    """Return the types that an annotation allows, of a literal those of its values."""
    if get_origin(form) is Annotated:
        return _kinds(get_args(form)[0])
    if get_origin(form) in (Union, UnionType):
        return set().union(*map(_kinds, get_args(form)))
    return {type(value) for value in get_args(form)} if get_origin(form) is Literal else {form}


Config = TypeVar("Config", bound=BaseModel)


def described_as(form: Any) -> BeforeValidator:
    """Return an annotation for a value that another validator checks or converts: `form` is its JSON Schema."""
    return BeforeValidator(lambda value: value, json_schema_input_type=form)


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, which also refuses duplicate keys; by default the last one wins silently."""

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


def read_yaml(path: Path) -> Any:
    """Read a YAML file.

    Raises:
        UserError: it is missing or malformed, or a mapping has a duplicate key; the message names the file, and the
            line or lines.
    """
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file.") from error
    except RecursionError as error:
        raise UserError(f"{path}: not valid YAML: nested too deep.") from error
    # ValueError: not UTF-8, an impossible date, or a number with too many digits.
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{path}: not valid YAML: {one_line(error)}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from error


def parse(model: type[Config], value: Any, *, where: str, context: dict[str, Any] | None = None) -> Config:
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
        raise UserError("\n".join(_explain(model, item, where) for item in error.errors())) from error


def load_config(model: type[Config], path: Path, *, context: dict[str, Any] | None = None) -> Config:
    """Build `model` from a YAML file; see `parse`."""
    return parse(model, read_yaml(path), where=str(path), context=context)


def _explain(model: type[BaseModel], item: Any, where: str) -> str:
    """Return one line for one pydantic error."""
    # pydantic adds the names of validator functions and a union's tags to the location, which mean nothing to the user.
    location = [part for part in item["loc"] if not (isinstance(part, str) and part.startswith(("function-", "<")))]
    key = ".".join(str(part) for part in location)
    if item["type"] == "extra_forbidden":
        return str(unknown("key", key, _keys_at(model, location[:-1]), where=where))
    if item["type"] == "missing":
        return f"{where}: key {key!r} is missing."
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "tuple_type":  # YAML knows lists only
        message = "expected a list"
    elif isinstance(item["input"], dict | BaseModel):  # about a whole object, whose value is too long to show
        return f"{where}: {': '.join(part for part in (key, message.rstrip('.')) if part)}."
    return f"{where}: {key}: {message} (got {item['input']!r})."


def _keys_at(model: type[BaseModel], location: list[Any]) -> list[str]:
    """Return the allowed keys of the nested model at `location`, with their full dotted names."""
    current = [model]
    for part in location:
        fields = [each.model_fields[part] for each in current if part in each.model_fields]
        # In a union, the keys of every alternative are allowed.
        current = [nested for field in fields for nested in _models_in(field.annotation)] or current
    prefix = "".join(f"{part}." for part in location)
    return list(dict.fromkeys(f"{prefix}{name}" for each in current for name in each.model_fields))


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the models that a type names, as itself or among its arguments."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for argument in get_args(annotation) for found in _models_in(argument)]

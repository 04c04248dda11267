"""The sweep file: YAML that says which given models are fine-tuned over which grid, without any pretraining."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from mlmclm.backends.device_kinds import Choice
from mlmclm.configuration import Role, described_as, load_config, read_yaml
from mlmclm.errors import unknown
from mlmclm.studies.in_folder import InFolder, file_of
from mlmclm.sweeps.space import Space

OF_STUDIES = ("corpus", "corpora", "recipe")
"""Keys that only study files have."""


Sources = Annotated[tuple[str, ...], Field(min_length=1, json_schema_extra={"uniqueItems": True})]
ModelSources = Sources | Annotated[Mapping[str, str], Field(min_length=1)]


class SweepFile(InFolder):
    """A sweep of given models; `docs/given-models.md` has an example.

    A model is a folder, the name of a model in a study of the store (NAME or STUDY/NAME; `STUDY/*` is all of a study's),
    or a name on the Hugging Face Hub (OWNER/NAME, or OWNER/NAME@REVISION). Its name is the last part of that or, if
    `models` is a mapping, its key. Folders are relative to the sweep file or, if nothing is found there, to the
    working directory.
    """

    kind = "a sweep"
    name: Annotated[str, Role.DISPLAY] = "sweep"
    """Name of the report's folder and of the MLflow experiment."""
    space: Annotated[str | dict[str, Any], described_as(str | Space), Role.CHOICE]
    """Search space: the name of a file in tune_spaces/, the path of any other file, or what such a file holds."""
    models: Annotated[Mapping[str, str], Role.CHOICE] = Field(min_length=1)
    """Models to fine-tune: a list, or a mapping of names to sources."""
    baseline: Annotated[str | None, Role.DISPLAY] = None
    """The model, one of `models`, that the others are compared with."""
    device: Annotated[Choice, Role.WORK] = "auto"
    tracking: Annotated[str | None, Role.WORK] = None
    """Address of an MLflow server, as in a study file."""

    def model_of(self, name: str, *, where: str) -> str:
        """Return a model's name. If the sweep has no such model, the `UserError` starts with `where`."""
        if name not in self.models:
            raise unknown("model", name, self.models, where=where)
        return name

    @field_validator("models", mode="before", json_schema_input_type=ModelSources)
    @classmethod
    def _named(cls, value: Any) -> Any:
        return named_models(value) if isinstance(value, Sequence) and not isinstance(value, str) else value

    @field_validator("models")
    @classmethod
    def _names(cls, value: Mapping[str, str]) -> Mapping[str, str]:
        for name, source in value.items():
            # Names become folders and parts of cells' names; an asterisk stands for a study's models until these are known.
            if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._@-]*\*?", name) is None:
                raise ValueError(f"{name!r}: a model's name is letters, digits, '.', '_', '@' and '-'")
            if name.endswith("*") != source.endswith("/*"):
                raise ValueError(f"{name!r}: the models of a study ({source}) keep their own names")
        return value


def named_models(sources: Sequence[str]) -> dict[str, str]:
    """Return the models' sources by name; `NAME=SOURCE` gives a name, else it is the last part of the source.

    Raises:
        ValueError: two models have one name.
    """
    named: dict[str, str] = {}
    for text in map(str, sources):
        name, equals, source = text.partition("=")
        if not equals:
            name, source = text.replace("/", "") if text.endswith("/*") else Path(text.partition("@")[0]).name, text
        elif source.endswith("/*"):
            raise ValueError(f"{text!r}: the models of a study keep their own names")
        if not source:
            raise ValueError(f"{text!r}: a model's folder or name is missing")
        if name in named:
            raise ValueError(
                f"two models are called {name!r} ({named[name]} and {source}); give one a name of its own, as NAME=SOURCE"
            )
        named[name] = source
    return named


def is_sweep_file(path: Path) -> bool:
    """Return whether a YAML file is meant as a sweep file rather than a study file."""
    return is_sweep(read_yaml(file_of(path)))


def is_sweep(values: Any) -> bool:
    """Return whether the values of a file are those of a sweep file rather than a study file."""
    return isinstance(values, Mapping) and not any(key in values for key in OF_STUDIES)


def load_sweep(path: Path) -> SweepFile:
    """Read and check a sweep file; errors are as those of `configuration.load_config`."""
    return load_config(SweepFile, file_of(path), context={"file": file_of(path)})

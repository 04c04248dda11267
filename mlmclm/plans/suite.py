"""A suite: the names of models that belong together, as a YAML file; `paper`, the published study's set, ships with the package."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from pydantic import Field, ValidationInfo, field_validator, model_validator

from mlmclm.configuration import Frozen, load_config, parse
from mlmclm.errors import MlmclmError, unknown
from mlmclm.models.sizes import SIZES
from mlmclm.plans import names
from mlmclm.plans.names import ModelName
from mlmclm.plans.recipe import Recipe

FOLDER = Path(__file__).parent / "suites"
"""The packaged suites, `NAME.yaml` each."""


class Suite(Frozen):
    """Models to plan and pretrain together; their corpus and tokenizer are a study file's."""

    description: str = ""
    size: str | None = None
    """Of the models whose names leave it out: with `2m`, `clm-100` is `2m-clm-100`."""
    models: tuple[str, ...] = Field(min_length=1)
    """Names after the grammar (`plans.names`), each once."""
    recipe: Recipe | None = None
    """Fields that take the place of the study's, or without a study of the published recipe's; the others stay."""

    @field_validator("size")
    @classmethod
    def _known(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and value not in _sizes(info):
            raise ValueError(str(unknown("size", value, _sizes(info))))
        return value

    @model_validator(mode="after")
    def _models(self, info: ValidationInfo) -> Suite:
        spelled = [str(self._parse(name, _sizes(info))) for name in self.models]
        twice = sorted({name for name in spelled if spelled.count(name) > 1})
        if twice:
            raise ValueError(f"models: listed twice: {', '.join(twice)}")
        return self

    @property
    def parsed(self) -> tuple[ModelName, ...]:
        """The models' plans."""
        return tuple(self._parse(name) for name in self.models)

    def _parse(self, name: str, sizes: Iterable[str] | None = None) -> ModelName:
        """`sizes`: that there are; None where it is known that the name's is one."""
        bare = re.match(r"(clm|mlm\d*|untrained)(-|$)", name) is not None
        if bare and self.size is None:
            raise ValueError(f"models: {name!r} has no size: begin it with one, or give the suite a size")
        name = f"{self.size}-{name}" if bare else name
        try:
            return names.parse(name, [name.partition("-")[0]] if sizes is None else sizes)
        except MlmclmError as error:  # pydantic adds the file's name to a ValueError only
            raise ValueError(f"models: {error}") from error

    def recipe_over(self, recipe: Recipe, *, where: str) -> Recipe:
        """`recipe` with the suite's fields in the place of its own.

        Raises:
            UserError: the two together contradict themselves, such as a batch that the workers don't divide.
        """
        if self.recipe is None:
            return recipe
        return parse(Recipe, {**recipe.model_dump(), **self.recipe.model_dump(exclude_unset=True)}, where=where)


def _sizes(info: ValidationInfo) -> tuple[str, ...]:
    return tuple(SIZES) if info.context is None else info.context["sizes"]


def suite_names() -> list[str]:
    """The names of the packaged suites, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def find_suite(name_or_path: str, sizes: Iterable[str] = SIZES) -> Suite:
    """The suite of a packaged name (`paper`) or of a YAML file; whatever ends in .yaml or .yml, or has a folder in it, is a path.

    Args:
        sizes: that its models can have.

    Raises:
        UserError: no such name (with the nearest one) or file, an unknown key, or a value that is not allowed.
    """
    if name_or_path.endswith((".yaml", ".yml")) or len(Path(name_or_path).parts) > 1:
        return load_config(Suite, Path(name_or_path), context={"sizes": tuple(sizes)})
    if name_or_path not in suite_names():
        raise unknown("suite", name_or_path, suite_names(), where="--suite")
    return load_config(Suite, FOLDER / f"{name_or_path}.yaml", context={"sizes": tuple(sizes)})

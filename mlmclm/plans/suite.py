"""Suites: YAML files that list models that belong together. The package includes published sets: `paper`, `ettin`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import Field, PrivateAttr, ValidationInfo, field_validator, model_validator

from mlmclm.configuration import Enters, Frozen, Role, load_config, parse_config
from mlmclm.corpora.mixes import Mix
from mlmclm.errors import MlmclmError, unknown
from mlmclm.models.sizes import SIZES
from mlmclm.objectives.objective import OBJECTIVES
from mlmclm.plans import names
from mlmclm.plans.names import ModelName
from mlmclm.plans.recipe import SCHEDULE, Recipe

FOLDER = Path(__file__).parent / "suites"
"""Folder of the packaged suites, one `NAME.yaml` each."""


class Suite(Frozen):
    """Models to plan and pretrain together. A study file supplies their corpus and tokenizer."""

    description: Annotated[str, Role.DISPLAY] = ""
    size: Annotated[str | None, Role.CHOICE] = None
    """Size of the models whose names omit it: with `2m`, `clm-100` is `2m-clm-100`."""
    models: Annotated[tuple[str, ...], Role.CHOICE] = Field(min_length=1)
    """Model names (grammar in `plans.names`), without duplicates."""
    recipe: Annotated[Recipe | None, Role.WEIGHTS, Enters.INDIRECTLY] = None
    """Overrides for the study's recipe, or for the published one if there is no study. Fields not set here stay."""
    mixes: Annotated[dict[str, Mix], Role.WEIGHTS, Enters.INDIRECTLY] = Field(default_factory=dict)
    """Phase -> its mix of sources, for a study whose `corpora` have them all. In any other study, phases read that study's own text."""
    departures: Annotated[tuple[str, ...], Role.DISPLAY] = ()
    """Differences from the publication that the suite follows, for display."""

    _parsed: tuple[ModelName, ...] = PrivateAttr()

    @field_validator("size")
    @classmethod
    def _known(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and value not in _sizes(info):
            raise ValueError(str(unknown("size", value, _sizes(info))))
        return value

    @model_validator(mode="after")
    def _models(self, info: ValidationInfo) -> Suite:
        self._parsed = tuple(self._parse(name, _sizes(info)) for name in self.models)
        spelled = list(map(str, self._parsed))
        twice = sorted({name for name in spelled if spelled.count(name) > 1})
        if twice:
            raise ValueError(f"models: listed twice: {', '.join(twice)}")
        return self

    @property
    def parsed(self) -> tuple[ModelName, ...]:
        """The parsed names of the models."""
        return self._parsed

    def _parse(self, name: str, sizes: Iterable[str]) -> ModelName:
        """Parse a model's name, with the suite's size in front if it has none."""
        bare = name.partition("-")[0].rstrip("0123456789") in {*OBJECTIVES, "untrained"}
        if bare and self.size is None:
            raise ValueError(f"models: {name!r} has no size: begin it with one, or give the suite a size")
        name = f"{self.size}-{name}" if bare else name
        try:
            return names.parse_name(name, sizes)
        except MlmclmError as error:
            # pydantic collects only ValueErrors into a validation error, whose message then names the file.
            raise ValueError(f"models: {error}") from error

    def lacking(self, sources: Iterable[str]) -> list[str]:
        """Return the mixes' sources that a study's corpora lack; if any is lacking, the study's models are trained without mixes."""
        named = {name for mix in self.mixes.values() for name, _ in mix}
        return sorted(named - set(sources))

    def recipe_over(self, recipe: Recipe, *, where: str, sources: Iterable[str] = ()) -> Recipe:
        """Return `recipe` with the suite's fields in place of its own; a suite's phases replace the recipe's schedule.

        Args:
            sources: names of the study's corpora.

        Raises:
            UserError: if the combination is invalid, such as a batch that is not divisible by the number of workers.
        """
        overrides = {} if self.recipe is None else self.recipe.model_dump(exclude_unset=True)
        replaced = set(SCHEDULE) if self.recipe is not None and self.recipe.has_phases else set()
        values = {**recipe.model_dump(exclude=replaced), **overrides}
        mixes = {} if self.lacking(sources) else self.mixes
        for phases in (values["phases"], *values["phases_by_size"].values()):
            for phase in phases:
                if phase["name"] in mixes:
                    phase["mix"] = mixes[phase["name"]]
        return parse_config(Recipe, values, where=where) if overrides or mixes else recipe


def _sizes(info: ValidationInfo) -> tuple[str, ...]:
    return tuple(SIZES) if info.context is None else info.context["sizes"]


def suite_names() -> list[str]:
    """Return the sorted names of the packaged suites."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def find_suite(name_or_path: str, sizes: Iterable[str] = SIZES) -> Suite:
    """Load a packaged suite by name (`paper`) or a suite from a YAML file.

    Args:
        name_or_path: a path if it ends in .yaml or .yml or contains a folder, else the name of a packaged suite.
        sizes: the sizes that its models may have.

    Raises:
        UserError: if there is no such name (the message suggests the nearest one) or file, a key is unknown, or a
            value is not allowed.
    """
    path = Path(name_or_path)
    if not name_or_path.endswith((".yaml", ".yml")) and len(path.parts) <= 1:
        if name_or_path not in suite_names():
            raise unknown("suite", name_or_path, suite_names(), where="--suite")
        path = FOLDER / f"{name_or_path}.yaml"
    return load_config(Suite, path, context={"sizes": tuple(sizes)})

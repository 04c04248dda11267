"""The study file: one YAML that says which models are pretrained on what, and over which grid they are fine-tuned."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import Field, PrivateAttr, ValidationInfo, field_validator

from mlmclm.configuration import Frozen, load_config
from mlmclm.corpora.config import CorpusConfig, TokenizerConfig
from mlmclm.errors import MlmclmError, UserError, unknown
from mlmclm.models.sizes import SIZES
from mlmclm.plans.names import ModelName, parse
from mlmclm.plans.recipe import Recipe


class StudyFile(Frozen):
    """A study; see `examples/quickstart.yaml` for a commented one.

    Of what it reads, paths are relative to the study file, and where nothing is there, to the working directory.
    """

    name: str
    """Names the report's folder and the MLflow experiment."""
    initial: dict[str, str] = Field(default_factory=dict)
    """Models to continue from: the name that stands for one in the models' names in place of a size, and its folder or name on the
    Hugging Face hub (OWNER/NAME, or OWNER/NAME@REVISION). NAME-untrained is the model as it is given."""
    models: tuple[str, ...] = Field(min_length=1)
    """Names after the grammar, such as 2m-clm-150-mlm40-600; SIZE-untrained is a freshly initialised model."""
    baseline: str | None = None
    """The model that the others are compared with; one of `models`."""
    corpus: CorpusConfig
    tokenizer: TokenizerConfig | None = None
    """Left out where there are models to continue from: it is theirs."""
    recipe: Recipe
    space: str
    """A search space: the name of a file in tune_spaces/, or the path of one."""
    tasks: tuple[str, ...] | None = None
    """In place of the search space's tasks."""
    tracking: str | None = None
    """Address of an MLflow server; by default that of MLFLOW_TRACKING_URI, else the store's own database, which `mlmclm ui` shows."""
    _folder: Path | None = PrivateAttr(default=None)

    def model_post_init(self, context: Any) -> None:
        """Takes up where the file lies."""
        self._folder = (context or {}).get("folder")

    @property
    def folder(self) -> Path | None:
        """The study file's folder; None for a study that comes of no file."""
        return self._folder

    @field_validator("name")
    @classmethod
    def _plain(cls, value: str) -> str:
        if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value) is None:
            raise ValueError("a study's name is letters, digits, '.', '_' and '-', and starts with a letter or digit")
        return value

    @field_validator("initial")
    @classmethod
    def _new_sizes(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._]*", name) is None:
                raise ValueError(
                    f"{name!r}: the name of a model to continue from is letters, digits, '.' and '_', and starts with a letter or digit"
                )
            if name in SIZES or re.fullmatch(r"clm|mlm\d*|untrained", name):
                raise ValueError(f"{name!r} means something else in models' names; choose another name")
        return value

    @field_validator("tokenizer")
    @classmethod
    def _needed(cls, value: TokenizerConfig | None, info: ValidationInfo) -> TokenizerConfig | None:
        if value is None and not info.data.get("initial", True):
            raise ValueError("it is missing; only models to continue from bring their own")
        return value

    @field_validator("models")
    @classmethod
    def _distinct(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        twice = sorted({name for name in value if value.count(name) > 1})
        if twice:
            raise ValueError(f"listed twice: {', '.join(twice)}")
        return value

    @property
    def sizes(self) -> tuple[str, ...]:
        """Words that models' names can begin with."""
        return (*SIZES, *self.initial)

    @property
    def parsed(self) -> tuple[ModelName, ...]:
        """The models' plans."""
        return tuple(parse(name, self.sizes) for name in self.models)

    def model_of(self, name: str, *, where: str) -> str:
        """Return the name of one of the study's models as the study has it.

        Raises:
            UserError: none of them has it; the message starts with `where`.
        """
        name = self.spelled(name)
        if name not in self.models:
            raise unknown("model", name, self.models, where=where)
        return name

    def spelled(self, name: str) -> str:
        """A model's name with steps in place of shares (`1m-clm-25%-mlm40-1k` is `1m-clm-250-mlm40-1k`); any other as it is."""
        return str(parse(name, self.sizes)) if "%" in name else name


def load_study(path: Path) -> StudyFile:
    """Reads and checks a study file.

    Raises:
        UserError: the file, key, value and what is allowed.
    """
    study = load_config(StudyFile, path, context={"folder": path.parent})
    try:
        parsed = study.parsed
        baseline = None if study.baseline is None else study.spelled(study.baseline)
    except MlmclmError as error:
        raise UserError(f"{path}: models: {error}") from error
    names = tuple(map(str, parsed))
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"{path}: models: listed twice: {', '.join(twice)}.")
    study = study.model_copy(update={"models": names, "baseline": baseline})
    if study.baseline is not None and study.baseline not in study.models:
        raise UserError(f"{path}: baseline: {study.baseline!r} is not one of the models ({', '.join(study.models)}).")
    sizes = sorted({name.size for name in parsed})
    if study.baseline is not None and len(sizes) > 1:
        raise UserError(
            f"{path}: baseline: models of several sizes ({', '.join(sizes)}) have no common baseline; leave it out."
        )
    return study

"""The study file: one YAML that says which models are pretrained on what, and over which grid they are fine-tuned."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import Field, field_validator

from mlmclm.configuration import Frozen, load_config
from mlmclm.corpora.config import CorpusConfig, TokenizerConfig
from mlmclm.errors import MlmclmError, UserError
from mlmclm.studies.names import ModelName, parse
from mlmclm.studies.recipe import Recipe


class StudyFile(Frozen):
    """A study; see `examples/quickstart.yaml` for a commented one."""

    name: str
    """Names the report's folder and the MLflow experiment."""
    models: tuple[str, ...] = Field(min_length=1)
    """Names after the grammar, such as 2m-clm-150-mlm40-600; SIZE-untrained is a freshly initialised model."""
    baseline: str | None = None
    """The model that the others are compared with; one of `models`."""
    corpus: CorpusConfig
    tokenizer: TokenizerConfig
    recipe: Recipe
    space: str
    """A search space: the name of a file in tune_spaces/, or a path to one."""
    tasks: tuple[str, ...] | None = None
    """In place of the search space's tasks."""
    tracking: str | None = None
    """Address of an MLflow server; by default the store's own database, which `mlmclm ui` shows."""

    @field_validator("name")
    @classmethod
    def _plain(cls, value: str) -> str:
        if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value) is None:
            raise ValueError("a study's name is letters, digits, '.', '_' and '-', and starts with a letter or digit")
        return value

    @field_validator("models")
    @classmethod
    def _distinct(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        twice = sorted({name for name in value if value.count(name) > 1})
        if twice:
            raise ValueError(f"listed twice: {', '.join(twice)}")
        return value

    @property
    def parsed(self) -> tuple[ModelName, ...]:
        """The models' plans."""
        return tuple(parse(name) for name in self.models)


def load_study(path: Path) -> StudyFile:
    """Reads and checks a study file.

    Raises:
        UserError: the file, key, value and what is allowed.
    """
    study = load_config(StudyFile, path)
    try:
        parsed = study.parsed
    except MlmclmError as error:
        raise UserError(f"{path}: models: {error}") from error
    if study.baseline is not None and study.baseline not in study.models:
        raise UserError(f"{path}: baseline: {study.baseline!r} is not one of the models ({', '.join(study.models)}).")
    sizes = sorted({name.size for name in parsed})
    if study.baseline is not None and len(sizes) > 1:
        raise UserError(
            f"{path}: baseline: models of several sizes ({', '.join(sizes)}) have no common baseline; leave it out."
        )
    return study

"""The study file: YAML that says which models are pretrained on what, and over which grid they are fine-tuned."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from mlmclm.configuration import Enters, Frozen, Role, load_config
from mlmclm.corpora.corpus_config import CorpusConfig, TokenizerConfig
from mlmclm.corpora.mixes import words
from mlmclm.errors import MlmclmError, UserError, for_each, unknown
from mlmclm.models.sizes import SIZES
from mlmclm.objectives.objective import OBJECTIVES
from mlmclm.plans.names import ModelName, parse
from mlmclm.plans.recipe import Recipe
from mlmclm.plans.stages import history
from mlmclm.service.placement import Choice
from mlmclm.studies.in_folder import InFolder, file_of


class Card(Frozen):
    """Facts for model cards that the study cannot know."""

    licence: Annotated[str | None, Role.DISPLAY] = None
    """Licence of the models, as the Hub names it (such as apache-2.0); it depends on the corpus."""
    datasets: Annotated[tuple[str, ...], Role.DISPLAY] = ()
    """Data sets of the corpus, by their names on the Hub."""
    citation: Annotated[str | None, Role.DISPLAY] = None
    """BibTeX entry of the work to cite."""


class StudyFile(InFolder):
    """A study; see `examples/quickstart.yaml` for a commented one.

    Input paths are relative to the study file or, if nothing is found there, to the working directory.
    """

    kind = "a study"
    name: Annotated[str, Role.DISPLAY]
    """Name of the report's folder and of the MLflow experiment."""
    initial: Annotated[dict[str, str], Role.WEIGHTS, Enters.INDIRECTLY] = Field(default_factory=dict)
    """Models to continue from, by the name that replaces a size in the models' names.

    The value is a folder, or a name on the Hugging Face Hub (OWNER/NAME, or OWNER/NAME@REVISION). A model called
    SIZE-untrained, with such a name as its size, is the given model itself.
    """
    models: Annotated[tuple[str, ...], Role.CHOICE] = Field(min_length=1)
    """Model names (`plans.names`), such as 2m-clm-150-mlm40-600; SIZE-untrained is a freshly initialised model."""
    baseline: Annotated[str | None, Role.DISPLAY] = None
    """The model, one of `models`, that the others are compared with."""
    corpus: Annotated[CorpusConfig | None, Role.TOKENS, Enters.INDIRECTLY] = None
    """The text to train on. Either this or `corpora`."""
    corpora: Annotated[
        dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")], CorpusConfig], Role.TOKENS, Enters.INDIRECTLY
    ] = Field(default_factory=dict)
    """Several sources by name. The recipe's `mix` gives their shares."""
    tokenizer: Annotated[TokenizerConfig | None, Role.TOKENS, Enters.INDIRECTLY] = None
    """May be left out if there are models to continue from; their tokenizer is used then."""
    recipe: Annotated[Recipe, Role.WEIGHTS, Enters.INDIRECTLY]
    card: Annotated[Card, Role.DISPLAY] = Card()
    """Entries of the models' cards."""
    tracking: Annotated[str | None, Role.WORK] = None
    """Address of an MLflow server.

    The default is MLFLOW_TRACKING_URI, else the store's own database, which `mlmclm ui` shows.
    """

    @field_validator("initial")
    @classmethod
    def _new_sizes(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._]*", name) is None:
                raise ValueError(
                    f"{name!r}: the name of a model to continue from is letters, digits, '.' and '_', and starts with a letter or digit"
                )
            if name in SIZES or re.fullmatch(rf"({'|'.join(OBJECTIVES)})\d*|untrained", name):
                raise ValueError(f"{name!r} means something else in models' names; choose another name")
        return value

    @field_validator("tokenizer")
    @classmethod
    def _needed(cls, value: TokenizerConfig | None, info: ValidationInfo) -> TokenizerConfig | None:
        # Pydantic leaves out an `initial` that failed its own validation; that error is enough.
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

    @model_validator(mode="after")
    def _every_size_has_phases(self) -> Self:
        if not self.recipe.has_phases:
            return self
        try:
            sizes = dict.fromkeys(name.size for name in self.parsed)
        except UserError as error:
            raise ValueError(str(error).rstrip(".")) from error
        for size in self.recipe.phases_by_size:
            if size not in self.sizes:
                raise ValueError(str(unknown("size", size, self.sizes, where="recipe.phases_by_size")).rstrip("."))
        for size in sizes:
            if not self.recipe.phases_of(size):
                raise ValueError(
                    f"recipe.phases_by_size: models of size {size} have no phases; give phases for them, or for all sizes as recipe.phases "
                    f"(there are some for {', '.join(self.recipe.phases_by_size)})"
                )
        return self

    @model_validator(mode="after")
    def _mixes_fit(self) -> Self:
        if (self.corpus is None) == (not self.corpora):
            raise ValueError("give either corpus or, for a mix of several sources, corpora")
        mixes = [("recipe", self.recipe.mix)]
        for phases in (self.recipe.phases, *self.recipe.phases_by_size.values()):
            mixes += [(f"recipe.phases: {phase.name!r}", phase.mix) for phase in phases]
        for where, mix in mixes:
            if mix is not None and not self.corpora:
                raise ValueError(
                    f"{where}: a mix is one of several sources, and the study has no corpora; give them, or leave mix out"
                )
            for name, _ in mix or ():
                if name not in self.corpora:
                    raise ValueError(str(unknown("source", name, self.corpora, where=f"{where}: mix")).rstrip("."))
        if self.corpora and self.recipe.mix is None:
            raise ValueError(f"recipe.mix: it is missing; give the weights of the corpora ({', '.join(self.corpora)})")
        return self

    @property
    def sources(self) -> dict[str, CorpusConfig]:
        """The corpora that models are trained on, by name; a single corpus has the name ""."""
        if self.corpus is not None:
            return {"": self.corpus}
        mixes = self.recipe.mixes({name.size for name in self.parsed})
        used = {name for mix in mixes for name, _ in mix or ()}
        return {name: corpus for name, corpus in self.corpora.items() if name in used}

    @property
    def source(self) -> str:
        """The corpus's source, or the mixes that models are trained on, for display."""
        mixes = self.recipe.mixes({name.size for name in self.parsed})
        return "; ".join(words(mix) for mix in mixes if mix is not None) or self.sources[""].source

    @property
    def sizes(self) -> tuple[str, ...]:
        """Words that models' names can begin with."""
        return (*SIZES, *self.initial)

    @property
    def device(self) -> Choice:
        """The device that cells and evaluations run on too."""
        return self.recipe.device

    @property
    def parsed(self) -> tuple[ModelName, ...]:
        """The models' names, parsed."""
        return tuple(parse(name, self.sizes) for name in self.models)

    @property
    def context(self) -> int:
        """Length in tokens of the sequences that every model has been trained on."""
        if not self.recipe.has_phases:
            return self.recipe.block_length
        return min(history(name, self.recipe).settled(self.recipe).block_length for name in self.parsed)

    def model_of(self, name: str, *, where: str) -> str:
        """Return a model's name as the study spells it. If there is no such model, the `UserError` starts with `where`."""
        name = self.spelled(name)
        if name not in self.models:
            raise unknown("model", name, self.models, where=where)
        return name

    def spelled(self, name: str) -> str:
        """Return a model's name with steps in place of shares; a name without shares is returned unchanged.

        For example, `1m-clm-25%-mlm40-1k` becomes `1m-clm-250-mlm40-1k`.
        """
        return str(parse(name, self.sizes)) if "%" in name else name


def load_study(path: Path, *, copy_of: Path | None = None) -> StudyFile:
    """Read and check a study file, or the packaged study of this name (`in_folder.file_of`).

    Args:
        copy_of: the file that it is a copy of, to which its paths are relative.

    Raises:
        UserError: it is missing or invalid; the message names the file, the key, the value and what is allowed.
    """
    path = file_of(path)
    study = load_config(StudyFile, path, context={"file": copy_of or path})
    try:
        parsed = study.parsed
        baseline = None if study.baseline is None else study.spelled(study.baseline)
    except MlmclmError as error:
        raise UserError(f"{path}: models: {error}") from error

    def check(name: ModelName) -> None:
        """Check that the recipe can train a model, as far as that is known without its files."""
        try:
            history(name, study.recipe)
            if name.size in SIZES:
                study.recipe.check_positions(name.size, SIZES[name.size])
        except UserError as error:
            raise UserError(f"{path}: {error}") from error

    for_each(parsed, check)
    # Checked again after parsing, because a name with shares and one with steps can be the same model.
    names = tuple(map(str, parsed))
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"{path}: models: listed twice: {', '.join(twice)}.")
    every, every_tokens = study.recipe.revisions_every, study.recipe.revisions_every_tokens
    longest = max(name.steps for name in parsed)
    if every is not None and every > longest > 0:
        raise UserError(
            f"{path}: recipe.revisions_every {every}: longer than any model's training; allowed: 1 to {longest}, the steps of the longest."
        )
    if every_tokens is not None:
        most = max(history(name, study.recipe).tokens(study.recipe) for name in parsed)
        if every_tokens > most > 0:
            raise UserError(
                f"{path}: recipe.revisions_every_tokens {every_tokens}: more than any model sees; allowed: 1 to {most}, the most tokens of a model."
            )
    study = study.model_copy(update={"models": names, "baseline": baseline})
    if study.baseline is not None and study.baseline not in study.models:
        raise UserError(f"{path}: baseline: {study.baseline!r} is not one of the models ({', '.join(study.models)}).")
    sizes = sorted({name.size for name in parsed})
    if study.baseline is not None and len(sizes) > 1:
        raise UserError(
            f"{path}: baseline: models of several sizes ({', '.join(sizes)}) have no common baseline; leave it out."
        )
    return study

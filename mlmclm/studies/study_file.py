"""The YAML file of a study: what is pretrained on what, or which models are given, and the grid of their fine-tuning."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, PrivateAttr, ValidationInfo, field_validator, model_validator

from mlmclm.analysis.claim import SourcedClaim
from mlmclm.answers.claim_files import read_claims
from mlmclm.answers.received_study import RECORD, check_study
from mlmclm.backends.device_kinds import Choice
from mlmclm.configuration import Enters, Frozen, Role, described_as, parse_config, read_yaml
from mlmclm.corpora.corpus_config import CorpusConfig, TokenizerConfig
from mlmclm.corpora.mixes import mix_text
from mlmclm.errors import MlmclmError, UserError, for_each, unknown
from mlmclm.evaluation.zero_shot_config import ZeroShot
from mlmclm.models.sizes import SIZES
from mlmclm.models.sources import NAME, named_models
from mlmclm.objectives.objective import OBJECTIVES
from mlmclm.plans.names import ModelName, replicates_among
from mlmclm.plans.names import parse_name as parse_name
from mlmclm.plans.recipe import Recipe
from mlmclm.plans.stages import history
from mlmclm.storage.packaged import SPACES, packaged_names
from mlmclm.storage.place import file_of
from mlmclm.sweeps.axes import SeedList, without_duplicates
from mlmclm.sweeps.space import Changes, Space, find_space

OF_STUDIES = ("corpus", "corpora", "recipe")
"""Keys that only the files of studies that train their models have."""
Sources = Annotated[tuple[str, ...], Field(min_length=1, json_schema_extra={"uniqueItems": True})]
ModelSources = Sources | Annotated[Mapping[str, str], Field(min_length=1)]
PartName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class Card(Frozen):
    """Facts for model cards that do not follow from the study."""

    licence: Annotated[str | None, Role.DISPLAY] = None
    """Licence of the models, as the Hub names it (such as apache-2.0); it depends on the corpus."""
    datasets: Annotated[tuple[str, ...], Role.DISPLAY] = ()
    """Data sets of the corpus, by their names on the Hub."""
    citation: Annotated[str | None, Role.DISPLAY] = None
    """BibTeX entry of the work to cite."""


class SweepSettings(Frozen):
    """Settings of the sweep in study files and sweep files, and the file's folder, where paths in it are looked up first."""

    space: Annotated[str | dict[str, Any] | None, described_as(str | Space | None), Role.CHOICE] = None
    """Search space: the name of a file in tune_spaces/, the path of any other file, or what such a file holds. Only
    fine-tuning needs it."""
    tasks: Annotated[
        Annotated[tuple[str, ...], Field(min_length=1), AfterValidator(without_duplicates)] | None, Role.CHOICE
    ] = None
    """Tasks to use in place of the search space's."""
    seeds: Annotated[SeedList | None, Role.CHOICE] = None
    """Seeds to use in place of the search space's, in the same forms."""
    per_task: Annotated[dict[str, Changes], Role.WEIGHTS, Enters.INDIRECTLY] = Field(default_factory=dict)
    """Task -> settings of the protocol to change for it; they take precedence over the search space's."""
    per_model: Annotated[dict[str, Changes], Role.WEIGHTS, Enters.INDIRECTLY] = Field(default_factory=dict)
    """Model -> settings of the protocol to change for it; they take precedence over the search space's and the tasks'."""

    zero_shot: Annotated[ZeroShot | None, Role.CHOICE] = None
    """Tasks on which every model is evaluated without fine-tuning, besides those that it is fine-tuned on (docs/evaluation.md)."""

    claims: Annotated[tuple[str, ...] | None, Role.DISPLAY] = None
    """Files of claims that the report tests: packaged ones (`ettin`) or paths; by default all packaged ones (docs/claims.md)."""

    kind: ClassVar[Literal["study", "sweep"]]
    """The command that runs the file."""
    _file: Path | None = PrivateAttr(default=None)

    @field_validator("name", check_fields=False)
    @classmethod
    def _plain(cls, value: str) -> str:
        # It is the name of a folder and of an MLflow experiment.
        if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value) is None:
            raise ValueError(
                f"a {cls.kind}'s name is letters, digits, '.', '_' and '-', and starts with a letter or digit"
            )
        return value

    @model_validator(mode="after")
    def _changes_of_a_space(self) -> Self:
        if self.space is None:
            for key in ("tasks", "seeds", "per_task", "per_model"):
                if getattr(self, key):
                    raise ValueError(f"{key}: it changes a search space, and none is given; add 'space'")
        return self

    def model_post_init(self, context: Any) -> None:
        """Remember the file."""
        self._file = (context or {}).get("file")

    @property
    def file(self) -> Path | None:
        """The file; None for a configuration that was not loaded from one."""
        return self._file

    @property
    def folder(self) -> Path | None:
        """The file's folder; None for a configuration that was not loaded from a file."""
        return None if self._file is None else self._file.parent

    def at(self, key: str) -> str:
        """Return a key for a message, with the file that it is in."""
        return key if self._file is None else f"{self._file}: {key}"

    def spelled(self, name: str) -> str:
        """Return a model's name as the file spells it."""
        return name

    def find_claims(self) -> tuple[SourcedClaim, ...]:
        """Return the claims that the report tests; errors as of `read_claims`."""
        return read_claims(self.claims, self.folder)

    def find_space(self) -> Space:
        """Return the search space with this file's tasks, seeds and overrides (`sweeps.space.find_space`).

        Raises:
            UserError: the file names no space, or there is no such space.
        """
        if self.space is None:
            raise UserError(
                f"{self.at('space')}: it is missing; fine-tuning needs a search space. Name a packaged one "
                f"({', '.join(packaged_names(SPACES))}) or a file of your own."
            )
        return find_space(
            self.space,
            self.tasks,
            beside=self.folder,
            seeds=self.seeds,
            per_task=self.per_task,
            per_model=self.per_model,
        )


def _models_or_parts(schema: dict[str, Any]) -> None:
    """Change the JSON Schema so that a file needs `models` or `parts`: parts name models too."""
    schema["required"].remove("models")
    schema["anyOf"] = [{"required": ["models"]}, {"required": ["parts"]}]


class StudyFile(SweepSettings):
    """A study; see `examples/quickstart.yaml` for a commented one.

    Input paths are relative to the study file or, if nothing is found there, to the working directory.
    """

    model_config = ConfigDict(json_schema_extra=_models_or_parts)

    kind = "study"
    name: Annotated[str, Role.DISPLAY]
    """Name of the report's folder and of the MLflow experiment."""
    initial: Annotated[dict[str, str], Role.WEIGHTS, Enters.INDIRECTLY] = Field(default_factory=dict)
    """Models to continue from, by the name that replaces a size in the models' names.

    The value is a folder, or a name on the Hugging Face Hub (OWNER/NAME, or OWNER/NAME@REVISION). A model called
    SIZE-untrained, with such a name as its size, is the given model itself.
    """
    models: Annotated[tuple[str, ...], Role.CHOICE] = Field(min_length=1)
    """Model names (`plans.names`), such as 2m-clm-150-mlm40-600; SIZE-untrained is a freshly initialised model. By default
    those of the parts."""
    parts: Annotated[dict[PartName, Sources], Role.CHOICE] = Field(default_factory=dict)
    """Part -> models. `--part` computes one part at a time, as a study of its own whose name ends with the part's. Parts
    may share models; together they have all."""
    replicates: Annotated[int, Role.CHOICE] = Field(1, ge=1)
    """Runs of pretraining per model, which differ in their seeds (`Recipe.pretraining_seeds`): with 3, `2m-clm-1k` stands for
    itself, `2m-clm-1k-r2` and `2m-clm-1k-r3`. Single ones can be listed in `models` instead. Given models have none."""
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

    The default is MLFLOW_TRACKING_URI, else the store's own database, which `mlmclm tracking ui` shows.
    """

    @model_validator(mode="before")
    @classmethod
    def _models_of_parts(cls, values: Any) -> Any:
        parts = values.get("parts") if isinstance(values, Mapping) else None
        if (
            "models" in values
            or not isinstance(parts, Mapping)
            or not all(isinstance(names, list | tuple) for names in parts.values())
        ):
            return values
        return {**values, "models": list(dict.fromkeys(chain.from_iterable(parts.values())))}

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
        return "; ".join(mix_text(mix) for mix in mixes if mix is not None) or self.sources[""].source

    @property
    def sizes(self) -> tuple[str, ...]:
        """The sizes, and names in place of sizes, with which models' names can begin."""
        return (*SIZES, *self.initial)

    @property
    def device(self) -> Choice:
        """The device that cells and evaluations run on too."""
        return self.recipe.device

    @property
    def parsed(self) -> tuple[ModelName, ...]:
        """The models' names, parsed, each followed by its replicates."""
        return self._with_replicates(self.models)

    @property
    def beside(self) -> tuple[ModelName, ...]:
        """The models of other parts. The training of this part's models keeps the states at which these branch off."""
        chosen, all_models = set(self.parsed), dict.fromkeys(chain.from_iterable(self.parts.values()))
        return tuple(name for name in self._with_replicates(all_models) if name not in chosen)

    def _with_replicates(self, models: Iterable[str]) -> tuple[ModelName, ...]:
        listed = [parse_name(name, self.sizes) for name in models]
        numbers = range(2, self.replicates + 1)
        names: list[ModelName] = []
        for name in listed:
            names.append(name)
            if name.replicate == 1 and (name.phases or name.size not in self.initial):
                further = (replace(name, replicate=number) for number in numbers)
                names += [run for run in further if run not in listed]
        return tuple(names)

    @property
    def _firsts(self) -> dict[str, str]:
        return replicates_among({str(name): name for name in self.parsed})

    def narrowed(self, models: Sequence[str]) -> Self:
        """Return the study with some of its models, spelled as in `models`, and with its settings for these."""
        kept = self.baseline if self.baseline in models else None  # a baseline must be one of the models
        changes, firsts = {self.spelled(name): settings for name, settings in self.per_model.items()}, self._firsts
        whose = {name: name if name in changes else firsts.get(name, name) for name in models}
        per_model = {name: changes[key] for name, key in whose.items() if key in changes}
        return self.model_copy(update={"models": tuple(models), "baseline": kept, "per_model": per_model})

    def of_part(self, part: str, *, where: str) -> Self:
        """Return the study of one part, which is called NAME-PART.

        Raises:
            UserError: there is no such part, or the study has none of its models; the message starts with `where`.
        """
        if part not in self.parts:
            raise unknown("part", part, self.parts, where=where)
        firsts, in_part = self._firsts, self.parts[part]
        listed = set(chain.from_iterable(self.parts.values()))
        chosen = [name for name in self.models if (name if name in listed else firsts[name]) in in_part]
        if not chosen:
            raise UserError(f"{where}: models: none of part {part!r} ({', '.join(in_part)}) is among them.")
        return self.narrowed(chosen).model_copy(update={"name": f"{self.name}-{part}"})

    @property
    def context(self) -> int:
        """Length in tokens of the sequences that every model has been trained on."""
        if not self.recipe.has_phases:
            return self.recipe.block_length
        return min(history(name, self.recipe).resolved(self.recipe).block_length for name in self.parsed)

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
        return str(parse_name(name, self.sizes)) if "%" in name else name


class SweepFile(SweepSettings):
    """A sweep of given models; `docs/given-models.md` has an example.

    A model is a folder, the name of a model in a study of the store (NAME or STUDY/NAME; `STUDY/*` is all of a study's),
    or a name on the Hugging Face Hub (OWNER/NAME, or OWNER/NAME@REVISION). Its name is the last part of that or, if
    `models` is a mapping, its key. Folders are relative to the sweep file or, if nothing is found there, to the
    working directory.
    """

    kind = "sweep"
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

    @field_validator("models", mode="before", json_schema_input_type=ModelSources)
    @classmethod
    def _named(cls, value: Any, info: ValidationInfo) -> Any:
        file = (info.context or {}).get("file")
        listed = isinstance(value, Sequence) and not isinstance(value, str)
        return named_models(value, None if file is None else file.parent) if listed else value

    @field_validator("models")
    @classmethod
    def _names(cls, value: Mapping[str, str]) -> Mapping[str, str]:
        for name, source in value.items():
            # Names become folders and parts of cells' names; an asterisk stands for a study's models until these are known.
            if re.fullmatch(rf"{NAME.pattern}\*?", name) is None:
                raise ValueError(f"{name!r}: a model's name is letters, digits, '.', '_', '@' and '-'")
            if name.endswith("*") != source.endswith("/*"):
                raise ValueError(f"{name!r}: the models of a study ({source}) keep their own names")
        return value


AnyFile = StudyFile | SweepFile
"""The file of a study whose models are trained, or given."""


def load_file(path: Path, *, copy_of: Path | None = None) -> AnyFile:
    """Read and check the file of a study, or the packaged study of this name (`file_of`); in a bundle, `check_study` checks it too.

    Args:
        copy_of: the file that it is a copy of, to which its paths are relative.

    Raises:
        UserError: it is missing or invalid; the message names the file, the key, the value and what is allowed.
    """
    path = file_of(path)
    values = read_yaml(path)
    if (path.parent / RECORD).is_file():
        check_study(values, path)
    return read_file(values, where=str(path), file=copy_of or path)


def load_study(path: Path) -> StudyFile:
    """Read and check the file of a study that trains its models, as `load_file` does."""
    path = file_of(path)
    return _read_study(read_yaml(path), where=str(path), file=path)


def read_file(values: Any, *, where: str, file: Path | None = None) -> AnyFile:
    """Check the values of a study's file; if they have no key of `OF_STUDIES`, its models are given.

    Args:
        where: starts each message.
        file: the file to which paths are relative; None for the working directory.

    Raises:
        UserError: as `load_file`.
    """
    if isinstance(values, Mapping) and not any(key in values for key in OF_STUDIES):
        return parse_config(SweepFile, values, where=where, context={"file": file})
    return _read_study(values, where=where, file=file)


def _read_study(values: Any, *, where: str, file: Path | None) -> StudyFile:
    study = parse_config(StudyFile, values, where=where, context={"file": file})
    try:
        parsed = study.parsed
        baseline = None if study.baseline is None else study.spelled(study.baseline)
    except MlmclmError as error:
        raise UserError(f"{where}: models: {error}") from error

    def check(name: ModelName) -> None:
        """Check that the recipe can train a model, as far as that is known without its files."""
        try:
            history(name, study.recipe)
            if name.size in SIZES:
                study.recipe.check_positions(name.size, SIZES[name.size])
        except UserError as error:
            raise UserError(f"{where}: {error}") from error

    for_each(parsed, check)
    # Compared as steps, because a name with shares and one with steps can be the same model.
    names = tuple(map(str, parsed))
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"{where}: models: listed twice: {', '.join(twice)}.")
    every, every_tokens = study.recipe.revisions_every, study.recipe.revisions_every_tokens
    longest = max(name.steps for name in parsed)
    if every is not None and every > longest > 0:
        raise UserError(
            f"{where}: recipe.revisions_every {every}: longer than any model's training; allowed: 1 to {longest}, the steps of the longest."
        )
    if every_tokens is not None:
        most = max(history(name, study.recipe).tokens(study.recipe) for name in parsed)
        if every_tokens > most > 0:
            raise UserError(
                f"{where}: recipe.revisions_every_tokens {every_tokens}: more than any model sees; allowed: 1 to {most}, the most tokens of a model."
            )
    study = study.model_copy(update={"models": names, "baseline": baseline, "parts": _parts(study, names, where)})
    if study.baseline is not None and study.baseline not in study.models:
        raise UserError(f"{where}: baseline: {study.baseline!r} is not one of the models ({', '.join(study.models)}).")
    sizes = sorted({name.size for name in parsed})
    if study.baseline is not None and len(sizes) > 1:
        raise UserError(
            f"{where}: baseline: models of several sizes ({', '.join(sizes)}) have no common baseline; leave it out."
        )
    return study


def _parts(study: StudyFile, names: Sequence[str], where: str) -> dict[str, tuple[str, ...]]:
    """Return the parts with their models spelled as in `names`; each of `names` must be in a part."""
    parts: dict[str, tuple[str, ...]] = {}
    for part, models in study.parts.items():
        try:
            spelled = parts[part] = tuple(str(parse_name(name, study.sizes)) for name in models)
        except MlmclmError as error:
            raise UserError(f"{where}: parts.{part}: {error}") from error
        if twice := sorted({name for name in spelled if spelled.count(name) > 1}):
            raise UserError(f"{where}: parts.{part}: listed twice: {', '.join(twice)}.")
    listed, firsts = set(chain.from_iterable(parts.values())), study._firsts
    left = [name for name in names if name not in listed and firsts.get(name) not in listed]
    if parts and left:
        raise UserError(f"{where}: parts: models in none of them: {', '.join(left)}; add them to a part.")
    return parts

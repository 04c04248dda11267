"""Settings of sweeps, which the files of studies and of given models share: search space, evaluations, claims."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, PrivateAttr, field_validator, model_validator

from mlmclm.analysis.claim import SourcedClaim
from mlmclm.answers.claim_files import read_claims
from mlmclm.configuration import Enters, Frozen, Role, described_as
from mlmclm.errors import UserError
from mlmclm.evaluation.zero_shot_config import ZeroShot
from mlmclm.storage.packaged import SPACES, names_in
from mlmclm.sweeps.learning_rates import without_duplicates
from mlmclm.sweeps.protocols import Changes
from mlmclm.sweeps.seed_list import SeedList
from mlmclm.sweeps.space import Space, find_space


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
    """Tasks that every model answers as it is, besides those that it is fine-tuned on (docs/evaluation.md)."""

    claims: Annotated[tuple[str, ...] | None, Role.DISPLAY] = None
    """Files of claims that the report tests: packaged ones (`ettin`) or paths; by default all packaged ones (docs/claims.md)."""

    kind: ClassVar[Literal["study", "sweep"]]
    """The command that it is the file of."""
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
                f"({', '.join(names_in(SPACES))}) or a file of your own."
            )
        return find_space(
            self.space,
            self.tasks,
            beside=self.folder,
            seeds=self.seeds,
            per_task=self.per_task,
            per_model=self.per_model,
        )

"""The zero-shot evaluations that a study's file asks for, and the reading of their tasks and models."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from mlmclm.configuration import Enters, Frozen, Role
from mlmclm.errors import UserError
from mlmclm.storage.files import first_existing, places_of

if TYPE_CHECKING:
    from mlmclm.evaluation.evaluations import Subject, ZeroShotTask
    from mlmclm.evaluation.language_model import LanguageModel
    from mlmclm.evaluation.mteb_tasks import SentenceModel


class ZeroShot(Frozen):
    """The tasks that every model answers without training."""

    tasks: Annotated[tuple[str, ...], Role.EVALUATION, Enters.INDIRECTLY] = ()
    """Tasks of lm-evaluation-harness by name, or YAML files in its format."""
    winogender: Annotated[str | None, Role.EVALUATION, Enters.INDIRECTLY] = None
    """Folder with Winogender's files."""
    winogender_rule: Annotated[Literal["mass", "published"], Role.EVALUATION, Enters.INDIRECTLY] = "mass"
    limit: Annotated[int | None, Role.EVALUATION, Enters.INDIRECTLY] = Field(None, ge=1)
    """Maximum number of documents to evaluate per task of the harness, the first ones; None for all."""

    @model_validator(mode="after")
    def _some(self) -> Self:
        if not self.tasks and self.winogender is None:
            raise ValueError("nothing to evaluate on: give tasks, or winogender")
        if self.limit is not None and not self.tasks:
            raise ValueError(
                f"limit {self.limit}: it limits tasks, and there are none; Winogender is always evaluated whole"
            )
        if self.winogender_rule != "mass" and self.winogender is None:
            raise ValueError(f"winogender_rule {self.winogender_rule}: winogender is not given")
        return self

    def found(self, folder: Path | None, data_root: Path | None) -> Self:
        """Return a copy with files in place of relative names, looked up first in the study file's `folder`."""

        def resolved(name: str, key: str) -> str:
            places = places_of(name, folder, data_root)
            path = first_existing(places)
            if path is None:
                raise UserError(f"zero_shot.{key}: {name} does not exist (looked for {', '.join(map(str, places))}).")
            return str(path.resolve())

        tasks = tuple(resolved(name, "tasks") if name.endswith((".yaml", ".yml")) else name for name in self.tasks)
        winogender = None if self.winogender is None else resolved(self.winogender, "winogender")
        return self.model_copy(update={"tasks": tasks, "winogender": winogender})

    def read(self, data_root: Path | None) -> list[ZeroShotTask]:
        """Return the tasks with their data, as `harness.load_tasks` and `winogender.read_winogender` read them.

        Raises:
            UserError: the harness is needed and not installed, or something is wrong with a task.
        """
        tasks: list[ZeroShotTask] = []
        if self.tasks:
            if find_spec("lm_eval") is None:
                raise UserError("these tasks need lm-evaluation-harness: pip install 'mlmclm[evaluation]'.")
            from mlmclm.evaluation.harness import load_tasks

            tasks += load_tasks(self.tasks, data_root=data_root, limit=self.limit)
        if self.winogender is not None:
            from mlmclm.evaluation.winogender import read_winogender

            tasks.append(read_winogender(Path(self.winogender), self.winogender_rule))
        return tasks


def read_mteb(names: Sequence[str]) -> list[ZeroShotTask]:
    """Return tasks of MTEB, as `mteb_tasks.load_mteb` takes them.

    Raises:
        UserError: a package is missing, or a task is unknown or wrong.
    """
    if not names:
        return []
    missing = [name for name in ("mteb", "sentence_transformers") if find_spec(name) is None]
    if missing:
        raise UserError(f"--mteb needs {' and '.join(missing)}: pip install 'mlmclm[evaluation]'.")
    from mlmclm.evaluation.mteb_tasks import load_mteb

    return list(load_mteb(names))


def load_model(subject: Subject) -> LanguageModel | SentenceModel:
    """Load the model to evaluate, on a GPU if there is one; raise a `UserError` if its hashes have changed."""
    from mlmclm.backends.choice import best_device

    subject.bind()
    device = str(best_device())
    if subject.scoring == "embedding":
        from mlmclm.evaluation.mteb_tasks import SentenceModel

        return SentenceModel.load(subject.folder, device)
    from mlmclm.evaluation.language_model import LanguageModel

    return LanguageModel.load(subject.folder, subject.scoring, device=device)

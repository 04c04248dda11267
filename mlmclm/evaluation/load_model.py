"""The model of a subject in memory, whatever kind it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlmclm.evaluation.evaluations import Subject
    from mlmclm.evaluation.language_model import LanguageModel
    from mlmclm.evaluation.mteb_tasks import SentenceModel


def load_model(subject: Subject) -> LanguageModel | SentenceModel:
    """Load the model that is evaluated, on a GPU if there is one."""
    from mlmclm.evaluation.language_model import LanguageModel, device_name

    if subject.scoring != "embedding":
        return LanguageModel.load(subject.folder, subject.scoring, device=device_name())
    from mlmclm.evaluation.mteb_tasks import SentenceModel

    return SentenceModel.load(subject.folder, device_name())

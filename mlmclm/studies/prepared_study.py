"""A study whose corpus is prepared and whose stages are planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlmclm.corpora.mixed_corpus import AnyCorpus
from mlmclm.launches.run_stage import missing_states
from mlmclm.plans.names import ModelName
from mlmclm.plans.stages import Plan, Stage, State
from mlmclm.pretraining import states
from mlmclm.pretraining.initial import StoredInitial
from mlmclm.studies.place import Place
from mlmclm.studies.study_file import StudyFile


@dataclass(frozen=True)
class PreparedStudy:
    """A study with its corpus on disk and its plan made."""

    study: StudyFile
    place: Place
    corpus: AnyCorpus
    plan: Plan
    fingerprint: str
    initial: Mapping[str, StoredInitial] = field(default_factory=dict)
    """Given models to continue from, by size; all other sizes begin with random weights."""

    def target(self, name: ModelName) -> State:
        """Return the state that is a model of the study."""
        return self.plan.targets[self.plan.models.index(name)]

    def model_folder(self, name: ModelName) -> Path:
        """Return the path of a model's Hugging Face folder, whether or not it exists."""
        return states.state_folder(self.place.store, self.target(name).key(self.fingerprint)) / "model"

    def curve(self, name: ModelName) -> list[dict[str, Any]]:
        """Return a trained model's metrics from its first step on, one record a step; an empty list if untrained."""
        state = self.target(name)
        return states.curve(self.place.store, state.key(self.fingerprint)) if state.legs else []

    def trained(self, stage: Stage) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return a finished stage's own metrics, one record a step, and its `system_facts`.

        These describe the machine and the software on which the stage ended.
        """
        key = stage.end.key(self.fingerprint)
        rows = states.curve(self.place.store, key)
        system = states.describe(states.state_folder(self.place.store, key)).get("system", {})
        return [row for row in rows if row["step"] > stage.start.step], system

    def missing(self, stage: Stage) -> tuple[State, tuple[State, ...]]:
        """Return the state from which a stage resumes, and the states that it still has to make."""
        return missing_states(stage, self.place.store, self.fingerprint)

    def unfinished(self) -> list[Stage]:
        """Return the stages with missing states, in an order in which they can run."""
        return [stage for stage in self.plan.stages if self.missing(stage)[1]]

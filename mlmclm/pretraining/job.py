"""The job of a stage's workers, as plain values.

Ray's controller process loads this module too, so it imports neither torch nor DeepSpeed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mlmclm.backends.model_shape import ModelShape
from mlmclm.corpora.blocks import Blocks
from mlmclm.models.sizes import Size
from mlmclm.models.warm_up import shape_of_size
from mlmclm.objectives.objective import Objective
from mlmclm.plans.plan import Leg, leg_at
from mlmclm.plans.recipe import Recipe
from mlmclm.pretraining.states import exists
from mlmclm.service.placement import Device


@dataclass(frozen=True)
class StageJob:
    """One stage as plain values, the same for every worker."""

    title: str
    size: str
    shape: Size
    initial: str | None
    """Key of the weights that the model begins with; None for random ones."""
    store: str
    run_folder: str
    model: str
    """The model that the stage is for (the first of several), as a label of metrics."""
    corpus: str
    """Key of the prepared corpus."""
    train: Blocks
    validation: Blocks
    tokenizer: str
    """Folder of the tokenizer."""
    legs: tuple[Leg, ...]
    """All legs of the stage's end state; the first of them may lie before its start."""
    start: int
    """Step of the state to start from."""
    start_key: str | None
    """Its key; None for the initialisation."""
    deposits: tuple[tuple[int, str], ...]
    """(step, key) of the states to leave behind, in order; the last is the end."""
    recipe: Recipe
    fingerprint: str
    device: Device

    @property
    def objective(self) -> Objective:
        """Objective of the stage's steps."""
        return self.legs[-1].objective

    @property
    def last(self) -> int:
        """The last step, counted from 1 as in metrics and deposits."""
        return self.deposits[-1][0]

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1."""
        return leg_at(self.legs, step - 1).rate(step - 1, self.recipe)

    def keeps(self, step: int) -> bool:
        """Return whether the state behind a step is written: as a deposit, or as a checkpoint to go on from."""
        return step in dict(self.deposits) or step % self.recipe.checkpoint_every == 0

    def next_deposit(self) -> int:
        """The first step whose state is still to be left behind. A checkpoint from beyond it (of an earlier plan, which
        didn't want that state) is of no use."""
        absent = [step for step, key in self.deposits if not exists(Path(self.store), key)]
        return absent[0] if absent else self.last + 1

    def model_shape(self) -> ModelShape:
        """The shape that kernels are compiled for."""
        whole_layers = self.recipe.compile or self.recipe.activation_checkpointing
        return shape_of_size(self.shape, self.recipe.precision, fused=not whole_layers)

    def note(self, text: str) -> None:
        """Leaves a line for the driver, which says it when the run has ended."""
        with self.notes_path.open("a", encoding="utf-8") as handle:
            handle.write(f"{text}\n")

    @property
    def notes_path(self) -> Path:
        """Lines that a person should read when the run has ended."""
        return Path(self.run_folder) / "notes.txt"

    @property
    def metrics_path(self) -> Path:
        """One JSON line a step, written by rank 0."""
        return Path(self.run_folder) / "metrics.jsonl"

    @property
    def stop_path(self) -> Path:
        """Written when a loss or its gradient is no longer finite; the stage ends without depositing anything more."""
        return Path(self.run_folder) / "stopped.json"

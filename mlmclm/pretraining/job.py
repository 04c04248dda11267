"""The description of a stage that its workers receive, as plain values.

Ray Train's controller process loads this module too, so it must import neither torch nor DeepSpeed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mlmclm.backends.model_shape import ModelShape
from mlmclm.corpora.blocks import Blocks
from mlmclm.corpora.chunks import Chunks
from mlmclm.corpora.mixed_blocks import InTurns, MixedBlocks
from mlmclm.corpora.order import Samples
from mlmclm.models.sizes import Size
from mlmclm.models.warm_up import shape_of_size
from mlmclm.objectives.objective import Objective
from mlmclm.plans.plan import Leg, Sources, State, leg_at, revision_steps, samples_of
from mlmclm.plans.recipe import Recipe
from mlmclm.pretraining.states import exists
from mlmclm.service.placement import Device


@dataclass(frozen=True)
class StageJob:
    """One stage as plain, serialisable values; the same for every worker."""

    title: str
    size: str
    shape: Size
    initial: str | None
    """Key of the initial model whose weights the model starts from; None for random weights."""
    store: str
    run_folder: str
    model: str
    """The model that the stage is for (the first if there are several), used as a label of metrics."""
    corpus: str
    """Key of the prepared corpus."""
    train: Blocks | Chunks | MixedBlocks
    validation: Blocks | Chunks | InTurns
    tokenizer: str
    """Folder of the prepared tokenizer."""
    legs: tuple[Leg, ...]
    """All legs of the stage's end state. The first ones may lie before the stage's start."""
    start: int
    """Step of the state that the stage starts from."""
    start_key: str | None
    """Key of that state; None for the initialisation."""
    deposits: tuple[tuple[int, str], ...]
    """(step, key) of the states to deposit in the store, in order. The last one is the end of the stage."""
    recipe: Recipe
    """The recipe as it is in the stage's phase."""
    whole_recipe: Recipe
    """The study's recipe, with all phases."""
    fingerprint: str
    device: Device
    sources: Sources = ()
    """Names and keys of the corpora that `corpus` consists of, if there are several."""

    @property
    def objective(self) -> Objective:
        """The objective of the stage's steps."""
        return self.legs[-1].objective

    @property
    def last(self) -> int:
        """The last step, counted from 1 as in metrics and deposits."""
        return self.deposits[-1][0]

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1."""
        return leg_at(self.legs, step - 1).rate(step - 1, self.recipe)

    def samples(self, step: int) -> Samples:
        """Return the samples of the global batch of a step, counted from 0 (`plans.plan.samples_of`)."""
        return samples_of(self.legs, step, self.whole_recipe)

    @property
    def moments_since(self) -> int:
        """Step at which the optimizer's moments were last 0: the start of training, or of a phase with new ones."""
        phases = [leg.phase for leg in self.legs if leg.phase is not None and leg.phase.moments == "new"]
        return max((phase.start for phase in phases), default=0)

    def keeps(self, step: int) -> bool:
        """Return whether the state after a step is written, as a deposit or as a checkpoint to resume from."""
        return step in dict(self.deposits) or step % self.recipe.checkpoint_every == 0

    def revises(self, step: int) -> bool:
        """Return whether the weights after a step are a revision."""
        return step in self._revision_steps

    @cached_property
    def _revision_steps(self) -> frozenset[int]:
        return frozenset(revision_steps(self.legs, self.whole_recipe))

    def key_at(self, step: int) -> str:
        """Return the key of the state after a step of the stage or before it."""
        return State(self.size, self.legs, self.initial, sources=self.sources).at(step).key(self.fingerprint)

    def next_deposit(self) -> int:
        """Return the step of the first deposit that the store lacks.

        A checkpoint beyond that step is useless. An earlier plan that did not want this state may have left one.
        """
        absent = [step for step, key in self.deposits if not exists(Path(self.store), key)]
        return absent[0] if absent else self.last + 1

    def model_shape(self) -> ModelShape:
        """Return the model shape that kernels are compiled for."""
        # Both options work on layers as modules, which a fused block would bypass.
        whole_layers = self.recipe.compile or self.recipe.activation_checkpointing
        return shape_of_size(self.shape, self.recipe.precision, fused=not whole_layers)

    def note(self, text: str) -> None:
        """Leave a line for the driver, which prints it when the run has ended."""
        with self.notes_path.open("a", encoding="utf-8") as handle:
            handle.write(f"{text}\n")

    @property
    def notes_path(self) -> Path:
        """File of lines for the user, which the driver prints when the run has ended."""
        return Path(self.run_folder) / "notes.txt"

    @property
    def metrics_path(self) -> Path:
        """File of metrics with one JSON line per step, written by rank 0."""
        return Path(self.run_folder) / "metrics.jsonl"

    @property
    def stop_path(self) -> Path:
        """File written when a loss or gradient is not finite. The stage then ends without any further deposit."""
        return Path(self.run_folder) / "stopped.json"

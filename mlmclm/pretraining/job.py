"""The description of a stage that its workers receive, as plain values.

Ray Train's controller process loads this module too, so it must import neither torch nor DeepSpeed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mlmclm.backends.device_kinds import Device
from mlmclm.backends.model_shape import ModelShape
from mlmclm.corpora.blocks import Blocks
from mlmclm.corpora.chunks import Chunks
from mlmclm.corpora.mixed_blocks import InTurns, MixedBlocks
from mlmclm.corpora.order import Samples
from mlmclm.models.sizes import Size
from mlmclm.models.warm_up import shape_of_size
from mlmclm.plans.recipe import Recipe
from mlmclm.plans.segments import revision_steps, samples_of, segment_at
from mlmclm.plans.stages import Stage
from mlmclm.pretraining.parts import PART_BYTES
from mlmclm.registry import Shipment

VALIDATION_LOSS = "validation loss"
"""Name of the validation loss where a message says which quantity is not finite."""


@dataclass(frozen=True)
class StageJob:
    """A stage to train, as serialisable values; the same for every worker."""

    stage: Stage
    """The stage, from a state that the store has to states that it lacks."""
    shape: Size
    store: Path
    run_folder: Path
    corpus: str
    """Key of the prepared corpus."""
    train: Blocks | Chunks | MixedBlocks
    validation: Blocks | Chunks | InTurns
    tokenizer: Path
    """Folder of the prepared tokenizer."""
    whole_recipe: Recipe
    """The study's recipe, with all phases."""
    fingerprint: str
    device: Device
    registered: Shipment | None = None
    """The extensions that the driver has registered (`mlmclm.registry`), for the workers."""
    fitting: int | None = None
    """Micro-batch that was found to fit into a GPU's memory; None if the recipe sets it or none was sought."""
    part_bytes: int = PART_BYTES
    """Maximum size of a state's file in bytes."""

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe with the settings of the stage's phase, and the micro-batch that was found to fit."""
        resolved = self.stage.end.resolved(self.whole_recipe)
        return resolved if self.fitting is None else resolved.model_copy(update={"micro_batch": self.fitting})

    @cached_property
    def deposits(self) -> dict[int, str]:
        """Keys of the states to deposit in the store, by their steps."""
        return {state.step: state.key(self.fingerprint) for state in self.stage.states}

    @property
    def start_key(self) -> str | None:
        """Key of the state from which the workers start; None for the initialisation."""
        start = self.stage.start
        return start.key(self.fingerprint) if start.segments else None

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1."""
        return segment_at(self.stage.end.segments, step - 1).rate(step - 1, self.recipe)

    def samples(self, step: int) -> Samples:
        """Return the samples of the global batch of a step, counted from 0 (`plans.segments.samples_of`)."""
        return samples_of(self.stage.end.segments, step, self.whole_recipe)

    @property
    def moments_since(self) -> int:
        """Step at which the optimiser's moments were last 0: the start of training, or of a phase with new ones."""
        phases = [
            segment.phase
            for segment in self.stage.end.segments
            if segment.phase is not None and segment.phase.moments == "new"
        ]
        return max((phase.start for phase in phases), default=0)

    def keeps(self, step: int) -> bool:
        """Return whether the state after a step is written, as a deposit or as a checkpoint to resume from."""
        return step in self.deposits or step % self.recipe.checkpoint_every == 0

    @cached_property
    def revision_steps(self) -> frozenset[int]:
        """Steps after which the weights are stored as a revision (`callbacks.revisions`)."""
        return frozenset(revision_steps(self.stage.end.segments, self.whole_recipe))

    def key_at(self, step: int) -> str:
        """Return the key of the state after a step of the stage or before it."""
        return self.stage.end.at(step).key(self.fingerprint)

    def description(self, step: int) -> dict[str, Any]:
        """Describe how the state after a step is made, for `state.json`."""
        state = self.stage.end.at(step)
        # Left out unless set, so that a state's bytes are the same as before recipes had these fields.
        newer, fields = ("callbacks", "pretraining_seeds", "deterministic", "fewest_workers"), Recipe.model_fields
        left_out = {name for name in newer if getattr(self.whole_recipe, name) == fields[name].default}
        return {
            "size": state.size,
            "legs": [segment.identity() for segment in state.segments],
            "parent": self.start_key,
            **({} if state.initial is None else {"initial": state.initial}),
            **({} if state.seeds is None else {"seeds": state.seeds._asdict()}),
            "fingerprint": self.fingerprint,
            "sources": dict(state.sources),
            "recipe": self.whole_recipe.model_dump(mode="json", exclude=left_out),
            "corpus": self.corpus,
        }

    def model_shape(self) -> ModelShape:
        """Return the model shape that kernels are compiled for."""
        from mlmclm.backends.wide_products import processor_has_bf16

        # Two options work on layers as modules, which a fused block would bypass. The CPU's fused blocks have an fp32 residual stream.
        whole_layers = self.recipe.compile or self.recipe.activation_checkpointing
        whole_layers |= self.recipe.precision == "bf16-residual" and processor_has_bf16()
        return shape_of_size(self.shape, self.recipe.precision, fused=not whole_layers)

    def note(self, text: str) -> None:
        """Leave a line for the driver, which prints it when the run has ended."""
        with self.notes_path.open("a", encoding="utf-8") as handle:
            handle.write(f"{text}\n")

    @property
    def notes_path(self) -> Path:
        """File of lines for the user, which the driver prints when the run has ended."""
        return self.run_folder / "notes.txt"

    @property
    def metrics_path(self) -> Path:
        """File of metrics with one JSON line per step, written by rank 0."""
        return self.run_folder / "metrics.jsonl"

    @property
    def stop_path(self) -> Path:
        """File written when a loss or gradient is not finite. The stage then ends without any further deposit."""
        return self.run_folder / "stopped.json"

"""Checkpoints of a running stage, and the states that it leaves in the store."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray.train
from ray.train import CheckpointUploadMode

from mlmclm.pretraining import checkpoints, states
from mlmclm.pretraining.callbacks.callback import Callback, RunningStage
from mlmclm.tracking.system import system_facts


class StateWriter(Callback):
    """Writes states while training goes on, one at a time, and reports each to Ray Train when it is whole.

    A write that fails ends the run: Ray Train raises its error, and so does the next write or the end.
    """

    everywhere = True  # a state is gathered from all workers, and all report it

    def __init__(self, stage: RunningStage) -> None:
        super().__init__(stage)
        self._writing: Future[None] | None = None

    def on_step_end(self, step: int) -> None:
        if self.stage.job.keeps(step):
            self._wait()
            self._write(step, dict(self.stage.job.deposits).get(step))

    def on_end(self) -> None:
        self._wait()

    def _wait(self) -> None:
        """Until what is being written is whole."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def _write(self, step: int, key: str | None) -> None:
        """Copies the state to the host's memory and begins to write it; collective.

        Args:
            key: where the plan wants this state, its key: it is deposited in the store too, before it is reported.
        """
        job = self.stage.job
        state = self.stage.engine.state(step)
        if state is None:
            ray.train.report({"step": step}, checkpoint_upload_mode=CheckpointUploadMode.ASYNC)
            return
        description = self._description(step)
        folder = Path(ray.train.get_context().get_storage().experiment_fs_path)
        writing: Future[None] = Future()

        def put(_: ray.train.Checkpoint, name: str) -> ray.train.Checkpoint:
            try:
                rows = [row for row in states.read_metrics(job.metrics_path) if row["step"] <= step]
                if key is None:
                    checkpoints.write_folder(folder / name, state, description, rows)
                else:
                    states.link(checkpoints.deposit(Path(job.store), key, state, description, rows), folder / name)
            except BaseException as error:
                writing.set_exception(error)
                raise
            writing.set_result(None)
            return ray.train.Checkpoint.from_directory(folder / name)

        self._writing = writing
        ray.train.report(
            {"step": step},
            checkpoint=ray.train.Checkpoint.from_directory(folder),  # where `put` makes the real one
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
            checkpoint_upload_fn=put,
            delete_local_checkpoint_after_upload=False,
        )

    def _description(self, step: int) -> dict[str, Any]:
        """Return what a state was made of (`state.json`)."""
        job, engine = self.stage.job, self.stage.engine
        return {
            "size": job.size,
            "legs": [[str(leg.objective), leg.start, min(leg.stop, step), leg.origin, leg.decay_end] for leg in job.legs if leg.start < step],
            "parent": job.start_key,
            **({} if job.initial is None else {"initial": job.initial}),
            "fingerprint": job.fingerprint,
            "recipe": job.recipe.model_dump(mode="json"),
            "corpus": job.corpus,
            "system": {**system_facts(), "workers": engine.world, "device": str(engine.device), "backend": engine.backend.name},
        }  # fmt: skip

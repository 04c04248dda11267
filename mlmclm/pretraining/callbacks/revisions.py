"""Revisions: weights of steps at which no model ends, for `mlmclm export --revisions`."""

from __future__ import annotations

from mlmclm.pretraining import checkpoints, states
from mlmclm.pretraining.callbacks.callback import Callback
from mlmclm.pretraining.checkpoints import TrainingState


class Revisions(Callback):
    """Keeps the weights at the steps of `recipe.revisions_every` that the store does not have yet.

    They are on disk before the next step begins, so a stage that resumes from a checkpoint misses no revision.
    """

    everywhere = True  # gathering the weights is a collective

    def on_start(self) -> None:
        # The first weights; or those of a checkpoint that was complete when the run died before the revision was.
        self.on_step_end(self.stage.start)

    def on_step_end(self, step: int) -> None:
        job = self.stage.job
        if step not in job.revision_steps or step in job.deposits:
            return
        # Only rank 0 looks, because workers that see a shared file system differently would wait for each other.
        state = self.stage.engine.state(step, moments=False)
        if state is not None:
            self._keep(state, job.key_at(step))

    def _keep(self, state: TrainingState, key: str) -> None:
        job = self.stage.job
        if states.weights_folder(job.store, key) is not None:
            return
        revision = states.StoredRevision(job.store, key)
        revision.find(read=False)  # sets a damaged one aside
        description = {"size": job.stage.end.size, "key": key, "fingerprint": job.fingerprint, "corpus": job.corpus}
        checkpoints.write_folder(revision.folder, state, description, ())
        revision.send()

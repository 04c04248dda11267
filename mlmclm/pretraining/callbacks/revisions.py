"""Revisions: weights of steps at which no model ends, for `mlmclm export --revisions`."""

from __future__ import annotations

from mlmclm.pretraining import checkpoints, states
from mlmclm.pretraining.callbacks.callback import Callback
from mlmclm.pretraining.checkpoints import TrainingState
from mlmclm.pretraining.peers import Peers


class Revisions(Callback):
    """Keeps the weights at the steps of `recipe.revisions_every` that the store does not have yet.

    They are on disk before the next step begins, so a stage that resumes from a checkpoint misses no revision.
    """

    always = True
    everywhere = True  # gathering the weights is a collective

    def on_start(self) -> None:
        # Store the first weights; or those of a checkpoint, if a run died after completing it and before storing its revision.
        self.on_step_end(self.stage.start)

    def on_step_end(self, step: int) -> None:
        job = self.stage.job
        if step not in job.revision_steps or step in job.deposits:
            return
        engine = self.stage.engine
        state, revision = engine.state(step, moments=False), states.StoredRevision(job.store, job.key_at(step))
        peers = checkpoints.writers(state, f"revision/{step}", engine.rank, engine.world)
        if engine.rank < peers.world:
            with peers.together():
                if engine.rank > 0:
                    checkpoints.write_share(revision.folder, state, peers)
                # Only rank 0 looks, because workers that see a shared file system differently would wait for each other.
                elif states.weights_folder(job.store, revision.key) is None:
                    self._keep(revision, state, peers)

    def _keep(self, revision: states.StoredRevision, state: TrainingState, peers: Peers) -> None:
        job, key = self.stage.job, revision.key
        revision.find(read=False)  # sets a damaged one aside
        description = {"size": job.stage.end.size, "key": key, "fingerprint": job.fingerprint, "corpus": job.corpus}
        checkpoints.write_folder(revision.folder, state, description, (), peers=peers)

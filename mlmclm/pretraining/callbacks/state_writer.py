"""Checkpoints of a running stage, and the states that it deposits in the store."""

from __future__ import annotations

from concurrent.futures import Future
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

from mlmclm.backends.choice import gpu_names
from mlmclm.pretraining import checkpoints, states
from mlmclm.pretraining.callbacks.callback import Callback, RunningStage
from mlmclm.system import system_facts


class StateWriter(Callback):
    """Writes states in the background, one at a time, and reports each to the launcher when it is complete.

    Each worker copies and writes its own parts of a large state (`parts`), and rank 0 completes the folder. A failed write
    ends the run: the launcher raises its error, and so do the next write and the end of the stage, on every worker.
    """

    always = True
    everywhere = True  # copying a state is a collective, and the launcher wants a report from every worker

    def __init__(self, stage: RunningStage) -> None:
        super().__init__(stage)
        self._writing: Future[None] | None = None

    def on_step_end(self, step: int) -> None:
        if self.stage.job.keeps(step):
            # One write at a time: each holds a copy of the worker's parts in the host's memory.
            self._wait()
            self._write(step, self.stage.job.deposits.get(step))

    def on_end(self) -> None:
        self._wait()

    def _wait(self) -> None:
        """Wait until the current write is complete; raise its error if it failed."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def _write(self, step: int, key: str | None) -> None:
        """Copy the state to host memory and start writing it; collective.

        Args:
            key: key of the state if the plan needs it. It is then deposited in the store as well, before it is
                reported.
        """
        job, engine = self.stage.job, self.stage.engine
        state = engine.state(step)
        # Called on all workers, since a callback that runs everywhere may gather its state.
        kept = {name: callback.state_dict() for name, callback in self.stage.callbacks.items()}
        if engine.rank == 0:
            # A state changes with the next step, so what is written must be a copy.
            state = replace(state, callbacks={name: deepcopy(values) for name, values in kept.items() if values})
        peers = checkpoints.writers(state, f"state/{step}", engine.rank, engine.world)
        if engine.rank >= peers.world:
            self.stage.launcher.report(step)
            return
        description = job.description(step)
        description["system"] = {
            **system_facts(gpu_names()),
            "workers": engine.world,
            "micro_batch": engine.micro,
            "device": str(engine.device),
            "backend": engine.backend.described(job.recipe.precision),
        }
        writing: Future[None] = Future()

        def lead(folder: Path) -> None:
            # The log goes on while this thread runs, so it may hold later steps by now.
            rows = [row for row in states.read_metrics(job.metrics_path) if row["step"] <= step]
            if key is None:
                to = states.sent_as(job.run_folder, step)
                checkpoints.write_folder(folder, state, description, rows, to=to, peers=peers)
                states.drop_earlier(job.run_folder, step)
                return
            deposited = checkpoints.deposit(job.store, key, state, description, rows, peers)
            if deposited.is_dir():  # else it is at the store's address only
                # Hard links: the checkpoint is another name for the deposited files and takes no more space.
                states.link(deposited, folder)

        def write(folder: Path) -> None:
            try:
                with peers.together():
                    if engine.rank == 0:
                        lead(folder)
                    elif key is None:
                        checkpoints.write_share(folder, state, peers, to=states.sent_as(job.run_folder, step))
                    else:
                        checkpoints.write_share(states.state_folder(job.store, key), state, peers)
            except BaseException as error:
                writing.set_exception(error)
                raise
            writing.set_result(None)

        self._writing = writing
        self.stage.launcher.keep(step, write)

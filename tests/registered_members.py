"""Members of registries that tests register. Their module has no code that cell keys refuse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mlmclm.pretraining.callbacks.callback import Callback
from mlmclm.schedules.decay import Decay


class Root(Decay):
    name = "root"

    def factor(self, left: float) -> float:
        return left**0.5


class Faded(Callback):
    """Scales a weight before each step by a factor that depends on the mean gradient norm, on all workers."""

    everywhere = True
    asks = ("gradient_norm",)

    def __init__(self, stage: Any) -> None:
        super().__init__(stage)
        self.norms: list[float] = []
        self.mean = torch.zeros(2)

    def on_step_begin(self, step: int) -> None:
        weight = next(self.stage.engine.engine.module.parameters())
        if self.stage.engine.rank == 0:  # which shares its weights with the others
            with torch.no_grad():
                weight.mul_(1 - 1e-3 * float(self.mean[0]))
        torch.distributed.barrier()

    def on_step_end(self, step: int) -> None:
        assert step == self.stage.latest.step
        self.norms.append(self.metric("gradient_norm"))
        self.mean += (torch.tensor([self.norms[-1], step]) - self.mean) / len(self.norms)

    def state_dict(self) -> Mapping[str, Any]:
        return {"norms": self.norms, "mean": self.mean}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.norms, self.mean = list(state["norms"]), state["mean"].clone()


class Averaged(Callback):
    """Replaces a weight by its mean over the last steps, every five steps and where the learning rate's decay ends."""

    everywhere = True

    def __init__(self, stage: Any) -> None:
        super().__init__(stage)
        self.sum, self.count = torch.zeros(()), 0

    def on_step_end(self, step: int) -> None:
        weight = next(self.stage.engine.engine.module.parameters())
        torch.distributed.barrier()  # workers share their weights
        self.sum, self.count = self.sum + weight.detach(), self.count + 1
        torch.distributed.barrier()
        if step % 5 == 0 or step == self.stage.decay_end(step):
            if self.stage.engine.rank == 0:
                with torch.no_grad():
                    weight.copy_(self.sum / self.count)
            self.sum, self.count = torch.zeros(()), 0
        torch.distributed.barrier()

    def state_dict(self) -> Mapping[str, Any]:
        return {"sum": self.sum, "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sum, self.count = state["sum"].clone(), int(state["count"])

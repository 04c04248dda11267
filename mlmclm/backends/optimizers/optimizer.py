"""The interface of an optimiser.

To add an optimiser, add a subclass of `Optimizer` to `rules.py`, or register one (`mlmclm.registry`). torch is imported where
one is built, because recipes only name it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from mlmclm.registry import KINDS, MemberName, Registry

if TYPE_CHECKING:
    import torch
    from torch import nn

Groups = list[dict[str, Any]]
"""torch's parameter groups."""


class Hyperparameters(NamedTuple):
    """Hyperparameters of an optimiser; the learning rate is set before each step."""

    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    """As the optimiser defines it; AdamW multiplies it by the learning rate, as torch does."""
    peak: float = 1.0
    """The schedule's highest learning rate."""


class Optimizer(ABC):
    """A rule that updates weights. It keeps at most two moments of a weight, in the form of Adam's.

    `build` returns a torch optimiser that applies the rule. Its state of a weight is `step`, `exp_avg` and `exp_avg_sq`,
    which pretraining states store.
    """

    name: ClassVar[str]
    """The name in a recipe or protocol."""
    whole_gradients: ClassVar[bool] = False
    """Whether a step needs all of a weight's gradient, which ZeRO divides among workers."""

    @classmethod
    @abstractmethod
    def build(cls, groups: Groups, settings: Hyperparameters) -> torch.optim.Optimizer:
        """Return torch's optimiser, with learning rate 0, for groups that have a `weight_decay` of their own each."""

    @classmethod
    def groups(cls, parameters: Iterable[nn.Parameter], settings: Hyperparameters) -> Groups:
        """Return the parameters with their weight decay in pretraining: by default, norms and biases have none."""
        return apart(parameters, settings)


def apart(parameters: Iterable[nn.Parameter], settings: Hyperparameters) -> Groups:
    """Return the parameters in two groups, as is usual: matrices with weight decay, norms and biases without."""
    listed = list(parameters)
    matrices = [parameter for parameter in listed if parameter.ndim > 1]
    vectors = [parameter for parameter in listed if parameter.ndim <= 1]
    groups: Groups = [{"params": matrices, "weight_decay": settings.weight_decay}]
    return [*groups, {"params": vectors, "weight_decay": 0.0}] if vectors else groups


OPTIMIZERS: Registry[type[Optimizer]] = KINDS["optimizer"]
"""The optimisers by name."""
OptimizerName = Annotated[str, MemberName("optimizer")]
"""The name of an optimiser."""

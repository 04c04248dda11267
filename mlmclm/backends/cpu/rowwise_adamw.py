"""AdamW that updates only those rows of the embedding which a step reads.

In a small model about half the weights are the embedding's, and a batch reads a few hundred of its rows. The others get
no gradient, but AdamW moves them too, by weight decay and by the momentum of past gradients. Nobody sees that before a
batch reads the row again, so it is done then: the missed steps are made up one by one, with the same arithmetic, to the
same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mlmclm.backends.cpu.loops import Array, compiled
from mlmclm.backends.optimizers.optimizer import Hyperparameters
from mlmclm.backends.optimizers.updates import joint_norm


class RowwiseAdamW:
    """AdamW in fp32 on the CPU; an embedding row is updated when a forward pass reads it, and at the end."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], embedding: nn.Embedding, settings: Hyperparameters, steps: int
    ) -> None:
        self.embedding, self.settings = embedding, settings
        self.others = [parameter for parameter in parameters if parameter is not embedding.weight]
        self.moments = [(torch.zeros_like(parameter), torch.zeros_like(parameter)) for parameter in self.others]
        self.rows = (torch.zeros_like(embedding.weight), torch.zeros_like(embedding.weight))
        """First and second moments of the embedding."""
        self.done = np.zeros(len(embedding.weight), dtype=np.int64)
        """int64 [rows]: number of steps that each row has made."""
        self.began = np.zeros(len(embedding.weight), dtype=np.bool_)
        """bool [rows]: whether a row ever had a gradient; until then its moments are 0."""
        self.taken = 0
        """Number of steps taken."""
        self.factors = np.empty((steps, 3), dtype=np.float32)
        """float32 [steps, 3]: for each step taken, the matrices' factors; see `_factors`."""
        self._found: Tensor | None = None
        # A sparse gradient names the rows that were read; the hook brings rows up to date before they are read.
        embedding.sparse = True
        self._hook = embedding.register_forward_pre_hook(lambda module, inputs: self._catch_up(inputs[0]))

    def norm(self) -> float:
        found = self._gradient_of_rows()
        return joint_norm(
            [*(p.grad for p in self.others if p.grad is not None), *([] if found is None else [found.values()])]
        )

    def step(self, rate: float, scale: float) -> None:
        self.factors[self.taken] = self._factors(rate, decayed=True)
        betas, scaled = self._constants(), np.float32(scale)
        plain = self._factors(rate, decayed=False)
        for parameter, moments in zip(self.others, self.moments, strict=True):
            if parameter.grad is not None:
                factors = self.factors[self.taken] if parameter.ndim > 1 else plain
                arrays = (_flat(tensor) for tensor in (parameter, *moments, parameter.grad.contiguous()))
                _move(*arrays, scaled, factors, betas)
                parameter.grad = None
        found = self._gradient_of_rows()
        if found is not None:
            rows = found.indices()[0].numpy()
            arrays = (tensor.detach().numpy() for tensor in (self.embedding.weight, *self.rows, found.values()))
            _move_rows(rows, *arrays, scaled, self.factors[self.taken], betas)
            self.done[rows] = self.taken + 1
            self.began[rows] = True
        self.embedding.weight.grad = self._found = None
        self.taken += 1

    def settle(self) -> None:
        self._catch_up(torch.arange(len(self.done)))

    def finish(self) -> None:
        self._hook.remove()
        self.embedding.sparse = False
        self.settle()

    def _gradient_of_rows(self) -> Tensor | None:
        """Return the embedding's gradient, sparse, with each row once; None if there is none."""
        # Kept, because `norm` and `step` both need it, and merging repeated rows takes time.
        if self._found is None and self.embedding.weight.grad is not None:
            self._found = self.embedding.weight.grad.coalesce()
        return self._found

    def _catch_up(self, ids: Tensor) -> None:
        """Make up the steps that the rows of these ids have missed."""
        rows = np.unique(ids.numpy())
        rows = rows[self.done[rows] < self.taken]
        arrays = (tensor.detach().numpy() for tensor in (self.embedding.weight, *self.rows))
        _make_up(rows, *arrays, self.done, self.began, self.factors[: self.taken], self._constants())
        self.done[rows] = self.taken

    def _factors(self, rate: float, *, decayed: bool) -> Array:
        """Return float32 [3] for the next step: the factor of weight decay, the learning rate over the first moment's
        bias correction, and the inverse root of the second moment's."""
        first, second = (1 - beta ** (self.taken + 1) for beta in (self.settings.beta1, self.settings.beta2))
        left = 1 - rate * self.settings.weight_decay if decayed else 1
        with np.errstate(over="ignore"):  # a rate beyond fp32's range becomes infinite, and the cell diverges
            return np.array((left, rate / first, 1 / math.sqrt(second)), dtype=np.float32)

    def _constants(self) -> Array:
        """Return float32 [5]: both betas, 1 minus each, and epsilon."""
        one, two = self.settings.beta1, self.settings.beta2
        return np.array((one, two, 1 - one, 1 - two, self.settings.epsilon), dtype=np.float32)


def _flat(tensor: Tensor) -> Array:
    return tensor.detach().view(-1).numpy()


# Compiled without fast-math: a step made up later must have the same bits as one made in time.


@compiled(set())
def _move(
    weight: Array, first: Array, second: Array, grad: Array, scale: Any, factors: Array, constants: Array
) -> None:
    left, rate, root = factors[0], factors[1], factors[2]
    beta_1, beta_2, rest_1, rest_2, epsilon = constants[0], constants[1], constants[2], constants[3], constants[4]
    for i in range(weight.shape[0]):
        g = grad[i] * scale
        m, v = first[i] * beta_1 + g * rest_1, second[i] * beta_2 + g * g * rest_2
        first[i], second[i] = m, v
        weight[i] = weight[i] * left - rate * m / (np.sqrt(v) * root + epsilon)


@compiled(set())
def _move_rows(
    rows: Array, weight: Array, first: Array, second: Array, grad: Array, scale: Any, factors: Array, constants: Array
) -> None:
    for place in range(rows.shape[0]):
        row = rows[place]
        _move(weight[row], first[row], second[row], grad[place], scale, factors, constants)


@compiled(set())
def _make_up(
    rows: Array, weight: Array, first: Array, second: Array, done: Array, began: Array, factors: Array, constants: Array
) -> None:
    beta_1, beta_2, epsilon = constants[0], constants[1], constants[4]
    for row in rows:
        w, m, v = weight[row], first[row], second[row]
        for step in range(done[row], factors.shape[0]):
            left, rate, root = factors[step, 0], factors[step, 1], factors[step, 2]
            if began[row]:
                for i in range(w.shape[0]):
                    m[i] *= beta_1
                    v[i] *= beta_2
                    w[i] = w[i] * left - rate * m[i] / (np.sqrt(v[i]) * root + epsilon)
            else:
                # Without moments only weight decay moves a row.
                for i in range(w.shape[0]):
                    w[i] *= left

"""AdamW that leaves alone the rows of the embedding which a step doesn't read.

In a small model about half of the weights are the embedding's, and a batch reads a few hundred of its rows. The others get no gradient, but AdamW
moves them too, by decay and by the momentum of gradients past. Nobody sees that before a batch reads the row again, so it is done then:
the steps missed, one by one, by the same arithmetic, to the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mlmclm.backends.adamw import Settings, joint_norm
from mlmclm.backends.cpu.loops import Array, compiled


class RowwiseAdamW:
    """AdamW in fp32 on the CPU; a row of the embedding is moved when a forward pass asks for it, and at the end."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], embedding: nn.Embedding, settings: Settings, steps: int
    ) -> None:
        self.embedding, self.settings = embedding, settings
        self.others = [parameter for parameter in parameters if parameter is not embedding.weight]
        self.moments = [(torch.zeros_like(parameter), torch.zeros_like(parameter)) for parameter in self.others]
        self.rows = (torch.zeros_like(embedding.weight), torch.zeros_like(embedding.weight))
        """Moments of the embedding."""
        self.done = np.zeros(len(embedding.weight), dtype=np.int64)
        """int64 [rows]: how many steps a row has made."""
        self.began = np.zeros(len(embedding.weight), dtype=np.bool_)
        """bool [rows]: whether a row ever had a gradient; its moments are 0 before."""
        self.taken = 0
        self.factors = np.empty((steps, 3), dtype=np.float32)
        """Of each step taken, for matrices: see `_factors`."""
        self._found: Tensor | None = None
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

    def finish(self) -> None:
        self._hook.remove()
        self.embedding.sparse = False
        self._catch_up(torch.arange(len(self.done)))

    def _gradient_of_rows(self) -> Tensor | None:
        """The embedding's gradient, sparse, a row once; None where there is none."""
        if self._found is None and self.embedding.weight.grad is not None:
            self._found = self.embedding.weight.grad.coalesce()
        return self._found

    def _catch_up(self, ids: Tensor) -> None:
        """Has the rows of these ids make the steps that they have missed."""
        rows = np.unique(ids.numpy())
        rows = rows[self.done[rows] < self.taken]
        arrays = (tensor.detach().numpy() for tensor in (self.embedding.weight, *self.rows))
        _make_up(rows, *arrays, self.done, self.began, self.factors[: self.taken], self._constants())
        self.done[rows] = self.taken

    def _factors(self, rate: float, *, decayed: bool) -> Array:
        """float32 [3] of the next step: what is left of a weight, the rate over the first moment's bias, the root of the second's
        bias, inverted."""
        first, second = (1 - beta ** (self.taken + 1) for beta in (self.settings.beta1, self.settings.beta2))
        left = 1 - rate * self.settings.weight_decay if decayed else 1
        with np.errstate(over="ignore"):  # a rate that fp32 doesn't hold makes the cell diverge
            return np.array((left, rate / first, 1 / math.sqrt(second)), dtype=np.float32)

    def _constants(self) -> Array:
        """float32 [5]: both betas, what they lack to 1, epsilon."""
        one, two = self.settings.beta1, self.settings.beta2
        return np.array((one, two, 1 - one, 1 - two, self.settings.epsilon), dtype=np.float32)


def _flat(tensor: Tensor) -> Array:
    return tensor.detach().view(-1).numpy()


# Without liberties of arithmetic: a step that is made up for has the bits of one made in time.


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
                for i in range(w.shape[0]):
                    w[i] *= left

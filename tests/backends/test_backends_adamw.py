"""AdamW that leaves rows of the embedding for later is AdamW."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mlmclm.backends.cpu.rowwise_adamw import RowwiseAdamW
from mlmclm.backends.optimizers.optimizer import Hyperparameters, apart
from mlmclm.backends.optimizers.rules import AdamW
from mlmclm.backends.optimizers.updates import TorchUpdates
from mlmclm.finetuning.loop import clipping, optimizer_for
from mlmclm.finetuning.protocol import Protocol

ROWS, WIDTH, STEPS = 50, 24, 30
SETTINGS = Protocol(adam_epsilon=1e-8, weight_decay=0.3, clip_norm=2.0)


def settings_of(protocol: Protocol, peak: float = 1e-3) -> Hyperparameters:
    decay = protocol.optimizer_weight_decay(peak)
    return Hyperparameters(protocol.adam_beta1, protocol.adam_beta2, protocol.adam_epsilon, decay)


class Small(nn.Module):
    """An embedding with a row of padding, a matrix, a vector, and a weight that no loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH, padding_idx=0)
        self.layer = nn.Linear(WIDTH, 3)
        self.unused = nn.Parameter(torch.ones(2, 2))

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.embed(ids)).mean(0))


@pytest.fixture
def small() -> Small:
    torch.manual_seed(0)
    return Small()


def batches() -> Iterator[tuple[Tensor, float]]:
    """Ids, some of them twice and some rows never, and a rate; step 7 reads only what step 6 read."""
    chance = np.random.default_rng(1)
    for step in range(STEPS):
        if step != 7:
            ids = torch.from_numpy(np.append(chance.integers(0, ROWS - 10, 6), 0))
        yield ids, 5e-2 * (STEPS - step) / STEPS


def train(model: Small, optimizer: Any, read: Tensor | None = None) -> dict[str, Tensor]:
    """The weights after all steps. The loss is large at first, so that some gradients are clipped and others are not.

    Args:
        read: rows that are read, without any gradient, before each step.
    """
    clipped = []
    for ids, rate in batches():
        if read is not None:
            with torch.no_grad():
                model.embed(read)
        (model(ids) - torch.tensor([1.0, -1.0, 0.5])).square().sum().backward()
        scale = clipping(optimizer.norm(), SETTINGS.clip_norm)
        clipped.append(scale < 1)
        optimizer.step(rate, scale)
    optimizer.finish()
    assert any(clipped) and not all(clipped)
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def reference(model: Small, decay: float) -> dict[str, Tensor]:
    """By torch's AdamW and its clipping, every row at every step."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(SETTINGS.adam_beta1, SETTINGS.adam_beta2), eps=1e-8)
    for ids, rate in batches():
        (model(ids) - torch.tensor([1.0, -1.0, 0.5])).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), SETTINGS.clip_norm or 0.0)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in model.named_parameters()}


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("kind", [RowwiseAdamW, TorchUpdates])
def test_weights_are_those_of_torchs_adamw_and_clipping(small: Small, kind: Any, decoupled: bool) -> None:
    peak, decay = 1e-3, SETTINGS.weight_decay
    expected = reference(copy.deepcopy(small), decay)
    before = small.embed.weight.detach().clone()
    protocol = SETTINGS.model_copy(
        update={"decoupled_weight_decay": True, "weight_decay": decay * peak} if decoupled else {}
    )
    settings = settings_of(protocol, peak)
    parameters = [*small.parameters()]
    torchs = AdamW.build(apart(parameters, settings), settings)
    more = (small.embed, settings, STEPS) if kind is RowwiseAdamW else (torchs,)
    found = train(small, kind(parameters, *more))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=2e-5, atol=1e-7, msg=name)
    never = slice(ROWS - 10, ROWS)  # read by no batch, and decayed all the same
    assert (found["embed.weight"][never].abs() < before[never].abs()).all()
    assert torch.equal(found["unused"], torch.ones(2, 2)), "torch leaves a weight without gradient as it is"


def test_a_row_that_is_read_late_has_the_bits_of_one_that_is_read_at_every_step(small: Small) -> None:
    other = copy.deepcopy(small)
    late = train(small, RowwiseAdamW([*small.parameters()], small.embed, settings_of(SETTINGS), STEPS))
    always = train(
        other, RowwiseAdamW([*other.parameters()], other.embed, settings_of(SETTINGS), STEPS), read=torch.arange(ROWS)
    )
    for name, value in always.items():
        assert torch.equal(late[name], value), name


def test_a_row_is_up_to_date_when_it_is_read_and_others_are_not_yet(small: Small) -> None:
    """The value that a forward pass sees is torch's at that step; a row which nobody reads stays where it was."""
    expected, own = copy.deepcopy(small), small
    optimizer = RowwiseAdamW([*own.parameters()], own.embed, settings_of(SETTINGS), STEPS)
    whole = RowwiseAdamW([*expected.parameters()], expected.embed, settings_of(SETTINGS), STEPS)
    start = own.embed.weight.detach().clone()
    for model, each in ((own, optimizer), (expected, whole)):
        for ids in (torch.tensor([3, 4]), torch.tensor([4, 5]), torch.tensor([5, 6])):
            if model is expected:
                model.embed(torch.arange(ROWS))
            model(ids).sum().backward()
            each.step(1e-2, 1.0)
    assert not torch.equal(own.embed.weight[3], expected.embed(torch.arange(ROWS))[3])
    assert torch.equal(own.embed(torch.tensor([3]))[0], expected.embed(torch.arange(ROWS))[3])
    assert torch.equal(own.embed.weight[20], start[20])
    assert torch.equal(own.embed(torch.tensor([20]))[0], expected.embed(torch.arange(ROWS))[20])


def test_pure_bf16_weights_are_torchs_affair(small: Small) -> None:
    head = nn.Linear(2, 2)
    chosen: Any = small
    chosen.device = torch.device("cpu")
    assert isinstance(optimizer_for(chosen, head, SETTINGS, 1e-3, 1), RowwiseAdamW)
    assert isinstance(optimizer_for(chosen.bfloat16(), head.bfloat16(), SETTINGS, 1e-3, 1), TorchUpdates)

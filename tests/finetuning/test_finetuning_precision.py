"""Pure bfloat16: weights, gradients and optimiser states, against AdamW written out."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlmclm.backends.packing import Packing
from mlmclm.finetuning.batching import training_rows
from mlmclm.finetuning.protocol import Protocol
from mlmclm.finetuning.run import fresh_layers
from mlmclm.models.encoder import encode, pack_ids
from mlmclm.models.folder import load_encoder
from mlmclm.tasks.prepare_task import prepare_task
from mlmclm.tasks.prepared_task import PreparedTask
from small_models import save_small_model, write_sentiment
from trainings import trained

STEPS = 4
"""Few, for one weight that is rounded otherwise changes all gradients after it."""
PURE = Protocol(max_steps=STEPS, max_length=48, stride=8, batch_size=8, precision="bf16", clip_norm=None)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> PreparedTask:
    folder = tmp_path_factory.mktemp("precision")
    write_sentiment(folder / "data")
    save_small_model(folder / "model")
    return prepare_task("sst2", folder / "model", PURE, folder / "store", folder / "data")


def models(task: PreparedTask, dtype: torch.dtype) -> tuple[Any, nn.Module]:
    """The small model and a head; a new pair each time, always the same weights."""
    encoder = load_encoder(task.folder.parents[2] / "model")
    head = task.head(encoder.config.hidden_size, fresh_layers(torch.Generator().manual_seed(1)))
    return encoder.to(dtype), head.to(dtype)


def weights(*modules: nn.Module) -> dict[str, Tensor]:
    found = [
        (f"{place}.{name}", value) for place, each in enumerate(modules) for name, value in each.named_parameters()
    ]
    return {name: value.detach().clone() for name, value in found}


def written_out(task: PreparedTask, rate: float, moments: torch.dtype) -> dict[str, Tensor]:
    """The weights after a plain loop: AdamW in fp32, then weights rounded to bf16 and moments to `moments`, each step."""
    encoder, head = models(task, torch.bfloat16)
    encoder.train(), head.train()
    parameters = [*encoder.parameters(), *head.parameters()]
    first = [torch.zeros_like(value, dtype=moments) for value in parameters]
    second = copy.deepcopy(first)
    rows = training_rows(task.rows["train"], 8, seed=5)
    for step in range(STEPS):
        lr = rate if step == 0 else rate * (STEPS - step) / (STEPS - 1)  # one step of warm-up, then linear to 0
        batch = task.batch(next(rows))
        packing = Packing.of([len(ids) for ids in batch.sequences])
        hidden = encode(encoder, pack_ids(batch.sequences, packing), packing, causal=False)
        gradients = torch.autograd.grad(task.loss(head, hidden, packing, batch.targets), parameters)
        for place, (value, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            assert gradient.dtype == torch.bfloat16
            m = 0.9 * first[place].float() + 0.1 * gradient.float()
            v = 0.95 * second[place].float() + 0.05 * gradient.float() ** 2
            decayed = value.detach().float() * (1 - lr * (0.1 if value.ndim > 1 else 0.0))
            update = m / (1 - 0.9 ** (step + 1)) / ((v / (1 - 0.95 ** (step + 1))).sqrt() + 1e-5)
            with torch.no_grad():
                value.copy_(decayed - lr * update)
            first[place], second[place] = m.to(moments), v.to(moments)
    return weights(encoder, head)


def share_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    equal = sum(int((ours[name] == theirs[name]).sum()) for name in ours)
    return equal / sum(value.numel() for value in ours.values())


def test_pure_bf16_is_adamw_whose_weights_and_moments_are_rounded_every_step(task: PreparedTask) -> None:
    encoder, head = models(task, torch.bfloat16)
    trained(encoder, head, task, PURE, learning_rate=1e-3, order=5)
    found = weights(encoder, head)
    assert {value.dtype for value in found.values()} == {torch.bfloat16}
    assert share_equal(found, written_out(task, 1e-3, torch.bfloat16)) > 0.999
    assert share_equal(found, written_out(task, 1e-3, torch.float32)) < 0.98, "moments in fp32 would be told apart"


def test_a_small_step_is_lost_in_pure_bf16_and_kept_by_fp32_weights(task: PreparedTask) -> None:
    """Adam's first step is the rate itself, and moves a bf16 weight where it is at least half the distance to the next one:
    at 1e-5 where |w| < 2^-8, which is 15.5 % of N(0, 0.02) (the reference page has "about 16 %"), at 2e-4 where |w| < 2^-4.
    """
    changed = {}
    for precision, dtype in (("bf16", torch.bfloat16), ("bf16-autocast", torch.float32)):
        for rate in (1e-5, 2e-4):
            encoder, head = models(task, dtype)
            layers = encoder.layers  # every weight of theirs gets a gradient, which embeddings' don't
            before = weights(layers)
            protocol = Protocol.model_validate(
                {**PURE.model_dump(), "precision": precision, "max_steps": 1, "adam_epsilon": 1e-12}
            )
            trained(encoder, head, task, protocol, learning_rate=rate, order=5)
            moved = {name: value for name, value in weights(layers).items() if value.ndim > 1}
            changed[precision, rate] = 1 - share_equal(moved, {name: before[name] for name in moved})
    expected = math.erf(2**-8 / 0.02 / math.sqrt(2))
    assert changed["bf16", 1e-5] == pytest.approx(expected, abs=0.02)
    assert changed["bf16", 2e-4] > 0.98
    assert changed["bf16-autocast", 1e-5] > 0.98


def test_a_decoupled_decay_takes_its_share_of_a_weight_whatever_the_rate() -> None:
    """MosaicML's DecoupledAdamW: torch's AdamW multiplies the decay by the step's rate, so it is divided by the peak."""
    assert Protocol(weight_decay=0.01, decoupled_weight_decay=True).optimizer_weight_decay(1e-3) == pytest.approx(10)
    assert Protocol(weight_decay=1e-6).optimizer_weight_decay(1e-3) == 1e-6

"""Activation checkpointing: the same loss and gradients, with fewer activations kept."""

from __future__ import annotations

import pytest
import torch
from transformers import EuroBertConfig

from mlmclm.models.build import PretrainingModel, build_model

CONFIG = EuroBertConfig(
    vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    mask_token_id=3, tie_word_embeddings=False,
)  # fmt: skip


def run(again: bool, causal: bool) -> tuple[float, dict[str, torch.Tensor], int]:
    """Loss, gradients, and bytes that autograd keeps between the forward and the backward pass."""
    model = PretrainingModel(build_model(CONFIG, 0), precision="fp32", activation_checkpointing=again)
    ids = torch.randint(4, 300, (8, 32), generator=torch.Generator().manual_seed(1))
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss: torch.Tensor = model(ids, torch.where(ids % 3 == 0, ids, -100), causal)
    held = sum(kept.values())
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, held


@pytest.mark.parametrize("causal", [False, True])
def test_loss_and_gradients_are_the_same_and_less_is_kept(causal: bool) -> None:
    loss, gradients, held = run(False, causal)
    again, other, held_again = run(True, causal)
    assert again == pytest.approx(loss, rel=1e-6)
    assert gradients.keys() == other.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(other[name], gradient, rtol=1e-4, atol=1e-5)
    assert held_again < held / 2

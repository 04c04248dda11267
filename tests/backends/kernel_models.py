"""Models of all kinds whose blocks are computed by kernels, or by torch, on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    EuroBertConfig,
    EuroBertForMaskedLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from mlmclm.models.architectures import layers_of


def makers(
    common: dict[str, Any], *, window: int, head_width: int, local: int
) -> dict[str, Callable[[], PreTrainedModel]]:
    """Return functions that make a model of each kind.

    Args:
        common: settings of all configurations.
        window: of Qwen2's layers but the first.
        head_width: of Qwen3's heads.
        local: tokens that ModernBERT's local layers see.
    """
    return {
        "eurobert": lambda: EuroBertForMaskedLM(EuroBertConfig(**common, num_key_value_heads=1, mask_token_id=3)),
        "eurobert, tied": lambda: EuroBertForMaskedLM(
            EuroBertConfig(**common, num_key_value_heads=3, mask_token_id=3, tie_word_embeddings=True)
        ),
        # A layer of each kind.
        "qwen2, windows": lambda: Qwen2ForCausalLM(
            Qwen2Config(
                **common, num_key_value_heads=1, use_sliding_window=True, sliding_window=window, max_window_layers=1
            )
        ),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**common, num_key_value_heads=1, head_dim=head_width)),
        "modernbert": lambda: ModernBertForMaskedLM(
            ModernBertConfig(**common, local_attention=local, cls_token_id=1, sep_token_id=2)
        ),
        "bert": lambda: BertForMaskedLM(
            BertConfig(**common, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        ),
    }


def randomised(make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Return a model with random weights, also in norms and biases; each call gives the same."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = make()
        for parameter in model.parameters():
            if parameter.ndim == 1:
                torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    return model


def state_types(model: PreTrainedModel) -> set[torch.dtype]:
    """Return a set to which the base model's passes add the dtypes of the states that its layers return."""
    dtypes: set[torch.dtype] = set()
    for layer in layers_of(model):
        # A block of kernels returns the pending addition beside the states.
        layer.register_forward_hook(lambda _, args, out: dtypes.add((out if isinstance(out, Tensor) else out[0]).dtype))
    return dtypes

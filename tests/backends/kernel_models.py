"""Models of all kinds whose blocks are computed by kernels, or by torch, on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
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
    """Return a model with random weights, in norms and biases too; the same at each call."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = make()
        for parameter in model.parameters():
            if parameter.ndim == 1:
                torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    return model

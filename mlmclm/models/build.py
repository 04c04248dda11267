"""A EuroBERT model of a named size, freshly initialised, and its weights as one loss at the labelled positions."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import EuroBertConfig, EuroBertForMaskedLM, PreTrainedTokenizerFast

from mlmclm.models.attention import LONGEST_WRITTEN_OUT, use_attention
from mlmclm.models.block import fits, run_blocks
from mlmclm.models.cross_entropy import LabelledCrossEntropyHead
from mlmclm.models.packing import Packing
from mlmclm.models.sizes import SIZES


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A prepared tokenizer folder (tokenizer.json); pad, bos, eos and mask tokens are set."""
    return PreTrainedTokenizerFast.from_pretrained(str(folder))


def model_config(size: str, tokenizer: PreTrainedTokenizerFast, length: int) -> EuroBertConfig:
    """EuroBERT's configuration for a size of `SIZES`: RMSNorm eps 1e-5, SwiGLU, RoPE base 10,000, no bias, untied embeddings.

    Args:
        length: longest sequence, in tokens.
    """
    shape = SIZES[size]
    return EuroBertConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_value_heads,
        max_position_embeddings=length,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        initializer_range=shape.initial_deviation,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        mask_token_id=tokenizer.mask_token_id,
        dtype="float32",
    )


def build(config: EuroBertConfig, seed: int) -> EuroBertForMaskedLM:
    """The model with normal weights (`Size.initial_deviation`) that are a function of the configuration and the seed; fp32, on the CPU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return EuroBertForMaskedLM(config)


class PretrainingModel(nn.Module):
    """A model's loss as a sum over labelled positions; logits exist at those positions only, a chunk at a time.

    The weights keep the names of the Hugging Face model (`state_dict` of `.model`).
    """

    def __init__(self, model: EuroBertForMaskedLM, *, precision: str, activation_checkpointing: bool = False) -> None:
        """`activation_checkpointing`: keep each layer's input only, and compute the layer again in the backward pass."""
        super().__init__()
        use_attention(model)
        head = LabelledCrossEntropyHead(model.lm_head.weight)
        model.lm_head = head
        self.model = model
        self.bf16 = precision == "bf16-autocast"
        self.checkpointing = activation_checkpointing
        if activation_checkpointing:
            model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})

    def forward(self, input_ids: Tensor, labels: Tensor, causal: bool) -> Tensor:
        """Sum of -ln p(label) in nats over the positions whose label isn't -100, an fp32 scalar.

        Args:
            input_ids: int64 [sequences, length].
            labels: int64 [sequences, length], aligned with the position whose output predicts them.
            causal: whether a position sees earlier ones only.
        """
        with self._autocast(input_ids.device.type):
            fused = input_ids.device.type == "cpu" and input_ids.shape[1] <= LONGEST_WRITTEN_OUT
            if fused and not self.checkpointing and fits(self.model.model):
                packing = Packing.uniform(*input_ids.shape)
                hidden = run_blocks(self.model.model, input_ids.view(1, -1), packing, causal=causal)
            else:
                hidden = self.model.model(input_ids=input_ids, is_causal=causal).last_hidden_state.flatten(0, 1)
        # hidden: [sequences * length, hidden]
        where = (labels.flatten() != -100).nonzero().flatten()
        return self.model.lm_head(hidden[where], labels.flatten()[where], bf16=self.bf16)

    def _autocast(self, device: str) -> AbstractContextManager[Any]:
        return torch.autocast(device, dtype=torch.bfloat16) if self.bf16 else nullcontext()

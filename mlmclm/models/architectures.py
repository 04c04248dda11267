"""What differs between architectures: the class that holds the weights, a fresh configuration, and the same weights as a decoder.

Everywhere else a model is what transformers calls a masked language model, or for Qwen a causal one that is told not to be: a base
model (`.base_model`), an LM head (`get_output_embeddings`), and for ModernBERT and BERT a dense layer with a norm between the two
(`before_head`).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from transformers import (
    BertForMaskedLM,
    EuroBertConfig,
    EuroBertForMaskedLM,
    LlamaConfig,
    ModernBertConfig,
    ModernBertDecoderConfig,
    ModernBertForMaskedLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    RobertaForMaskedLM,
)

from mlmclm.models.sizes import GLOBAL_EVERY, Size

FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings",
    "initializer_range", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "attention_bias",
    "attention_dropout", "mlp_bias",
)  # fmt: skip
LLAMA_FIELDS = ("num_key_value_heads", "head_dim", "rms_norm_eps", "hidden_act")
"""What EuroBERT's configuration has in common with Llama's beyond `FIELDS`, by the same names."""
MODERNBERT_FIELDS = (
    "hidden_activation", "norm_eps", "norm_bias", "embedding_dropout", "mlp_dropout", "decoder_bias", "classifier_bias",
    "classifier_activation", "initializer_cutoff_factor", "local_attention", "layer_types", "cls_token_id", "sep_token_id",
)  # fmt: skip
"""Likewise ModernBERT's with its decoder's."""


@dataclass(frozen=True)
class Architecture:
    """One family of models; the key in `ARCHITECTURES` is transformers' `model_type` of the encoder."""

    model: type[PreTrainedModel]
    decoder_config: Callable[[PreTrainedConfig], PreTrainedConfig]
    """The configuration under which the weights are a causal decoder."""
    decoder_weights: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None
    """The decoder's weights by its names for them; None where they are the encoder's."""
    isolates: bool = False
    """Whether its forward takes `position_ids` and hands `packing` on to attention, so that documents in a block can be kept apart."""
    dense: Callable[[PreTrainedModel, Tensor], Tensor] | None = None
    """What the LM head gets from final hidden states [positions, hidden]; None where it gets them as they are."""


def _eurobert(size: Size, tokenizer: PreTrainedTokenizerFast, length: int) -> EuroBertConfig:
    """RMSNorm eps 1e-5, SwiGLU, RoPE base 10,000, no bias, untied embeddings."""
    return EuroBertConfig(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_value_heads,
        max_position_embeddings=length,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        initializer_range=size.initial_deviation,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        mask_token_id=tokenizer.mask_token_id,
        dtype="float32",
    )


def _llama(config: PreTrainedConfig) -> LlamaConfig:
    return LlamaConfig(architectures=["LlamaForCausalLM"], **shared(config, LLAMA_FIELDS))


def _modernbert(size: Size, tokenizer: PreTrainedTokenizerFast, length: int) -> ModernBertConfig:
    """LayerNorm eps 1e-5, GLU with GELU, tied embeddings, no bias but the LM head's (ModernBERT, arXiv 2412.13663, section 2.1),
    RoPE base 10,000 in every layer (Ettin's pretraining phase)."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    return ModernBertConfig(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        max_position_embeddings=length,
        norm_eps=1e-5,
        rope_parameters={"full_attention": dict(rope), "sliding_attention": dict(rope)},
        layer_types=["sliding_attention" if layer % GLOBAL_EVERY else "full_attention" for layer in range(size.layers)],
        local_attention=2 * (size.window or length),
        initializer_range=size.initial_deviation,
        decoder_bias=True,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        cls_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        sep_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def _modernbert_decoder(config: PreTrainedConfig) -> ModernBertDecoderConfig:
    return ModernBertDecoderConfig(architectures=["ModernBertDecoderForCausalLM"], **shared(config, MODERNBERT_FIELDS))


def _causal(config: PreTrainedConfig) -> PreTrainedConfig:
    config = copy.deepcopy(config)
    config.is_causal = True
    return config


def _is_decoder(name: str) -> Callable[[PreTrainedConfig], PreTrainedConfig]:
    """BERT's configuration with causal attention, for the class of this name."""

    def decoder(config: PreTrainedConfig) -> PreTrainedConfig:
        config = copy.deepcopy(config)
        config.is_decoder, config.architectures = True, [name]
        return config

    return decoder


def _roberta_dense(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """The first half of transformers' RobertaLMHead, whose second is the LM head."""
    head = model.lm_head
    normed: Tensor = head.layer_norm(functional.gelu(head.dense(hidden)))
    return normed


def shared(config: PreTrainedConfig, fields: tuple[str, ...]) -> dict[str, Any]:
    """The values of what every configuration has, and of `fields`, for an encoder's decoder and the reverse."""
    values = {name: getattr(config, name) for name in (*FIELDS, *fields)}
    return values | {"rope_parameters": copy.deepcopy(config.rope_parameters), "dtype": "float32"}


def _split(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """ModernBERT's weights under the decoder's names: the fused projection `Wqkv` in three, `head` as `lm_head`."""
    parted: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        fused = re.fullmatch(r"(model\.layers\.\d+\.attn\.)Wqkv(\.\w+)", name)
        if fused is not None:
            for letter, part in zip("qkv", tensor.chunk(3), strict=True):
                parted[f"{fused[1]}{letter}_proj{fused[2]}"] = part.clone()
        else:
            parted[re.sub(r"^head\.", "lm_head.", name)] = tensor
    return parted


ARCHITECTURES: dict[str, Architecture] = {
    "eurobert": Architecture(EuroBertForMaskedLM, _llama, isolates=True),
    "modernbert": Architecture(
        ModernBertForMaskedLM,
        _modernbert_decoder,
        _split,
        isolates=True,
        dense=lambda model, hidden: model.head(hidden),
    ),
    # Only to continue from: transformers has no masked language model of theirs, but their own class attends in both directions
    # where the configuration says that it is not causal.
    "qwen2": Architecture(Qwen2ForCausalLM, _causal, isolates=True),
    "qwen3": Architecture(Qwen3ForCausalLM, _causal, isolates=True),
    # Likewise: learned positions, token types that are all 0, a norm behind each layer.
    "bert": Architecture(
        BertForMaskedLM,
        _is_decoder("BertLMHeadModel"),
        dense=lambda model, hidden: model.cls.predictions.transform(hidden),
    ),
    "roberta": Architecture(RobertaForMaskedLM, _is_decoder("RobertaForCausalLM"), dense=_roberta_dense),
}
DROPOUTS = (
    "attention_dropout", "attention_probs_dropout_prob", "embedding_dropout", "hidden_dropout_prob", "mlp_dropout",
)  # fmt: skip
"""By the names of any architecture's configuration; pretraining has none, so that a step depends on nothing but its batch."""
FRESH: dict[str, Callable[[Size, PreTrainedTokenizerFast, int], PreTrainedConfig]] = {
    "eurobert": _eurobert,
    "modernbert": _modernbert,
}
"""A size's configuration for a tokenizer and a longest sequence in tokens."""


def first_position(config: PreTrainedConfig) -> int:
    """The number of a sequence's first position: RoBERTa's come behind that of padding, the others' begin at 0."""
    return config.pad_token_id + 1 if config.model_type == "roberta" else 0


def before_head(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """What the LM head gets, [positions, hidden], from final hidden states of the same shape."""
    dense = ARCHITECTURES[model.config.model_type].dense
    return hidden if dense is None else dense(model, hidden)


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """The layers of a base model."""
    layers: nn.ModuleList = model.layers if hasattr(model, "layers") else model.encoder.layer
    return layers


def final_states(model: PreTrainedModel, input_ids: Tensor, *, causal: bool, **more: Any) -> Tensor:
    """Final hidden states [batch, length, hidden] of a base model in either direction.

    Args:
        model: selected by `mlmclm.models.attention.use_attention`, which alone decides what a token sees.
        more: for the model's forward.
    """
    if hasattr(model.config, "layer_types"):
        # A mask for each kind of layer is taken as it is; none is built.
        more["attention_mask"] = {"full_attention": None, "sliding_attention": None}
    first = first_position(model.config)
    if first and more.get("position_ids") is not None:
        more["position_ids"] = more["position_ids"] + first
    hidden: Tensor = model(input_ids=input_ids, is_causal=causal, use_cache=False, **more).last_hidden_state
    return hidden


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights by Hugging Face name; tied matrices are there once, under the embedding's name."""
    return {name: parameter.detach().contiguous() for name, parameter in model.named_parameters()}


def load_weights(
    model: PreTrainedModel, weights: Mapping[str, Tensor], then: Callable[[nn.Parameter], None] | None = None
) -> None:
    """Takes up what `weights_of` gave, one weight after the other; a parameter that has a shape alone (`build.hollow`) becomes
    real, on the CPU.

    Args:
        then: called with each parameter when it has its weight.

    Raises:
        ValueError: other names than the model's.
    """
    others = {name for name, _ in model.named_parameters()} ^ set(weights)
    if others:
        raise ValueError(f"these weights are another model's: {', '.join(sorted(others)[:5])}")
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            # In place, since a tied matrix is one parameter under several modules.
            real = torch.empty_like(parameter, device="cpu")
            torch.utils.swap_tensors(parameter, nn.Parameter(real, parameter.requires_grad))  # type: ignore[no-untyped-call]
        with torch.no_grad():
            parameter.copy_(weights[name])
        if then is not None:
            then(parameter)

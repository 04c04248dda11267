"""Differences between architectures: model class, configuration of a new model, and the same weights as a decoder.

Everywhere else a model is what transformers calls a masked language model (for Qwen, a causal one with `is_causal`
false): a base model (`.base_model`), an LM head (`get_output_embeddings`) and, for ModernBERT and BERT, a dense layer
with a norm between the two (`before_head`).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
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

from mlmclm.errors import UserError
from mlmclm.models.sizes import GLOBAL_EVERY, Size

FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings",
    "initializer_range", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "attention_bias",
    "attention_dropout", "mlp_bias",
)  # fmt: skip
"""Configuration fields that an encoder and its decoder share, both in EuroBERT and in ModernBERT."""
LLAMA_FIELDS = ("num_key_value_heads", "head_dim", "rms_norm_eps", "hidden_act")
"""Fields that EuroBERT's configuration shares with Llama's beyond `FIELDS`, by the same names."""
MODERNBERT_FIELDS = (
    "hidden_activation", "norm_eps", "norm_bias", "embedding_dropout", "mlp_dropout", "decoder_bias", "classifier_bias",
    "classifier_activation", "initializer_cutoff_factor", "local_attention", "layer_types", "cls_token_id", "sep_token_id",
)  # fmt: skip
"""Fields that ModernBERT's configuration shares with its decoder's beyond `FIELDS`."""

ROPE = {"rope_type": "default", "rope_theta": 10_000.0}


@dataclass(frozen=True)
class Architecture:
    """A family of models; the key in `ARCHITECTURES` is the encoder's `model_type` in transformers."""

    model: type[PreTrainedModel]
    decoder_config: Callable[[PreTrainedConfig], PreTrainedConfig]
    """Function that returns the configuration under which the weights are a causal decoder."""
    decoder_weights: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None
    """Function that returns the weights under the decoder's names; None if these are the same as the encoder's."""
    isolates: bool = False
    """The forward takes `position_ids` and passes `packing` to attention, so that documents can be kept apart."""
    residual: bool = True
    """Layers add to a residual stream; False if each ends with a norm."""
    dense: Callable[[PreTrainedModel, Tensor], Tensor] | None = None
    """Function from final hidden states [positions, hidden] to the LM head's input; None if they are the same."""


def _shape(size: Size, tokenizer: PreTrainedTokenizerFast, length: int) -> dict[str, Any]:
    """Return the fields of a fresh configuration that have the same meaning in every architecture."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "max_position_embeddings": length,
        "initializer_range": size.initial_deviation,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }


def _eurobert(size: Size, tokenizer: PreTrainedTokenizerFast, length: int) -> EuroBertConfig:
    """Return EuroBERT's configuration: RMSNorm eps 1e-5, SwiGLU, RoPE base 10,000, no bias, untied embeddings."""
    return EuroBertConfig(
        **_shape(size, tokenizer, length),
        num_key_value_heads=size.key_value_heads,
        rms_norm_eps=1e-5,
        rope_parameters=dict(ROPE),
        tie_word_embeddings=False,
        mask_token_id=tokenizer.mask_token_id,
    )


def _modernbert(size: Size, tokenizer: PreTrainedTokenizerFast, length: int) -> ModernBertConfig:
    """Return ModernBERT's configuration.

    LayerNorm eps 1e-5, GLU with GELU, tied embeddings, no bias but the LM head's (ModernBERT, arXiv 2412.13663, section
    2.1), RoPE base 10,000 in every layer (Ettin's pretraining phase).
    """
    return ModernBertConfig(
        **_shape(size, tokenizer, length),
        norm_eps=1e-5,
        rope_parameters={"full_attention": dict(ROPE), "sliding_attention": dict(ROPE)},
        layer_types=["sliding_attention" if layer % GLOBAL_EVERY else "full_attention" for layer in range(size.layers)],
        # transformers counts both sides of the window together.
        local_attention=2 * (size.window or length),
        decoder_bias=True,
        tie_word_embeddings=True,
        cls_token_id=tokenizer.bos_token_id,
        sep_token_id=tokenizer.eos_token_id,
    )


def with_values(config: PreTrainedConfig, **values: Any) -> PreTrainedConfig:
    """Return a copy of a configuration with these values."""
    config = copy.deepcopy(config)
    config.update(values)
    return config


def _roberta_dense(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Compute the first half of transformers' RobertaLMHead; its second half is the LM head."""
    head = model.lm_head
    normed: Tensor = head.layer_norm(functional.gelu(head.dense(hidden)))
    return normed


def shared(config: PreTrainedConfig, fields: tuple[str, ...]) -> dict[str, Any]:
    """Return the values of `FIELDS` and of `fields`, to convert an encoder's configuration to its decoder's or back."""
    values = {name: getattr(config, name) for name in (*FIELDS, *fields)}
    return values | {"rope_parameters": copy.deepcopy(config.rope_parameters), "dtype": "float32"}


def _split(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return ModernBERT's weights under the decoder's names: `Wqkv` as three projections, `head` as `lm_head`."""
    parted: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if fused := re.fullmatch(r"(model\.layers\.\d+\.attn\.)Wqkv(\.\w+)", name):
            for letter, part in zip("qkv", tensor.chunk(3), strict=True):
                # Copies, because safetensors refuses to save tensors that share memory.
                parted[f"{fused[1]}{letter}_proj{fused[2]}"] = part.clone()
        else:
            parted[re.sub(r"^head\.", "lm_head.", name)] = tensor
    return parted


ARCHITECTURES: dict[str, Architecture] = {
    "eurobert": Architecture(
        EuroBertForMaskedLM,
        lambda config: LlamaConfig(architectures=["LlamaForCausalLM"], **shared(config, LLAMA_FIELDS)),
        isolates=True,
    ),
    "modernbert": Architecture(
        ModernBertForMaskedLM,
        lambda config: ModernBertDecoderConfig(
            architectures=["ModernBertDecoderForCausalLM"], **shared(config, MODERNBERT_FIELDS)
        ),
        _split,
        isolates=True,
        dense=lambda model, hidden: model.head(hidden),
    ),
    # Only to continue from: transformers has no masked language model for Qwen, but its causal class attends in both
    # directions if the configuration says that it is not causal.
    "qwen2": Architecture(Qwen2ForCausalLM, partial(with_values, is_causal=True), isolates=True),
    "qwen3": Architecture(Qwen3ForCausalLM, partial(with_values, is_causal=True), isolates=True),
    # Also only to continue from: learned positions, token types that are all 0, a norm after each layer.
    "bert": Architecture(
        BertForMaskedLM,
        partial(with_values, is_decoder=True, architectures=["BertLMHeadModel"]),
        residual=False,
        dense=lambda model, hidden: model.cls.predictions.transform(hidden),
    ),
    "roberta": Architecture(
        RobertaForMaskedLM,
        partial(with_values, is_decoder=True, architectures=["RobertaForCausalLM"]),
        residual=False,
        dense=_roberta_dense,
    ),
}
DROPOUTS = (
    "attention_dropout", "attention_probs_dropout_prob", "embedding_dropout", "hidden_dropout_prob", "mlp_dropout",
)  # fmt: skip
"""Dropout fields of any architecture's configuration. Pretraining has no dropout, so that a step depends on nothing but
its batch."""
FRESH: dict[str, Callable[[Size, PreTrainedTokenizerFast, int], PreTrainedConfig]] = {
    "eurobert": _eurobert,
    "modernbert": _modernbert,
}
"""Functions that return a size's configuration, for a tokenizer and a longest sequence in tokens."""


def set_rope(config: PreTrainedConfig, base: float | None, local: float | None) -> None:
    """Set the bases of the rotary position embedding; None leaves one as it is.

    Args:
        base: for all layers, or for those with global attention in an architecture that has both.
        local: for layers with local attention.

    Raises:
        UserError: the architecture has no such positions or layers.
    """
    rope = getattr(config, "rope_parameters", None)
    for name, kind, value in (("rope_base", "full_attention", base), ("local_rope_base", "sliding_attention", local)):
        if value is None:
            continue
        if not rope:
            raise UserError(f"{name} {value:g}: {config.model_type} models have no rotary positions; leave it out.")
        if kind in rope:
            rope[kind]["rope_theta"] = float(value)
        elif name == "rope_base":
            rope["rope_theta"] = float(value)
        else:
            raise UserError(
                f"{name} {value:g}: {config.model_type} models have no layers with local attention that have a base of their own; leave it out."
            )


def before_head(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Return the LM head's input, [positions, hidden], for final hidden states of the same shape."""
    dense = ARCHITECTURES[model.config.model_type].dense
    return hidden if dense is None else dense(model, hidden)


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """Return the layers of a base model."""
    layers: nn.ModuleList = model.layers if hasattr(model, "layers") else model.encoder.layer
    return layers


def final_states(model: PreTrainedModel, input_ids: Tensor, *, causal: bool, **more: Any) -> Tensor:
    """Compute final hidden states [batch, length, hidden] of a base model in either direction.

    `mlmclm.models.attention.use_attention` must have prepared the model; it alone decides what a token sees. `more` goes
    to the model's forward.
    """
    if hasattr(model.config, "layer_types"):
        # If the mask is a dict with one for each kind of layer, transformers uses it unchanged and builds none itself.
        more["attention_mask"] = {"full_attention": None, "sliding_attention": None}
    # Where padding has a position of its own, as in RoBERTa, the first token has the position after that.
    positions = getattr(getattr(model, "embeddings", None), "position_embeddings", None)
    padding = getattr(positions, "padding_idx", None)
    if padding is not None and more.get("position_ids") is not None:
        more["position_ids"] = more["position_ids"] + padding + 1
    hidden: Tensor = model(input_ids=input_ids, is_causal=causal, use_cache=False, **more).last_hidden_state
    return hidden


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the weights by Hugging Face name; a tied matrix appears once, under the embedding's name."""
    return {name: parameter.detach().contiguous() for name, parameter in model.named_parameters()}


def load_weights(
    model: PreTrainedModel, weights: Mapping[str, Tensor], then: Callable[[nn.Parameter], None] | None = None
) -> None:
    """Load what `weights_of` returned, one weight after the other; call `then` with each parameter once it is loaded.

    A parameter without memory (`build.hollow`) becomes real, on the CPU.

    Raises:
        ValueError: the names are not the model's.
    """
    differing = {name for name, _ in model.named_parameters()} ^ set(weights)
    if differing:
        raise ValueError(f"these weights are another model's: {', '.join(sorted(differing)[:5])}")
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            # In place, because a tied matrix is one parameter of several modules.
            real = torch.empty_like(parameter, device="cpu")
            torch.utils.swap_tensors(parameter, nn.Parameter(real, parameter.requires_grad))  # type: ignore[no-untyped-call]
        with torch.no_grad():
            parameter.copy_(weights[name])
        if then is not None:
            then(parameter)

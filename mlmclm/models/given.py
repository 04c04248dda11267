"""Models to continue from: a Hugging Face folder or name becomes an encoder of `ARCHITECTURES` that keeps every weight.

    EuroBERT, ModernBERT    as they are
    Llama, SmolLM           a EuroBERT encoder, whose state-dict keys are the same
    ModernBERT decoders     a ModernBERT encoder, with query, key and value projections fused
    Qwen2, Qwen3            their own class with `is_causal` false
    BERT, RoBERTa           as they are, without the layers over the first token

The vocabulary gains the tokens that the tokenizer has beyond the model's own: at least a mask token, if there is none.
A new token's rows in the embedding and the LM head are the mean of the others.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    EuroBertConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertDecoderForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from mlmclm.errors import UserError, one_line
from mlmclm.models.architectures import (
    ARCHITECTURES,
    DROPOUTS,
    LLAMA_FIELDS,
    MODERNBERT_FIELDS,
    load_weights,
    shared,
    weights_of,
    with_values,
)
from mlmclm.models.build import hollow
from mlmclm.models.folder import POOLED, check_model_folder, load_tokenizer, read_config, read_model
from mlmclm.models.sizes import Size, parameters
from mlmclm.models.sources import fetch_source
from mlmclm.storage.files import read_json

MASK_TOKENS = ("<|mask|>", "[MASK]", "<mask>")
"""If a tokenizer names no mask token, the first of these texts in its vocabulary is used; if it has none, the first is added."""
POOLING = re.compile(r"(bert|roberta)\.(pooler\.|embeddings\.position_ids)|cls\.seq_relationship\.")
"""Published weights of BERT that no language model uses: the layers over the first token, and stored position ids."""


@dataclass(frozen=True)
class Initial:
    """Configuration, weights and tokenizer that a model starts from."""

    config: PreTrainedConfig
    weights: dict[str, Tensor]
    """fp32, by the names of `architectures.weights_of`."""
    tokenizer: PreTrainedTokenizerFast
    """It has a mask token."""

    def model(self) -> PreTrainedModel:
        """Return the model with this configuration and these weights; see `begin`."""
        return begin(self.config, self.weights)


def begin(config: PreTrainedConfig, weights: Mapping[str, Tensor] | None) -> PreTrainedModel:
    """Return the model with these weights, or `hollow`: in fp32, on the CPU, without the configuration's dropout."""
    model = hollow(with_values(config, **{name: 0.0 for name in DROPOUTS if hasattr(config, name)}))
    if weights is not None:
        load_weights(model, weights)
    return model


def write_initial(folder: Path, initial: Initial) -> None:
    """Write configuration and weights into an existing folder."""
    initial.config.save_pretrained(str(folder))
    save_file(initial.weights, str(folder / "model.safetensors"), metadata={"format": "pt"})


@dataclass(frozen=True)
class _Decoder:
    """A decoder architecture that becomes an encoder, with functions that return the encoder's parts."""

    model: type[PreTrainedModel]
    config: Callable[[PreTrainedConfig], PreTrainedConfig]
    weights: Callable[[dict[str, Tensor]], dict[str, Tensor]]


def read_initial(source: str | Path, tokenizer: PreTrainedTokenizerFast | None = None) -> Initial:
    """Read a model folder, or fetch one from the Hugging Face hub by its name; no code that comes with it is run.

    Args:
        tokenizer: the corpus's, which may have more tokens than the model's own; by default the model's own.

    Raises:
        UserError: there is no such folder, the architecture is not supported, the weights are not a whole language
            model, or the tokenizer gives the model's tokens other ids.
        EnvironmentFault: the hub cannot be reached.
    """
    folder = fetch_source(str(source))
    kind = check_model_folder(folder)["model_type"]
    _check_kind(kind, source)
    model_tokenizer = load_tokenizer(folder)
    vocabulary = model_tokenizer.get_vocab()
    chosen = _with_mask(model_tokenizer) if tokenizer is None else tokenizer
    new = _new_ids(vocabulary, chosen, source)
    decoder = _DECODERS.get(kind)
    model = _load(folder, decoder.model if decoder is not None else ARCHITECTURES[kind].model)
    if kind in POOLED and not model.config.tie_word_embeddings:
        raise UserError(
            f"{source}: tie_word_embeddings: false is not supported for {kind!r}: its LM head is the embedding."
        )
    if (
        model.config.tie_word_embeddings
        and model.get_output_embeddings().weight is not model.get_input_embeddings().weight
    ):
        instead = "" if kind in POOLED else " Set it to false if the head of its own is meant."
        raise UserError(
            f"{folder / 'config.json'}: tie_word_embeddings: true, but the weights have an LM head that differs from the embedding.{instead}"
        )
    _grow(model, sorted(vocabulary.values()), new, folder)
    config = _encoder(model.config)
    weights = weights_of(model)
    if decoder is not None:
        weights = decoder.weights(weights)
    if config.model_type == "eurobert":
        config.mask_token_id = chosen.mask_token_id
    return Initial(config, weights, chosen)


def encoder_config(folder: Path) -> PreTrainedConfig:
    """Return the encoder's configuration for a folder's model of a supported architecture, from config.json alone."""
    kind = read_json(folder / "config.json").get("model_type")
    _check_kind(kind, folder)
    return _encoder(read_config(folder))


def encoder_size(config: PreTrainedConfig) -> Size:
    """Return the shape of an encoder with this configuration; parameters are counted on transformers' own class."""
    local = (getattr(config, "layer_types", None) or []).count("sliding_attention")
    shape = Size(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_attention_heads,
        key_value_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        initial_deviation=config.initializer_range,
        architecture=config.model_type,
        window=config.sliding_window if local else None,
        local=local or None,
        head_width=getattr(config, "head_dim", None),
        gated=config.model_type not in POOLED,
        vocabulary=config.vocab_size,
    )
    # On the meta device, without memory: only the shapes are needed.
    with torch.device("meta"):
        base = ARCHITECTURES[config.model_type].model(copy.deepcopy(config)).base_model
    counted = sum(parameter.numel() for parameter in base.parameters())
    # `extra` makes the closed form equal to the count.
    return replace(shape, extra=counted - parameters(shape, config.vocab_size))


def _check_kind(kind: str, source: str | Path) -> None:
    if kind not in ARCHITECTURES and kind not in _DECODERS:
        raise UserError(
            f"{source}: the architecture {kind!r} cannot be continued from; "
            f"supported: {', '.join(sorted([*ARCHITECTURES, *_DECODERS]))}."
        )


def _encoder(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration under which the weights are an encoder."""
    if config.model_type in _DECODERS:
        config = _DECODERS[config.model_type].config(config)
    direction = {"is_causal": False} if config.model_type in ("qwen2", "qwen3") else {}
    direction |= {"is_decoder": False} if config.model_type in POOLED else {}
    return with_values(config, **direction, dtype="float32")


def _with_mask(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    if tokenizer.mask_token is None:
        vocabulary = tokenizer.get_vocab()
        text = next((text for text in MASK_TOKENS if text in vocabulary), MASK_TOKENS[0])
        tokenizer.add_special_tokens({"mask_token": text})
    return tokenizer


def _new_ids(model_vocabulary: dict[str, int], tokenizer: PreTrainedTokenizerFast, source: str | Path) -> list[int]:
    """Return the ids of the tokens that the model's own vocabulary lacks."""
    vocabulary = tokenizer.get_vocab()
    for text, index in model_vocabulary.items():
        if vocabulary.get(text) != index:
            raise UserError(
                f"{source}: the tokenizer is not this model's: {text!r} has the id {vocabulary.get(text)} in it, and {index} "
                "in the model's own. Use the model's folder as the tokenizer's path."
            )
    if tokenizer.mask_token_id is None:
        raise UserError(f"{source}: the tokenizer has no mask token.")
    return sorted(set(vocabulary.values()) - set(model_vocabulary.values()))


def _load(folder: Path, kind: type[PreTrainedModel]) -> PreTrainedModel:
    try:
        model, info = read_model(kind, folder)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{folder}: the model cannot be read ({one_line(error, 300)}).") from error
    unused = [key for key in info["unexpected_keys"] if POOLING.match(key) is None]
    problems = {"the weights lack": info["missing_keys"], f"{kind.__name__} has no place for": unused}
    for words, keys in problems.items():
        if keys:
            raise UserError(f"{folder}: {words} {', '.join(sorted(keys)[:5])}; a whole language model is needed.")
    return model


def _grow(model: PreTrainedModel, known_ids: list[int], new: list[int], folder: Path) -> None:
    """Give new tokens the mean of the known ones' rows, in the embedding and the LM head."""
    rows = len(model.get_input_embeddings().weight)
    if known_ids[-1] >= rows:
        raise UserError(f"{folder}: the tokenizer has the id {known_ids[-1]}, but the embedding only {rows} rows.")
    if not new:
        return
    if new[-1] >= rows:
        with torch.random.fork_rng(devices=[]):
            model.resize_token_embeddings(new[-1] + 1, mean_resizing=False)
    head = model.get_output_embeddings()
    tensors = [model.get_input_embeddings().weight, head.weight, getattr(head, "bias", None)]
    with torch.no_grad():
        # By identity, so that a tied matrix is changed once.
        for tensor in {id(tensor): tensor for tensor in tensors if tensor is not None}.values():
            tensor[new] = tensor[known_ids].mean(0)


def _eurobert(config: PreTrainedConfig) -> EuroBertConfig:
    if config.mlp_bias:
        raise UserError(
            f"{config._name_or_path}: mlp_bias: with it, EuroBERT has a bias in its LM head, and Llama has none."
        )
    return EuroBertConfig(**shared(config, LLAMA_FIELDS))


def _fuse(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a ModernBERT decoder's weights under the encoder's names."""
    fused: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if match := re.fullmatch(r"(model\.layers\.\d+\.attn\.)q_proj(\.\w+)", name):
            parts = [weights[f"{match[1]}{letter}_proj{match[2]}"] for letter in "qkv"]
            fused[f"{match[1]}Wqkv{match[2]}"] = torch.cat(parts)
        elif re.search(r"\.[kv]_proj\.", name) is None:
            fused[re.sub(r"^lm_head\.", "head.", name)] = tensor
    return fused


_DECODERS = {
    "llama": _Decoder(LlamaForCausalLM, _eurobert, lambda weights: weights),
    "modernbert-decoder": _Decoder(
        ModernBertDecoderForCausalLM, lambda config: ModernBertConfig(**shared(config, MODERNBERT_FIELDS)), _fuse
    ),
}

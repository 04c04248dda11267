"""Models to continue from: a Hugging Face folder or name becomes an encoder of `ARCHITECTURES` that keeps every weight.

    EuroBERT, ModernBERT    as they are
    Llama, SmolLM           a EuroBERT encoder, whose state-dict keys are the same
    ModernBERT decoders     a ModernBERT encoder, with query, key and value projections fused
    Qwen2, Qwen3            their own class with `is_causal` false

The vocabulary gains what the tokenizer has more than the model's own: a mask token at least, where there is none. A new token's
rows of the embedding and of the LM head are the mean of the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
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

from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.models.architectures import ARCHITECTURES, LLAMA_FIELDS, MODERNBERT_FIELDS, load_weights, shared, weights_of
from mlmclm.models.build import build
from mlmclm.models.folder import check_model_folder, load_tokenizer, quiet

MASK_TOKENS = ("<|mask|>", "[MASK]", "<mask>")
"""Texts that are taken for the mask token where the tokenizer names none but has one of them; the first is added otherwise."""
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True)
class Initial:
    """What a model starts from."""

    config: PreTrainedConfig
    weights: dict[str, Tensor]
    """fp32, by the names of `architectures.weights_of`."""
    tokenizer: PreTrainedTokenizerFast
    """With a mask token."""

    def model(self) -> PreTrainedModel:
        """The model with these weights, fp32, on the CPU."""
        model = build(self.config, 0)
        load_weights(model, self.weights)
        return model


@dataclass(frozen=True)
class _Decoder:
    """A decoder that becomes an encoder."""

    model: type[PreTrainedModel]
    config: Callable[[PreTrainedConfig], PreTrainedConfig]
    """The encoder's configuration."""
    weights: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    """The encoder's weights by its names for them."""


def read_initial(source: str | Path, tokenizer: PreTrainedTokenizerFast | None = None) -> Initial:
    """Reads a model folder, or fetches one from the Hugging Face hub by its name; no code that comes with it is run.

    Args:
        tokenizer: of the corpus, which may have more tokens than the model's own; by default the model's own.

    Raises:
        UserError: no such folder, an architecture that is not supported, weights that are not a whole language model, or a
            tokenizer that gives the model's tokens other ids.
        EnvironmentFault: the hub cannot be reached.
    """
    folder = _fetch(source)
    kind = check_model_folder(folder)["model_type"]
    if kind not in ARCHITECTURES and kind not in _DECODERS:
        raise UserError(
            f"{source}: the architecture {kind!r} cannot be continued from; "
            f"supported: {', '.join(sorted([*ARCHITECTURES, *_DECODERS]))}."
        )
    own = load_tokenizer(folder, PreTrainedTokenizerFast)
    known = own.get_vocab()
    chosen = _with_mask(own) if tokenizer is None else tokenizer
    new = _new_ids(known, chosen, source)
    decoder = _DECODERS.get(kind)
    model = _load(folder, decoder.model if decoder is not None else ARCHITECTURES[kind].model)
    _grow(model, sorted(known.values()), new, folder)
    config = decoder.config(model.config) if decoder is not None else model.config
    weights = weights_of(model)
    if decoder is not None:
        weights = decoder.weights(weights)
    if config.model_type == "eurobert":
        config.mask_token_id = chosen.mask_token_id
    elif config.model_type in ("qwen2", "qwen3"):
        config.is_causal = False
    config.dtype = "float32"
    return Initial(config, weights, chosen)


def _fetch(source: str | Path) -> Path:
    """The folder itself, or the hub's files of that name in the local cache."""
    folder = Path(source).expanduser()
    if folder.exists() or HUB_NAME.fullmatch(str(source)) is None:
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(source), allow_patterns=["*.json", "*.safetensors"], ignore_patterns=["*/*"]))
    except (OSError, ValueError) as error:
        raise EnvironmentFault(
            f"{source}: no such folder, and it cannot be loaded from the Hugging Face hub "
            f"({' '.join(str(error).split())[:300]}). Check the name and the network, or give a local folder."
        ) from error


def _with_mask(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    if tokenizer.mask_token is None:
        vocabulary = tokenizer.get_vocab()
        text = next((text for text in MASK_TOKENS if text in vocabulary), MASK_TOKENS[0])
        tokenizer.add_special_tokens({"mask_token": text})
    return tokenizer


def _new_ids(known: dict[str, int], tokenizer: PreTrainedTokenizerFast, source: str | Path) -> list[int]:
    """Ids of the tokens that the model doesn't know."""
    vocabulary = tokenizer.get_vocab()
    for text, index in known.items():
        if vocabulary.get(text) != index:
            raise UserError(
                f"{source}: the tokenizer is not this model's: {text!r} has the id {vocabulary.get(text)} in it, and {index} "
                "in the model's own. Use the model's folder as the tokenizer's path."
            )
    if tokenizer.mask_token_id is None:
        raise UserError(f"{source}: the tokenizer has no mask token.")
    return sorted(set(vocabulary.values()) - set(known.values()))


def _load(folder: Path, kind: type[PreTrainedModel]) -> PreTrainedModel:
    try:
        with quiet(), torch.random.fork_rng(devices=[]):
            model, info = kind.from_pretrained(
                str(folder),
                dtype=torch.float32,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{folder}: the model cannot be read ({' '.join(str(error).split())[:300]}).") from error
    problems = {"the weights lack": info["missing_keys"], f"{kind.__name__} has no place for": info["unexpected_keys"]}
    for words, keys in problems.items():
        if keys:
            raise UserError(f"{folder}: {words} {', '.join(sorted(keys)[:5])}; a whole language model is needed.")
    whole: PreTrainedModel = model
    return whole


def _grow(model: PreTrainedModel, known: list[int], new: list[int], folder: Path) -> None:
    """Gives the rows of new tokens the mean of the known ones', in the embedding and the LM head."""
    rows = len(model.get_input_embeddings().weight)
    if known[-1] >= rows:
        raise UserError(f"{folder}: the tokenizer has the id {known[-1]}, but the embedding only {rows} rows.")
    if not new:
        return
    if new[-1] >= rows:
        with torch.random.fork_rng(devices=[]):
            model.resize_token_embeddings(new[-1] + 1, mean_resizing=False)
    head = model.get_output_embeddings()
    tensors = [model.get_input_embeddings().weight, head.weight, getattr(head, "bias", None)]
    with torch.no_grad():
        for tensor in {id(tensor): tensor for tensor in tensors if tensor is not None}.values():
            tensor[new] = tensor[known].mean(0)


def _eurobert(config: PreTrainedConfig) -> EuroBertConfig:
    if config.mlp_bias:
        raise UserError(
            f"{config._name_or_path}: mlp_bias: EuroBERT has a bias in its LM head with it, Llama has none."
        )
    return EuroBertConfig(**shared(config, LLAMA_FIELDS))


def _modernbert(config: PreTrainedConfig) -> ModernBertConfig:
    return ModernBertConfig(**shared(config, MODERNBERT_FIELDS))


def _fuse(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A ModernBERT decoder's weights under the encoder's names."""
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
    "modernbert-decoder": _Decoder(ModernBertDecoderForCausalLM, _modernbert, _fuse),
}

"""Hugging Face folders: safetensors, tokenizer and card, loadable by transformers without any code of this project.

A EuroBERT encoder and a Llama decoder have the same state-dict keys, so one set of weights is exported as either:

    FOLDER/            EuroBertForMaskedLM: AutoModel, AutoModelForMaskedLM
    FOLDER/decoder/    LlamaForCausalLM (after a CLM phase): AutoModelForCausalLM; the weights are the same file, hard-linked
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from transformers import EuroBertConfig, LlamaConfig

from mlmclm.files import whole_folder


def decoder_config(config: EuroBertConfig) -> LlamaConfig:
    """The Llama configuration under which a EuroBERT model's weights are a causal decoder."""
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=dict(config.rope_parameters),
        hidden_act=config.hidden_act,
        initializer_range=config.initializer_range,
        tie_word_embeddings=config.tie_word_embeddings,
        attention_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        dtype="float32",
    )


def export_folder(
    target: Path,
    weights: dict[str, Tensor],
    config: EuroBertConfig,
    tokenizer: Path,
    *,
    card: str,
    decoder: bool,
) -> None:
    """Writes a model folder whole or not at all; one that is there stays as it is.

    Args:
        weights: fp32, by Hugging Face name.
        tokenizer: folder whose files are copied as they are, so that the model's tokenizer is the corpus's to the byte.
        card: the README.md.
        decoder: also write `decoder/`.
    """
    if (target / "config.json").is_file():
        return
    config.architectures = ["EuroBertForMaskedLM"]
    with whole_folder(target) as folder:
        save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
        config.save_pretrained(str(folder))
        _copy_tokenizer(tokenizer, folder)
        (folder / "README.md").write_text(card, encoding="utf-8")
        if decoder:
            (folder / "decoder").mkdir()
            os.link(folder / "model.safetensors", folder / "decoder" / "model.safetensors")
            decoder_config(config).save_pretrained(str(folder / "decoder"))
            _copy_tokenizer(tokenizer, folder / "decoder")


def _copy_tokenizer(source: Path, target: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (source / name).is_file():
            shutil.copy(source / name, target / name)

"""Hugging Face folders: safetensors, tokenizer and card, loadable by transformers without any code of this project.

One set of weights is exported as either:

    FOLDER/            AutoModel, AutoModelForMaskedLM: EuroBertForMaskedLM, ModernBertForMaskedLM
                       (Qwen: AutoModelForCausalLM, with `is_causal` false); mlmclm.json, which only mlmclm reads
    FOLDER/decoder/    AutoModelForCausalLM (after a CLM phase): LlamaForCausalLM, ModernBertDecoderForCausalLM, Qwen's

A EuroBERT encoder and a Llama decoder have the same state-dict keys, so they share one hard-linked file; ModernBERT's
decoder has separate query, key and value projections. Tokenizers add to a text the tokens that the model was
trained with (`exported_tokenizer`).
"""

from __future__ import annotations

import os
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig

from mlmclm.corpora.exported_tokenizer import write_tokenizer
from mlmclm.corpora.notes import CONTEXT, OBJECTIVE, STATE, add_notes, note_written
from mlmclm.models.architectures import ARCHITECTURES
from mlmclm.models.sources import longest
from mlmclm.storage.files import read_json, whole_folder


def export_folder(
    target: Path,
    weights: dict[str, Tensor],
    config: PreTrainedConfig,
    tokenizer: Path,
    *,
    card: str,
    decoder_card: str | None = None,
    context: int | None = None,
    state: str | None = None,
    objective: str | None = None,
    begins: bool = False,
) -> None:
    """Write a model folder, whole or not at all; an existing one stays as it is.

    Args:
        weights: fp32, by Hugging Face name (`architectures.weights_of`).
        tokenizer: the corpus's prepared folder; `exported_tokenizer` says how the exported ones differ.
        card: text of README.md.
        decoder_card: text of `decoder/README.md`; None to write no `decoder/`.
        context, state, objective: for the notes, unless None (`notes.CONTEXT`, `notes.STATE`, `notes.OBJECTIVE`).
        begins: whether the model was trained on texts that begin with BOS.
    """
    if (target / "config.json").is_file():
        return
    architecture = ARCHITECTURES[config.model_type]
    config.architectures = [architecture.model.__name__]
    with whole_folder(target) as folder:
        save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
        config.save_pretrained(str(folder))
        most = context or longest(config.to_dict())
        write_tokenizer(tokenizer, folder, decoder=False, begins=begins, context=most)
        (folder / "README.md").write_text(card, encoding="utf-8")
        parts = [folder]
        if decoder_card is not None:
            parts.append(folder / "decoder")
            parts[1].mkdir()
            (parts[1] / "README.md").write_text(decoder_card, encoding="utf-8")
            file = parts[1] / "model.safetensors"
            if architecture.decoder_weights is None:
                os.link(folder / "model.safetensors", file)
            else:
                save_file(architecture.decoder_weights(weights), str(file), metadata={"format": "pt"})
            write_tokenizer(tokenizer, parts[1], decoder=True, begins=begins, context=most)
            decoder_config = architecture.decoder_config(config)
            # BOS and EOS are those of the decoder's tokenizer, not of the encoder's.
            decoder_config.update(read_json(parts[1] / "generation_config.json"))
            decoder_config.save_pretrained(str(parts[1]))
        notes = {CONTEXT: context, STATE: state, OBJECTIVE: objective}
        for part in parts:
            add_notes(part, {name: value for name, value in notes.items() if value is not None})
            # Checksums come last, over the finished files.
            note_written(part)

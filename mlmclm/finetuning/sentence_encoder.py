"""Export of the encoder of a cell that embeds texts, as a sentence-transformers folder with pooling, prompts and maximum length.

Cells keep no weights, so the cell is trained again: the same cell ends at the same weights on the same hardware.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModel, PreTrainedModel

from mlmclm.backends.packing import Packing
from mlmclm.corpora.exported_tokenizer import post_processor
from mlmclm.corpora.fast_tokenizer import PLAIN
from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.finetuning.cell import Cell, cell_key
from mlmclm.finetuning.protocol import Protocol
from mlmclm.finetuning.run import run_cell
from mlmclm.models.architectures import ARCHITECTURES, weights_of
from mlmclm.models.encoder import encode, pack_ids
from mlmclm.models.folder import DEFAULT_KERNELS, load_tokenizer, quiet
from mlmclm.numbers import rate_text
from mlmclm.storage.files import read_json, whole_folder, write_json
from mlmclm.tasks.declaration import titles
from mlmclm.tasks.texts import ending

POOLING = {"mean": "mean_tokens", "bos": "cls_token", "last": "lasttoken"}
"""Pooling of a protocol -> its name in sentence-transformers' `1_Pooling/config.json`."""


def check_target(cell: Cell, target: Path) -> None:
    """Check, before a cell is trained, that it can be exported.

    Raises:
        UserError: the task's family does not embed texts, or the target exists and is not an empty folder.
    """
    if not cell.declared.kind.embeds:
        raise UserError(
            f"task {cell.task} is {cell.declared.family}: only a {titles(lambda kind: kind.embeds)} cell is an encoder of "
            "sentence-transformers."
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"--to {target}: there is something already; name a folder that isn't there, or is empty.")


def export_sentence_encoder(cell: Cell, target: Path, **options: Any) -> dict[str, Any]:
    """Train a cell that embeds texts, write its encoder as a folder of sentence-transformers, and return its result.

    The options are those of `run_cell`.

    Raises:
        UserError: as `check_target`; or transformers can't load the model with the cell's attention.
        EnvironmentFault: the cell diverged.
    """
    check_target(cell, target)
    with whole_folder(target) as folder:

        def keep(encoder: nn.Module, result: dict[str, Any]) -> None:
            if result["status"] == "ok":
                _write_encoder(encoder.cpu().to(torch.float32), folder, causal=cell.protocol.attention == "causal")

        result = run_cell(cell, on_end=keep, **options)
        if result["status"] != "ok":
            raise EnvironmentFault(f"the cell {cell_key(cell)} diverged at step {result['diverged_step']}.")
        _write_tokenizer(cell, folder)
        _write_modules(cell.protocol, folder, read_json(folder / "config.json")["hidden_size"])
        (folder / "README.md").write_text(_card(cell, result), encoding="utf-8")
    return result


def _write_encoder(encoder: PreTrainedModel, folder: Path, *, causal: bool) -> None:
    """Write an encoder in a form that transformers loads with the cell's attention, bidirectional or causal.

    Raises:
        UserError: there is no such form.
    """
    encoder.eval()
    # Compare on any tokens except padding, for which RoBERTa counts no positions. One text is shorter, because some
    # classes change their direction if there is a mask for padding.
    padding = encoder.config.pad_token_id or 0
    tokens = np.delete(np.arange(9), padding) if padding < 9 else np.arange(8)
    packing = Packing.of([8, 5])
    row = pack_ids([tokens, tokens[:5]], packing)
    mask = torch.tensor([[1] * 8, [1] * 5 + [0] * 3])
    ids = torch.from_numpy(tokens).repeat(2, 1).masked_fill(mask == 0, padding)
    with torch.no_grad():
        expected = encode(encoder, row, packing, causal=causal)[: packing.tokens]
        for model in _forms(encoder, causal=causal):
            shutil.rmtree(folder)
            model.save_pretrained(folder)
            with quiet():
                loaded = AutoModel.from_pretrained(folder, **DEFAULT_KERNELS).eval()
            states = loaded(input_ids=ids, attention_mask=mask).last_hidden_state[mask.bool()]
            if (states - expected).abs().max() < 1e-3 * expected.abs().max():
                return
    one, both = "earlier tokens only", "both sides"
    sees = f"{both}, and the cell saw {one}" if causal else f"{one}, and the cell saw {both}"
    raise UserError(
        f"transformers loads {type(encoder).__name__} as a model that sees {sees}. sentence-transformers can't use such a folder."
    )


def _forms(encoder: PreTrainedModel, *, causal: bool) -> Iterator[PreTrainedModel]:
    """Yield the forms of an encoder that transformers may load with the right direction.

    Most classes have one direction. Some follow the configuration's `is_causal`, and some have a twin for decoders.
    """
    yield encoder
    encoder.config.is_causal = causal
    yield encoder
    architecture = ARCHITECTURES.get(encoder.config.model_type)
    if causal and architecture is not None:
        weights = {f"model.{name}": weight for name, weight in weights_of(encoder).items()}
        if architecture.decoder_weights is not None:
            weights = architecture.decoder_weights(weights)
        decoder = AutoModel.from_config(architecture.decoder_config(encoder.config), attn_implementation="eager")
        # Not strict: some classes add a pooling layer, which nothing here reads.
        decoder.load_state_dict({name.removeprefix("model."): weight for name, weight in weights.items()}, strict=False)
        yield decoder


def _write_tokenizer(cell: Cell, folder: Path) -> None:
    """Write a tokenizer that gives a text the tokens that the cell was trained on."""
    framed = cell.protocol.special_tokens == "tokenizer"
    tokenizer = load_tokenizer(cell.model_folder, own_template=framed)
    tokenizer.model_max_length, tokenizer.padding_side = cell.protocol.max_length, "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    settings = read_json(folder / "tokenizer_config.json")
    # A tokenizer class that transformers 4 has, too.
    write_json(folder / "tokenizer_config.json", {**settings, "tokenizer_class": PLAIN[0]})
    if not framed:
        content = read_json(folder / "tokenizer.json")
        end = ending(tokenizer)
        token = str(tokenizer.convert_ids_to_tokens(end))
        content["post_processor"] = post_processor(content.get("post_processor"), end=(token, end))
        write_json(folder / "tokenizer.json", content)


CARD = """---
library_name: sentence-transformers
pipeline_tag: sentence-similarity
tags: [sentence-transformers, mlmclm]
---

# {model}, fine-tuned on {task}

{model} after {steps:,} steps on {title} with mlmclm, at learning rate {rate} and seed {seed}. {metric} on the test split of that task:
{score:.4f}. Vectors are pooled by {pooling}{attention}. Queries and documents have prompts, which `encode_query` and `encode_document` add.

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("path/to/this/folder")
queries = model.encode_query(["Who wrote it?"])
documents = model.encode_document(["She wrote it.", "It rained."])
print(model.similarity(queries, documents))
```
"""


def _card(cell: Cell, result: Mapping[str, Any]) -> str:
    """Return the README of an exported folder."""
    return CARD.format(
        model=cell.model,
        task=cell.task,
        title=cell.declared.title,
        steps=result["steps"],
        rate=rate_text(cell.learning_rate),
        seed=cell.seed,
        metric=result["metric"],
        score=result["scores"]["test"][result["metric"]],
        pooling=cell.protocol.pooling,
        attention=", and a token sees earlier ones only" if cell.protocol.attention == "causal" else "",
    )


def _write_modules(protocol: Protocol, folder: Path, hidden: int) -> None:
    """Write the files that sentence-transformers reads beside the model's own."""
    (folder / "1_Pooling").mkdir()
    (folder / "2_Normalize").mkdir()
    parts = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{name}"}
        for number, (path, name) in enumerate(parts)
    ]
    pooling = {f"pooling_mode_{name}": how == protocol.pooling for how, name in POOLING.items()}
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": hidden, **pooling})
    prompts = {"query": protocol.query_prefix, "document": protocol.document_prefix}
    write_json(folder / "config_sentence_transformers.json", {"prompts": prompts, "similarity_fn_name": "cosine"})
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": protocol.max_length, "do_lower_case": False})
    write_json(folder / "modules.json", modules)

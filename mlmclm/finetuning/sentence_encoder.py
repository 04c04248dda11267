"""A retrieval cell's encoder as a folder of sentence-transformers, with pooling, prompts and longest sequence.

Cells keep no weights, so the cell is trained again: the same cell ends at the same weights on the same hardware.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoModel

from mlmclm.backends.packing import Packing
from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.finetuning.cell import Cell, cell_key
from mlmclm.finetuning.run import run_cell
from mlmclm.models.encoder import encode, pack_ids
from mlmclm.models.exported_tokenizer import post_processor
from mlmclm.models.folder import load_tokenizer, quiet
from mlmclm.storage.files import read_json, whole_folder, write_json
from mlmclm.tasks.family import ending

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from mlmclm.finetuning.protocol import Protocol

POOLING = {"mean": "mean_tokens", "bos": "cls_token", "last": "lasttoken"}
"""Pooling of a protocol -> its name in sentence-transformers' `1_Pooling/config.json`."""


def check_target(cell: Cell, target: Path) -> None:
    """Refuse what can't be exported before the cell is trained.

    Raises:
        UserError: the task is not retrieval, the protocol is causal, or there is something at the target.
    """
    if cell.declared.family != "retrieval":
        raise UserError(
            f"task {cell.task} is {cell.declared.family}: only a retrieval cell is an encoder of sentence-transformers."
        )
    if cell.protocol.attention == "causal":
        raise UserError(
            f"task {cell.task}: the protocol has attention: causal, and sentence-transformers would load the folder as an "
            "encoder that sees both sides. Use attention: bidirectional."
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"--to {target}: there is something already; name a folder that isn't there, or is empty.")


def export_sentence_encoder(
    cell: Cell,
    target: Path,
    *,
    store: Path,
    data_root: Path | None,
    on_step: Callable[[int, int, float], None] | None = None,
) -> dict[str, Any]:
    """Train a retrieval cell, write its encoder as a folder of sentence-transformers, and return its result.

    Args:
        on_step: as for `run_cell`.

    Raises:
        UserError: as `check_target`; or transformers can't load the model as an encoder that sees both sides.
        EnvironmentFault: the cell diverged.
    """
    check_target(cell, target)
    with whole_folder(target) as folder:

        def keep(encoder: nn.Module, result: dict[str, Any]) -> None:
            if result["status"] == "ok":
                _write_encoder(encoder.cpu().to(torch.float32), folder)

        result = run_cell(cell, store=store, data_root=data_root, on_end=keep, on_step=on_step)
        if result["status"] != "ok":
            raise EnvironmentFault(f"the cell {cell_key(cell)} diverged at step {result['diverged_step']}.")
        _write_tokenizer(cell, folder)
        _write_modules(cell.protocol, folder, read_json(folder / "config.json")["hidden_size"])
    return result


def _write_encoder(encoder: PreTrainedModel, folder: Path) -> None:
    """Write an encoder so that transformers loads it as one that sees both sides, as the cell did.

    A decoder's class is causal unless its configuration says `is_causal: false`, and some classes ignore that.

    Raises:
        UserError: it can't be loaded so.
    """
    encoder.eval()
    packing = Packing.of([8])
    ids = pack_ids([np.arange(8)], packing)[:, :8]  # any tokens will do
    with torch.no_grad():
        wanted = encode(encoder, pack_ids([np.arange(8)], packing), packing, causal=False)[:8]
        for _ in range(2):
            encoder.save_pretrained(folder)
            with quiet():
                found = AutoModel.from_pretrained(folder).eval()(ids).last_hidden_state[0]
            if (found - wanted).abs().max() < 1e-3 * wanted.abs().max():
                return
            encoder.config.is_causal = False
    raise UserError(
        f"transformers loads {type(encoder).__name__} as a model that sees earlier tokens only, and the cell saw both sides. "
        "sentence-transformers can't use such a folder."
    )


def _write_tokenizer(cell: Cell, folder: Path) -> None:
    """Write a tokenizer that gives a text the tokens that the cell was trained on."""
    own = cell.protocol.special_tokens == "tokenizer"
    tokenizer = load_tokenizer(cell.model_folder, own_template=own)
    tokenizer.model_max_length, tokenizer.padding_side = cell.protocol.max_length, "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    if not own:
        content = read_json(folder / "tokenizer.json")
        end = ending(tokenizer)
        token = str(tokenizer.convert_ids_to_tokens(end))
        content["post_processor"] = post_processor(content.get("post_processor"), end=(token, end))
        write_json(folder / "tokenizer.json", content)


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

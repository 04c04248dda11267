"""Make the backend compile what a model needs before any clock starts, by running a small model of the same shape.

`python -m mlmclm.models.warm_up JSON` does it in a process of its own.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from mlmclm.backends.model_shape import ModelShape

if TYPE_CHECKING:
    import torch

    from mlmclm.models.sizes import Size

FUSED = ("eurobert", "llama")
"""Model types whose blocks a backend may fuse."""


def compile_kernels(
    shapes: Iterable[ModelShape | None], announce: Callable[[str], None], device: torch.device | str | None = None
) -> None:
    """Make a device's backend compile what models of these shapes need (see `Reference.prepare`).

    `device` is None for the GPU if torch sees one, else the CPU.
    """
    wanted = sorted({shape for shape in shapes if shape is not None}, key=str)
    if wanted:
        # torch is slow to import, and not needed where there is nothing to compile.
        from mlmclm.backends.choice import backend_of, best_device

        backend_of(device or best_device()).prepare(wanted, announce, compile_all)


def shape_of_size(size: Size, precision: str, *, fused: bool) -> ModelShape:
    """Return the shape of a model in pretraining, which has no dropout; `fused`: blocks may be fused."""
    return ModelShape(
        heads=size.heads,
        key_heads=size.key_value_heads,
        width=size.head_width or size.hidden // size.heads,
        fused=fused and size.architecture in FUSED,
        dropout=False,
        **_types(precision),
    )


def shape_of_folder(folder: Path, precision: str) -> ModelShape | None:
    """Return the shape of a folder's model in fine-tuning; None if its config.json lacks the values."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        heads = config["num_attention_heads"]
        return ModelShape(
            heads=heads,
            key_heads=config.get("num_key_value_heads") or heads,
            width=config.get("head_dim") or config["hidden_size"] // heads,
            fused=config["model_type"] in FUSED,
            dropout=bool(config.get("attention_probs_dropout_prob", config.get("attention_dropout"))),
            **_types(precision),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None  # the code that loads the model reports what is wrong with it


def _types(precision: str) -> dict[str, str]:
    return {
        "weights": "bfloat16" if precision == "bf16" else "float32",
        "products": "float32" if precision == "fp32" else "bfloat16",
    }


def compile_all(shapes: Iterable[ModelShape]) -> None:
    """Run every operation once on a small scale, with models of these shapes, in this process."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            for shape in shapes:
                _compute(shape)
    finally:
        torch.set_num_threads(threads)


def _compute(shape: ModelShape) -> None:
    """Run passes of a small model with attention of this shape, its loss, and steps of the optimiser of fine-tuning."""
    import torch
    from torch import nn
    from transformers import EuroBertConfig, EuroBertForMaskedLM

    from mlmclm.backends.choice import autocast, backend_of
    from mlmclm.backends.optimizers.optimizer import Hyperparameters
    from mlmclm.backends.optimizers.rules import AdamW
    from mlmclm.backends.packing import Packing
    from mlmclm.models.build import PretrainingModel
    from mlmclm.models.encoder import encode

    config = EuroBertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads, head_dim=shape.width, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, mask_token_id=3, attention_dropout=0.1 * shape.dropout, tie_word_embeddings=False,
    )  # fmt: skip
    model = EuroBertForMaskedLM(config).to(getattr(torch, shape.weights))
    apart = shape.products != shape.weights
    pretraining = PretrainingModel(model, precision="bf16-autocast" if apart else "fp32")
    pretraining.fused = shape.fused
    packing, ids = Packing.of([40, 24]), torch.arange(64)[None]
    labels = torch.where(ids % 3 == 0, ids, -100)
    # Evaluation too: it has no dropout, so other loops may run.
    for training in (True, False):
        model.train(training)
        for causal in (True, False):
            pretraining(ids, labels, causal, packing).backward()
    # Fine-tuning's AdamW on rows of the embedding takes fp32 weights only.
    if shape.weights == "float32":
        model.zero_grad()
        head = nn.Linear(32, 2)
        parameters = [*model.base_model.parameters(), *head.parameters()]
        embedding, settings = model.get_input_embeddings(), Hyperparameters(0.9, 0.999, 1e-8, 0.01)
        optimizer = backend_of("cpu").updates(AdamW, parameters, embedding, settings, 2)
        row = nn.functional.pad(ids, (0, packing.padded_tokens - packing.tokens))
        for _ in range(2):
            with autocast(ids.device, apart):
                head(encode(model.base_model, row, packing, causal=False, fused=shape.fused)).float().sum().backward()
            optimizer.norm()
            optimizer.step(1e-3, 1.0)
        optimizer.finish()


def main() -> None:
    """Compile for the shapes on the command line; exit with `EX_TEMPFAIL` if the machine fails and not the kernels."""
    try:
        compile_all([ModelShape(**shape) for shape in json.loads(sys.argv[1])])
    except (OSError, MemoryError, ImportError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(os.EX_TEMPFAIL)


if __name__ == "__main__":
    main()

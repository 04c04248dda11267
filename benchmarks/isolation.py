"""Time that keeping documents apart saves:  python -m benchmarks.isolation

A training step's forward and backward pass on blocks of packed documents, with attention over whole blocks and within documents,
alternating, on one thread in bf16 autocast; a section of `benchmarks/RESULTS.md`.
"""

from __future__ import annotations

import numpy as np
import torch
from transformers import EuroBertConfig, ModernBertConfig, PreTrainedConfig

from benchmarks.results import machine, write_section
from benchmarks.run import measure
from mlmclm.backends.packing import Packing
from mlmclm.corpora.row_lengths import document_lengths
from mlmclm.models.build import PretrainingModel, build_model

EOS = 2
SHAPE = {
    "vocab_size": 4096, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 2,
    "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": EOS,
}  # fmt: skip


def documents(sequences: int, length: int, mean: int) -> torch.Tensor:
    """int64 [sequences, length] of random tokens; documents' lengths are geometric."""
    chance = np.random.default_rng(0)
    ids = chance.integers(4, 4096, (sequences, length))
    ids[chance.random(ids.shape) < 1 / mean] = EOS
    return torch.from_numpy(ids)


def compare(config: PreTrainedConfig, sequences: int, length: int, mean: int) -> tuple[float, float]:
    """Return the seconds of a step within documents, whose ends are found in it, and of one over whole blocks; MLM at 40 %."""
    ids = documents(sequences, length, mean)
    labels = torch.where(torch.rand(ids.shape) < 0.4, ids, -100)
    model = PretrainingModel(build_model(config, 0), precision="bf16-autocast")

    def apart() -> None:
        model(ids, labels, False, Packing.of(document_lengths(ids.numpy(), EOS), fine=True)).backward()

    def together() -> None:
        model(ids, labels, False).backward()

    return measure(apart, together)


def main() -> None:
    """Measure, and write the section of RESULTS.md."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    configs = {
        "EuroBERT": EuroBertConfig(**SHAPE, num_key_value_heads=2, mask_token_id=3, tie_word_embeddings=False),
        "ModernBERT": ModernBertConfig(**SHAPE, local_attention=128, cls_token_id=1, sep_token_id=EOS),
    }
    lines = [
        f"Command: `python -m benchmarks.isolation`. Machine: {machine()}, one thread used.",
        "Model: 4 layers x 128, vocabulary 4,096, bf16 autocast; forward and backward pass, MLM 40 %.",
        "",
        "| architecture | blocks | mean document | within documents, ms | whole blocks, ms | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for name, config in configs.items():
        for sequences, length, mean in ((12, 128, 60), (4, 512, 100), (2, 2048, 200)):
            apart, together = compare(config, sequences, length, mean)
            lines.append(
                f"| {name} | {sequences} x {length:,} | {mean} | {1e3 * apart:.1f} | {1e3 * together:.1f} | {together / apart:.2f} |"
            )
    write_section("Documents kept apart", lines)


if __name__ == "__main__":
    main()

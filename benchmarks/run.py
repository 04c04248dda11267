"""Speed beside a peer, in one process and one run:  make bench   (or  python -m benchmarks.run)

Each row runs the same work twice, by this project and by stock transformers, alternating, on one thread in bf16 autocast; the
medians go to `benchmarks/RESULTS.md`. Text and models are made on the spot.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from transformers import EuroBertConfig, EuroBertForMaskedLM

from benchmarks.results import machine, write_section
from mlmclm.backends.packing import Packing
from mlmclm.models.attention import use_attention
from mlmclm.models.build import PretrainingModel
from mlmclm.models.encoder import encode, pack_ids, pool

ROUNDS = 15


def config() -> EuroBertConfig:
    """The quickstart's 4-layer 2m size at a vocabulary of 4,096."""
    return EuroBertConfig(
        vocab_size=4096, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        mask_token_id=3, tie_word_embeddings=False,
    )  # fmt: skip


def pretraining(labelled: float, causal: bool) -> tuple[Callable[[], None], Callable[[], None], int]:
    """Return one optimiser step on 12 x 128 tokens, ours and one with full logits, and its number of tokens."""
    ids = torch.randint(4, 4096, (12, 128))
    labels = torch.where(torch.rand(12, 128) < labelled, ids, -100)
    ours, stock = (
        PretrainingModel(EuroBertForMaskedLM(config()), precision="bf16-autocast"),
        EuroBertForMaskedLM(config()),
    )
    steps = [torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True) for model in (ours, stock)]

    def own() -> None:
        (ours(ids, labels, causal) / int((labels != -100).sum())).backward()
        steps[0].step()
        steps[0].zero_grad()

    def peer() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = stock(ids, is_causal=causal).logits
        torch.nn.functional.cross_entropy(logits.float().view(-1, 4096), labels.view(-1)).backward()
        steps[1].step()
        steps[1].zero_grad()

    return own, peer, ids.numel()


def finetuning(shortest: int, longest: int) -> tuple[Callable[[], None], Callable[[], None], int]:
    """Return one classification step on 32 ragged sequences, ours concatenated and one padded, and its number of real tokens."""
    chance = np.random.default_rng(0)
    lengths = chance.integers(shortest, longest + 1, 32)
    sequences = [chance.integers(4, 4096, length) for length in lengths]
    ours, stock = (EuroBertForMaskedLM(config()).model for _ in range(2))
    use_attention(ours)
    heads = [torch.nn.Linear(128, 2) for _ in range(2)]
    labels = torch.from_numpy(chance.integers(0, 2, 32))
    steps = [
        torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=1e-4, fused=True)
        for model, head in zip((ours, stock), heads, strict=True)
    ]
    padded = torch.zeros(32, longest, dtype=torch.int64)
    for row, sequence in enumerate(sequences):
        padded[row, : len(sequence)] = torch.from_numpy(sequence)
    mask = (torch.arange(longest)[None] < torch.from_numpy(lengths)[:, None]).long()

    def own() -> None:
        packing = Packing.of(lengths)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            vectors = pool(encode(ours, pack_ids(sequences, packing), packing, causal=False), packing, "mean")
            loss = torch.nn.functional.cross_entropy(heads[0](vectors).float(), labels)
        loss.backward()
        steps[0].step()
        steps[0].zero_grad()

    def peer() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = stock(padded, attention_mask=mask).last_hidden_state
            vectors = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            loss = torch.nn.functional.cross_entropy(heads[1](vectors).float(), labels)
        loss.backward()
        steps[1].step()
        steps[1].zero_grad()

    return own, peer, int(lengths.sum())


def measure(own: Callable[[], None], peer: Callable[[], None]) -> tuple[float, float]:
    """Return the median seconds of both; they alternate, so that noise of the machine affects both."""
    times: tuple[list[float], list[float]] = ([], [])
    for round_ in range(ROUNDS + 3):
        for work, kept in zip((own, peer), times, strict=True):
            started = time.perf_counter()
            work()
            if round_ >= 3:
                kept.append(time.perf_counter() - started)
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> None:
    """Measure, and write the section of RESULTS.md."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cases = {
        "pretraining step, MLM 40 %, 12 x 128": pretraining(0.4, causal=False),
        "pretraining step, CLM, 12 x 128": pretraining(1.0, causal=True),
        "fine-tuning step, 32 sequences of 4 to 40": finetuning(4, 40),
        "fine-tuning step, 32 sequences of 10 to 120": finetuning(10, 120),
    }
    lines = [
        f"Command: `make bench`. Machine: {machine()}, one thread used.",
        "Model: 4 layers x 128, vocabulary 4,096, bf16 autocast, fused AdamW. Peer: stock transformers, padded, full logits, SDPA.",
        "",
        "| case | ours, ms | peer, ms | ours, real tokens/s | ratio |",
        "|---|---|---|---|---|",
    ]
    for name, (step, peer_step, tokens) in cases.items():
        ours, theirs = measure(step, peer_step)
        lines.append(f"| {name} | {1e3 * ours:.1f} | {1e3 * theirs:.1f} | {tokens / ours:,.0f} | {theirs / ours:.2f} |")
    write_section("Single steps", lines)


if __name__ == "__main__":
    main()

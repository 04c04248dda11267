"""Expected utilisation of GPUs by the bytes and FLOPs that the CUDA path would issue, which are counted without a GPU.

    python -m benchmarks.roofline            prints the table; --write puts it into benchmarks/RESULTS.md

A model, not a measurement (`benchmarks.utilisation` measures). Times of products, of attention and of all other traffic are
added up, since kernels run one after the other. Launches, messages between GPUs and data loading take no time here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from benchmarks.results import write_section
from benchmarks.traffic import LABELLED, Case, LayerCounts, per_layer
from mlmclm.models.sizes import PUBLISHED_VOCABULARY, SIZES, Size, parameters, training_flops
from mlmclm.plans.devices import DEVICES

MICRO_TOKENS, STEP_TOKENS = 32_768, 131_072
"""Tokens of a micro-batch, and of a step on each GPU."""
BLOCK = 2048
"""Tokens of a sequence."""
OPTIMIZER = 36
"""Bytes a parameter and step: the norm reads the gradient (4), AdamW reads weight, gradient and moments (16) and writes
all but the gradient (12), and the gradient is set to zero (4)."""
PRECISIONS = ("bf16-autocast", "bf16-residual")
"""Values of `Recipe.precision`. Columns that don't name theirs are about the first."""
NAMES = ("210m", "610m", "1b", "ettin17m", "ettin32m", "ettin68m", "ettin150m", "ettin400m", "ettin1b")


@dataclass(frozen=True)
class Roof:
    """Limits of a GPU."""

    name: str
    """A key of `DEVICES`, which has the peak."""
    bandwidth: float
    """Bytes a second, by the vendor's data sheet."""
    bandwidth_share: float
    """Share of the bandwidth that an elementwise kernel reaches."""
    product_share: float
    """Share of the peak that large matrix products reach."""
    attention_share: float
    """Share of the peak that attention's kernel reaches, forward and backward, where the scores that the backward pass computes
    again are counted."""
    local_shares: tuple[float, float]
    """The same for the kernel of attention in a window of 64 tokens to each side; in both directions, and causal."""

    @property
    def peak(self) -> float:
        """FLOP/s."""
        return DEVICES[self.name].peak


ROOFS = (
    Roof("h100", 3.35e12, 0.89, 0.75, 0.38, (0.05, 0.033)),
    # On the H100 FlashAttention 2 reached 25.9 % without a window. Here it is taken to lose as much in one.
    Roof("a100", 2.039e12, 0.90, 0.78, 0.60, (0.05 / 0.259 * 0.60, 0.033 / 0.259 * 0.60)),
)
ASSUMPTIONS = (
    "Assumptions. Peaks and bandwidths (3.35 and 2.04 TB/s) are those of the data sheets of H100 SXM and A100 SXM 80 GB. On an H100, "
    "products reach 75 % of the peak, attention 38 % (7 products for 6, since the backward pass computes the scores again), attention in a "
    "window of 64 tokens to each side 5 % (causal 3.3 %), and elementwise kernels 89 % of the bandwidth (the norms' backward pass 79 %, "
    "others 93 %), as measured with 610m and Ettin's 150m (Utilisation of a GPU). On an A100 they reach 78 and 60 % of the peak and 90 % of "
    "the bandwidth: the best shapes of products were measured at 86 % (ml-engineering, Maximum Achievable Matmul FLOPS, A100 SXM), and these "
    "are narrower; FlashAttention 2 reaches 60 % (arXiv 2307.08691, section 4). In a window it reaches 12 % (causal 7.6 %), if it loses as "
    "much there as on the H100, where it reached 25.9 % without one. Blocks of "
    f"{BLOCK:,} tokens, micro-batches of {MICRO_TOKENS:,}, steps of {STEP_TOKENS:,} tokens a GPU, AdamW in fp32."
)


def seconds(name: str, causal: bool, counts: LayerCounts, roof: Roof) -> tuple[float, float]:
    """Return a token's seconds, and its model FLOPs."""
    size = SIZES[name]
    vocabulary = PUBLISHED_VOCABULARY[size.architecture]
    share = 1.0 if causal else LABELLED
    million = 10**6

    def attention(size: Size) -> float:
        return flops(size, BLOCK) - flops(size, 1)

    def flops(size: Size, length: int) -> float:
        labelled = round(share * million)
        taken = training_flops(
            size, tokens=million, labelled=labelled, length=length, vocabulary=vocabulary, causal=causal
        )
        return taken / million

    model = flops(size, BLOCK)
    local = attention(replace(size, layers=size.local_layers, local=size.local_layers))
    count = parameters(size, vocabulary)
    moved = (
        size.layers * (counts.activations + counts.weights / MICRO_TOKENS)
        + counts.around
        + share * counts.head
        + OPTIMIZER * count / STEP_TOKENS
    )
    # With a dense mask, the hidden scores are computed as well.
    hidden = size.layers * counts.dense_masks * 12 * size.attended * BLOCK
    products = size.layers * counts.flops + counts.flops_around
    attended = (attention(size) - local + hidden) / roof.attention_share + local / roof.local_shares[causal]
    # Attention's backward pass computes the scores again: 7 products for 6.
    work = products / roof.product_share + attended * 7 / 6
    return work / roof.peak + moved / (roof.bandwidth_share * roof.bandwidth), model


def rows() -> Iterator[str]:
    """Lines of the table."""
    for name in NAMES:
        for isolated in (False, True):
            for causal in (False, True):
                kilobytes, shares = [], []
                for precision in PRECISIONS:
                    counts = per_layer(Case(SIZES[name], causal, isolated, precision))
                    kilobytes.append(f"{counts.activations / 1e3:,.0f}")
                    for roof in ROOFS:
                        taken, model = seconds(name, causal, counts, roof)
                        shares.append(f"{model / taken / roof.peak:.0%}")
                yield (
                    f"| {name} | {'isolated' if isolated else 'joined'} | {'CLM' if causal else 'MLM 40 %'} | {' | '.join(kilobytes)} | "
                    f"{counts.casts:.0f} | {counts.dense_masks:.2f} | {counts.waits} | {counts.head / 1e6:.2f} | {' | '.join(shares)} |"
                )


def main(
    title: Annotated[str, typer.Option(help="Title of the section.")] = "Roofline of the CUDA path",
    write: Annotated[bool, typer.Option("--write", help="Write the table to benchmarks/RESULTS.md.")] = False,
) -> None:
    """Count the CUDA path's traffic, and turn it into expected utilisation."""
    lines = [
        "`python -m benchmarks.roofline`: a model of GPUs. Bytes are those of all operations but products and attention.",
        "",
        ASSUMPTIONS,
        "",
        "| size | documents | objective | kB a token and layer | bf16-residual | casts a layer | dense masks a layer | waits | head, MB a label "
        "| H100 | A100 | bf16-residual: H100 | A100 |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows():
        lines.append(row)
        print(row, flush=True)
    if write:
        write_section(title, lines)
    else:
        print("\n".join(lines[:4]))


if __name__ == "__main__":
    typer.run(main)

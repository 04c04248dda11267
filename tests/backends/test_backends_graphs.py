"""Layers under torch.compile on the CUDA path: each is one graph, joined or isolated, and computes what torch does."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import varlen_on_cpu
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import EuroBertConfig, ModernBertConfig

from mlmclm.backends import choice
from mlmclm.backends.cuda import Cuda
from mlmclm.backends.packing import Packing
from mlmclm.backends.reference import Reference
from mlmclm.models import compilation
from mlmclm.models.build import PretrainingModel, build_model

SHAPE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3,
}  # fmt: skip
CONFIGS = {
    "eurobert": partial(EuroBertConfig, **SHAPE, num_key_value_heads=2),
    "modernbert": partial(ModernBertConfig, **SHAPE, local_attention=8),
}
PAIRS = [("eurobert", False, False), ("eurobert", True, True), ("modernbert", False, True), ("modernbert", True, False)]
"""Each pair of settings once."""
DOCUMENTS = ([60, 10, 50], [1, 119], [2] * 60)


def gradient(kind: str, precision: str, causal: bool, packings: list[Packing | None], *, compiled: bool) -> Tensor:
    """Return the gradient of the losses of a batch in each of these layouts, summed, as one fp64 vector."""
    chance = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 97, (3, 40), generator=chance)
    labels = torch.where(torch.rand(ids.shape, generator=chance) < 0.4, ids.flip(1), -100)
    model = PretrainingModel(build_model(CONFIGS[kind](), 0), precision=precision, compiled=compiled)
    for packing in packings:
        model(ids, labels, causal, packing).backward()
    return torch.cat([part.grad.double().flatten() for part in model.parameters()])


@pytest.mark.parametrize(("kind", "causal", "isolated"), PAIRS)
def test_a_layer_is_one_graph_and_computes_what_torch_does(
    kind: str, causal: bool, isolated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    packings = [Packing.of(lengths) for lengths in DOCUMENTS] if isolated else [None]
    monkeypatch.setenv("MLMCLM_BACKEND", "reference")
    exact = gradient(kind, "fp32", causal, packings, compiled=False)
    rounded = gradient(kind, "bf16-autocast", causal, packings, compiled=False)
    monkeypatch.setitem(choice._chosen, ("cpu", "gpu"), Cuda())
    varlen_on_cpu.register()
    monkeypatch.setattr(Cuda, "losses", Reference.losses)  # Liger's kernel runs on GPUs only
    monkeypatch.setenv("MLMCLM_BACKEND", "gpu")
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(compilation.torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    found = gradient(kind, "bf16-autocast", causal, packings, compiled=True)
    assert not counters["graph_break"]
    assert (rounded - exact).norm() > 1e-3 * exact.norm()
    assert (found - exact).norm() < 1.5 * (rounded - exact).norm()
    kinds = 2 if kind == "modernbert" else 1
    # Lengths, of which the first is taken for fixed, differ; after one more graph they may be any.
    assert counters["stats"]["unique_graphs"] <= 4 * kinds

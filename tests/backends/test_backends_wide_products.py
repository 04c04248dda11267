"""Without instructions for bfloat16 no product of such matrices is computed, in either direction, and results are right."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BertConfig,
    BertModel,
    EuroBertConfig,
    LlamaConfig,
    LlamaModel,
    ModernBertConfig,
    ModernBertModel,
    PreTrainedModel,
)

from mlmclm.backends import wide_products
from mlmclm.backends.choice import backend_of
from mlmclm.backends.packing import Packing
from mlmclm.finetuning.forward import compute_in
from mlmclm.finetuning.protocol import Protocol
from mlmclm.models.attention import use_attention
from mlmclm.models.build import PretrainingModel, build_model
from mlmclm.models.encoder import encode, pool
from mlmclm.pretraining.speed import matrix_peak

COMMON: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, Any] = {
    "llama": lambda: LlamaModel(LlamaConfig(**COMMON, num_key_value_heads=1)),
    "modernbert": lambda: ModernBertModel(ModernBertConfig(**COMMON, local_attention=8)),
    "bert": lambda: BertModel(BertConfig(**COMMON, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)),
}


class Products(TorchDispatchMode):
    """Counts the matrix products that reach torch's kernels, by dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in func._schema.name for name in ("mm", "linear", "attention", "dot", "mv")):
            self.dtypes += [each.dtype for each in args if isinstance(each, Tensor)]
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=["", "reference"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MLMCLM_BACKEND", request.param)
    monkeypatch.setattr(wide_products, "processor_has_bf16", lambda: False)
    yield


def test_the_backend_says_so() -> None:
    name = backend_of("cpu").name
    assert backend_of("cpu").described("fp32") == name
    for precision in ("bf16-autocast", "bf16"):
        assert backend_of("cpu").described(precision).startswith(f"{name} (float32 products")


def test_the_measured_peak_is_of_float32() -> None:
    with Products() as products:
        matrix_peak(torch.device("cpu"), bf16=True)
    assert set(products.dtypes) == {torch.float32}


@pytest.mark.parametrize("causal", [False, True])
def test_pretraining_with_autocast_is_pretraining_in_fp32(causal: bool) -> None:
    ids = torch.randint(4, 97, (3, 20), generator=torch.Generator().manual_seed(0))
    labels = torch.where(ids % 2 == 0, ids, -100)
    found = []
    for precision in ("bf16-autocast", "bf16-residual", "fp32"):
        model = PretrainingModel(
            build_model(EuroBertConfig(**COMMON, num_key_value_heads=1, mask_token_id=3), 0), precision=precision
        )
        with Products() as products:
            loss = model(ids, labels, causal)
            loss.backward()
        assert set(products.dtypes) == {torch.float32}
        found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(one, other) for *both, other in zip(*found, strict=True) for one in both)


@pytest.mark.parametrize("kind", MODELS)
def test_bf16_weights_take_products_in_fp32_rounded_to_bf16(kind: str) -> None:
    """As far from fp64 as torch's own bfloat16 operations are, which are slow but right on any processor."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model: PreTrainedModel = MODELS[kind]().to(torch.bfloat16).eval()
    packing = Packing.of([9, 14, 5])
    ids = torch.randint(4, 97, (1, packing.padded_tokens), generator=torch.Generator().manual_seed(0))
    protocol = Protocol(precision="bf16", max_length=32, max_steps=1)

    def compute(model: PreTrainedModel) -> Tensor:
        use_attention(model)
        with compute_in(protocol, packing.device):
            states = encode(model, ids, packing, causal=False)
        assert states.dtype == model.dtype
        loss = pool(states, packing, "mean").square().sum()
        loss.backward()
        grads = [part.grad.double().flatten() for part in model.parameters() if part.grad is not None]
        return torch.cat([loss.detach().double()[None], *grads])

    exact = compute(copy.deepcopy(model).double())
    with pytest.MonkeyPatch.context() as native:
        native.setattr(wide_products, "processor_has_bf16", lambda: True)
        torch_s = compute(copy.deepcopy(model))
    with Products() as products:
        found = compute(model)
    assert products.dtypes and set(products.dtypes) == {torch.float32}
    assert 0 < (found - exact).norm() < 1.5 * (torch_s - exact).norm() < 0.1 * exact.norm()

"""The chunked loss at labelled positions equals a plain cross-entropy over full logits, and so do its gradients."""

from __future__ import annotations

import pytest
import torch

from mlmclm.backends.reference import Reference
from mlmclm.models.build import PretrainingModel, build_model, model_config
from mlmclm.models.cross_entropy import LabelledCrossEntropyHead
from mlmclm.models.sizes import SIZES, Size
from small_models import small_tokenizer

CHUNK = Reference.logits_at_once
BY = ["loops", "torch"]
"""The way to compute the loss: this project's loops, or torch's operations as on a GPU."""


@pytest.fixture
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setenv("MLMCLM_BACKEND", "reference")


@pytest.mark.parametrize("by", BY, indirect=True)
@pytest.mark.parametrize("positions", [0, 1, 63, 64, CHUNK, 2 * CHUNK + 5])
def test_loss_and_gradients_equal_torch_s_cross_entropy_over_all_logits(positions: int, by: None) -> None:
    generator = torch.Generator().manual_seed(positions)
    weight = torch.randn(301, 16, generator=generator).requires_grad_()
    hidden = torch.randn(positions, 16, generator=generator).requires_grad_()
    labels = torch.randint(301, (positions,), generator=generator)
    head = LabelledCrossEntropyHead(torch.nn.Parameter(weight.detach().clone()))
    own = hidden.detach().clone().requires_grad_()
    loss = head(own, labels, bf16=False)
    (3 * loss).backward()
    expected = torch.nn.functional.cross_entropy(hidden @ weight.T, labels, reduction="sum")
    (3 * expected).backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(own.grad, hidden.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(head.weight.grad, weight.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_reference_s_losses_and_their_gradient_equal_torch_s_in_float64(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (30 * torch.randn(70, 301, generator=generator)).to(dtype)
    labels = torch.randint(301, (70,), generator=generator)
    labels[:20] = logits[:20].argmax(1)  # where loss and gradient are nearly 0
    exact = logits.double().clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy(exact, labels, reduction="sum")
    expected.backward()
    loss = Reference().losses(logits, logits.shape[1], labels)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2**-8}[dtype]
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=min(tolerance, 1e-6), atol=0)
    torch.testing.assert_close(logits.double(), exact.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("by", BY, indirect=True)
def test_gradients_are_the_slopes_of_the_loss(by: None) -> None:
    """In fp64, along random directions of hidden states and weights together, by central differences."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, *directions = (
        torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((70, 16), (301, 16)) * 4
    )
    labels = torch.randint(301, (70,), generator=generator)

    def loss_at(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return LabelledCrossEntropyHead(torch.nn.Parameter(weight))(hidden, labels, bf16=False)

    own, head = hidden.clone().requires_grad_(), LabelledCrossEntropyHead(torch.nn.Parameter(weight.clone()))
    head(own, labels, bf16=False).backward()
    for d_hidden, d_weight in zip(directions[::2], directions[1::2], strict=True):
        step = 1e-5
        ahead = loss_at(hidden + step * d_hidden, weight + step * d_weight)
        behind = loss_at(hidden - step * d_hidden, weight - step * d_weight)
        slope = ((own.grad * d_hidden).sum() + (head.weight.grad * d_weight).sum()).item()
        assert (ahead - behind).item() / (2 * step) == pytest.approx(slope, rel=1e-7, abs=1e-6)


@pytest.mark.parametrize("by", BY, indirect=True)
@pytest.mark.parametrize("positions", [0, 1, 64, 2 * CHUNK + 5])
@pytest.mark.parametrize("bias", [False, True])
def test_hits_are_those_of_the_argmax_over_all_logits(positions: int, bias: bool, by: None) -> None:
    generator = torch.Generator().manual_seed(positions)
    weight = torch.nn.Parameter(torch.randn(301, 16, generator=generator))
    offsets = torch.nn.Parameter(torch.randn(301, generator=generator))
    hidden = torch.randn(positions, 16, generator=generator)
    logits = (hidden @ weight.T + (offsets if bias else 0)).detach()
    best = logits.argmax(1)
    labels = torch.where(torch.rand(positions, generator=generator) < 0.3, best, (best + 7) % 301)
    head = LabelledCrossEntropyHead(weight, offsets if bias else None)
    found = head(hidden, labels, bf16=False, count=True)
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="sum").double()
    torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-5)
    assert int(found[1]) == int((best == labels).sum())
    assert not found.requires_grad
    assert float(found[0].float()) == head(hidden, labels, bf16=False).item(), "counting changes no bit of the loss"
    rounded = head(hidden, labels, bf16=True, count=True)
    assert abs(int(rounded[1]) - int(found[1])) <= 0.03 * positions


@pytest.mark.parametrize("vocabulary", [400, 401, 416])
def test_nothing_depends_on_what_the_memory_of_the_logits_held(
    vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in bf16 either, where the CPU's products of rows of another length than a multiple of 32 read beyond their ends."""
    torch.manual_seed(0)
    hidden, labels = torch.randn(100, 32), torch.randint(vocabulary, (100,))
    weight, empty, found = torch.randn(vocabulary, 32), torch.empty, []
    for held in (0.0, float("nan")):
        monkeypatch.setattr(torch, "empty", lambda *size, held=held, **given: empty(*size, **given).fill_(held))
        head, own = LabelledCrossEntropyHead(torch.nn.Parameter(weight.clone())), hidden.clone().requires_grad_()
        loss = head(own, labels, bf16=True)
        loss.backward()
        found.append((loss.detach(), own.grad, head.weight.grad))
    for clean, dirty in zip(*found, strict=True):
        assert clean.isfinite().all() and torch.equal(clean, dirty)


@pytest.mark.parametrize("kind", ["eurobert", "modernbert"])
def test_eos_is_learned_like_any_other_token_where_it_is_the_pad_token_too(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with Llama 3's tokenizer; held against transformers' class on vectors of the embedding's rows, where none is special."""
    monkeypatch.setitem(SIZES, "small", Size(2, 32, 48, 4, 4, 0.3, architecture=kind, window=8))
    tokenizer = small_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    config = model_config("small", tokenizer, 64)
    built, end = build_model(config, 0), tokenizer.eos_token_id
    assert built.config.pad_token_id == end
    weight = built.get_input_embeddings().weight
    assert weight[end].std() > 0.2
    plain = build_model(model_config("small", small_tokenizer(), 64), 0).get_input_embeddings().weight
    drawn = torch.tensor([row for row in range(len(weight)) if row not in (0, end)])
    assert torch.equal(weight[drawn], plain[drawn]), "nothing else is drawn otherwise"
    ids = torch.randint(4, len(tokenizer), (2, 16), generator=torch.Generator().manual_seed(0))
    ids[:, [5, 11]] = end
    labels = torch.where(torch.arange(16) % 3 == 0, ids, -100)
    stock = type(built)(config)
    stock.load_state_dict(built.state_dict())
    PretrainingModel(built, precision="fp32")(ids, labels, False).backward()
    rows = stock.get_input_embeddings().weight
    logits = stock(inputs_embeds=rows[ids]).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    assert rows.grad[end].abs().max() > 1e-3
    torch.testing.assert_close(weight.grad[end], rows.grad[end], rtol=1e-4, atol=1e-4)

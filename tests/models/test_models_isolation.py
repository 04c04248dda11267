"""Documents kept apart in a block: each gets what it gets alone from transformers' own model, and nothing from the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_models_architectures import COMMON, VOCABULARY, decoder
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    EuroBertConfig,
    EuroBertForMaskedLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import mlmclm.backends.cpu
from mlmclm.backends.attention_settings import AttentionSettings
from mlmclm.backends.choice import backend_of
from mlmclm.backends.cpu import Cpu
from mlmclm.backends.cuda import Cuda
from mlmclm.backends.packing import (
    ROUND_LENGTH,
    Packing,
    cut_finely,
    cut_into_groups,
    round_up,
)
from mlmclm.backends.reference import Reference
from mlmclm.corpora.row_lengths import document_lengths
from mlmclm.models.build import PretrainingModel

EOS, LENGTH = 2, 48
LENGTHS = [[17, 1, 5, 25], [48], [9, 30, 2, 2, 5]]
"""Of the documents in each block; the last of a block is cut off by its end."""
WAYS = ["default", "transformers' layers", "long ones apart", "again"]


def model(kind: str) -> PreTrainedModel:
    """Random weights; in ModernBERT's local layers a token sees four to each side."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        if kind == "eurobert":
            return EuroBertForMaskedLM(EuroBertConfig(**COMMON, num_key_value_heads=2, mask_token_id=3))
        if kind == "modernbert":
            return ModernBertForMaskedLM(ModernBertConfig(**COMMON, local_attention=8, cls_token_id=1, sep_token_id=2))
        return Qwen3ForCausalLM(Qwen3Config(**COMMON, num_key_value_heads=2, head_dim=8))


def blocks() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, VOCABULARY, (len(LENGTHS), LENGTH), generator=generator)
    for row, lengths in zip(ids, LENGTHS, strict=True):
        row[np.cumsum(lengths)[:-1] - 1] = EOS
    return ids


def labelled(ids: Tensor, causal: bool) -> Tensor:
    if causal:
        labels = torch.full_like(ids, -100)
        labels[:, :-1] = ids[:, 1:]
        return labels.masked_fill(ids == EOS, -100)
    return torch.where(torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)) < 0.4, ids, -100)


def alone(kind: str, ids: Tensor, labels: Tensor, causal: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Summed loss of the documents, each by itself through transformers' model with its own positions; and gradients."""
    stock = model(kind)
    stock.set_attn_implementation("sdpa")
    total = torch.zeros(())
    for row, wanted, lengths in zip(ids, labels, LENGTHS, strict=True):
        for document, target in zip(row.split(lengths), wanted.split(lengths), strict=True):
            logits = stock(document[None], is_causal=causal).logits[0]
            total = total + cross_entropy(logits, target, reduction="sum") if bool((target != -100).any()) else total
    total.backward()
    return total.detach(), {name: parameter.grad for name, parameter in stock.named_parameters()}


def alone_as_modernbert_decoder(ids: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Likewise by transformers' ModernBertDecoder, whose weights have other names."""
    stock = decoder(model("modernbert"))
    total = torch.zeros(())
    for row, wanted, lengths in zip(ids, labels, LENGTHS, strict=True):
        for document, target in zip(row.split(lengths), wanted.split(lengths), strict=True):
            if bool((target != -100).any()):
                total = total + cross_entropy(stock(document[None]).logits[0], target, reduction="sum")
    total.backward()
    found = {name: parameter.grad for name, parameter in stock.named_parameters()}
    fused: dict[str, Tensor] = {}
    for name, gradient in found.items():
        if ".q_proj." in name:
            fused[name.replace("q_proj", "Wqkv")] = torch.cat(
                [found[name.replace("q_proj", f"{letter}_proj")] for letter in "qkv"]
            )
        elif ".k_proj." not in name and ".v_proj." not in name:
            fused[name.replace("lm_head.", "head.", 1) if name.startswith("lm_head.") else name] = gradient
    return total.detach(), fused


def set_way(way: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Has the CPU compute as it does at other lengths; returns arguments of `PretrainingModel`."""
    if way == "transformers' layers":
        monkeypatch.setattr(Cpu, "fuses", lambda *_: False)
    elif way == "long ones apart":
        monkeypatch.setattr(mlmclm.backends.cpu, "LONGEST_WRITTEN_OUT", 16)
    return {"activation_checkpointing": way == "again"}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["eurobert", "modernbert", "qwen3"])
def test_loss_and_every_gradient_are_those_of_the_documents_each_alone_through_transformers(
    kind: str, causal: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = blocks()
    labels = labelled(ids, causal)
    if kind == "modernbert" and causal:
        expected, wanted = alone_as_modernbert_decoder(ids, labels)
    elif kind == "qwen3" and not causal:
        monkeypatch.setattr(Qwen3Config, "is_causal", False, raising=False)
        expected, wanted = alone(kind, ids, labels, causal)
    else:
        expected, wanted = alone(kind, ids, labels, causal)
    own = PretrainingModel(model(kind), precision="fp32", **set_way(way, monkeypatch))
    packing = Packing.of(document_lengths(ids.numpy(), EOS), fine=True)
    assert packing.lengths.tolist() == [length for lengths in LENGTHS for length in lengths]
    loss = own(ids, labels, causal, packing)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-4)
    assert dict(own.model.named_parameters()).keys() == wanted.keys()
    for name, parameter in own.model.named_parameters():
        scale = max(1.0, wanted[name].abs().max().item())
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-3, atol=1e-5 * scale, msg=name)
    assert abs(float(own(ids, labels, causal).detach()) - float(loss.detach())) > 0.1, (
        "together they say something else"
    )


@pytest.mark.parametrize("way", WAYS[:3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["eurobert", "modernbert", "qwen3"])
def test_no_gradient_reaches_another_document(
    kind: str, causal: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = PretrainingModel(model(kind), precision="fp32", **set_way(way, monkeypatch))
    ids = blocks()
    packing = Packing.of(document_lengths(ids.numpy(), EOS), fine=True)
    vectors: list[Tensor] = []
    own.model.get_input_embeddings().register_forward_hook(
        lambda *call: vectors.append(call[2]) or call[2].retain_grad()
    )
    document = packing.sequence_of_token
    for number, (start, length) in enumerate(zip(packing.starts, packing.lengths, strict=True)):
        labels = torch.full(ids.shape, -100)
        labels.view(-1)[start + length - 1] = 7
        own(ids, labels, causal, packing).backward()
        reached = vectors.pop().grad.view(-1, 32)[: packing.tokens].abs().sum(-1) > 0
        assert bool(reached.any()) and not bool(reached[document != number].any())
        if kind != "modernbert":
            assert bool(reached[document == number].all())


@pytest.mark.parametrize("kind", ["eurobert", "modernbert"])
def test_under_autocast_the_loss_is_near_the_exact_one(kind: str) -> None:
    ids = blocks()
    labels, packing = labelled(ids, False), Packing.of(document_lengths(ids.numpy(), EOS), fine=True)
    exact, rounded = (
        PretrainingModel(model(kind), precision=precision)(ids, labels, False, packing)
        for precision in ("fp32", "bf16-autocast")
    )
    torch.testing.assert_close(rounded, exact, rtol=0.02, atol=0)


def test_documents_end_with_the_separator_or_their_block() -> None:
    tokens = np.array([[5, 6, EOS, 7], [EOS, EOS, 8, EOS], [9, 9, 9, 9]])
    assert document_lengths(tokens, EOS).tolist() == [3, 1, 1, 1, 2, 4]


def test_fine_groups_hold_a_power_of_two_of_sequences_each_and_never_compute_more_than_coarse_ones() -> None:
    chance = np.random.default_rng(0)
    for count in (1, 2, 7, 100):
        lengths = np.sort(chance.geometric(0.01, count))[::-1]
        groups = cut_finely(lengths)
        assert [first for first, _ in groups] == [0, *(last for _, last in groups[:-1])] and groups[-1][1] == count
        assert all((last - first).bit_count() == 1 for first, last in groups)

        def scores(found: list[tuple[int, int]], lengths: np.ndarray = lengths) -> int:
            return sum((last - first) * round_up(int(lengths[first]), ROUND_LENGTH) ** 2 for first, last in found)

        assert scores(groups) <= scores(cut_into_groups(lengths))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [1, 3, 20])
def test_the_written_out_backward_of_local_attention_equals_finite_differences(causal: bool, window: int) -> None:
    packing = Packing.of([19, 1, 4, 33, 7])
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, packing.padded_tokens, 2) for heads in (4, 2, 2)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def attention(*three: Tensor) -> Tensor:
        return backend_of("cpu").packed_attention(*three, packing, AttentionSettings(causal, 0.7, window=window))[
            :, : packing.tokens
        ]

    assert torch.autograd.gradcheck(attention, tensors, fast_mode=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 5])
def test_the_gpu_s_variable_length_kernel_and_its_stand_in_are_asked_for_the_same_attention(
    causal: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is replaced by what torch documents of it: windows (left, right) that include their ends, -1 for none."""

    def varlen_attn(
        query: Tensor, key: Tensor, value: Tensor, ends: Tensor, _: Tensor, *longest: int, **more: Any
    ) -> Tensor:
        assert longest == (packing.longest, packing.longest)
        left, right = more["window_size"]
        repeat = query.shape[1] // key.shape[1]
        pieces = []
        for start, stop in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
            q, k, v = query[start:stop], *(part[start:stop].repeat_interleave(repeat, 1) for part in (key, value))
            back = torch.arange(stop - start)[:, None] - torch.arange(stop - start)
            seen = ((back <= left) | (left == -1)) & ((-back <= right) | (right == -1))
            scores = torch.einsum("qhw,khw->hqk", q, k) * more["scale"]
            pieces.append(torch.einsum("hqk,khw->qhw", scores.masked_fill(~seen, -torch.inf).softmax(-1), v))
        return torch.cat(pieces)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    packing = Packing.of([19, 1, 4, 33, 7])
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, packing.padded_tokens, 8) for heads in (4, 2, 2)]
    exact = [torch.randn(shape, generator=generator).bfloat16().float() for shape in shapes]
    rounded = [part.bfloat16() for part in exact]
    settings = AttentionSettings(causal, 0.3, window=window)
    real = slice(None, packing.tokens)
    for expected in (
        Reference().packed_attention(*exact, packing, settings),
        backend_of("cpu").packed_attention(*exact, packing, settings),
    ):
        padded = Cuda().packed_attention(*exact, packing, settings)
        torch.testing.assert_close(padded[0, real], expected[0, real], rtol=1e-4, atol=1e-5)
        kernel = Cuda().packed_attention(*rounded, packing, settings)
        torch.testing.assert_close(kernel[0, real].float(), expected[0, real], rtol=0.03, atol=0.03)

"""Concatenated sequences give what the padded Hugging Face model gives, values and gradients, in each way of computing
it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import EuroBertConfig, EuroBertModel, LlamaConfig, LlamaModel, PreTrainedModel

import mlmclm.backends.cpu.packed_attention
from mlmclm.backends.attention_settings import AttentionSettings
from mlmclm.backends.choice import backend_of
from mlmclm.backends.cpu import Cpu
from mlmclm.backends.cpu.block import run_blocks
from mlmclm.backends.packing import Chosen, Packing, cut_into_groups
from mlmclm.models.attention import use_attention
from mlmclm.models.encoder import encode, pack_ids, pool

VOCABULARY = 97
RAGGED = [5, 1, 33, 17, 64, 2, 48, 9, 30, 31, 7, 3, 80, 12, 21, 40, 6, 18]


def model(kind: str, *, key_value_heads: int = 4, length: int = 128, hidden: int = 32) -> PreTrainedModel:
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": key_value_heads,
        "max_position_embeddings": length,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.3 * (32 / hidden) ** 0.5,
    }
    with torch.random.fork_rng():
        torch.manual_seed(3)
        if kind == "eurobert":
            return EuroBertModel(EuroBertConfig(**settings, mask_token_id=3))
        return LlamaModel(LlamaConfig(**settings))


def sequences(lengths: list[int]) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(4, VOCABULARY, length) for length in lengths]


def padded(stock: PreTrainedModel, rows: list[np.ndarray], *, causal: bool) -> list[torch.Tensor]:
    """Hidden states of each sequence by transformers' own forward over a padded batch, with torch's attention."""
    stock.set_attn_implementation("sdpa")
    longest = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.from_numpy(row)
        mask[number, : len(row)] = 1
    shape = (len(rows), 1, longest, longest)
    allowed = mask[:, None, None, :].bool().expand(shape)
    if causal:
        allowed = allowed & torch.ones(longest, longest, dtype=torch.bool).tril()
    hidden = stock(input_ids=ids, attention_mask=allowed.contiguous(), use_cache=False).last_hidden_state
    return [hidden[number, : len(row)] for number, row in enumerate(rows)]


def packed(own: PreTrainedModel, rows: list[np.ndarray], *, causal: bool) -> list[torch.Tensor]:
    use_attention(own)
    packing = Packing.of([len(row) for row in rows])
    hidden = encode(own, pack_ids(rows, packing), packing, causal=causal)
    return list(hidden[: packing.tokens].split(packing.lengths.tolist()))


def gradients(states: list[torch.Tensor], owner: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Of a loss that weighs every number of every sequence differently."""
    generator = torch.Generator().manual_seed(1)
    loss = sum((state * torch.randn(state.shape, generator=generator)).sum() for state in states)
    owner.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in owner.named_parameters()}


@pytest.mark.parametrize("way", ["block", "block in parts", "transformers"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("key_value_heads", [4, 2, 1])
@pytest.mark.parametrize("kind", ["eurobert", "llama"])
def test_packed_states_and_gradients_equal_the_padded_models(
    kind: str, key_value_heads: int, causal: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "transformers":
        monkeypatch.setattr(Cpu, "fuses", lambda *_: False)
    elif way == "block in parts":
        monkeypatch.setattr(mlmclm.backends.cpu.packed_attention, "SCORES_AT_ONCE", 5000)
    both = model(kind, key_value_heads=key_value_heads).train()
    rows = sequences(RAGGED)
    expected = padded(both, rows, causal=causal)
    wanted = gradients(expected, both)
    found = packed(both, rows, causal=causal)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    for name, gradient in gradients(found, both).items():
        scale = wanted[name].abs().max().item()
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-5 * max(scale, 1.0), msg=name)


CHOICES = {
    "some": lambda generator: np.flatnonzero(generator.random(sum(RAGGED)) < 0.4),
    "one of a sequence": lambda _: np.cumsum(RAGGED) - 1,
    "of few sequences": lambda _: np.array([6, 7, 60, 300]),
    "all": lambda _: np.arange(sum(RAGGED)),
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("key_value_heads", [4, 2])
def test_states_of_chosen_tokens_and_their_gradients_equal_the_padded_models(choice: str, key_value_heads: int) -> None:
    both = model("eurobert", key_value_heads=key_value_heads).train()
    rows = sequences(RAGGED)
    tokens = torch.from_numpy(CHOICES[choice](np.random.default_rng(2)))
    expected = torch.cat(padded(both, rows, causal=False))[tokens]
    wanted = gradients([expected], both)
    use_attention(both)
    packing = Packing.of(RAGGED)
    ids = pack_ids(rows, packing)
    found = run_blocks(both, ids, packing, causal=False, chosen=Chosen(packing, tokens))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for name, gradient in gradients([found], both).items():
        scale = wanted[name].abs().max().item()
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-5 * max(scale, 1.0), msg=name)
    with pytest.raises(ValueError, match="causal"):
        run_blocks(both, ids, packing, causal=True, chosen=Chosen(packing, tokens))


def test_chosen_tokens_under_autocast_are_as_near_the_exact_ones_as_all_are() -> None:
    """Here attention is by tiles, where the CPU has them."""
    both = model("eurobert", hidden=128).train()
    rows = sequences(RAGGED)
    tokens = torch.from_numpy(CHOICES["some"](np.random.default_rng(2)))
    exact = torch.cat(padded(both, rows, causal=False))[tokens]
    wanted = gradients([exact], both)
    use_attention(both)
    packing = Packing.of(RAGGED)
    errors = []
    for chosen in (Chosen(packing, tokens), None):
        with torch.autocast("cpu", torch.bfloat16):
            found = run_blocks(both, pack_ids(rows, packing), packing, causal=False, chosen=chosen)
        found = found if chosen else found[tokens]
        grads = gradients([found], both)
        away = torch.stack([(grads[name] - value).norm() / value.norm() for name, value in wanted.items()])
        errors.append((float((found - exact).detach().std() / exact.detach().std()), float(away.max())))
    (state, gradient), (usual, usual_gradient) = errors
    assert usual < 0.05
    assert state < 1.2 * usual
    assert gradient < 1.2 * usual_gradient


def test_both_ways_agree_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    both = model("eurobert").train()
    rows = sequences(RAGGED)
    exact = torch.cat(padded(both, rows, causal=False))
    with torch.autocast("cpu", torch.bfloat16):
        block = torch.cat(packed(both, rows, causal=False))
        monkeypatch.setattr(Cpu, "fuses", lambda *_: False)
        generic = torch.cat(packed(both, rows, causal=False))
    spread = exact.std()
    assert (generic - exact).std() / spread < 0.03
    assert (block - exact).std() / spread < 1.3 * (generic - exact).std() / spread


def test_what_is_said_about_padding_moves_nothing() -> None:
    packing = Packing.of([3, 5])
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, 2, packing.padded_tokens, 8, generator=generator, requires_grad=True) for _ in range(3)
    )
    output = backend_of("cpu").packed_attention(query, key, value, packing, AttentionSettings(False, 0.3))
    assert bool((output[0, packing.tokens :] == 0).all())
    grads = torch.autograd.grad(output[0, packing.tokens :].sum() * 7, (query, key, value))
    assert all(bool((grad == 0).all()) for grad in grads)


def test_written_out_backward_equals_finite_differences() -> None:
    packing = Packing.of([3, 1, 4])
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 4, packing.padded_tokens, 2), (1, 2, packing.padded_tokens, 2), (1, 2, packing.padded_tokens, 2)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    for causal in (False, True):

        def attention(*three: torch.Tensor, causal: bool = causal) -> torch.Tensor:
            return backend_of("cpu").packed_attention(*three, packing, AttentionSettings(causal, 0.7))[
                :, : packing.tokens
            ]

        assert torch.autograd.gradcheck(attention, tensors, fast_mode=True)


def test_dropout_in_attention_follows_the_global_stream_and_keeps_the_mean() -> None:
    packing = Packing.of([16])
    query = torch.zeros(1, 1, packing.padded_tokens, 4)
    value = torch.ones(1, 1, packing.padded_tokens, 4, requires_grad=True)

    def run() -> torch.Tensor:
        torch.manual_seed(5)
        outputs = [
            backend_of("cpu").packed_attention(query, query, value, packing, AttentionSettings(False, 1.0, 0.25))
            for _ in range(200)
        ]
        return torch.stack(outputs)[:, 0, :16]

    first = run()
    assert torch.equal(first, run())
    assert first.std() > 0.05
    assert abs(first.mean().item() - 1.0) < 0.02
    first.sum().backward()
    torch.testing.assert_close(value.grad[0, 0, :16].sum(), first.sum(), rtol=1e-4, atol=1e-2)


def test_poolings_take_the_mean_the_first_and_the_last_token() -> None:
    packing = Packing.of([2, 3])
    hidden = torch.arange(packing.padded_tokens, dtype=torch.float32).unsqueeze(1)
    assert pool(hidden, packing, "mean").flatten().tolist() == [0.5, 3.0]
    assert pool(hidden, packing, "bos").flatten().tolist() == [0.0, 2.0]
    assert pool(hidden, packing, "last").flatten().tolist() == [1.0, 4.0]


def test_groups_cover_all_sequences_and_unlike_lengths_are_kept_apart() -> None:
    lengths = np.array([512] * 8 + [16] * 56)
    groups = cut_into_groups(lengths)
    assert groups[0] == (0, 8)
    assert [first for first, _ in groups[1:]] == [last for _, last in groups[:-1]]
    assert groups[-1][1] == 64
    assert cut_into_groups(np.full(32, 20)) == [(0, 32)]


def test_a_packing_needs_tokens() -> None:
    for lengths in ([], [3, 0]):
        with pytest.raises(ValueError, match="at least one"):
            Packing.of(lengths)


def test_position_restart_and_padding_is_never_absent() -> None:
    packing = Packing.of([40, 24])
    assert packing.padded_tokens == 128
    assert packing.position_ids[0, :64].tolist() == [*range(40), *range(24)]

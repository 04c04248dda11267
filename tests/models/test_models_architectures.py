"""Every architecture, in both directions, computes what transformers' own encoder and decoder compute from the same weights."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    AutoConfig,
    EuroBertConfig,
    EuroBertForMaskedLM,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertDecoderForCausalLM,
    ModernBertForMaskedLM,
    PreTrainedModel,
)

import mlmclm.backends.cpu
from mlmclm.backends import wide_products
from mlmclm.backends.packing import Packing
from mlmclm.models.architectures import ARCHITECTURES, final_states, layers_of, load_weights, weights_of
from mlmclm.models.attention import use_attention
from mlmclm.models.build import PretrainingModel, build_model, hollow
from mlmclm.models.encoder import encode, pack_ids
from mlmclm.models.folder import load_encoder
from mlmclm.models.stored_tensors import StoredTensors
from small_models import small_tokenizer

VOCABULARY, LENGTH = 97, 24
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}


def masked_model(kind: str) -> PreTrainedModel:
    """A masked language model with random weights; in ModernBERT's local layers a token sees four to each side."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        if kind == "eurobert":
            return EuroBertForMaskedLM(EuroBertConfig(**COMMON, num_key_value_heads=2, mask_token_id=3))
        config = ModernBertConfig(
            **COMMON, local_attention=8, cls_token_id=1, sep_token_id=2, decoder_bias=kind == "modernbert with bias"
        )
        model = ModernBertForMaskedLM(config)
        if config.decoder_bias:
            torch.nn.init.normal_(model.decoder.bias)
        return model


def decoder(model: PreTrainedModel) -> PreTrainedModel:
    """Transformers' decoder with the same weights, put together here by name."""
    config = ARCHITECTURES[model.config.model_type].decoder_config(model.config)
    weights = dict(model.state_dict())
    if model.config.model_type == "eurobert":
        other = LlamaForCausalLM(config)
    else:
        other = ModernBertDecoderForCausalLM(config)
        for name in [name for name in weights if "Wqkv" in name]:
            query, key, value = weights.pop(name).view(3, 32, 32)
            for letter, part in zip("qkv", (query, key, value), strict=True):
                weights[name.replace("Wqkv", f"{letter}_proj")] = part
        weights = {re.sub("^head", "lm_head", name): tensor for name, tensor in weights.items()}
    other.load_state_dict(weights)
    return other


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, VOCABULARY, (3, LENGTH), generator=generator)
    return ids, torch.where(torch.rand(ids.shape, generator=generator) < 0.4, ids, -100)


KINDS = ["eurobert", "modernbert", "modernbert with bias"]


@pytest.mark.parametrize("written_out", [True, False])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_every_gradient_equal_the_transformers_encoder_s_and_decoder_s(
    kind: str, causal: bool, written_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not written_out:
        monkeypatch.setattr(mlmclm.backends.cpu, "LONGEST_WRITTEN_OUT", 0)
    reference = decoder(masked_model(kind)) if causal else masked_model(kind)
    ids, labels = batch()
    expected = cross_entropy(reference(ids).logits.flatten(0, 1), labels.flatten(), reduction="sum")
    expected.backward()
    wanted = {name: parameter.grad for name, parameter in reference.named_parameters()}
    model = PretrainingModel(masked_model(kind), precision="fp32")
    loss = model(ids, labels, causal)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-4)
    for name, parameter in model.model.named_parameters():
        if causal:
            name = re.sub("^head", "lm_head", name)
        if causal and "Wqkv" in name:
            gradient = torch.cat([wanted.pop(name.replace("Wqkv", f"{letter}_proj")) for letter in "qkv"])
        else:
            gradient = wanted.pop(name)
        scale = max(1.0, gradient.abs().max().item())
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-5 * scale, msg=name)
    assert not wanted


@pytest.mark.parametrize("kind", KINDS)
def test_under_autocast_the_loss_is_near_the_exact_one(kind: str) -> None:
    ids, labels = batch()
    exact, rounded = (
        PretrainingModel(masked_model(kind), precision=precision)(ids, labels, False)
        for precision in ("fp32", "bf16-autocast")
    )
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, exact, rtol=0.02, atol=0)


def layer_states(model: PreTrainedModel) -> list[Tensor]:
    """A list to which the model's next forward pass adds what each layer returns."""
    states: list[Tensor] = []
    for layer in layers_of(model.base_model):
        layer.register_forward_hook(lambda _, given, returned: states.append(returned))
    return states


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_bf16_residual_stream_is_summed_in_bf16_from_the_first_layer_to_the_last(
    kind: str, causal: bool, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held against transformers' encoder and decoder, whose first layer is given rounded states."""
    monkeypatch.setattr(wide_products, "processor_has_bf16", lambda: True)
    ids, labels = batch()
    reference = decoder(masked_model(kind)) if causal else masked_model(kind)
    theirs = layer_states(reference)
    first = layers_of(reference.base_model)[0]
    first.register_forward_pre_hook(lambda _, given: (given[0].bfloat16(), *given[1:]))
    with torch.autocast("cpu", torch.bfloat16):
        logits = reference(ids).logits.float()
    expected = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    exact = PretrainingModel(masked_model(kind), precision="fp32")(ids, labels, causal)
    model = PretrainingModel(masked_model(kind), precision="bf16-residual", activation_checkpointing=again)
    ours = layer_states(model.model)
    loss = model(ids, labels, causal)
    ours = ours[: len(theirs)]  # a backward pass that computes layers again adds to them
    loss.backward()
    assert len(ours) == len(theirs) > 1
    for own, wanted in zip(ours, theirs, strict=True):
        assert own.dtype == wanted.dtype == torch.bfloat16
        assert (own.float() - wanted.float()).norm() < 0.05 * wanted.float().norm()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=0.005, atol=0)
    torch.testing.assert_close(loss, exact, rtol=0.02, atol=0)
    assert all(parameter.grad is not None and parameter.grad.dtype == torch.float32 for parameter in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_reaches_no_later_token_when_causal_and_every_token_when_not(kind: str) -> None:
    model = masked_model(kind)
    use_attention(model)
    embedding = model.get_input_embeddings()
    vectors: list[Tensor] = []
    embedding.register_forward_hook(lambda *call: vectors.append(call[2]) or call[2].retain_grad())
    ids = batch()[0][:1, :12]
    for causal in (True, False):
        for position in range(12):
            hidden = final_states(model.model, ids, causal=causal)
            (hidden[0, position] * torch.arange(32)).sum().backward()
            reached = vectors.pop().grad[0].abs().sum(-1) > 0
            expected = torch.arange(12) <= position if causal else torch.ones(12, dtype=torch.bool)
            assert torch.equal(reached, expected)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_longer_than_the_window_give_what_each_gives_alone(causal: bool) -> None:
    model = masked_model("modernbert")
    reference = (decoder(model) if causal else masked_model("modernbert")).model
    use_attention(model)
    ids = batch()[0]
    rows = [ids[0, :20].numpy(), ids[1, :3].numpy(), ids[2].numpy()]
    packing = Packing.of([len(row) for row in rows])
    hidden = encode(model.model, pack_ids(rows, packing), packing, causal=causal)[: packing.tokens]
    for found, row in zip(hidden.split(packing.lengths.tolist()), rows, strict=True):
        expected = reference(torch.from_numpy(row)[None]).last_hidden_state[0]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("written_out", [True, False])
@pytest.mark.parametrize("causal", [False, True])
def test_a_modernbert_decoder_s_folder_is_the_stock_decoder_when_causal_and_the_stock_encoder_when_not(
    causal: bool, written_out: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its local layers see four tokens to each side, or three to the left; the sequences are longer."""
    if not written_out:
        monkeypatch.setattr(mlmclm.backends.cpu, "LONGEST_WRITTEN_OUT", 4)
    encoder = masked_model("modernbert")
    stock = decoder(encoder)
    stock.save_pretrained(tmp_path)
    small_tokenizer().save_pretrained(tmp_path)
    loaded = load_encoder(tmp_path)
    assert (type(loaded).__name__, loaded.config.sliding_window) == ("ModernBertDecoderModel", 4)
    reference = (stock if causal else encoder).model.eval()
    rows = [row[:length].numpy() for row, length in zip(batch()[0], (20, 3, LENGTH), strict=True)]
    packing = Packing.of([len(row) for row in rows])
    packed = encode(loaded, pack_ids(rows, packing), packing, causal=causal)[: packing.tokens]
    for found, row in zip(packed.split(packing.lengths.tolist()), rows, strict=True):
        ids = torch.from_numpy(row)[None]
        expected = reference(ids).last_hidden_state[0]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(final_states(loaded, ids, causal=causal)[0], expected, rtol=1e-4, atol=1e-4)
    config = copy.deepcopy(reference.config)
    config.sliding_window = 3
    other = type(reference)(config)
    other.load_state_dict(reference.state_dict())
    one_fewer = other.eval()(ids).last_hidden_state[0]
    assert (one_fewer - expected).abs().max() > 0.01


def test_weights_carry_over_by_name_with_tied_matrices_once() -> None:
    model, other = masked_model("modernbert"), ModernBertForMaskedLM(masked_model("modernbert").config)
    weights = weights_of(model)
    assert "decoder.weight" not in weights
    load_weights(other, weights)
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)
    assert other.decoder.weight is other.model.embeddings.tok_embeddings.weight
    weights.pop("head.dense.weight")
    with pytest.raises(ValueError, match=r"another model's: head\.dense\.weight"):
        load_weights(other, weights)


@pytest.mark.parametrize("kind", sorted(ARCHITECTURES))
def test_a_hollow_model_becomes_the_built_one_as_it_reads_weight_after_weight(kind: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(kind, **COMMON)
    whole, other = build_model(config, 1), hollow(config)
    assert all(parameter.is_meta for parameter in other.parameters())
    save_file({f"w/{name}": tensor for name, tensor in weights_of(whole).items()}, tmp_path / "weights.safetensors")
    read: list[torch.Size] = []
    load_weights(other, StoredTensors(tmp_path / "weights.safetensors", "w/"), lambda weight: read.append(weight.shape))
    assert read == [weight.shape for weight in whole.parameters()]
    assert other.state_dict().keys() == whole.state_dict().keys()
    for (name, tensor), found in zip(whole.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(found, tensor), name
    for (name, buffer), found in zip(whole.named_buffers(), other.buffers(), strict=True):
        assert torch.equal(found, buffer), name
    assert [p.requires_grad for p in other.parameters()] == [p.requires_grad for p in whole.parameters()]
    shared = [(name, id(p)) for name, p in whole.named_parameters(remove_duplicate=False)]
    again = [(name, id(p)) for name, p in other.named_parameters(remove_duplicate=False)]
    assert _groups(shared) == _groups(again), "what is tied stays tied"
    linear = torch.nn.Linear(2, 2)
    assert not linear.weight.is_meta, "other modules are real again"


def _groups(named: list[tuple[str, int]]) -> list[list[str]]:
    return sorted([name for name, other in named if other == identity] for identity in {each for _, each in named})


def test_stored_tensors_are_those_of_a_prefix_and_a_file_cut_short_has_none(tmp_path: Path) -> None:
    path = tmp_path / "some.safetensors"
    tensors = {"w/a": torch.arange(6.0).view(2, 3), "w/b": torch.ones(2), "m/a": torch.zeros(3)}
    save_file(tensors, path)
    stored = StoredTensors(path, "w/")
    assert sorted(stored) == ["a", "b"]
    assert len(stored) == 2
    assert torch.equal(stored["a"], tensors["w/a"])
    assert "m/a" not in stored
    with pytest.raises(KeyError):
        stored["m/a"]
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(SafetensorError):
        StoredTensors(path)

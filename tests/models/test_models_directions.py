"""A model that cannot be run in both directions over packed sequences is refused; one that can is used as transformers computes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModel,
    BartConfig,
    BertConfig,
    BloomConfig,
    ConvBertConfig,
    ElectraConfig,
    EuroBertConfig,
    FNetConfig,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    ModernBertConfig,
    ModernBertDecoderConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    RobertaConfig,
    T5Config,
    T5EncoderModel,
)

import mlmclm.models.directions
from mlmclm.backends.packing import Packing
from mlmclm.errors import UserError
from mlmclm.models.directions import KNOWN, use_either_direction
from mlmclm.models.encoder import encode, pack_ids
from mlmclm.models.folder import load_encoder
from small_models import small_tokenizer

SHAPE = {
    "vocab_size": 400, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2}
LOCAL = {"local_attention": 8, "cls_token_id": 1, "sep_token_id": 2}
ABLE: dict[str, PreTrainedConfig] = {
    "eurobert": EuroBertConfig(**SHAPE, **GROUPED),
    "llama": LlamaConfig(**SHAPE, **GROUPED),
    "modernbert": ModernBertConfig(**SHAPE, **LOCAL),
    "modernbert-decoder": ModernBertDecoderConfig(**SHAPE, **LOCAL),
    "bert": BertConfig(**SHAPE),
    "roberta": RobertaConfig(**SHAPE),
    "qwen2": Qwen2Config(**SHAPE, **GROUPED),
    "qwen3": Qwen3Config(**SHAPE, **GROUPED, head_dim=8),
    "mistral": MistralConfig(**SHAPE, **GROUPED),
    "gpt2": GPT2Config(vocab_size=400, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3),
    "electra": ElectraConfig(**SHAPE, embedding_size=32),
}
UNABLE: dict[str, tuple[PreTrainedConfig, str]] = {
    "convbert": (ConvBertConfig(**SHAPE, embedding_size=32), "what a text gives depends on"),
    "fnet": (FNetConfig(**SHAPE), "what a text gives depends on"),
    "bloom": (BloomConfig(vocab_size=400, hidden_size=32, n_layer=2, n_head=4), "ValueError.*see no later ones"),
    "bart": (
        BartConfig(
            vocab_size=400, d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=48, decoder_ffn_dim=48,
            encoder_attention_heads=4, decoder_attention_heads=4, max_position_embeddings=64, init_std=0.3,
        ), "kept apart",
    ),
    "mamba": (MambaConfig(vocab_size=400, hidden_size=32, num_hidden_layers=2, state_size=4), "(TypeError|KeyError)"),
    "gemma2": (Gemma2Config(**SHAPE, **GROUPED, head_dim=8), "caps the logits.*see no later ones"),
}  # fmt: skip


def made(config: PreTrainedConfig, seed: int = 3) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModel.from_config(config).eval()


@pytest.fixture
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlmclm.models.directions, "KNOWN", frozenset())


@pytest.mark.parametrize("kind", ABLE)
def test_attention_that_can_be_exchanged_is_found_to_be(kind: str, nothing_is_known: None) -> None:
    """Those that are not tried out otherwise among them."""
    assert set(ABLE) > set(KNOWN)
    use_either_direction(made(ABLE[kind]), Path(kind))


@torch.no_grad()
def test_a_model_of_another_architecture_computes_what_transformers_does_and_sees_both_ways(tmp_path: Path) -> None:
    small_tokenizer().save_pretrained(tmp_path)
    made(ABLE["gpt2"]).save_pretrained(tmp_path)
    rows = [np.arange(5, 25), np.arange(30, 37)]
    packing = Packing.of([20, 7])
    states = encode(load_encoder(tmp_path), pack_ids(rows, packing), packing, causal=True)
    stock = AutoModel.from_pretrained(tmp_path).eval()
    for part, row in zip(states[:27].split([20, 7]), rows, strict=True):
        alone = stock(input_ids=torch.from_numpy(row)[None]).last_hidden_state[0]
        torch.testing.assert_close(part, alone, rtol=1e-4, atol=1e-4)
    both = encode(load_encoder(tmp_path), pack_ids(rows, packing), packing, causal=False)
    assert (both[0] - states[0]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", UNABLE)
def test_one_that_cannot_is_refused_with_what_is_wrong_and_what_is_allowed(kind: str, tmp_path: Path) -> None:
    config, reason = UNABLE[kind]
    small_tokenizer().save_pretrained(tmp_path)
    made(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=rf"{tmp_path}: .*'{kind}' cannot be fine-tuned.*{reason}.*modernbert"):
        load_encoder(tmp_path)


@torch.no_grad()
def test_a_bias_by_distance_would_be_lost_and_is_kept_by_the_model_s_own_forward() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config: Any = T5Config(vocab_size=400, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
        model = T5EncoderModel(config).eval()
        torch.nn.init.normal_(model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight)
    rows = [np.arange(5, 25), np.arange(30, 37)]
    alone = [model(input_ids=torch.from_numpy(row)[None]).last_hidden_state[0] for row in rows]
    use_either_direction(model, Path("t5"))
    packing = Packing.of([20, 7])
    states = encode(model, pack_ids(rows, packing), packing, causal=False)
    torch.testing.assert_close(states[:27], torch.cat(alone), rtol=1e-4, atol=1e-4)

"""A model that is continued from keeps what it computed, sees in both directions, and has a mask token."""

from __future__ import annotations

import io
import json
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertLMHeadModel,
    EuroBertConfig,
    EuroBertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    ModernBertConfig,
    ModernBertDecoderConfig,
    ModernBertDecoderForCausalLM,
    ModernBertForMaskedLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
    RobertaForMaskedLM,
    pipeline,
)

from mlmclm.backends.packing import Packing
from mlmclm.errors import UserError
from mlmclm.models.architectures import before_head, final_states, layers_of
from mlmclm.models.attention import use_attention
from mlmclm.models.build import PretrainingModel
from mlmclm.models.encoder import encode, pack_ids
from mlmclm.models.exported_folder import export_folder
from mlmclm.models.folder import check_length, load_encoder
from mlmclm.models.given import Initial, encoder_size, read_initial
from mlmclm.models.sizes import parameters, training_flops
from mlmclm.reports.model_card import model_cards
from small_models import small_tokenizer

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"num_key_value_heads": 2}
LOCAL = {"local_attention": 8, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
KINDS = {
    "llama": (LlamaForCausalLM, LlamaConfig, GROUPED | {"rope_parameters": LLAMA3, "head_dim": 16}),
    "smollm": (LlamaForCausalLM, LlamaConfig, GROUPED | {"tie_word_embeddings": True}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, GROUPED | {"tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, GROUPED | {"head_dim": 16}),
    "modernbert": (ModernBertForMaskedLM, ModernBertConfig, LOCAL),
    "modernbert-decoder": (ModernBertDecoderForCausalLM, ModernBertDecoderConfig, LOCAL),
    "eurobert": (EuroBertForMaskedLM, EuroBertConfig, GROUPED | {"pad_token_id": 0, "mask_token_id": 3}),
    "bert": (BertForMaskedLM, BertConfig, {"pad_token_id": 0}),
    "roberta": (RobertaForMaskedLM, RobertaConfig, {"pad_token_id": 0}),
}
ENCODERS = ("modernbert", "eurobert", "bert", "roberta")


def tokenizer_without_mask() -> PreTrainedTokenizerFast:
    backend = small_tokenizer().backend_tokenizer
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def save(kind: str, folder: Path, *, spare: int = 0) -> Path:
    """A folder of this architecture; its tokenizer has no mask token, and the embedding `spare` rows more than it needs."""
    tokenizer = tokenizer_without_mask()
    tokenizer.save_pretrained(folder)
    text = (folder / "tokenizer.json").read_text().replace("<mask>", "<other>")
    (folder / "tokenizer.json").write_text(text)
    model_class, config_class, more = KINDS[kind]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = model_class(config_class(vocab_size=len(tokenizer) + spare, **SHAPE, **more))
        if model.get_output_embeddings().bias is not None:
            torch.nn.init.normal_(model.get_output_embeddings().bias)
        model.save_pretrained(folder)
    return folder


def logits(model: PreTrainedModel, ids: Tensor, *, causal: bool) -> Tensor:
    """The full logits of a model in this package's attention."""
    use_attention(model)
    hidden = final_states(model.base_model, ids, causal=causal)
    return model.get_output_embeddings()(before_head(model, hidden))


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(4, 300, (2, 24), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_it_computes_what_the_original_does_and_attends_in_both_directions(
    kind: str, ids: Tensor, tmp_path: Path
) -> None:
    original = KINDS[kind][0].from_pretrained(save(kind, tmp_path)).eval()
    model = read_initial(tmp_path).model()
    known = original.config.vocab_size
    expected = original(ids).logits
    found = logits(model, ids, causal=kind not in ENCODERS)[..., :known]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    changed = ids.clone()
    changed[:, -1] = ids[:, -1] % 300 + 4
    for causal in (True, False):
        same = torch.equal(*(final_states(model.base_model, each, causal=causal)[:, -2] for each in (ids, changed)))
        assert same == causal


def test_a_mask_token_gets_the_mean_row_of_the_embedding_and_the_head(kind: str, tmp_path: Path) -> None:
    save(kind, tmp_path)
    initial = read_initial(tmp_path)
    before = len(tokenizer_without_mask())
    assert initial.tokenizer.mask_token == "<|mask|>"
    assert initial.tokenizer.mask_token_id == before == initial.config.vocab_size - 1
    model = initial.model()
    head = model.get_output_embeddings()
    for tensor in (model.get_input_embeddings().weight, head.weight, head.bias):
        if tensor is not None:
            assert len(tensor) == before + 1
            torch.testing.assert_close(tensor[before], tensor[:before].mean(0))
    if kind in ("llama", "smollm", "eurobert"):
        assert initial.config.mask_token_id == before


def test_spare_rows_of_the_embedding_are_used_first(tmp_path: Path) -> None:
    save("qwen2", tmp_path, spare=10)
    initial = read_initial(tmp_path)
    before = len(tokenizer_without_mask())
    assert initial.config.vocab_size == before + 10
    embedding = initial.model().get_input_embeddings().weight
    torch.testing.assert_close(embedding[before], embedding[:before].mean(0))


def test_a_mask_token_that_is_there_is_used_and_nothing_grows(tmp_path: Path) -> None:
    save("llama", tmp_path)
    small_tokenizer().save_pretrained(tmp_path)
    initial = read_initial(tmp_path)
    assert initial.tokenizer.mask_token_id == initial.config.mask_token_id == 3
    assert initial.config.vocab_size == len(small_tokenizer())


def test_it_trains_and_what_is_exported_computes_the_same(kind: str, ids: Tensor, tmp_path: Path) -> None:
    initial = read_initial(save(kind, tmp_path / "source"))
    model = initial.model()
    folder = tmp_path / "exported"
    initial.tokenizer.save_pretrained(tmp_path / "tokenizer")
    export_folder(
        folder, initial.weights, initial.config, tmp_path / "tokenizer", card="A card.", decoder_card="Another."
    )
    base = AutoModel.from_pretrained(folder).eval()
    causal = AutoModelForCausalLM.from_pretrained(folder / "decoder").eval()
    with torch.no_grad():
        wanted = logits(model, ids, causal=True)
        torch.testing.assert_close(causal(ids).logits, wanted, rtol=1e-4, atol=1e-4)
        both = final_states(model.base_model, ids, causal=False)
        torch.testing.assert_close(base(ids).last_hidden_state, both, rtol=1e-4, atol=1e-4)
        packing = Packing.of([24, 10])
        rows = [ids[0].numpy(), ids[1, :10].numpy()]
        packed = encode(load_encoder(folder), pack_ids(rows, packing), packing, causal=False)
        torch.testing.assert_close(packed[:24], both[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(packed[24:34], base(ids[1:, :10]).last_hidden_state[0], rtol=1e-4, atol=1e-4)
        full = logits(model, ids, causal=False)
    training = PretrainingModel(initial.model(), precision="fp32")
    loss = training(ids, ids, False)
    expected = torch.nn.functional.cross_entropy(full.flatten(0, 1), ids.flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-3)
    loss.backward()
    assert all(parameter.grad is not None for parameter in training.parameters())


@pytest.mark.parametrize("objective", ["clm", "mlm40", "mntp15"])
def test_the_code_of_an_export_s_cards_runs_and_what_they_promise_the_hub_loads(
    kind: str, objective: str, tmp_path: Path
) -> None:
    initial, folder = read_initial(save(kind, tmp_path / "source")), tmp_path / "exported"
    initial.tokenizer.save_pretrained(tmp_path / "tokenizer")
    causal, architecture = objective == "clm", initial.config.model_type
    facts = {"name": "m", "objective": objective, "causal": causal, "architecture": architecture}
    facts["predicts_one_earlier"] = objective == "mntp15"
    card, decoder_card = model_cards(facts, decoder=causal)
    export_folder(folder, initial.weights, initial.config, tmp_path / "tokenizer", card=card, decoder_card=decoder_card)
    parts = (folder, folder / "decoder") if causal else (folder,)
    found = {}
    for part in parts:
        written = (part / "README.md").read_text()
        for number, block in enumerate(re.findall(r"```python\n(.*?)```", written, re.DOTALL)):
            scope: dict[str, Any] = {}
            with redirect_stdout(io.StringIO()) as printed:
                exec(block.replace("path/to/this/folder", str(part)), scope)
            assert printed.getvalue().strip()
            found[part.name, number] = scope
        tag = yaml.safe_load(written.split("---\n")[1])["pipeline_tag"]
        # Given by name, the pipeline takes its own class, as a widget of the Hub does.
        made = pipeline(tag, model=str(part), tokenizer=str(part))
        assert made("The <|mask|> is here.", **({"max_new_tokens": 2} if tag == "text-generation" else {}))
        assert tag == ("text-generation" if part.name == "decoder" else
                       "fill-mask" if objective == "mlm40" and not architecture.startswith("qwen") else "feature-extraction")  # fmt: skip
    scope = found["exported", int(not causal)]
    for text, vector in zip(scope["texts"], scope["vectors"], strict=True):
        with torch.no_grad():
            alone = scope["model"](scope["tokenizer"](text, return_tensors="pt")["input_ids"]).last_hidden_state[0]
        torch.testing.assert_close(vector, alone.mean(0), rtol=1e-4, atol=1e-4)
    if causal:
        return
    # The printed token is what the objective predicts in the mask's place.
    scope = found["exported", 0]
    ids = scope["inputs"]["input_ids"]
    place = int((ids[0] == initial.tokenizer.mask_token_id).nonzero()) - (objective == "mntp15")
    with torch.no_grad():
        wanted = logits(initial.model(), ids, causal=False)[0, place]
    torch.testing.assert_close(scope["logits"][scope["hidden"]][0], wanted, rtol=1e-3, atol=1e-3)


def test_the_corpus_s_tokenizer_may_have_more_tokens_but_no_other_ids(tmp_path: Path) -> None:
    save("llama", tmp_path)
    longer = read_initial(tmp_path).tokenizer
    longer.add_tokens(["<extra>"])
    initial: Initial = read_initial(tmp_path, longer)
    assert initial.config.vocab_size == len(tokenizer_without_mask()) + 2
    with pytest.raises(UserError, match=r"the tokenizer is not this model's: .* has the id"):
        read_initial(tmp_path, small_tokenizer(300))


@pytest.mark.parametrize(
    ("kind", "classes"),
    [("bert", (BertForMaskedLM, BertLMHeadModel)), ("roberta", (RobertaForMaskedLM, RobertaForCausalLM))],
)
@pytest.mark.parametrize("causal", [False, True])
def test_losses_and_gradients_of_bert_are_those_of_transformers_own_classes(
    kind: str, classes: tuple[type[PreTrainedModel], ...], causal: bool, ids: Tensor, tmp_path: Path
) -> None:
    """Its two classes: masked, and as a decoder; both without dropout (`eval`), as pretraining is."""
    save(kind, tmp_path)
    initial = read_initial(tmp_path)
    initial.model().save_pretrained(tmp_path)  # with the row of the mask token
    peer = classes[causal].from_pretrained(tmp_path, is_decoder=causal).eval()
    labels = torch.where(torch.rand(ids.shape, generator=torch.Generator().manual_seed(2)) < 0.4, ids, -100)
    expected = peer(ids, labels=labels).loss
    ours = labels
    if causal:  # a label of ours is at the position whose output predicts it
        ours = torch.full_like(labels, -100)
        ours[:, :-1] = labels[:, 1:]
    training = PretrainingModel(initial.model().train(), precision="fp32")
    loss = training(ids, ours, causal) / int((ours != -100).sum())
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    expected.backward()
    loss.backward()
    found = dict(training.model.named_parameters())
    assert found.keys() == dict(peer.named_parameters()).keys()
    for name, parameter in peer.named_parameters():
        torch.testing.assert_close(
            found[name].grad, parameter.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_bert_as_it_is_published_keeps_its_own_dropout_for_fine_tuning_and_none_for_pretraining(tmp_path: Path) -> None:
    """Published weights hold layers over the first token too; they are left out."""
    save("bert", tmp_path)
    config = BertConfig.from_pretrained(tmp_path)
    whole = BertForPreTraining(config)
    whole.save_pretrained(tmp_path)
    initial = read_initial(tmp_path)
    assert initial.config.hidden_dropout_prob == config.hidden_dropout_prob == 0.1
    model = initial.model()
    assert not any(module.p for module in model.modules() if isinstance(module, torch.nn.Dropout))
    kept = whole.bert.encoder.state_dict()
    assert all(torch.equal(kept[name], tensor) for name, tensor in model.bert.encoder.state_dict().items())
    assert not any("pooler" in name or "seq_relationship" in name for name in initial.weights)


def test_roberta_s_longest_sequence_leaves_out_the_positions_up_to_padding_s(tmp_path: Path) -> None:
    save("roberta", tmp_path)
    check_length(tmp_path, 63)
    with pytest.raises(UserError, match=r"max_length is 64, but the model in .* was made for 63 positions"):
        check_length(tmp_path, 64)
    model = read_initial(tmp_path).model()
    ids = torch.randint(4, 300, (1, 63))
    assert logits(model, ids, causal=False).shape[1] == 63
    with pytest.raises((IndexError, RuntimeError)):
        logits(model, torch.randint(4, 300, (1, 64)), causal=False)


def test_bert_with_an_lm_head_of_its_own_is_refused(tmp_path: Path) -> None:
    save("bert", tmp_path)
    config = BertConfig.from_pretrained(tmp_path, tie_word_embeddings=False)
    BertForMaskedLM(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="tie_word_embeddings: false is not supported for 'bert'"):
        read_initial(tmp_path)


def test_the_shape_of_a_given_model_counts_its_parameters_and_matrices(kind: str, tmp_path: Path) -> None:
    model = read_initial(save(kind, tmp_path)).model()
    size = encoder_size(model.config)
    assert parameters(size, model.config.vocab_size) == sum(p.numel() for p in model.base_model.parameters())
    layers = layers_of(model.base_model)
    matrices = sum(p.numel() for p in layers.parameters() if p.dim() == 2)
    assert size.layers * size.products == matrices
    flops = {
        causal: training_flops(size, tokens=10 * 16, labelled=7, length=16, vocabulary=size.vocabulary, causal=causal)
        for causal in (False, True)
    }
    head = model.get_output_embeddings().weight.numel()
    head += sum(
        p.numel()
        for n, p in model.named_parameters()
        if "dense.weight" in n and n.split(".")[0] in ("head", "cls", "lm_head")
    )
    window = 4 if "modernbert" in kind else 99
    local = sum("sliding" in each for each in getattr(model.config, "layer_types", None) or [])
    for causal, found in flops.items():
        keys = 8 if causal else 16
        seen = (4 - local) * keys + local * min(keys, window if causal else 2 * window + 1)
        width = size.heads * (getattr(model.config, "head_dim", None) or 8)
        assert found == 160 * (6 * matrices + 12 * width * seen) + 6 * 7 * head


def test_a_folder_without_its_lm_head_is_refused(tmp_path: Path) -> None:
    save("llama", tmp_path)
    LlamaModel.from_pretrained(tmp_path).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"the weights lack lm_head\.weight; a whole language model is needed"):
        read_initial(tmp_path)


def test_weights_that_the_architecture_has_no_place_for_are_refused(tmp_path: Path) -> None:
    save("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(UserError, match=r"LlamaForCausalLM has no place for model\.layers\.3"):
        read_initial(tmp_path)

"""Sequences laid end to end change nothing: in every made and architecture, with either mask, a training step's logits and gradients
are those of transformers' own model over the same batch, padded on the right with an attention mask."""

from __future__ import annotations

import copy
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    EuroBertConfig,
    EuroBertModel,
    LlamaConfig,
    LlamaModel,
    ModernBertConfig,
    ModernBertDecoderConfig,
    ModernBertDecoderModel,
    ModernBertModel,
    PreTrainedModel,
)

from mlmclm.finetuning.forward import forward
from mlmclm.finetuning.loop import evaluate_splits
from mlmclm.finetuning.protocol import Protocol
from mlmclm.finetuning.run import fresh_layers
from mlmclm.models.attention import use_attention
from mlmclm.tasks.prepare_task import prepare_task
from mlmclm.tasks.prepared_task import Batch, PreparedTask
from small_models import FILL, write_place, write_table

SHAPE = {
    "vocab_size": 400, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 64, "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}
LOCAL = {"local_attention": 8, "cls_token_id": 1, "sep_token_id": 2, "global_attn_every_n_layers": 3}
"""A token of ModernBERT's local layers sees four to each side."""
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TASKS = {
    "sst2": "sequence-classification",
    "stsb": "sequence-regression",
    "conll2003": "token-classification",
    "squad_v2": "question-answering",
    "reqa_squad": "retrieval",
}
NONE: dict[str, list[Any]] = {"text": [], "answer_start": []}
TOLERANCE = {torch.float32: 2e-4, torch.float64: 1e-5}
"""Of the largest number; cosines of positions and losses are in fp32, whatever the model."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data/ and model/, whose tokenizer all of the models here have."""
    folder = tmp_path_factory.mktemp("padding")
    write_place(folder)
    chance = random.Random(1)
    texts = [" ".join(chance.choices(FILL, k=chance.randint(1, 20))) for _ in range(60)]
    rows = {"sentence1": texts, "sentence2": texts[::-1], "label": [float(n % 6) for n in range(60)]}
    write_table(folder / "data" / "stsb", "train", rows)
    answers = [{"text": [text[:3]], "answer_start": [0]} if n % 3 else NONE for n, text in enumerate(texts)]
    names = [str(n) for n in range(60)]
    questions = {"id": names, "title": names, "context": texts, "question": names, "answers": answers}
    write_table(folder / "data" / "squad_v2", "train", questions)
    return folder


def base(kind: str) -> PreTrainedModel:
    """Random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        if kind == "eurobert":
            model = EuroBertModel(EuroBertConfig(**SHAPE, **GROUPED))
        elif kind == "modernbert":
            model = ModernBertModel(ModernBertConfig(**SHAPE, **LOCAL))
        else:
            model = BertModel(BertConfig(**SHAPE, **STILL), add_pooling_layer=False)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # biases, and norms' weights
                nn.init.normal_(parameter, 0.0 if name.endswith("bias") else 1.0, 0.2)
        return model


def stock(own: PreTrainedModel, *, causal: bool) -> PreTrainedModel:
    """Transformers' own encoder or decoder with the weights of `own`: a class that has this direction by itself."""
    kind, weights = own.config.model_type, dict(own.state_dict())
    if kind == "eurobert":
        other = (
            LlamaModel(LlamaConfig(**SHAPE, **GROUPED)) if causal else EuroBertModel(EuroBertConfig(**SHAPE, **GROUPED))
        )
    elif kind == "bert":
        other = BertModel(BertConfig(**SHAPE, **STILL, is_decoder=causal), add_pooling_layer=False)
    elif not causal:
        other = ModernBertModel(ModernBertConfig(**SHAPE, **LOCAL))
    else:
        other = ModernBertDecoderModel(ModernBertDecoderConfig(**SHAPE, **LOCAL))
        for name in [name for name in weights if "Wqkv" in name]:
            for letter, part in zip("qkv", weights.pop(name).chunk(3), strict=True):
                weights[name.replace("Wqkv", f"{letter}_proj")] = part
    other.load_state_dict(weights)
    return other


def padded(model: PreTrainedModel, rows: list[Any]) -> Tensor:
    """[sequences, longest, hidden]."""
    longest = max(map(len, rows))
    ids, mask = torch.zeros(2, len(rows), longest, dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row)
        mask[number, : len(row)] = 1
    return model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state


def fill(parts: list[Any], value: int) -> Tensor:
    """[sequences, longest] of rows of numbers."""
    return nn.utils.rnn.pad_sequence([torch.as_tensor(part) for part in parts], batch_first=True, padding_value=value)


def one_each(states: Tensor, lengths: Tensor, how: str) -> Tensor:
    """[sequences, hidden]."""
    if how == "last":
        return states[torch.arange(len(states)), lengths - 1]
    real = (torch.arange(states.shape[1]) < lengths[:, None]).to(states).unsqueeze(-1)
    return (states * real).sum(1) / real.sum(1)


def expected(task: str, model: PreTrainedModel, head: Any, batch: Batch, settings: Protocol) -> tuple[Tensor, Tensor]:
    """Loss, and logits at real tokens one after the other (of a sequence; the vectors, in retrieval), written down for padded batches."""
    targets = {name: torch.as_tensor(values) for name, values in batch.targets.items()}
    if task == "reqa_squad":
        half = len(batch.sequences) // 2
        vectors = []
        for rows in (batch.sequences[:half], batch.sequences[half:]):  # two batches of different lengths
            pooled = one_each(padded(model, rows), torch.tensor([len(row) for row in rows]), settings.pooling)
            vectors.append(pooled / pooled.norm(dim=1, keepdim=True))
        similar = vectors[0] @ vectors[1].t() / settings.temperature
        documents = targets["documents"]
        again = (documents[:, None] == documents) & ~torch.eye(half, dtype=torch.bool)
        loss = -similar.masked_fill(again, -torch.inf).log_softmax(1).diagonal().mean()
        return loss, torch.cat(vectors)
    states = padded(model, batch.sequences)
    lengths = torch.tensor([len(row) for row in batch.sequences])
    real = torch.arange(states.shape[1]) < lengths[:, None]
    if task in ("sst2", "stsb"):
        logits = head[-1](functional.gelu(head[0](one_each(states, lengths, settings.pooling))))
        if task == "stsb":
            return ((logits.squeeze(1) - targets["label"]) ** 2).mean(), logits
        return -logits.log_softmax(1)[torch.arange(len(logits)), targets["label"]].mean(), logits
    logits = head[-1](states)
    if task == "conll2003":
        labels = fill(targets["labels"].split(lengths.tolist()), -100)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits[real]
    allowed = real & (torch.arange(states.shape[1]) >= targets["passage"][:, None])
    spans = logits.masked_fill(~allowed.unsqueeze(-1), -torch.inf).log_softmax(1)  # [sequences, longest, 2]
    wanted = [spans[torch.arange(len(spans)), targets[name], end] for end, name in enumerate(("start", "end"))]
    return -torch.cat(wanted).mean(), logits[real]


def prepared(place: Path, task: str, *, causal: bool) -> tuple[PreparedTask, Protocol]:
    protocol = Protocol(
        max_length=60, stride=8, precision="fp32", head_dropout=0.0, attention="causal" if causal else "bidirectional",
        pooling="last" if causal else "mean",
    )  # fmt: skip
    made = prepare_task(task, place / "model", protocol, place / "store", place / "data")
    assert made.family == TASKS[task]
    return made, protocol


def gradients(model: PreTrainedModel, head: nn.Module) -> dict[str, Tensor]:
    """By the encoder's names: a ModernBERT decoder's three projections as one."""
    found = {name: parameter.grad for name, parameter in [*model.named_parameters(), *head.named_parameters("head")]}
    for name in [name for name in found if re.search(r"attn\.q_proj", name) and "ModernBert" in type(model).__name__]:
        parts = [found.pop(name.replace("q_proj", f"{letter}_proj")) for letter in "qkv"]
        found[name.replace("q_proj", "Wqkv")] = torch.cat(parts)
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def same(found: Tensor, wanted: Tensor, tolerance: float, what: str, scale: float | None = None) -> None:
    """Within a share of the scale, by default of the largest number."""
    scale = wanted.detach().abs().max().item() if scale is None else scale
    assert scale > 0, what
    found = found.to(wanted.dtype)
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance * scale, msg=lambda text: f"{what}: {text}")


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize(
    ("kind", "dtype"), [("eurobert", torch.float64), ("modernbert", torch.float32), ("bert", torch.float32)]
)
@pytest.mark.parametrize("task", TASKS)
def test_logits_and_gradients_are_those_of_the_padded_model(
    place: Path, task: str, kind: str, causal: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, protocol = prepared(place, task, causal=causal)
    batch = made.batch(np.arange(18))
    lengths = [len(row) for row in batch.sequences]
    assert max(lengths) > 1.5 * min(lengths)
    own = base(kind).to(dtype).train()
    reference = stock(own, causal=causal).to(dtype).train()
    head = made.head(32, fresh_layers(torch.Generator().manual_seed(1))).to(dtype)
    for number, parameter in enumerate(head.parameters()):
        nn.init.normal_(parameter, 0.0, 0.5, generator=torch.Generator().manual_seed(number))
    other = copy.deepcopy(head)

    loss, logits = expected(task, reference, other, batch, protocol)
    loss.backward()

    use_attention(own)
    seen: list[Tensor] = []
    if task == "reqa_squad":
        embeddings = made.embeddings
        monkeypatch.setattr(made, "embeddings", lambda *given: seen.append(embeddings(*given)) or seen[-1])
    else:
        head[-1].register_forward_hook(lambda *call: seen.append(call[2]))
    step = forward(own, head, made, protocol, batch)
    step.backward()

    (found,) = seen
    same(found, logits, TOLERANCE[dtype], "logits")
    assert step.loss == pytest.approx(loss.item(), rel=TOLERANCE[dtype])
    wanted, others = gradients(reference, other), gradients(own, head)
    assert wanted.keys() == others.keys() and len(wanted) > 20
    sizes = {name: gradient.abs().max().item() for name, gradient in wanted.items()}
    least = 0.01 * max(sizes.values())  # a bias below a softmax moves nothing: its gradient is rounding
    for name, gradient in wanted.items():
        same(others[name], gradient, 5 * TOLERANCE[dtype], name, max(sizes[name], least))


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("kind", ["eurobert", "modernbert", "bert"])
def test_predictions_are_those_of_the_padded_model_for_each_example(
    place: Path, kind: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluation takes sequences by length, in batches of its own."""
    made, protocol = prepared(place, "sst2", causal=causal)
    protocol = protocol.model_copy(update={"evaluation_batch_tokens": 100})
    own, head = base(kind), made.head(32, fresh_layers(torch.Generator().manual_seed(1)))
    reference = stock(own, causal=causal).eval()
    found: list[np.ndarray[Any, Any]] = []
    examples = made.examples
    monkeypatch.setattr(made, "examples", lambda split, given: found.extend(given) or examples(split, given))
    use_attention(own)
    evaluate_splits(own, head, made, protocol, ["test"])
    rows = list(made.columns["test"]["input_ids"])
    batch = Batch(rows, {"label": np.zeros(len(rows), np.int64)})
    with torch.no_grad():
        wanted = expected("sst2", reference, head, batch, protocol)[1]
    same(torch.from_numpy(np.stack(found)), wanted, TOLERANCE[torch.float32], "predictions")

"""A retrieval batch in chunks is the batch at once, but for the memory."""

from __future__ import annotations

import dataclasses
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, EuroBertConfig, EuroBertModel, PreTrainedModel

from mlmclm.backends.packing import Packing
from mlmclm.finetuning.batching import batches_by_length
from mlmclm.finetuning.cell import Cell, cell_key
from mlmclm.finetuning.forward import forward
from mlmclm.finetuning.protocol import Protocol
from mlmclm.finetuning.run import run_cell
from mlmclm.models.attention import use_attention
from mlmclm.models.encoder import encode, pack_ids
from mlmclm.models.folder import weights_hash
from mlmclm.tasks.prepare_task import prepare_task
from mlmclm.tasks.prepared_task import PreparedTask
from small_models import save_small_model, write_retrieval

WHOLE = Protocol(max_steps=4, max_length=48, stride=8, batch_size=24, precision="fp32")
CHUNKED = WHOLE.model_copy(update={"chunk_tokens": 100})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data/ and model/."""
    folder = tmp_path_factory.mktemp("chunks")
    write_retrieval(folder / "data")
    save_small_model(folder / "model")
    return folder


def retrieval(place: Path, protocol: Protocol = WHOLE, **changes: Any) -> tuple[PreparedTask, Protocol]:
    own = Protocol.model_validate({**protocol.model_dump(), **changes})
    return prepare_task("reqa_squad", place / "model", own, place / "store", place / "data"), own


def small(kind: str) -> PreTrainedModel:
    """Random weights in training mode, fp64; `bert` and `attention` have dropout."""
    shape = {
        "vocab_size": 400, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 64, "initializer_range": 0.3, "pad_token_id": 0,
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(3)
        if kind == "bert":
            model = BertModel(BertConfig(**shape, hidden_dropout_prob=0.2), add_pooling_layer=False)
        else:
            dropout = {"attention_dropout": 0.3 if kind == "attention" else 0.0}
            model = EuroBertModel(EuroBertConfig(**shape, **dropout, num_key_value_heads=2))
    use_attention(model)
    return model.double().train()


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys() and len(found) > 10
    for name, gradient in wanted.items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("changes", [{}, {"symmetric": True, "pooling": "last"}, {"attention": "causal"}], ids=str)
def test_loss_and_gradients_are_those_of_the_whole_batch(place: Path, changes: dict[str, Any]) -> None:
    task, whole = retrieval(place, **changes)
    batch = task.batch(np.arange(24))
    model = small("plain")
    at_once = forward(model, nn.Module(), task, whole, batch)
    at_once.backward()
    wanted = gradients(model)
    for tokens in (64, 100, 300):
        chunked = whole.model_copy(update={"chunk_tokens": tokens})
        found = forward(model, nn.Module(), task, chunked, batch)
        assert found.tokens == at_once.tokens
        assert found.loss == pytest.approx(at_once.loss, rel=1e-12)
        found.backward()
        close(gradients(model), wanted)


@pytest.mark.parametrize("kind", ["bert", "attention"])
def test_with_dropout_the_second_pass_hides_what_the_first_hid(place: Path, kind: str) -> None:
    """Against all chunks with one graph, one after the other in the same stream of chance."""
    task, protocol = retrieval(place, CHUNKED)
    batch = task.batch(np.arange(24))
    model = small(kind)
    torch.manual_seed(5)
    chunks = list(batches_by_length(np.array([len(ids) for ids in batch.sequences]), 100))
    assert len(chunks) > 3
    vectors: list[Any] = [None] * len(batch.sequences)
    for rows in chunks:
        packing = Packing.of([len(batch.sequences[row]) for row in rows])
        hidden = encode(model, pack_ids([batch.sequences[row] for row in rows], packing), packing, causal=False)
        means = [part.mean(0) for part in hidden[: packing.tokens].split(packing.lengths.tolist())]
        for row, mean in zip(rows, means, strict=True):
            vectors[row] = mean / mean.norm()
    after = torch.get_rng_state()
    loss = task.loss_of(torch.stack(vectors), batch.targets)
    loss.backward()
    wanted = gradients(model)
    torch.manual_seed(5)
    found = forward(model, nn.Module(), task, protocol, batch)
    assert found.loss == pytest.approx(loss.item(), rel=1e-12)
    found.backward()
    close(gradients(model), wanted)
    assert torch.equal(torch.get_rng_state(), after), "the stream goes on behind the batch"
    torch.manual_seed(6)
    assert abs(forward(model, nn.Module(), task, protocol, batch).loss - loss.item()) > 1e-3


class Held:
    """Bytes that graphs hold for their backward: now, and the most so far."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def pack(self, tensor: Tensor) -> list[Tensor]:
        class Holder(list[Tensor]):  # a list that can be weakly referenced
            pass

        holder, size = Holder([tensor]), tensor.numel() * tensor.element_size()
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(holder, self._freed, size)
        return holder

    def _freed(self, size: int) -> None:
        self.now -= size


def held(place: Path, pairs: int, chunk_tokens: int | None) -> int:
    """The most bytes that a step over so many pairs holds."""
    task, protocol = retrieval(place, chunk_tokens=chunk_tokens)
    batch, model, counted = task.batch(np.arange(pairs)), small("plain"), Held()
    with torch.autograd.graph.saved_tensors_hooks(counted.pack, lambda holder: holder[0]):
        forward(model, nn.Module(), task, protocol, batch).backward()
    return counted.most


def test_memory_follows_the_chunk_and_not_the_batch(place: Path) -> None:
    """What the loss itself holds, [pairs, pairs] and [pairs, hidden], stays."""
    assert held(place, 240, None) > 9 * held(place, 24, None)
    few, many = held(place, 24, 128), held(place, 240, 128)
    of_the_loss = 8 * 4 * (240 * 240 + 2 * 240 * 32)
    assert many < few + of_the_loss
    assert many < held(place, 240, None) / 5


def test_a_cell_is_computed_in_chunks_and_only_one_that_is_has_another_key(place: Path) -> None:
    task, protocol = retrieval(place, CHUNKED, precision="bf16-autocast")
    assert "chunk_tokens" not in WHOLE.identity()
    assert protocol.identity()["chunk_tokens"] == 100
    folder = place / "model"
    made = Cell("m", folder, weights_hash(folder), "reqa_squad", task.task_data, protocol, 1e-3, 0)
    result = run_cell(made, store=place / "store", data_root=place / "data")
    assert (result["status"], result["steps"], result["key"]) == ("ok", 4, cell_key(made))
    assert cell_key(dataclasses.replace(made, protocol=WHOLE)) != cell_key(made)

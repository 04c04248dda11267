"""A cell is a pure function: same bits wherever it runs; divergence is a result; what can be learnt is learnt."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_cells import SHORT, make, run

import mlmclm.finetuning.forward
import mlmclm.finetuning.loop
import mlmclm.finetuning.run
from mlmclm.errors import UserError
from mlmclm.finetuning.batching import stream
from mlmclm.finetuning.cell import Cell, cell_key
from mlmclm.finetuning.protocol import Protocol
from mlmclm.finetuning.run import run_cell, run_training
from mlmclm.seeds import Seeds
from mlmclm.storage.files import canonical_json
from mlmclm.sweeps.trial import trainings_of, with_trainings
from mlmclm.tasks.declared_tasks import get_task
from mlmclm.tasks.families.token_classification import TaggingTask
from mlmclm.tasks.prepare_task import prepare_task
from small_models import save_small_model

TASKS = ("sst2", "stsb", "conll2003", "squad_v2", "reqa_squad")
CORRELATIONS = ("matthews", "spearman", "pearson")

CELLS = [
    *((task, SHORT) for task in TASKS),
    ("conll2003", SHORT.model_copy(update={"precision": "bf16"})),
    ("reqa_squad", SHORT.model_copy(update={"chunk_tokens": 64})),
]
"""Every family, and what else is computed differently."""


def bits(result: dict[str, Any]) -> str:
    """Everything that must be reproduced, in full precision."""
    return canonical_json({name: value for name, value in result.items() if name != "cost"})


FRESH = """
import sys, torch
torch.set_num_threads(1)
sys.path += {tests!r}
from pathlib import Path
import test_finetuning_cell as own
place = Path({place!r})
for task, protocol in own.CELLS:
    print("RESULT" + own.bits(own.run(place, own.make(place, task, protocol))))
print("DONE", flush=True)
cache = {{}}
while True:  # until this process is ended
    for task, protocol in own.CELLS:
        own.run(place, own.make(place, task, protocol, seed=3), cache)
        print("BESIDE", flush=True)
"""


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_cell_has_the_same_bits_in_a_fresh_process_again_in_a_reused_one_and_with_others_beside(
    place: Path, one_thread: None
) -> None:
    tests = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    code = FRESH.format(tests=tests, place=str(place))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        try:
            before = list(itertools.takewhile(lambda line: line != "DONE\n", other.stdout))
            fresh = [line.strip().removeprefix("RESULT") for line in before if line.startswith("RESULT")]
            assert len(fresh) == len(CELLS)
            assert other.stdout.readline() == "BESIDE\n"
            cache: dict[Any, Any] = {}
            torch.manual_seed(123)
            for task, protocol in CELLS:  # other cells first, and another seed of the same
                run(place, make(place, task, protocol, seed=7, learning_rate=1e-2), cache)
            beside = [bits(run(place, make(place, *cell), cache)) for cell in reversed(CELLS)]
            assert other.poll() is None, "the process beside was running"
        finally:
            other.kill()
    assert list(reversed(beside)) == fresh
    assert [bits(run(place, make(place, *cell), cache)) for cell in CELLS] == fresh, "again, and alone"
    assert len(set(fresh)) == len(CELLS)


def test_the_global_stream_is_neither_read_nor_moved(place: Path) -> None:
    cell = make(place, "conll2003")  # its head has dropout
    torch.manual_seed(1)
    first = bits(run(place, cell))
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert bits(run(place, cell)) == first
    assert torch.equal(torch.get_rng_state(), before)


def test_a_deterministic_cell_has_the_same_key_and_bits_on_a_cpu_and_refuses_what_is_not(
    place: Path, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = make(place, "conll2003")
    asked = dataclasses.replace(cell, protocol=cell.protocol.model_copy(update={"deterministic": True}))
    assert cell_key(asked) == cell_key(cell)
    assert bits(run(place, asked)) == bits(run(place, cell))

    def put(*_: Any) -> Any:
        torch.zeros(1).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
        raise ZeroDivisionError("not deterministic, and not refused")

    monkeypatch.setattr(mlmclm.finetuning.loop, "forward", put)
    with pytest.raises(UserError, match=r"protocol\.deterministic: put_ has no deterministic form"):
        run(place, asked)
    with pytest.raises(ZeroDivisionError):
        run(place, cell)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """What the cells of a test drew: the heads as they begin, the rows of all steps, what dropout hid first."""
    found: dict[str, list[Any]] = {"head": [], "order": [], "dropout": []}
    original = mlmclm.finetuning.run.fine_tune

    def watched(encoder: Any, head: Any, family: Any, *arguments: Any, **named: Any) -> Any:
        found["head"].append({name: value.clone() for name, value in head.state_dict().items()})
        rows: list[Any] = []
        found["order"].append(rows)
        batch = family.batch
        monkeypatch.setattr(family, "batch", lambda chosen: (rows.append(chosen.tolist()), batch(chosen))[1])
        state = torch.get_rng_state()
        found["dropout"].append(torch.nn.functional.dropout(torch.ones(1000), 0.5))
        torch.set_rng_state(state)
        return original(encoder, head, family, *arguments, **named)

    monkeypatch.setattr(mlmclm.finetuning.run, "fine_tune", watched)
    return found


@pytest.mark.parametrize("varied", ["head", "order", "dropout"])
def test_a_stream_of_another_seed_leaves_what_the_others_draw_as_it_is(
    place: Path, drawn: dict[str, list[Any]], varied: str
) -> None:
    held = {"head": 3, "order": 4, "dropout": 5}
    results = [
        run(place, make(place, "conll2003", seed=Seeds(**{**held, varied: number}))) for number in (held[varied], 6)
    ]  # conll2003's head has dropout
    heads = [torch.equal(value, drawn["head"][1][name]) for name, value in drawn["head"][0].items() if "weight" in name]
    same = {
        "head": all(heads),
        "order": drawn["order"][0] == drawn["order"][1],
        "dropout": torch.equal(*drawn["dropout"]),
    }
    assert len(drawn["order"][0]) == 8
    assert same == {name: name != varied for name in same}
    first, second = (result["streams"] for result in results)
    assert {name: first[name] == second[name] for name in first} == same
    assert first == {name: stream(number, name) for name, number in held.items()}
    assert results[0]["seed"] == held
    assert results[0]["key"] != results[1]["key"]
    assert results[0]["curve"] != results[1]["curve"]


def test_cells_that_share_a_training_have_the_bits_of_cells_by_themselves(place: Path, one_thread: None) -> None:
    """Two tasks with the same training rows and other test rows, and one of them searched or scored in part only."""
    for source in ("reqa_squad", "squad_4k"):
        first = get_task(source)
        second = first.model_copy(update={"name": f"{source}_again", "title": "the same, evaluated in part"})
        part = SHORT.model_copy(update={"max_evaluation_examples": 7, "evaluation_batch_tokens": 128})
        folder, where = place / "model", {"store": place / "store", "data_root": place / "data"}
        tasks = {
            each.name: prepare_task(each, folder, settings, **where)
            for each, settings in ((first, SHORT), (second, part))
        }
        cells = [
            dataclasses.replace(make(place, source), task=each.name, declaration=each, protocol=settings)
            for each, settings in ((first, SHORT), (second, part))
        ]
        cells = with_trainings(cells, tasks)
        assert len(trainings_of({cell_key(cell): cell for cell in cells})) == 1
        together = list(run_training(cells, **where))
        assert [bits(result) for result in together] == [bits(run(place, cell)) for cell in cells]
        assert together[0]["curve"] == together[1]["curve"] and together[0]["scores"] != together[1]["scores"]
        assert [result["cost"]["cells_of_training"] for result in together] == [2, 2]


def test_the_result_has_the_agreed_form(place: Path) -> None:
    cell = make(place, "squad_4k")
    result = run(place, cell)
    assert json.loads(json.dumps(result)) == result
    assert set(result) == {
        "schema", "key", "model", "weights", "task", "family", "task_data", "protocol", "learning_rate", "seed",
        "streams", "engine", "status", "metric", "scores", "diverged_step", "peak_learning_rate", "curve", "steps",
        "examples", "tokens", "parameters", "cost",
    }  # fmt: skip
    assert result["key"] == cell_key(cell)
    assert result["status"] == "ok"
    assert set(result["scores"]) == {"validation", "test"}
    assert result["metric"] in result["scores"]["test"]
    assert (result["steps"], result["examples"]) == (8, 64)
    assert result["curve"][-1][0] == 8
    assert result["peak_learning_rate"] == pytest.approx(cell.learning_rate, rel=1e-12)
    assert Protocol.model_validate(result["protocol"]) == SHORT
    assert set(result["cost"]) - {"commit"} == {
        "seconds", "start_up", "train", "evaluate", "worker", "finished", "device", "backend", "versions",
    }  # fmt: skip
    # A build from PyPI has its CUDA version in torch.__version__ only.
    assert torch.__version__.startswith(result["cost"]["versions"]["torch"])


def test_a_head_is_drawn_as_the_model_s_configuration_says(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deviation that transformers' heads of such a model have."""
    from transformers import AutoModelForTokenClassification

    folder = place / "model"
    deviation = json.loads((folder / "config.json").read_text())["initializer_range"]
    heads: list[Any] = []
    head = TaggingTask.head

    def watched(self: TaggingTask, hidden: int, linear: Any) -> torch.nn.Module:
        heads.append(head(self, 512, linear))  # wide, so that its deviation is sure
        raise UserError("seen")

    monkeypatch.setattr(TaggingTask, "head", watched)
    with pytest.raises(UserError, match="seen"):
        run_cell(make(place, "conll2003"), store=place / "store", data_root=place / "data")
    weight = heads[0][-1].weight
    assert weight.std().item() == pytest.approx(deviation, rel=0.05)
    stock = AutoModelForTokenClassification.from_pretrained(folder, num_labels=2000).classifier.weight
    assert stock.std().item() == pytest.approx(deviation, rel=0.05)


def test_the_key_says_what_matters_and_nothing_else(place: Path) -> None:
    cell = make(place, "sst2")
    key = cell_key(cell)
    assert cell_key(dataclasses.replace(cell, model="other", model_folder=Path("/elsewhere"))) == key
    changes: list[dict[str, Any]] = [
        {"weights": "0"}, {"task": "conll2003"}, {"task_data": "0"}, {"learning_rate": 1.1e-3}, {"seed": 1},
        {"protocol": SHORT.model_copy(update={"batch_size": 9})},
        {"protocol": SHORT.model_copy(update={"attention": "causal"})},
        {"protocol": SHORT.model_copy(update={"pooling": "bos"})}, {"protocol": SHORT.model_copy(update={"pooling": "last"})},
        {"protocol": SHORT.model_copy(update={"precision": "bf16"})},
        {"seed": Seeds(1, 0, 0)}, {"seed": Seeds(0, 1, 0)}, {"seed": Seeds(0, 0, 1)},
    ]  # fmt: skip
    assert len({key, *(cell_key(dataclasses.replace(cell, **change)) for change in changes)}) == 14


def test_the_key_of_a_cell_is_what_it_was_when_the_first_results_were_filed() -> None:
    cell = Cell("a", Path("a"), "weights of a", "sst2", "data of sst2", Protocol(max_steps=10), 1e-3, 0)
    assert cell_key(cell) == "389bf6c1a1a0ee89234cfeab59a521c0d5717ad5b2d7a1bfb02e358f282dac17"


@pytest.mark.parametrize(("task", "metric", "wanted"), [
    ("sst2", "accuracy", 0.9), ("stsb", "spearman", 0.8),
    ("conll2003", "f1", 0.9), ("reqa_squad", "ndcg@10", 0.6),
    *(pytest.param(name, "f1", 0.6, marks=pytest.mark.slow) for name in ("squad_4k", "squad_v2")),
])  # fmt: skip
def test_a_small_untrained_model_learns_what_can_be_learnt(place: Path, task: str, metric: str, wanted: float) -> None:
    # Whether a span is found after fewer steps depends on the rounding of the CPU.
    steps = 450 if task.startswith("squad") else 120
    protocol = Protocol(max_steps=steps, max_length=48, stride=8, batch_size=32, weight_decay=0.0, head_dropout=0.0)
    result = run(place, make(place, task, protocol, learning_rate=5e-3))
    assert result["scores"]["test"][metric] > wanted, result["scores"]


@pytest.mark.parametrize("changes", [
    {"precision": "bf16", "attention": "causal", "pooling": "last"},
    {"precision": "fp32", "epochs": 0.2, "max_steps": None, "classifier": "linear"},
    {"symmetric": True, "label_sub_tokens": "first", "clip_norm": None},
], ids=str)  # fmt: skip
def test_every_option_runs_in_every_family(place: Path, changes: dict[str, Any]) -> None:
    protocol = Protocol.model_validate({**SHORT.model_dump(), **changes})
    for task in TASKS:
        result = run(place, make(place, task, protocol))
        assert result["status"] == "ok"
        scores = [(name, value) for split in result["scores"].values() for name, value in split.items()]
        assert all((-1 if name in CORRELATIONS else 0) <= value <= 1 for name, value in scores)


def test_a_length_that_is_not_settled_is_refused(place: Path) -> None:
    cell = make(place, "sst2")
    with pytest.raises(UserError, match="at_context"):
        run(place, dataclasses.replace(cell, protocol=Protocol(length_share=0.5)))


def test_a_loss_that_is_not_finite_ends_the_cell_at_once_and_is_a_result(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = make(place, "sst2")
    calls = []
    original = mlmclm.finetuning.forward.encode

    def broken(*arguments: Any, **named: Any) -> torch.Tensor:
        calls.append(1)
        hidden = original(*arguments, **named)
        return hidden * math.inf if len(calls) == 5 else hidden

    monkeypatch.setattr(mlmclm.finetuning.forward, "encode", broken)
    result = run(place, cell)
    assert (result["status"], result["scores"], result["diverged_step"], result["steps"]) == ("diverged", None, 5, 4)
    assert len(calls) == 5
    json.dumps(result, allow_nan=False)


def test_an_absurd_rate_diverges(place: Path) -> None:
    for task in ("stsb", "conll2003", "squad_v2", "reqa_squad"):
        protocol = Protocol.model_validate({**SHORT.model_dump(), "clip_norm": None})
        result = run(place, make(place, task, protocol, learning_rate=1e38))
        assert result["status"] == "diverged", task
        assert 1 <= result["diverged_step"] <= 8


@pytest.mark.parametrize("precision", ["bf16-autocast", "bf16"])
def test_a_reused_worker_reads_a_model_once_and_every_cell_begins_from_its_weights(
    place: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    original = mlmclm.finetuning.run.load_encoder
    monkeypatch.setattr(
        mlmclm.finetuning.run, "load_encoder", lambda folder: (read.append(folder), original(folder))[1]
    )
    began: list[dict[str, torch.Tensor]] = []
    monkeypatch.setattr(mlmclm.finetuning.run, "fine_tune", began_with(mlmclm.finetuning.run.fine_tune, began))
    protocol = Protocol.model_validate({**SHORT.model_dump(), "precision": precision})
    cache: dict[Any, Any] = {}
    for task, rate in (("sst2", 1e-2), ("sst2", 1e38), ("conll2003", 1e-2), ("reqa_squad", 1e-2), ("sst2", 1e-2)):
        run(place, make(place, task, protocol, learning_rate=rate), cache)
    assert read == [place / "model"]
    stored = load_file(place / "model" / "model.safetensors")
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    assert len(began) == 5
    for weights in began:
        assert weights.keys() == {name.removeprefix("model.") for name in stored if name.startswith("model.")}
        assert all(torch.equal(weight, stored[f"model.{name}"].to(dtype)) for name, weight in weights.items())
    (base,) = (kept for name, kept in cache.items() if name[0] == "model")
    assert all(parameter.grad is None and parameter.dtype == torch.float32 for parameter in base.parameters())
    assert all(torch.equal(weight, stored[f"model.{name}"]) for name, weight in base.named_parameters())


def began_with(train: Any, began: list[dict[str, torch.Tensor]]) -> Any:
    """`train` that notes the encoder's weights before it."""

    def watched(encoder: Any, *arguments: Any, **named: Any) -> Any:
        began.append({name: weight.detach().clone() for name, weight in encoder.named_parameters()})
        return train(encoder, *arguments, **named)

    return watched


def test_a_folder_that_is_no_model_or_too_short_a_model_is_refused(place: Path, tmp_path: Path) -> None:
    cell = make(place, "sst2")
    with pytest.raises(UserError, match="tokenizer is missing"):
        run(place, dataclasses.replace(cell, model_folder=tmp_path))
    with pytest.raises(UserError, match="made for 128 positions"):
        run(place, dataclasses.replace(cell, protocol=Protocol(max_length=200)))


def test_weights_that_changed_since_the_plan_are_refused(place: Path, tmp_path: Path) -> None:
    other = save_small_model(tmp_path / "model", seed=9)
    with pytest.raises(UserError, match="the model m has changed since this sweep was planned"):
        run(place, dataclasses.replace(make(place, "sst2"), model_folder=other))


def test_three_equal_seeds_are_the_cell_of_one_seed(place: Path) -> None:
    assert cell_key(make(place, "conll2003", seed=2)) == cell_key(make(place, "conll2003", seed=Seeds(2, 2, 2)))

"""Evaluation during training: held against a plain training whose weights are looked at from outside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlmclm.errors import UserError
from mlmclm.finetuning.cell import Cell, cell_key, training_key
from mlmclm.finetuning.loop import evaluate, train
from mlmclm.finetuning.protocol import Protocol
from mlmclm.finetuning.run import run_cell
from mlmclm.models.folder import load_encoder, weights_hash
from mlmclm.sweeps.trainings import work_of
from mlmclm.tasks.family import Family, fresh_layers, get_family
from mlmclm.tasks.prepare_task import prepare_task
from mlmclm.tasks.prepared_task import PreparedTask
from small_models import save_small_model, write_sentiment

SETTINGS: dict[str, Any] = {"max_steps": 32, "max_length": 48, "stride": 8, "batch_size": 8, "precision": "fp32"}
RATE = 3e-3


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopping")
    write_sentiment(folder / "data")
    save_small_model(folder / "model")
    return folder


def prepared(place: Path, protocol: Protocol) -> PreparedTask:
    return prepare_task("sst2", place / "model", protocol, place / "store", place / "data")


def cell_of(place: Path, **changes: Any) -> Cell:
    protocol = Protocol.model_validate(SETTINGS | changes)
    task = prepared(place, protocol)
    weights = weights_hash(place / "model")
    return Cell(
        "m", place / "model", weights, "sst2", task.task_data, protocol, RATE, 0, training_data=task.training_data
    )


def watched(place: Path, streams: dict[str, int]) -> dict[int, dict[str, dict[str, float]]]:
    """All scores after every fourth step and the last one of a training that knows nothing of it."""
    protocol = Protocol.model_validate(SETTINGS)
    family: Family = get_family("sequence-classification")(prepared(place, protocol), protocol)
    encoder = load_encoder(place / "model")
    import torch

    chance = torch.Generator().manual_seed(streams["head"])
    head = family.head(encoder.config.hidden_size, fresh_layers(chance, encoder.config.initializer_range))
    seen = {}

    def look(step: int, steps: int, loss: float) -> None:
        if step % 4 == 0 or step == steps:
            examples = evaluate(encoder, head, family, protocol, ("validation", "test"))
            assert examples is not None
            seen[step] = {split: family.scores(rows) for split, rows in examples.items()}
            encoder.train(), head.train()

    train(encoder, head, family, protocol, learning_rate=RATE, order=streams["order"], on_step=look)
    return seen


def test_scores_are_those_of_the_best_evaluation_and_patience_ends_the_training(place: Path) -> None:
    where: dict[str, Any] = {"store": place / "store", "data_root": place / "data"}
    last = run_cell(cell_of(place), **where)
    seen = watched(place, last["streams"])
    assert seen[32] == last["scores"]
    curve = {step: each["validation"]["accuracy"] for step, each in seen.items()}
    best = max(curve, key=lambda step: (curve[step], -step))
    assert best < 32 and seen[best]["test"] != seen[32]["test"], "there is something to choose"

    whole = run_cell(cell_of(place, evaluate_every=4), **where)
    assert whole["evaluations"] == [list(each) for each in curve.items()]
    assert (whole["best_step"], whole["steps"]) == (best, 32)
    assert whole["scores"] == seen[best]

    stopped = run_cell(cell_of(place, evaluate_every=4, patience=1), **where)
    ends = next(
        step
        for step in sorted(curve)
        if step > 4 and curve[step] <= max(curve[known] for known in curve if known < step)
    )
    assert (stopped["steps"], stopped["best_step"]) == (ends, ends - 4)
    assert stopped["scores"] == seen[ends - 4]
    assert stopped["curve"] == [point for point in whole["curve"] if point[0] <= ends]
    assert stopped["examples"] == ends * 8


def test_such_a_cell_has_a_key_of_its_own_and_shares_its_training_with_none(place: Path) -> None:
    plain, watched = cell_of(place), cell_of(place, evaluate_every=4)
    assert cell_key(plain) != cell_key(watched) != cell_key(cell_of(place, evaluate_every=4, patience=2))
    assert training_key(plain) != cell_key(plain)
    assert training_key(watched) == cell_key(watched)
    task = prepared(place, plain.protocol)
    validation = task.sizes["validation"][1]
    assert work_of(task, watched.protocol)[0] == work_of(task, plain.protocol)[0] + 8 * validation


def test_patience_counts_evaluations() -> None:
    from mlmclm.configuration import parse

    with pytest.raises(UserError, match="give 'evaluate_every' too"):
        parse(Protocol, {"patience": 3}, where="mine")

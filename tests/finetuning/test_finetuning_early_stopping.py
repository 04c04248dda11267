"""Evaluation during training: held against a plain training whose weights are looked at from outside."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mlmclm import versions
from mlmclm.errors import UserError
from mlmclm.finetuning.cell import Cell, cell_key, training_key
from mlmclm.finetuning.loop import BestWeights, evaluate_splits
from mlmclm.finetuning.protocol import Protocol
from mlmclm.finetuning.run import fresh_layers, run_cell
from mlmclm.models.folder import load_encoder, weights_hash
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.sweeps.trial import work_of
from mlmclm.tasks.prepare_task import prepare_task
from mlmclm.tasks.prepared_task import PreparedTask
from small_models import save_small_model, write_sentiment
from trainings import trained

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
    task = prepared(place, protocol)
    encoder = load_encoder(place / "model")
    chance = torch.Generator().manual_seed(streams["head"])
    head = task.head(encoder.config.hidden_size, fresh_layers(chance, encoder.config.initializer_range))
    seen = {}

    def look(step: int, steps: int, loss: float) -> None:
        if step % 4 == 0 or step == steps:
            examples = evaluate_splits(encoder, head, task, protocol, ("validation", "test"))
            assert examples is not None
            seen[step] = {split: task.scores(rows) for split, rows in examples.items()}
            encoder.train(), head.train()

    trained(encoder, head, task, protocol, learning_rate=RATE, order=streams["order"], on_step=look)
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
    from mlmclm.configuration import parse_config

    with pytest.raises(UserError, match="give 'evaluate_every' too"):
        parse_config(Protocol, {"patience": 3}, where="mine")


def test_scores_that_are_not_finite_are_never_the_best_and_can_be_filed(place: Path) -> None:
    layer = torch.nn.Linear(1, 1)
    best = BestWeights([layer], patience=2)
    stops = []
    for step, score in enumerate((math.nan, 0.5, math.nan, 0.9, math.inf, 0.1), 1):
        with torch.no_grad():
            layer.weight.fill_(step)
        stops.append(best.add(step, score))
    assert stops == [False, False, False, False, False, True] and best.step == 4
    assert best.evaluations == [[1, None], [2, 0.5], [3, None], [4, 0.9], [5, None], [6, 0.1]]
    best.restore()
    assert layer.weight.item() == 4
    cell = replace(cell_of(place, evaluate_every=1, patience=2, clip_norm=None), learning_rate=1e12)
    result = run_cell(cell, store=place / "store", data_root=place / "data")
    assert result["status"] == "diverged" and None in [score for _, score in result["evaluations"]]
    ResultsStore(place / "store").write(result)


def test_the_score_that_chooses_the_weights_is_in_the_key(place: Path) -> None:
    plain, watched = cell_of(place), cell_of(place, evaluate_every=4)
    other = plain.declared.model_copy(update={"metric": "f1"})
    assert cell_key(replace(plain, declaration=other)) == cell_key(plain)
    assert cell_key(replace(watched, declaration=other)) != cell_key(watched)


def test_distinct_batches_have_a_version_of_their_own_in_keys(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, distinct = cell_of(place), cell_of(place, distinct_batches=True)
    mined = replace(plain, declaration=plain.declared.model_copy(update={"columns": {"negative": "n"}}))
    keys = [(cell_key(each), training_key(each)) for each in (plain, distinct, mined)]
    monkeypatch.setattr(versions, "DISTINCT_BATCHES", 3)
    again = [(cell_key(each), training_key(each)) for each in (plain, distinct, mined)]
    assert keys[0] == again[0] and all(
        old != new for old, new in zip(keys[1] + keys[2], again[1] + again[2], strict=True)
    )

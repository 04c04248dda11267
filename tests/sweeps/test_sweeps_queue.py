"""The queue of a sweep's trainings: all are given once, workers stay with a model, models end together, long ones first."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from mlmclm.finetuning.cell import Cell, cell_key
from mlmclm.sweeps.cell_queue import CellQueue
from mlmclm.sweeps.trainings import Training, trainings_of
from sweep_cells import make_cell, make_cells


def by_key(cells: list[Cell]) -> dict[str, Cell]:
    return {cell_key(cell): cell for cell in cells}


def trainings(**counts: int) -> list[Training]:
    return trainings_of(by_key([cell for model, count in counts.items() for cell in make_cells(count, model=model)]))


@pytest.mark.parametrize("workers", [1, 2, 3, 7, 40])
def test_every_training_is_given_once_and_each_model_in_its_order(workers: int) -> None:
    every = trainings(a=7, b=1, c=12)
    queue, taken = CellQueue(every), list[Training]()
    while (training := queue.take(f"worker {len(taken) % workers}")) is not None:
        taken.append(training)
    assert sorted(each.name for each in taken) == sorted(each.name for each in every) and len(queue) == 0
    for model in "abc":
        seeds = [each.first.seed for each in taken if each.first.model == model]
        assert seeds == sorted(seeds)  # type: ignore[type-var]


def test_a_worker_changes_models_only_where_its_own_has_nothing_left() -> None:
    queue, models = CellQueue(trainings(a=5, b=5, c=5)), dict[str, list[str]]()
    for turn in range(15):
        training = queue.take(str(turn % 2))
        assert training is not None
        models.setdefault(str(turn % 2), []).append(training.first.model)
    changes = sum(one != other for each in models.values() for one, other in pairwise(each))
    assert changes == 2, "each has a model of its own, and both then share the third"


def models_taken(queue: CellQueue, workers: int) -> list[str]:
    taken = [queue.take(str(worker)) for worker in range(workers)]
    return [training.first.model for training in taken if training is not None]


def test_workers_go_where_most_work_is_left_for_each() -> None:
    # Work left per worker: b 10 alone of all; b 9 / 2, c 4; b 8 / 3, c 4, a 2; b 8 / 3, c 3 / 2, a 2.
    assert models_taken(CellQueue(trainings(a=2, b=10, c=4)), 4) == ["b", "b", "c", "b"]


def test_work_counts_and_not_the_number_of_trainings() -> None:
    heavy = [replace(cell, work=(100.0, 1.0)) for cell in make_cells(1, model="heavy")]
    assert models_taken(CellQueue(trainings_of(by_key([*make_cells(50, model="light"), *heavy]))), 2) == [
        "heavy",
        "light",
    ]


def test_the_longest_of_a_model_come_first_and_equals_in_their_order() -> None:
    sizes = {"short": (1.0, 1.0), "long": (9.0, 1.0), "searched": (5.0, 7.0)}
    cells = [replace(make_cell(task=task, seed=seed), work=work) for task, work in sizes.items() for seed in (0, 1)]
    queue = CellQueue(trainings_of(by_key(cells)))
    taken = [training.first for _ in cells if (training := queue.take("one")) is not None]
    assert [(cell.task, cell.seed) for cell in taken] == [
        ("searched", 0), ("searched", 1), ("long", 0), ("long", 1), ("short", 0), ("short", 1),
    ]  # fmt: skip


def test_a_training_that_comes_back_is_the_next_of_its_model() -> None:
    queue = CellQueue(trainings(a=3))
    first = queue.take("one")
    assert first is not None and queue.give_up("one") == first and queue.give_up("one") is None
    queue.put_back(first)
    assert queue.take("two") == first


def test_cells_of_equal_training_are_one_training_and_others_are_not() -> None:
    def cell(task: str, data: str, **changes: object) -> Cell:
        return replace(make_cell(task=task), training_data=data, work=(10.0, 1.0), **changes)  # type: ignore[arg-type]

    judged = make_cell().protocol.model_copy(update={"max_evaluation_documents": "judged"})
    longer = make_cell().protocol.model_copy(update={"max_steps": 20})
    cells = [
        cell("msmarco", "pairs"), cell("nq", "pairs", protocol=judged), cell("sst2", "rows"), cell("mldr", "pairs"),
        cell("nq", "pairs", learning_rate=1e-5), cell("nq", "pairs", seed=7), cell("nq", "pairs", weights="other"),
        cell("nq", "pairs", protocol=longer), cell("a", ""), cell("b", ""),
    ]  # fmt: skip
    groups = [[each.task for each in training.cells.values()] for training in trainings_of(by_key(cells))]
    assert groups == [["msmarco", "nq", "mldr"], ["sst2"], ["nq"], ["nq"], ["nq"], ["nq"], ["a"], ["b"]]
    shared = trainings_of(by_key(cells))[0]
    assert shared.name == "a/msmarco+nq+mldr/lr1e-03/s0" and shared.work == 13.0

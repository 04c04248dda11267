"""The queue of a sweep's cells: all are given once, workers stay with a model, and models end together."""

from __future__ import annotations

from itertools import pairwise

import pytest
from sweep_cells import make_cells

from mlmclm.finetuning.cell import Cell, cell_key
from mlmclm.sweeps.cell_queue import CellQueue


def cells_of(**counts: int) -> dict[str, Cell]:
    return {cell_key(cell): cell for model, count in counts.items() for cell in make_cells(count, model=model)}


@pytest.mark.parametrize("workers", [1, 2, 3, 7, 40])
def test_every_cell_is_given_once_and_each_model_in_its_order(workers: int) -> None:
    cells = cells_of(a=7, b=1, c=12)
    queue, taken = CellQueue(cells), list[str]()
    while (key := queue.take(f"worker {len(taken) % workers}")) is not None:
        taken.append(key)
    assert sorted(taken) == sorted(cells) and len(queue) == 0
    for model in "abc":
        seeds = [cells[key].seed for key in taken if cells[key].model == model]
        assert seeds == sorted(seeds)  # type: ignore[type-var]


def test_a_worker_changes_models_only_where_its_own_has_no_cell_left() -> None:
    cells = cells_of(a=5, b=5, c=5)
    queue, models = CellQueue(cells), dict[str, list[str]]()
    for turn in range(15):
        key = queue.take(str(turn % 2))
        assert key is not None
        models.setdefault(str(turn % 2), []).append(cells[key].model)
    changes = sum(one != other for each in models.values() for one, other in pairwise(each))
    assert changes == 2, "each has a model of its own, and both then share the third"


def test_workers_go_where_most_cells_are_left_for_each() -> None:
    queue = CellQueue(cells := cells_of(a=2, b=10, c=4))
    assert [cells[queue.take(str(worker)) or ""].model for worker in range(4)] == ["b", "b", "c", "b"]


def test_a_cell_that_comes_back_is_the_next_of_its_model() -> None:
    queue = CellQueue(cells_of(a=3))
    first = queue.take("one")
    assert first is not None and queue.give_up("one") == first and queue.give_up("one") is None
    queue.put_back(first)
    assert queue.take("two") == first

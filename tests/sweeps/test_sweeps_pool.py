"""The pool of a sweep's workers fills the cluster, is refilled, grows with it and shrinks; late results are waited for."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import sweep_cells
from ray.cluster_utils import Cluster as Raylets
from sweep_cells import FakeWorker, InACrew, NeverStarts, SlowToStart, crew, make_cells

from mlmclm.errors import EnvironmentFault
from mlmclm.finetuning.cell import Cell, cell_key
from mlmclm.service.ray_cluster import ray_session
from mlmclm.sweeps.ledger import Ledger
from mlmclm.sweeps.outcome import SweepOutcome
from mlmclm.sweeps.run_sweep import run_sweep


@pytest.fixture(scope="module")
def raylets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Raylets]:
    """A session on a head with two CPUs, to which nodes can be added."""
    ray.cloudpickle.register_pickle_by_value(sweep_cells)
    with ray_session(tmp_path_factory.mktemp("ray"), num_cpus=2):
        raylets = Raylets(initialize_head=False, shutdown_at_exit=False)
        raylets.head_node = ray._private.worker._global_node
        yield raylets
    ray.cloudpickle.unregister_pickle_by_value(sweep_cells)


def sweep(store: Path, cells: list[Cell], worker: type[Any], **options: Any) -> SweepOutcome:
    return run_sweep(cells, store=store, data_root=None, worker=worker, **options)


def aside(act: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not true() and time.monotonic() < deadline:
        time.sleep(0.05)


def workers_of(outcome: SweepOutcome) -> Counter[str]:
    return Counter(result["cost"]["worker"] for result in outcome.results)


def test_a_worker_that_starts_late_gets_its_share(raylets: Raylets, tmp_path: Path) -> None:
    outcome = sweep(tmp_path, make_cells(80), SlowToStart)
    assert (outcome.computed, outcome.failed) == (80, [])
    assert len(workers_of(outcome)) == 2
    assert min(workers_of(outcome).values()) > 10


def test_a_killed_worker_is_replaced(raylets: Raylets, tmp_path: Path) -> None:
    (tmp_path / "wanted").write_text("3")  # only two fit, so every cell waits for the one that replaces the killed one

    def kill() -> None:
        wait_until(lambda: len(crew(tmp_path)) == 2)
        os.kill(crew(tmp_path)[0], signal.SIGKILL)

    thread = aside(kill)
    cells = make_cells(6)
    outcome = sweep(tmp_path, cells, InACrew)
    thread.join()
    assert [result["key"] for result in outcome.results] == list(map(cell_key, cells))
    assert len(crew(tmp_path)) == 3


def test_a_node_that_joins_late_is_used_and_one_that_leaves_is_done_without(raylets: Raylets, tmp_path: Path) -> None:
    (tmp_path / "wanted").write_text("3")

    def join_and_leave() -> None:
        wait_until(lambda: len(crew(tmp_path)) == 2)
        node = raylets.add_node(num_cpus=1)
        wait_until(lambda: len(crew(tmp_path)) == 3)
        (tmp_path / "wanted").write_text("4")  # now all three wait with a cell each
        wait_until(lambda: len(list((tmp_path / "cells").glob("*/*.json"))) >= 3)
        raylets.remove_node(node, allow_graceful=False)
        (tmp_path / "wanted").write_text("3")

    thread = aside(join_and_leave)
    cells = make_cells(12)
    outcome = sweep(tmp_path, cells, InACrew)
    thread.join()
    assert [result["key"] for result in outcome.results] == list(map(cell_key, cells))
    assert outcome.failed == []


def test_workers_that_cannot_start_end_the_sweep_with_the_reason(raylets: Raylets, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"workers of the sweep do not start: .*no such library"):
        sweep(tmp_path, make_cells(3), NeverStarts, max_failures=1)


class Late(Ledger):
    """A ledger on a file system that shows a file only after its name was looked up `looks` times."""

    looks = 3

    def __init__(self, store: Path) -> None:
        super().__init__(store)
        self.looked = Counter[str]()

    def find(self, key: str) -> dict[str, Any] | None:
        found = super().find(key)
        if found is not None:
            self.looked[key] += 1
        return found if self.looked[key] > self.looks else None


def test_a_result_that_is_seen_late_is_waited_for(raylets: Raylets, tmp_path: Path) -> None:
    cells = make_cells(4)
    outcome = sweep(tmp_path, cells, FakeWorker, ledger=Late(tmp_path))
    assert [result["key"] for result in outcome.results] == list(map(cell_key, cells))
    assert outcome.computed == 4


def test_a_result_that_is_never_seen_is_an_error_that_says_so(
    raylets: Raylets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlmclm.sweeps.worker_pool.SECONDS_UNTIL_VISIBLE", 2.0)
    ledger = Late(tmp_path)
    ledger.looks = 1_000
    with pytest.raises(EnvironmentFault, match=r"a/sst2/lr1e-03/s\d: a worker filed this result 2 s ago.*shared"):
        sweep(tmp_path, make_cells(2), FakeWorker, ledger=ledger)

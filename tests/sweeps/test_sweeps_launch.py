"""A sweep on a real Ray cluster: what is there is not computed, and what breaks is tried again."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

import sweep_cells
from mlmclm.cluster.ray_cluster import ray_session
from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.finetuning.cell import cell_key
from mlmclm.finetuning.protocol import Protocol
from mlmclm.finetuning.run import run_cell
from mlmclm.models.folder import weights_hash
from mlmclm.sweeps import run_sweep as sweep_module
from mlmclm.sweeps.cell_failures import Retries
from mlmclm.sweeps.cells import SweepModel, expand
from mlmclm.sweeps.results_store import ResultsStore
from mlmclm.sweeps.run_sweep import await_visible, run_sweep
from mlmclm.sweeps.space import Space
from mlmclm.sweeps.sweep_options import SweepOptions, SweepOutcome
from mlmclm.sweeps.trainable import Finetune
from mlmclm.tasks.prepare_task import prepare_task
from small_models import save_small_model, write_entities, write_sentiment
from sweep_cells import Fails, FakeWorker, InACrew, SlowToStart, WatchedWorker, crew, make_cell, make_cells, make_result


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    ray.cloudpickle.register_pickle_by_value(sweep_cells)
    with ray_session(tmp_path_factory.mktemp("session"), num_cpus=2):
        yield
    ray.cloudpickle.unregister_pickle_by_value(sweep_cells)


def sweep(store: Path, cells: list[Any], **options: Any) -> SweepOutcome:
    return run_sweep(cells, SweepOptions(store=store, worker=FakeWorker, **options))


alone = partial(sweep, max_concurrent=1)
"""A sweep with one worker, for what doesn't depend on their number: each takes seconds to start."""


def faults(store: Path, **by_seed: str) -> None:
    (store / "faults").mkdir(exist_ok=True)
    for seed, fault in by_seed.items():
        (store / "faults" / seed.removeprefix("seed")).write_text(fault)


def signal_one_of_two(store: Path, number: int) -> None:
    """Send a signal to a worker, in a thread, once two have begun a cell."""

    def send() -> None:
        while len(crew(store)) < 2:
            time.sleep(0.02)
        os.kill(crew(store)[0], number)

    threading.Thread(target=send, daemon=True).start()


def starts(store: Path) -> dict[str, int]:
    return {path.name: len(path.read_text().splitlines()) for path in (store / "starts").iterdir()}


@pytest.fixture(scope="module")
def swept(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A sweep of 40 cells, each asked for twice. The first has a result, another sweep computes the second, and one of
    the two workers starts late."""
    store = tmp_path_factory.mktemp("swept")
    cells = [make_cell(model=model, task=task, seed=s) for model in "ab" for task in ("sst2", "rte") for s in range(10)]
    results_store, shared = ResultsStore(store), cells[1]
    results_store.write(make_result(cells[0]))
    looks: list[str] = []  # of this sweep, at who holds the lease: after the first it says that it waits
    looked = results_store.leases.holder

    def other_sweep() -> None:
        with results_store.leases.attempt([results_store.lease(cell_key(shared))]) as other:
            leased.set()
            assert other is None
            while results_store.missing(cells) != [shared] or len(looks) < 2:
                time.sleep(0.05)
            results_store.write(make_result(shared, worker="another sweep"))

    def holder(name: str) -> str | None:
        looks.append(name)
        return looked(name)

    leased = threading.Event()
    thread = threading.Thread(target=other_sweep, daemon=True)
    thread.start()
    assert leased.wait(300)
    results_store.leases.holder = holder  # type: ignore[method-assign]
    announced: list[dict[str, Any]] = []
    with contextlib.redirect_stderr(io.StringIO()) as said:
        options = SweepOptions(store=store, worker=SlowToStart, on_result=announced.append, results_store=results_store)
        outcome = run_sweep([*cells, *cells], options)
    thread.join(300)
    actors = {actor["ActorClassName"] for actor in ray._private.state.actors().values()}
    return SimpleNamespace(
        store=store, cells=cells, outcome=outcome, announced=announced, said=said.getvalue(), actors=actors
    )


def test_only_missing_cells_are_computed_once_each_and_all_come_back_in_order(swept: SimpleNamespace) -> None:
    outcome, twice = swept.outcome, [*swept.cells, *swept.cells]
    assert [result["key"] for result in outcome.results] == [cell_key(cell) for cell in twice]
    assert (outcome.computed, outcome.reused, outcome.failed, outcome.not_run) == (38, 2, [], [])
    assert sorted(result["key"] for result in swept.announced) == sorted(map(cell_key, twice))
    assert starts(swept.store) == {f"{cell.model}-{cell.task}-{cell.seed}": 1 for cell in swept.cells[2:]}
    (grid,) = outcome.grids  # Tune's own, whose trials are those that ran here
    trials = [trial for trial in grid if trial.error is None]  # Ray gives up a worker that takes minutes to start
    assert {(trial.config["model"], trial.config["task"]) for trial in trials} == {
        (cell.model, cell.task) for cell in swept.cells[2:]
    }
    filed = {result["key"]: result["scores"]["test"]["accuracy"] for result in outcome.results}
    told = [trial.metrics for trial in trials if "key" in trial.metrics]  # all but the one that another sweep computes
    assert len(told) >= len(trials) - 1 and all(filed[each["key"]] == each["test"]["accuracy"] for each in told)
    assert grid.get_best_result("score", "max").metrics["score"] == max(filed.values())


def test_workers_are_reused_and_one_that_starts_late_gets_its_share(swept: SimpleNamespace) -> None:
    shares = Counter(result["cost"]["worker"] for result in swept.outcome.results[2:40])
    assert len(shares) == 2 and min(shares.values()) > 5
    assert (swept.store / "environment").read_text() == f"1 1 {8 << 30}"
    assert swept.actors == {"SlowToStart"}
    assert list(swept.store.glob(".tune-*")) == [], "Tune's own state is removed"
    (grid,) = swept.outcome.grids
    assert not any(trial.metric_n_steps for trial in grid._experiment_analysis.trials), "lists of what was reported"


def test_a_cell_that_another_sweep_computes_is_waited_for_behind_the_others_and_taken(swept: SimpleNamespace) -> None:
    assert swept.outcome.results[1]["cost"]["worker"] == "another sweep"
    assert swept.announced[-1]["key"] == cell_key(swept.cells[1])
    assert swept.said.count("waiting for cells that process ") == 1
    assert "fine-tuning: 40/40 cells" in swept.said
    assert "1 computed by other processes" in swept.said
    assert list((swept.store / "claims").iterdir()) == []


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Sixteen real cells, and their results by themselves."""
    place = tmp_path_factory.mktemp("real")
    write_sentiment(place / "data", train=80, test=30)
    write_entities(place / "data", train=80, test=30)
    folders = {name: save_small_model(place / name, seed=seed) for seed, name in enumerate("ab")}
    protocol = Protocol(max_steps=4, max_length=48, stride=8, batch_size=8, max_evaluation_examples=20)
    space = Space(tasks=("sst2", "conll2003"), learning_rates=(1e-3, 1e-2), seeds=(0, 1), protocol=protocol)
    places = {"store": place, "data_root": place / "data"}
    data = {task: prepare_task(task, folders["a"], protocol, **places).task_data for task in space.tasks}
    models = [SweepModel(name, folder, weights_hash(folder)) for name, folder in folders.items()]
    cells = expand(space, models, data)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = [run_cell(cell, **places) for cell in cells]
    finally:
        torch.set_num_threads(threads)
    return SimpleNamespace(cells=cells, data=place / "data", alone=alone)


def sweep_of_real_cells(real: SimpleNamespace, store: Path, worker: type[Finetune]) -> list[dict[str, Any]]:
    """Check that the cells have the bits that they have by themselves; return the results."""
    options = SweepOptions(store=store, data_root=real.data, worker=worker)
    outcome = run_sweep(real.cells, options)
    outcome.check()
    assert outcome.computed == len(real.cells) == 16
    for found, wanted in zip(outcome.results, real.alone, strict=True):
        assert {**found, "cost": None} == {**wanted, "cost": None}
    return outcome.results


@pytest.mark.slow
def test_real_cells_have_the_same_bits_from_workers_side_by_side_as_by_themselves(
    cluster: None, real: SimpleNamespace, tmp_path: Path
) -> None:
    sweep_of_real_cells(real, tmp_path, WatchedWorker)
    watched = [line.split() for line in (tmp_path / "watched").read_text().splitlines()]
    assert len({process for process, *_ in watched}) == 2
    held = {(process, model): (base, weights) for process, model, base, weights in watched}
    assert all(held[process, model] == (base, weights) for process, model, base, weights in watched), "read once"


@pytest.mark.slow
def test_real_cells_have_the_same_bits_after_a_worker_was_killed_and_one_ran_out_of_memory(
    cluster: None, real: SimpleNamespace, tmp_path: Path
) -> None:
    faults(tmp_path, seed0="killed", seed1="memory")
    results = sweep_of_real_cells(real, tmp_path, Fails)
    failed = {each["failure"] for result in results for each in result["cost"].get("retried_after", ())}
    assert failed == {"crash", "out of memory"}


def test_a_second_sweep_computes_nothing_and_opens_no_session(tmp_path: Path) -> None:
    cells = make_cells(3)
    for cell in cells:
        ResultsStore(tmp_path).write(make_result(cell))

    @contextlib.contextmanager
    def no_session() -> Iterator[None]:
        raise AssertionError("a session was opened")
        yield

    announced: list[dict[str, Any]] = []
    outcome = sweep(tmp_path, cells, session=no_session, on_result=announced.append)
    assert (outcome.computed, outcome.reused) == (0, 3)
    assert announced == outcome.results == [make_result(cell) for cell in cells]


@pytest.fixture(scope="module")
def disturbed(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A sweep of six cells in which a worker is killed."""
    store = tmp_path_factory.mktemp("disturbed")
    (store / "wanted").write_text("3")  # only two fit, so cells wait for the one that replaces the killed one
    signal_one_of_two(store, signal.SIGKILL)
    cells = make_cells(6)
    options = SweepOptions(store=store, worker=InACrew)
    return SimpleNamespace(store=store, cells=cells, outcome=run_sweep(cells, options))


def test_a_worker_killed_in_the_middle_of_a_cell_is_replaced_and_costs_that_cell_another_start(
    disturbed: SimpleNamespace,
) -> None:
    assert len(crew(disturbed.store)) >= 3
    assert sorted(starts(disturbed.store).values()) == [1, 1, 1, 1, 1, 2]


@pytest.mark.slow
def test_a_cell_over_its_time_limit_is_ended_and_named_and_the_others_are_computed(
    cluster: None, tmp_path: Path
) -> None:
    faults(tmp_path, seed2="always waits")
    cells = make_cells(4)
    others = [cell for cell in cells if cell.seed != 2]
    outcome = sweep(tmp_path, cells, time_limit=45.0)
    assert [result["key"] for result in outcome.results] == [cell_key(cell) for cell in others]
    assert starts(tmp_path)["a-sst2-2"] == 1, "it would take as long again"
    with pytest.raises(
        EnvironmentFault, match=r"1 of 4 cells failed: a/sst2/lr1e-3/s2.*\n.*over the time limit of 45 s"
    ):
        outcome.check()


@pytest.mark.slow
def test_a_cell_that_runs_out_of_memory_is_computed_again_with_the_same_result(cluster: None, tmp_path: Path) -> None:
    faults(tmp_path, seed1="memory")
    cells = make_cells(3)
    outcome = sweep(tmp_path, cells)
    assert [result["scores"] for result in outcome.results] == [make_result(cell)["scores"] for cell in cells]
    retried = {result["seed"]: result["cost"].get("retried_after", []) for result in outcome.results}
    assert [each["failure"] for each in retried[1]] == ["out of memory"] and not retried[0] and not retried[2]


@pytest.mark.slow
def test_a_worker_that_hangs_is_replaced_and_its_cell_computed_by_another(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlmclm.sweeps.sweep_trials.SECONDS_UNTIL_HUNG", 5.0)
    faults(tmp_path, seed4="stops")
    cells = make_cells(6)
    outcome = sweep(tmp_path, cells)
    assert [result["key"] for result in outcome.results] == [cell_key(cell) for cell in cells]
    retried = [after for result in outcome.results if (after := result["cost"].get("retried_after"))]
    assert [[each["failure"] for each in after] for after in retried] == [["hung"]]


@pytest.mark.slow
def test_a_cell_that_always_crashes_fails_alone_after_its_retries_and_is_named(cluster: None, tmp_path: Path) -> None:
    cells = make_cells(5)
    faults(tmp_path, seed1="always raises", seed2="diverges", seed3="always input")
    outcome = sweep(tmp_path, cells, retries=Retries(crash=1))
    assert [result["seed"] for result in outcome.results] == [0, 2, 4]
    assert outcome.results[1]["status"] == "diverged", "divergence is a result, not a failure"
    assert starts(tmp_path)["a-sst2-1"] == 2
    assert starts(tmp_path)["a-sst2-3"] == 1, "bad input would fail again"
    with pytest.raises(EnvironmentFault) as caught:
        outcome.check()
    message = str(caught.value)
    assert "2 of 5 cells failed: a/sst2/lr1e-3/s1, a/sst2/lr1e-3/s3." in message
    assert "RuntimeError: something broke" in message
    assert "3 results are kept" in message
    assert "the data set has no such column" in str(outcome.failed[1][1])
    assert sweep(tmp_path, [cells[0], cells[2], cells[4]]).computed == 0


def test_cells_that_fail_for_bad_input_only_are_the_users_error() -> None:
    outcome = SweepOutcome([], failed=[(make_cell(), UserError("the data set has no such column"))])
    with pytest.raises(UserError, match="the data set has no such column"):
        outcome.check()


@pytest.mark.slow
def test_a_full_disk_ends_the_sweep_instead_of_failing_every_cell(cluster: None, tmp_path: Path) -> None:
    faults(tmp_path, seed1="always full")
    outcome = alone(tmp_path, make_cells(40))
    assert 0 < len(outcome.not_run) < 40
    assert len(outcome.results) + len(outcome.not_run) + 1 == 40
    with pytest.raises(EnvironmentFault, match=r"cells were not tried.*\n.*the disk is full"):
        outcome.check()


def test_a_damaged_result_is_named_before_anything_is_computed(tmp_path: Path) -> None:
    cells = make_cells(2)
    ResultsStore(tmp_path).write(make_result(cells[1]))
    path = ResultsStore(tmp_path).path(cell_key(cells[1]))
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(UserError, match=path.name):
        sweep(tmp_path, cells)


def test_a_cell_that_needs_more_than_the_cluster_has_is_refused(cluster: None, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"A cell needs 3 CPU on one node.*it has 2 CPUs"):
        sweep(tmp_path, make_cells(1), cpus_per_cell=3)


def test_an_error_of_the_callers_own_stops_the_sweep_and_reaches_the_caller(cluster: None, tmp_path: Path) -> None:
    def refuse(result: dict[str, Any]) -> None:
        raise LookupError("no thanks")

    with pytest.raises(LookupError, match="no thanks"):
        alone(tmp_path, make_cells(4), on_result=refuse)


@pytest.mark.slow
def test_a_cell_that_another_sweep_gives_up_is_computed(cluster: None, tmp_path: Path) -> None:
    cells = make_cells(2)
    results_store = ResultsStore(tmp_path)

    def other_sweep() -> None:
        with results_store.leases.attempt([results_store.lease(cell_key(cell)) for cell in cells]):
            leased.set()
            while not (tmp_path / "claims").exists() or not waiting.wait(0.02):
                pass

    leased, waiting = threading.Event(), threading.Event()
    thread = threading.Thread(target=other_sweep, daemon=True)
    thread.start()
    assert leased.wait(300)
    looked = results_store.leases.holder

    def holder(name: str) -> str | None:
        found = looked(name)
        waiting.set()  # this sweep's first experiment is over, and it waits
        return found

    results_store.leases.holder = holder  # type: ignore[method-assign]
    outcome = sweep(tmp_path, cells, results_store=results_store)
    thread.join(300)
    assert (outcome.computed, outcome.reused) == (2, 0)
    assert starts(tmp_path) == {"a-sst2-0": 1, "a-sst2-1": 1}


def test_a_result_that_is_seen_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells, results_store = make_cells(2), ResultsStore(tmp_path)
    results_store.write(make_result(cells[0]))

    def file_the_other(seconds: float) -> None:
        results_store.write(make_result(cells[1]))

    monkeypatch.setattr(sweep_module, "time", SimpleNamespace(monotonic=time.monotonic, sleep=file_the_other))
    await_visible(cells, results_store)
    assert results_store.missing(cells) == []


def test_a_result_that_is_never_seen_is_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_module, "SECONDS_UNTIL_VISIBLE", -1.0)
    with pytest.raises(EnvironmentFault, match=r"a/sst2/lr1e-3/s0: a worker filed this result.*shared by all nodes"):
        await_visible(make_cells(1), ResultsStore(tmp_path))

"""Trials of a sweep: their order, short cells, what is tried again, what ends, and results that are seen late."""

from __future__ import annotations

import errno
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray.exceptions import ActorDiedError, RayTaskError
from ray.tune.search import Searcher

from mlmclm.cluster.placement import Cluster, Resources
from mlmclm.errors import StorageFault, UserError
from mlmclm.finetuning.cell import Cell, cell_key
from mlmclm.sweeps import sweep_trials
from mlmclm.sweeps.cell_failures import Failure, Retries, failure_of
from mlmclm.sweeps.shared_cluster import SharedCluster
from mlmclm.sweeps.sweep_options import SweepOptions
from mlmclm.sweeps.sweep_progress import SweepProgress
from mlmclm.sweeps.sweep_trials import SweepTrials, in_order
from mlmclm.sweeps.table import SweepTable
from mlmclm.sweeps.trainable import COMPUTED, ENVIRONMENT_FAULT, STORAGE_FAULT, TAKEN, USER_ERROR
from mlmclm.sweeps.trial import SweepTrial, seeds_together, trainings_of
from mlmclm.sweeps.tune_hooks import CellSearch, SweepCallback, SweepScheduler
from sweep_cells import make_cell, make_cells


class Clock:
    """A clock that only the test moves."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Undrawn(SweepProgress):
    """A progress that is not shown."""

    def update(self) -> None:
        """Draw nothing."""


class Shared(SharedCluster):
    """Has room for so many trials."""

    def __init__(self, most: float = math.inf) -> None:
        self.nodes: list[Resources] = []
        super().__init__({"CPU": 1.0}, lambda: Cluster(tuple(self.nodes), {}))
        self.most = most


class World:
    """The trials of some cells, and what Tune, Ray and the store would tell them."""

    def __init__(self, cells: list[Cell], **options: Any) -> None:
        self.cells = {cell_key(cell): cell for cell in cells}
        self.there, self.filed = dict[str, dict[str, Any]](), dict[str, dict[str, Any]]()
        self.noted, self.availability = list[tuple[str, ...]](), SimpleNamespace(lost=0.0)
        retries, shared = options.pop("retries", Retries(crash=1)), options.pop("shared", Shared())
        places, resources = options.pop("places", 1), options.pop("resources", {"CPU": 1.0})
        shared.nodes = [{"CPU": float(places)} | {kind: places * amount for kind, amount in resources.items()}]
        self.progress = Undrawn(cells, table=SweepTable(cells))
        store: Any = SimpleNamespace(folder=self.noted, availability=self.availability, find_all=self.find_all)
        self.trials = SweepTrials(
            self.cells,
            self.progress,
            self.filed.update,
            store,
            SweepOptions(Path(), retries=retries, **options),
            like=SweepTrial((), Path("store"), resources=resources),
            shared=shared,
            failures=defaultdict(list),
        )

    def find_all(self, keys: Iterable[str], *, listed: bool) -> dict[str, dict[str, Any]]:
        """The results that are there, as a results store returns them."""
        return {key: self.there[key] for key in keys if key in self.there}

    def ask(self, name: str) -> list[int]:
        """Let Tune ask for a trial of this id, and begin it; return the seeds of its cells."""
        trial = self.trials.next(name)
        if trial is None:
            return []
        self.trials.begun(name)
        return [each.first.seed for each in trial.trainings]  # type: ignore[misc]

    def report(
        self, name: str, outcome: str = COMPUTED, *, seconds: float = 60.0, done: bool = True, **more: Any
    ) -> None:
        outcomes = [outcome for _ in self.trials._asked[name].trainings[0].cells]
        result = {"outcome": COMPUTED if outcome == TAKEN else outcome, "outcomes": outcomes, "backend": "cpu"}
        result["results"] = [None if outcome == TAKEN else {"status": "ok"} for _ in outcomes]
        self.trials.reported(name, {**result, "seconds": seconds, "hostname": "node-a", "done": done, **more})
        if done:
            self.trials.ended(name)

    def compute(self, name: str, **more: Any) -> list[int]:
        """Ask for a trial and compute it."""
        seeds = self.ask(name)
        for number in range(len(seeds)):
            self.report(name, done=number + 1 == len(seeds), **more)
        return seeds


@pytest.fixture(autouse=True)
def _notes_in_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures are noted in the list that stands for the results store's folder."""
    monkeypatch.setattr(sweep_trials, "record", lambda folder, *note: folder.append(note))


def actor_died(words: str) -> ActorDiedError:
    error = ActorDiedError()
    error.error_msg = words
    return error


@pytest.mark.parametrize(
    ("seconds", "waiting", "places", "together"),
    [
        (None, 100, 2, 1),
        (60.0, 100, 2, 1),
        (5.0, 100, 2, 1),
        (2.0, 100, 2, 3),
        (0.1, 100, 2, 50),
        (0.0, 100, 2, 50),
        (0.1, 6, 2, 3),
        (0.1, 1, 2, 1),
        (0.1, 1000, 8, 50),
        (0.1, 30, 0, 30),
        (4.0, 100_000, 32, 2),
        (4.0, 100_000, 500, 7),
        (60.0, 100_000, 500, 1),
    ],
)
def test_short_cells_share_a_trial_and_the_last_ones_are_divided(
    seconds: float | None, waiting: int, places: int, together: int
) -> None:
    assert seeds_together(seconds, waiting, places) == together


def test_trials_of_short_cells_take_seeds_of_one_model_task_and_rate_alone() -> None:
    cells = [make_cell(learning_rate=rate, seed=seed) for rate in (1e-3, 2e-3) for seed in range(4)]
    world = World(cells)
    assert world.compute("0", seconds=0.1) == [0], "nobody knows yet how long a cell takes"
    assert world.compute("1", seconds=0.1) == [1, 2, 3]
    assert world.compute("2", seconds=60.0) == [0, 1, 2, 3]
    assert world.trials.computed == 8 and world.trials.over and world.filed.keys() == world.cells.keys()


def test_trials_that_wait_for_a_further_place_have_the_last_trainings() -> None:
    world = World(make_cells(9), places=2)
    assert [world.ask(name) for name in "01"] == [[0], [1]]
    waits = [world.trials.next(name) for name in "ab"]
    assert [each.first.seed for each in waits if each is not None] == [8, 7]
    world.report("0", seconds=0.1)
    assert world.ask("2") == [2, 3], "takes the place that is free"
    world.trials.begun("a")
    assert world.ask("3") == [4], "there are three now"


def test_the_config_of_a_trial_is_what_its_name_says() -> None:
    world = World([make_cell(seed=seed) for seed in range(3)])
    found = world.trials.next("0")
    assert found is not None and found.name == "a/sst2/lr1e-3/s0"
    own = {name: value for name, value in found.config.items() if name != "sweep"}
    assert own == {"model": "a", "task": "sst2", "learning_rate": 1e-3, "seed": 0}
    several = replace(found, trainings=tuple(trainings_of(world.cells)))
    assert several.name == "a/sst2/lr1e-3/s0+s1+s2" and several.config["seed"] == [0, 1, 2]
    assert repr(found) == "<a/sst2/lr1e-3/s0 in store>"


def test_models_with_the_most_work_come_first_and_of_a_model_its_longest() -> None:
    sizes = {"short": (1.0, 1.0), "long": (9.0, 1.0), "searched": (5.0, 7.0)}
    cells = [replace(make_cell(task=task, seed=seed), work=work) for task, work in sizes.items() for seed in (0, 1)]
    cells = [*[replace(make_cell("b", seed=seed), work=(9.0, 0.0)) for seed in (0, 1)], *cells]
    taken = [each.first for each in in_order(trainings_of({cell_key(cell): cell for cell in cells}))]
    assert [(cell.model, cell.task, cell.seed) for cell in taken] == [
        ("a", "searched", 0), ("a", "searched", 1), ("a", "long", 0), ("a", "long", 1), ("a", "short", 0),
        ("a", "short", 1), ("b", "sst2", 0), ("b", "sst2", 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), Failure.OUT_OF_MEMORY),
        (MemoryError(), Failure.OUT_OF_MEMORY),
        (
            RayTaskError("train", "Traceback", torch.OutOfMemoryError("CUDA")).as_instanceof_cause(),
            Failure.OUT_OF_MEMORY,
        ),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
            Failure.OUT_OF_MEMORY,
        ),
        (RuntimeError("CUDA error: out of memory"), Failure.OUT_OF_MEMORY),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            Failure.OUT_OF_MEMORY,
        ),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), Failure.OUT_OF_MEMORY),
        (actor_died("Task was killed due to the node running low on memory."), Failure.OUT_OF_MEMORY),
        (actor_died("The actor died because its node has died. Node Id: 12"), Failure.LOST_NODE),
        (actor_died("The actor died because the worker process was killed."), Failure.CRASH),
        (RuntimeError("its node has died"), Failure.CRASH),
    ],
)
def test_failures_are_classed_by_what_ended_the_trial(error: Exception, failure: Failure) -> None:
    assert failure_of(error) is failure


def test_each_class_of_failure_has_its_own_bound_and_is_told_to_the_next_trial() -> None:
    world = World(make_cells(1))
    for number, error in enumerate((RuntimeError("one"), actor_died("its node has died"), MemoryError("three"))):
        assert world.ask(str(number)) == [0]
        world.trials.ended(str(number), error, "node-a")
    found = world.trials.next("3")
    assert found is not None and not world.trials.errors
    assert [each["failure"] for each in found.failures] == ["crash", "lost node", "out of memory"]
    world.trials.begun("3")
    world.trials.ended("3", RuntimeError("two crashes are one too many"), "node-b")
    (error,) = world.trials.errors.values()
    assert str(error) == "two crashes are one too many" and world.trials.over
    assert [note[2:] for note in world.noted] == [
        ("crash", "node-a"), ("lost node", "node-a"), ("out of memory", "node-a"), ("crash", "node-b"),
    ]  # fmt: skip


def test_a_crash_counts_against_the_training_that_ran_and_the_others_of_its_trial_are_as_before() -> None:
    world = World(make_cells(6))
    assert world.compute("0", seconds=0.1) == [0]
    assert world.ask("1") == [1, 2, 3, 4, 5]
    world.report("1", done=False, seconds=0.1)
    world.trials.ended("1", RuntimeError("broken"))
    assert world.ask("2") == [2], "by itself, with its failure"
    assert world.trials._asked["2"].trainings[0].first.seed == 2 and len(world.noted) == 1
    world.report("2", seconds=0.1)
    assert world.ask("3") == [3, 4, 5]


def test_a_trial_that_does_not_start_fails_no_cell_and_ten_of_them_end_the_sweep() -> None:
    world = World(make_cells(1))
    for number in range(10):
        assert world.trials.next(str(number)) is not None and not world.trials.fault
        world.trials.ended(str(number), RuntimeError("no such library"))
    assert "workers of the sweep do not start: RuntimeError: no such library" in str(world.trials.broken)
    assert world.trials.over and not world.trials.errors and list(world.trials.waiting) == list(world.cells)


def test_after_running_out_of_memory_fewer_cells_run_at_once() -> None:
    world = World(make_cells(9))
    for name in "012":
        world.ask(name)
    world.trials.ended("0", MemoryError())
    assert world.trials.most == 2 and world.ask("3") == [], "two run, and that is all that there is memory for"
    world.report("1")
    assert world.ask("4") == [0]
    world.trials.ended("4", MemoryError())
    assert world.trials.most == 2, "the same cell, which may simply be too large"


def test_with_a_gpu_of_its_own_for_each_cell_all_go_on_running() -> None:
    world = World(make_cells(3), resources={"GPU": 1.0})
    world.ask("0"), world.ask("1")
    world.trials.ended("0", MemoryError())
    assert (world.ask("2"), world.ask("3"), world.trials.asked) == ([0], [1], 3)


def test_cells_of_a_training_that_failed_are_kept_where_they_have_results_and_tried_one_by_one() -> None:
    cells = [replace(make_cells(1, task=task)[0], training_data="rows") for task in ("msmarco", "nq", "mldr")]
    world = World(cells, retries=Retries(crash=0))
    keys = list(world.cells)
    world.ask("0")
    world.there[keys[0]] = {"status": "ok"}  # filed before the second evaluation failed
    world.trials.ended("0", RuntimeError("the corpus is too large"))
    assert world.trials.computed == 1 and not world.trials.errors and set(world.trials.waiting) == set(keys[1:])
    for name in "12":
        world.ask(name)
        world.trials.ended(name, RuntimeError("the corpus is too large"))
    assert set(world.trials.errors) == set(keys[1:]) and world.trials.over


def test_errors_of_input_fail_a_cell_at_once_and_those_of_the_machine_end_the_sweep() -> None:
    world = World(make_cells(3))
    world.ask("0")
    world.report("0", USER_ERROR, message="no such column")
    assert not world.trials.fault and [str(each) for each in world.trials.errors.values()] == ["no such column"]
    world.ask("1")
    world.report("1", ENVIRONMENT_FAULT, message="the disk is full")
    assert world.trials.fault and world.ask("2") == [] and len(world.trials.waiting) == 1


@pytest.mark.parametrize(("exit_code", "kind"), [(1, StorageFault), (2, UserError)])
def test_an_outage_ends_the_sweep_but_fails_no_cell(exit_code: int, kind: type[Exception]) -> None:
    world = World(make_cells(1))
    world.ask("0")
    world.report("0", STORAGE_FAULT, message="out", exit_code=exit_code)
    assert type(world.trials.broken) is kind and str(world.trials.broken) == "out" and world.trials.fault
    assert list(world.trials.waiting) == list(world.cells) and not world.trials.errors and not world.noted


def test_cells_that_another_process_computes_are_left_to_it() -> None:
    world = World(make_cells(1))
    world.ask("0")
    world.report("0", TAKEN)
    assert list(world.trials.taken) == list(world.cells) and world.trials.over and not world.filed


Watched = tuple[World, Clock]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Watched]:
    """Makes a world with a clock."""
    clock = Clock()
    monkeypatch.setattr(sweep_trials, "time", clock)
    return lambda *args, **options: (World(*args, **options), clock)


def test_a_trial_hangs_if_it_takes_ten_times_as_long_as_the_longest_of_its_task(
    watched: Callable[..., Watched],
) -> None:
    world, clock = watched(make_cells(3))
    world.ask("0")
    clock.now += 10_000.0
    world.trials._look_at_trials()
    assert world.trials.to_end == [], "nobody knows how long a cell of this task takes"
    world.report("0", seconds=100.0)
    world.ask("1")
    clock.now += 999.0
    world.trials._look_at_trials()
    assert world.trials.to_end == []
    for _ in range(2):
        clock.now += 2.0
        world.trials._look_at_trials()
    assert world.trials.to_end == ["1"], "once"
    with pytest.raises(TimeoutError, match="hung"):  # which Tune takes for a failure of the trial
        SweepScheduler(world.trials).on_trial_complete(None, SimpleNamespace(trial_id="1"), {})
    world.trials.ended("1", RuntimeError("TimeoutError: hung"))
    found = world.trials.next("2")
    assert found is not None and found.failures[0]["failure"] == "hung"


def test_time_in_which_storage_did_not_answer_does_not_count(watched: Callable[..., Watched]) -> None:
    world, clock = watched(make_cells(2), time_limit=10.0)
    world.availability.lost = 500.0
    world.ask("0")
    clock.now, world.availability.lost = clock.now + 600.0, 1095.0
    world.trials._look_at_trials()
    assert world.trials.to_end == []
    clock.now += 6.0
    world.trials._look_at_trials()
    assert world.trials.to_end == ["0"]
    world.trials.ended("0", actor_died("killed"))
    (error,) = world.trials.errors.values()
    assert "over the time limit of 10 s" in str(error) and world.noted[0][2] == "time limit"


class Controller:
    """Stands for Tune's, with trials in these states."""

    def __init__(self, trials: SweepTrials, *states: str) -> None:
        self.trials = [
            SimpleNamespace(status=state, trial_id=str(number), metric_n_steps={})
            for number, state in enumerate(states)
        ]
        self.stopped: list[str] = []
        self._callback = SweepCallback(trials)

    def get_trials(self) -> list[Any]:
        return self.trials

    def stop_trial(self, trial: Any) -> None:
        trial.status = "TERMINATED"
        self.stopped.append(trial.trial_id)
        self._callback.on_trial_complete(0, [], trial)


@pytest.mark.parametrize(("most", "withdrawn"), [(9, []), (4, []), (3, ["3"]), (2, ["2", "3"]), (0, ["2", "3"])])
def test_trials_that_there_is_no_room_for_are_withdrawn_and_come_back_later(most: float, withdrawn: list[str]) -> None:
    shared = Shared()
    world = World(make_cells(9), shared=shared)
    world.ask("0"), world.ask("1")
    for name in "23":
        assert world.trials.next(name) is not None
    shared.most = most
    tune = Controller(world.trials, "RUNNING", "RUNNING", "PENDING", "PENDING")
    SweepScheduler(world.trials).choose_trial_to_run(tune)
    assert tune.stopped == withdrawn and len(world.trials.waiting) == 5 + len(withdrawn)
    shared.most = math.inf
    waiting = {cell.seed for cell in world.trials.waiting.values()}
    assert {each for name in "abcdefg" for each in world.ask(name)} == waiting


def test_where_fewer_trials_have_room_than_run_the_experiment_ends_with_them() -> None:
    shared = Shared(2)
    world = World(make_cells(9), shared=shared, places=2)
    world.ask("0"), world.ask("1")
    shared.most = 1
    world.trials._look_at_trials()
    assert world.progress.situation == "shares the cluster with another job"
    search = CellSearch(world.trials)
    assert world.trials.hands_over and search.suggest("2") == Searcher.FINISHED
    world.report("0"), world.report("1")
    assert world.trials.computed == 2 and len(world.trials.waiting) == 7, "the next experiment has them"
    world.trials._look_at_trials()
    assert world.progress.situation == "waiting for its turn: another job uses the cluster"


def test_where_the_last_node_is_lost_the_experiment_ends_and_what_waits_for_a_place_comes_back() -> None:
    shared = Shared()
    world = World(make_cells(4), shared=shared)
    world.ask("0")
    assert world.trials.next("1") is not None
    shared.nodes = []
    world.trials._look_at_trials()
    assert not world.trials.hands_over, "while a worker computes, there is one"
    world.trials.ended("0", actor_died("The actor died because its node has died."))
    world.trials._look_at_trials()
    tune = Controller(world.trials, "ERROR", "PENDING")
    SweepScheduler(world.trials).choose_trial_to_run(tune)
    assert tune.stopped == ["1"] and CellSearch(world.trials).suggest("2") == Searcher.FINISHED
    assert len(world.trials.waiting) == 4 and world.progress.situation == ""


def test_the_search_waits_for_cells_that_may_come_back_and_ends_with_the_last() -> None:
    world = World(make_cells(1))
    search = CellSearch(world.trials)
    assert search.suggest("0")["seed"] == 0 and search.suggest("1") is None
    world.trials.ended("0")
    assert search.suggest("2")["seed"] == 0, "it was withdrawn"
    world.trials.begun("2")
    world.report("2")
    assert search.suggest("3") == Searcher.FINISHED

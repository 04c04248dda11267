"""Stages run once each, after what they start from, and as many at once as there is room for."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from mlmclm.cluster.placement import HEAD, Cluster, Growth, NodeType
from mlmclm.errors import EnvironmentFault, UserError
from mlmclm.launches.side_by_side import run_stages, stages_at_once
from mlmclm.plans.names import parse_name
from mlmclm.plans.recipe import Recipe
from mlmclm.plans.stages import Plan, Stage, State, make_plan

NAMES = ("1m-clm-100", "1m-clm-50-mlm40-100", "1m-clm-25-mlm40-100", "1m-mlm40-100", "1m-mlm40-dec100-clm-120")


class Store:
    """Stands in for training: a stage leaves its states behind one after the other.

    Args:
        failing: the title of a stage that fails.
        together: stages wait until so many run, and one with several states for one that starts from the first.
    """

    def __init__(self, *, failing: str = "", together: int = 0) -> None:
        self.there: set[State] = set()
        self.runs: list[Stage] = []
        self.running = self.most = 0
        self.early: list[Stage] = []
        self.finished: set[Stage] = set()
        self.failing, self.together = failing, together
        self.change = threading.Condition()

    def ready(self, stage: Stage) -> bool:
        return not stage.start.segments or stage.start in self.there

    def run(self, stage: Stage) -> None:
        with self.change:
            assert self.ready(stage), "started before its state was there"
            self.runs.append(stage)
            self.running += 1
            self.most = max(self.most, self.running)
            if stage.start.segments and not any(stage.start in other.states for other in self.finished):
                self.early.append(stage)
            self.change.notify_all()
            assert self.change.wait_for(lambda: self.most >= self.together, 300), "so many have room"
        try:
            for state in stage.states:
                with self.change:
                    due = self.together and state is not stage.states[0]
                    assert not due or self.change.wait_for(lambda: self.early, 300), "one starts from the first state"
                if stage.title == self.failing:
                    raise UserError("diverged")
                self.there.add(state)
        finally:
            with self.change:
                self.finished.add(stage)
                self.running -= 1


def plan() -> Plan:
    return make_plan([parse_name(name) for name in NAMES], Recipe(warmup_steps=2, decay_steps=4))


@pytest.mark.parametrize("places", [1, 2, 10])
def test_every_stage_runs_once_and_no_more_at_once_than_there_is_room_for(places: int) -> None:
    stages, store = plan().stages, Store(together=2 if places > 1 else 0)
    run_stages(stages, run=store.run, ready=store.ready, at_once=lambda _: places, seconds_between_looks=0.005)
    assert sorted(store.runs, key=stages.index) == list(stages)
    assert (store.most == 1) == (places == 1) and store.most <= places


def test_a_stage_starts_from_a_state_on_another_s_way_before_that_one_ends() -> None:
    store = Store(together=2)
    run_stages(plan().stages, run=store.run, ready=store.ready, at_once=lambda _: 10, seconds_between_looks=0.005)
    assert "1m mlm40 25-100" in [stage.title for stage in store.early]


def test_a_failed_stage_is_raised_after_all_that_does_not_need_it() -> None:
    store = Store(failing="1m mlm40 0-100")
    with pytest.raises(UserError, match="diverged"):
        run_stages(plan().stages, run=store.run, ready=store.ready, at_once=lambda _: 1, seconds_between_looks=0.005)
    assert {stage.title for stage in store.runs} == {stage.title for stage in plan().stages} - {"1m clm 100-120"}


def test_stages_whose_start_never_appears_are_an_error_that_names_them() -> None:
    with pytest.raises(EnvironmentFault, match="1m mlm40 25-100"):
        run_stages(plan().stages, run=lambda _: None, ready=lambda stage: not stage.start.segments, at_once=lambda _: 9)


def test_room_counts_workers_and_leaves_others_what_they_hold() -> None:
    def found(has: int, free: int, running: int = 0) -> int:
        return stages_at_once(Cluster(({"CPU": has},), {"CPU": free}), {"CPU": 1}, workers=2, running=running)

    assert found(8, 8) == 4
    assert found(8, 4, running=2) == 4, "what our own two hold is ours"
    assert found(8, 8, running=2) == 4, "though they don't hold it yet"
    assert found(8, 1, running=2) == 2, "others hold 3"
    assert found(2, 0) == 1


def test_room_counts_what_the_autoscaler_can_add() -> None:
    growth = Growth((NodeType("gpu", {"CPU": 48, "GPU": 4}, 2),))
    empty = Cluster(({HEAD: 1},), {}, growth)
    assert stages_at_once(empty, {"GPU": 1}, workers=2, running=0) == 4
    assert stages_at_once(replace(empty, nodes=({HEAD: 1}, {"GPU": 4}), free={}), {"GPU": 1}, workers=2, running=1) == 3
    assert stages_at_once(replace(empty, growth=None), {"GPU": 1}, workers=2, running=0) == 1, "it may add none"


def test_a_stage_that_another_process_trains_starts_nothing_and_holds_up_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    store, stages = Store(), plan().stages
    shared = stages[0]
    elsewhere = ["process 7 on node1"]

    def held(stage: Stage) -> str | None:
        if stage is not shared or not elsewhere:
            return None
        if len(store.runs) == 2:  # those that start from the initialisation and need none of its states
            store.there |= set(shared.states)
            elsewhere.clear()
            return "process 7 on node1"
        return elsewhere[0]

    run_stages(stages, run=store.run, ready=store.ready, at_once=lambda _: 1, held=held, seconds_between_looks=0.005)
    assert sorted(store.runs, key=stages.index) == list(stages)
    assert store.runs.index(shared) == 2
    assert capfd.readouterr().err.count(f"{shared.title}: waiting for process 7 on node1, which trains it") == 1

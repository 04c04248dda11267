"""Sweeps tell each other what they hold and want, and each computes its share by itself."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest

from mlmclm.cluster import key_values
from mlmclm.sweeps import room
from mlmclm.sweeps.fair_share import Claimant
from mlmclm.sweeps.room import ClusterRoom


class World:
    """A cluster with CPUs, Ray's key-value store, and a clock that only the test moves."""

    def __init__(self, cpus: int) -> None:
        self.cpus, self.now = cpus, 1000.0
        self.store: dict[bytes, bytes] = {}
        self.held: dict[str, int] = {}
        self.looking = ""

    def free(self) -> dict[str, dict[str, float]]:
        return {"n": {"CPU": float(self.cpus - sum(self.held.values()))}}

    def sweep(self, name: str, wanted: int, *, held: int = 0, priority: float = 1.0) -> ClusterRoom:
        self.held[name] = held
        return ClusterRoom(
            Claimant(name, {"CPU": 1.0}, wanted, priority=priority), lambda: pytest.fail("not looked at")
        )

    def under(self, prefix: bytes) -> dict[bytes, bytes]:
        return {key: value for key, value in self.store.items() if key.startswith(prefix)}

    def look(self, *sweeps: ClusterRoom, seconds: float = 2.0) -> list[float]:
        """Let the sweeps look one after the other, twice, so that all know of all; return how many workers each may have."""
        for _ in range(2):
            self.now += seconds / 2
            for each in sweeps:
                self.looking = each._me.name
                each._exchange()
        return [each.most for each in sweeps]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(4)
    monkeypatch.setattr(key_values, "put", made.store.__setitem__)
    monkeypatch.setattr(key_values, "get_all", lambda prefix: made.under(prefix))
    monkeypatch.setattr(key_values, "delete", lambda prefix: [made.store.pop(key) for key in made.under(prefix)])
    monkeypatch.setattr(room, "held_by_node", lambda: {"n": made.held[made.looking]})
    monkeypatch.setattr(room, "free_by_node", made.free)
    monkeypatch.setattr(room, "time", SimpleNamespace(monotonic=lambda: made.now, time=lambda: 0.0))
    return made


def test_workers_are_handed_over_once_another_sweep_has_lacked_its_share_for_some_seconds(world: World) -> None:
    first = world.sweep("a", 9, held=4)
    assert world.look(first) == [math.inf], "it is alone"
    second = world.sweep("b", 9)
    assert world.look(first, second) == [math.inf, math.inf], "not at once: the second's workers may be starting"
    assert world.look(first, second, seconds=6.0) == [2, 2]
    world.held |= {"a": 2}
    assert world.look(first, second) == [2, 2], "what has become free is not the first's again"
    world.held |= {"b": 2}
    assert world.look(first, second) == [math.inf, math.inf], "both have their shares, and may ask for more nodes"
    assert (first.count, second.count) == (1, 1)


def test_a_sweep_with_little_left_takes_no_more_than_that(world: World) -> None:
    first, second = world.sweep("a", 9, held=4), world.sweep("b", 9)
    second.wanted = 1
    world.look(first, second)
    assert world.look(first, second, seconds=6.0) == [3, 1]


def test_a_sweep_of_three_times_the_priority_gets_three_times_the_workers(world: World) -> None:
    first, second = world.sweep("a", 9, held=4), world.sweep("b", 9, priority=3.0)
    world.look(first, second)
    assert world.look(first, second, seconds=6.0) == [1, 3]


def test_a_sweep_whose_driver_was_killed_is_forgotten_and_one_that_ends_leaves_at_once(world: World) -> None:
    first, killed, ends = world.sweep("a", 9, held=4), world.sweep("b", 9), world.sweep("c", 9)
    world.look(first, killed, ends)
    world.store[b"heartbeat:b:worker"] = b"of the sweep that is killed"
    assert first.count == 2
    with ends.followed():
        pass
    world.look(first)
    assert first.count == 1
    world.look(first, seconds=60.0)
    assert (first.count, first.most) == (0, math.inf)
    assert list(world.store) == [b"sweep:a"]


def test_a_cluster_that_does_not_answer_changes_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = world.sweep("a", 9, held=4), world.sweep("b", 9)
    world.look(first, second)
    world.look(first, second, seconds=6.0)

    def fail() -> dict[str, int]:
        raise RuntimeError("no answer")

    monkeypatch.setattr(room, "held_by_node", fail)
    assert world.look(first, second) == [2, 2]


def test_a_note_that_cannot_be_read_takes_no_part_and_stops_nobody(world: World) -> None:
    first, second = world.sweep("a", 9, held=4), world.sweep("b", 9)
    world.store[b"sweep:old"] = b'[1, {"name": "old", "size": 3}]'
    world.store[b"sweep:broken"] = b"{"
    world.look(first, second)
    assert world.look(first, second, seconds=6.0) == [2, 2]


def test_a_wish_that_changes_during_a_look_is_kept(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep sets what it wants in its own thread, while the one that looks waits for the cluster's answer."""
    first, second = world.sweep("a", 9, held=4), world.sweep("b", 0)
    world.look(first, second)

    def slow() -> dict[str, int]:
        if world.looking == "b":
            second.wanted = 9
        return {"n": world.held[world.looking]}

    monkeypatch.setattr(room, "held_by_node", slow)
    world.look(first, second)
    assert second.wanted == 9
    assert json.loads(world.store[b"sweep:b"])[1]["wanted"] == 9

"""Sweeps share a cluster fairly: no sweep could have more without taking from one that has less for its priority."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest

from mlmclm.sweeps.fair_share import Claimant, capacity_for, own_share
from mlmclm.sweeps.fair_share import fair_shares as shares_on_nodes

CPU = {"CPU": 1.0}


def fair_shares(*arguments: Any, **more: Any) -> dict[str, int]:
    """The workers of each sweep on all nodes together."""
    return {name: sum(own.values()) for name, own in shares_on_nodes(*arguments, **more).items()}


def most_workers(*arguments: Any) -> float:
    own = own_share(*arguments)
    return math.inf if own is None else sum(own.values())


def sweep(name: str, wanted: int, held: int = 0, priority: float = 1.0, **bundle: float) -> Claimant:
    return Claimant(name, bundle or CPU, wanted, {"n": held} if held else {}, priority)


def one(**resources: float) -> dict[str, dict[str, float]]:
    """A cluster of one node."""
    return {"n": resources}


def best_by_trying_all(slots: int, sweeps: list[Claimant]) -> list[float]:
    """The sorted workers for their priority of the best division: the worst off has as much as it can, and so on."""
    divisions = itertools.product(*(range(min(each.wanted, slots) + 1) for each in sweeps))
    found = [division for division in divisions if sum(division) <= slots]
    # As every division that leaves a wanted slot empty is worse, compare those that leave none.
    used = min(slots, sum(each.wanted for each in sweeps))
    full = [division for division in found if sum(division) == used]

    def unmet(division: tuple[int, ...]) -> list[float]:
        """Standing after one more worker, for those that want one, the worst off first."""
        return sorted((count + 1) / each.priority for count, each in zip(division, sweeps, strict=True))

    return max(unmet(division) for division in full)


@pytest.mark.parametrize("seed", range(40))
def test_shares_of_equal_workers_are_the_best_of_all_divisions(seed: int) -> None:
    draw = random.Random(seed)
    sweeps = [sweep(f"s{n}", draw.randint(0, 5)) for n in range(draw.randint(1, 4))]
    slots = draw.randint(0, 9)
    shares = fair_shares(one(CPU=float(slots)), sweeps, turn=draw.randint(0, 5))
    assert sum(shares.values()) == min(slots, sum(each.wanted for each in sweeps)), "nothing wanted is left unused"
    assert sorted(float(shares[each.name] + 1) for each in sweeps) == best_by_trying_all(slots, sweeps)


@pytest.mark.parametrize("seed", range(40))
def test_no_worker_moved_from_one_sweep_to_another_makes_shares_by_priority_more_even(seed: int) -> None:
    draw = random.Random(seed)
    sweeps = [
        sweep(f"s{n}", draw.randint(1, 9), 0, draw.choice([0.5, 1.0, 2.0, 3.0])) for n in range(draw.randint(2, 4))
    ]
    shares = fair_shares(one(CPU=float(draw.randint(0, 16))), sweeps)
    for rich, poor in itertools.permutations(sweeps, 2):
        if shares[rich.name] and shares[poor.name] < poor.wanted:
            assert shares[rich.name] / rich.priority <= (shares[poor.name] + 1) / poor.priority + 1e-9


def test_the_rest_of_an_uneven_division_goes_round() -> None:
    sweeps = [sweep("a", 9), sweep("b", 9)]
    assert [fair_shares(one(CPU=1.0), sweeps, turn)["a"] for turn in range(4)] == [1, 0, 1, 0]
    assert [fair_shares(one(CPU=5.0), sweeps, turn)["b"] for turn in range(2)] == [2, 3]
    assert fair_shares(one(CPU=3.0), sweeps[::-1]) == fair_shares(one(CPU=3.0), sweeps), "whoever asks"


def test_a_priority_of_three_is_three_times_the_workers() -> None:
    assert fair_shares(one(CPU=8.0), [sweep("a", 99), sweep("b", 99, priority=3)]) == {"a": 2, "b": 6}


def test_sweeps_on_gpus_and_on_cpus_have_equal_shares_of_what_each_needs_most() -> None:
    on_gpus, on_cpus = sweep("g", 99, CPU=1, GPU=1), sweep("c", 99, CPU=1)
    assert fair_shares(one(CPU=8.0, GPU=4.0), [on_gpus, on_cpus]) == {"g": 2, "c": 6}
    assert fair_shares(one(CPU=9.0, GPU=4.0), [on_gpus, sweep("c", 3)]) == {"g": 4, "c": 3}, "nothing is left unused"


def test_a_sweep_alone_may_have_all_and_two_that_have_their_shares_may_ask_for_more() -> None:
    assert most_workers("a", one(CPU=0.0), [sweep("a", 9, held=2)]) == math.inf
    both = [sweep("a", 9, held=1), sweep("b", 9, held=1)]
    assert most_workers("a", one(CPU=0.0), both) == math.inf
    # Nothing is there yet that could be divided, and an autoscaler adds nodes for what is asked for.
    assert most_workers("a", one(CPU=0.0), [sweep("a", 9), sweep("b", 9)]) == math.inf


def test_a_sweep_gives_up_what_another_lacks_and_both_keep_to_their_shares_until_then() -> None:
    sweeps = [sweep("a", 9, held=2), sweep("b", 9)]
    assert capacity_for(one(CPU=0.0, memory=5.0), sweeps) == one(CPU=2.0, memory=5.0)
    assert [most_workers(name, one(CPU=0.0), sweeps) for name in "ab"] == [1, 1]
    freed = [sweep("a", 9, held=1), sweep("b", 9)]
    assert [most_workers(name, one(CPU=1.0), freed) for name in "ab"] == [1, 1], "the freed place is not a's again"
    # One that has little left to do takes no more than it can use.
    assert most_workers("a", one(CPU=0.0), [sweep("a", 9, held=4), sweep("b", 1)]) == 3


def test_workers_are_counted_on_the_nodes_that_hold_them() -> None:
    nodes = {"m": {"CPU": 3.0}, "n": {"CPU": 3.0}}
    two = [sweep("a", 9, CPU=2), sweep("b", 9, CPU=2)]
    assert fair_shares(nodes, two) == {"a": 1, "b": 1}, "six CPUs on two nodes are two workers of two CPUs, not three"
    full = [Claimant("a", {"CPU": 2.0}, 9, {"m": 1, "n": 1}), Claimant("b", {"CPU": 2.0}, 9)]
    free = {"m": {"CPU": 1.0}, "n": {"CPU": 1.0}}
    assert [most_workers("a", free, full, turn) for turn in range(2)] == [1, 1], "the other gets a place in every turn"
    apart = [Claimant("a", {"CPU": 2.0}, 9, {"m": 1}), Claimant("b", {"CPU": 2.0}, 9, {"n": 1})]
    assert [most_workers("a", free, apart, turn) for turn in range(2)] == [math.inf, math.inf], "nobody lacks any"


def test_small_workers_are_counted_where_they_leave_room_for_large_ones() -> None:
    nodes = {"m": {"CPU": 4.0}, "n": {"CPU": 1.0}, "o": {"CPU": 1.0}}
    assert fair_shares(nodes, [sweep("a", 2), sweep("b", 1, CPU=4)]) == {"a": 2, "b": 1}


@pytest.mark.parametrize("seed", range(20))
def test_a_sweep_of_large_workers_gets_a_node_although_small_ones_are_spread_over_all(seed: int) -> None:
    """Cells end in any order; a sweep ends the workers that are on the nodes of others' shares."""
    draw, held = random.Random(seed), {"m": 4, "n": 4}
    for ended in range(200):
        free = {node: {"CPU": 8.0 - 2 * workers} for node, workers in held.items()}
        if any(resources["CPU"] >= 8 for resources in free.values()):
            break
        both = [sweep("big", 1, CPU=8), Claimant("small", {"CPU": 2.0}, 99, dict(held))]
        own = own_share("small", free, both, ended // 50)
        assert own is not None and sum(own.values()) == 4
        node = draw.choice([node for node in held for _ in range(held[node])])
        if held[node] - 1 >= own.get(node, 0):
            held[node] -= 1
    assert sorted(held.values()) == [0, 4]

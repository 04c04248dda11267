"""A sweep ends workers for other jobs that wait for a place, until both have equally many."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from mlmclm.cluster.placement import Cluster, PlacementGroup
from mlmclm.sweeps import shared_cluster
from mlmclm.sweeps.shared_cluster import SharedCluster, shared_with

CPU, GPU = {"CPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}
Job = list[PlacementGroup]


def job(held: int, *waits_for: dict[str, float]) -> Job:
    """A job that has so many places, and waits for these."""
    return [PlacementGroup(False, (GPU,))] * held + [PlacementGroup(True, (each,)) for each in waits_for]


@pytest.mark.parametrize(
    ("own", "others", "most"),
    [
        (8, [], math.inf),
        (8, [job(0, CPU)], 4),
        (5, [job(0, CPU)], 3),
        (4, [job(2, CPU)], 3),
        (4, [job(3, CPU)], math.inf),
        (4, [job(4, CPU)], math.inf),
        (8, [job(0)], math.inf),
        (8, [job(6, CPU), job(2, CPU)], 5),
        (1, [job(0, CPU)], 0),
        (1, [job(1, CPU)], math.inf),
        (0, [job(0, CPU)], math.inf),
        (8, [job(0, GPU)], math.inf),
        (8, [job(0, GPU, CPU)], 4),
    ],
)
def test_a_sweep_keeps_as_many_as_the_job_that_waits_gets(own: int, others: list[Job], most: float) -> None:
    jobs = {"me": job(own, CPU), **{str(number): each for number, each in enumerate(others)}}
    assert shared_with(jobs, "me", {"CPU": 1.0, "GPU": 0.0}) == most


def test_no_two_sweeps_give_each_other_the_same_places_again_and_again() -> None:
    for own in range(2, 20):
        for other in range(20):
            jobs = {"a": job(own, CPU), "b": job(other, CPU)}
            most = shared_with(jobs, "a", {"CPU": 1.0})
            if most < math.inf:
                kept = int(most)
                after = {"a": job(kept, CPU), "b": job(other + own - kept, CPU)}
                assert shared_with(after, "a", {"CPU": 1.0}) == shared_with(after, "b", {"CPU": 1.0}) == math.inf


def test_a_job_must_have_waited_for_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(shared_cluster, "time", SimpleNamespace(monotonic=lambda: clock.now))
    mine = SharedCluster({"CPU": 1.0}, lambda: Cluster((), {}))

    def look(seconds: float, own: int, other: Job) -> float:
        clock.now += seconds
        mine.share({"me": job(own), "other": other}, "me")
        return mine.most

    waits = job(0, CPU)
    assert look(0, 4, waits) == look(59, 4, waits) == math.inf, "its workers may be starting"
    assert look(2, 4, job(4, CPU)) == math.inf
    assert look(60, 4, waits) == look(30, 4, waits) == math.inf, "it has not waited all the time"
    assert look(31, 4, waits) == 2
    assert look(2, 2, waits) == 2, "what is free is given to the other in some seconds"
    assert look(2, 2, job(2, CPU)) == math.inf
    look(0, 1, waits)
    assert look(61, 1, waits) == 0

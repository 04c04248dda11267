"""The places (room for one worker each) that a sweep may keep on a cluster that other jobs use too.

The rule for sharing: if another job has waited for a place for a minute and has none, or at least two fewer than the sweep, the
sweep ends workers between two trainings until both jobs have equally many. Two jobs take turns at a single place. Priorities are
left to the cluster: to Ray's jobs, Kueue or Slurm.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain

from mlmclm.cluster.cluster import groups_of_jobs
from mlmclm.cluster.placement import Cluster, PlacementGroup, Resources, most_places
from mlmclm.progress import repeated

SECONDS_BETWEEN_LOOKS = 5.0
"""Seconds between two looks at the placement groups of all trials; a look takes the driver about 0.1 ms per trial."""
SECONDS_OF_WAITING = 60.0
"""How long another job must wait for a place until a sweep ends workers for it."""


def shared_with(jobs: Mapping[str, Sequence[PlacementGroup]], me: str, bundle: Resources) -> float:
    """Return how many workers a sweep may keep beside other jobs that wait for places; infinity for no limit.

    Args:
        jobs: the placement groups of each job, by its id.
        me: the id of the sweep's job.
        bundle: the resources of one of its workers. Jobs that also need other kinds are ignored: a worker's place would not help them.
    """
    held = {job: sum(not group.waiting for group in groups) for job, groups in jobs.items()}
    workers, kinds = held.get(me, 0), {kind for kind, amount in bundle.items() if amount}

    def waits(groups: Sequence[PlacementGroup]) -> bool:
        return any(group.waiting and kinds.issuperset(chain(*group.bundles)) for group in groups)

    fewest = min((held[job] for job, groups in jobs.items() if job != me and waits(groups)), default=workers)
    if workers and (fewest == 0 or workers - fewest >= 2):
        return (workers + fewest + 1) // 2 if workers > 1 else 0
    return math.inf


class SharedCluster:
    """A cluster that a sweep shares with other jobs.

    Args:
        bundle: the resources of a worker.
        view: returns the present state of the cluster.

    Attributes:
        most: the most workers that the sweep may have now beside other jobs.
    """

    def __init__(self, bundle: Resources, view: Callable[[], Cluster]) -> None:
        self._bundle, self.view, self.most = bundle, view, math.inf
        self._since: float | None = None
        """Time since which another job has waited for a place that is due to it, or at which this sweep last gave up places."""

    @property
    def has_nodes(self) -> bool:
        """Whether the cluster has or can get a node for a worker."""
        return most_places(self.view(), self._bundle) >= 1

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Look at what other jobs wait for, from time to time while the block runs."""

        def look() -> None:
            with suppress(Exception):  # if the cluster doesn't answer, the sweep itself reports it
                self.share(*groups_of_jobs())

        with repeated(look, seconds=SECONDS_BETWEEN_LOOKS, name="mlmclm-other-jobs"):
            yield

    def share(self, jobs: Mapping[str, Sequence[PlacementGroup]], me: str) -> None:
        """Set `most` from the placement groups that all jobs have and wait for now; see `shared_with`."""
        most, now = shared_with(jobs, me, self._bundle), time.monotonic()
        if most == math.inf:
            self._since, self.most = None, most
        elif self._since is None:
            self._since = now
        elif now - self._since >= SECONDS_OF_WAITING:
            # The other job gets a place some seconds after it becomes free, so its minute of waiting begins anew.
            self._since, self.most = now, most

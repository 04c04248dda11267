"""Stages side by side: each starts as soon as the state that it goes on from is there and the cluster has room for its workers."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Sequence

from mlmclm.errors import EnvironmentFault
from mlmclm.plans.plan import Stage
from mlmclm.progress import say
from mlmclm.service.placement import Cluster, Resources, most_places, places, places_now

SECONDS_BETWEEN_LOOKS = 1.0
"""A running stage leaves states behind on its way, from which others can start before it ends."""


def room(cluster: Cluster, bundle: Resources, *, workers: int, running: int) -> int:
    """How many stages may run at once, at least 1: Ray itself makes them wait for resources, and the autoscaler adds nodes for those
    that wait, so nodes that it can add count too.

    Args:
        bundle: what a worker reserves.
        workers: workers a stage.
        running: stages that run already; their workers may not hold their resources yet.
    """
    now, most = places_now(cluster, bundle), most_places(cluster, bundle)
    held_by_others = max(0, now - places(cluster.free, bundle) - running * workers)
    return max(1, int(((now if math.isinf(most) else most) - held_by_others) // workers))


def run_stages(
    stages: Sequence[Stage],
    *,
    run: Callable[[Stage], None],
    ready: Callable[[Stage], bool],
    at_once: Callable[[int], int],
    held: Callable[[Stage], str | None] = lambda _: None,
    seconds_between_looks: float = SECONDS_BETWEEN_LOOKS,
) -> None:
    """Runs every stage once, each in a thread of its own, the earlier of those that can start first.

    A stage that fails doesn't hinder those that need none of its states; when they are done, its error is raised.

    Args:
        run: trains a stage, and returns when it is done.
        ready: whether the state that a stage starts from is there.
        at_once: how many may run, given how many do.
        held: who else trains a stage, or a part of it, now; it is started when nobody does. None for nobody.

    Raises:
        BaseException: the first that `run` raised.
    """
    waiting, running = list(stages), 0
    ended: queue.SimpleQueue[tuple[Stage, BaseException | None]] = queue.SimpleQueue()
    failures: list[BaseException] = []
    said: set[Stage] = set()

    def attempt(stage: Stage) -> None:
        try:
            run(stage)
        except BaseException as error:
            ended.put((stage, error))
        else:
            ended.put((stage, None))

    while True:
        elsewhere = 0
        for stage in [stage for stage in waiting if ready(stage)]:
            other = held(stage)
            if other is not None:
                elsewhere += 1
                if stage not in said:
                    say(f"{stage.title}: waiting for {other}, which trains it")
                    said.add(stage)
                continue
            if running >= at_once(running):
                break
            waiting.remove(stage)
            running += 1
            # A daemon, so that an interrupted driver ends: its Ray session takes the workers with it.
            threading.Thread(target=attempt, args=(stage,), name=f"mlmclm {stage.title}", daemon=True).start()
        if running == 0 and elsewhere == 0:
            break
        try:
            stage, error = ended.get(timeout=seconds_between_looks)
        except queue.Empty:
            continue
        running -= 1
        if error is not None:
            failures.append(error)
            if running or any(ready(other) for other in waiting):
                say(f"{error} What does not depend on it goes on.")
    if failures:
        raise failures[0]
    if waiting:
        titles = ", ".join(stage.title for stage in waiting)
        raise EnvironmentFault(f"the states that these stages start from are not in the store: {titles}; run again.")

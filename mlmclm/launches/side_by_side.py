"""Concurrent stages: each starts as soon as its starting state exists and the cluster has room for its workers."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Sequence

from mlmclm.cluster.placement import Cluster, Resources, most_places, places, places_now
from mlmclm.errors import EnvironmentFault
from mlmclm.plans.stages import Stage
from mlmclm.progress import say

SECONDS_BETWEEN_LOOKS = 1.0
"""Seconds between checks for stages that can start.

A running stage saves checkpoints from which others can start before it ends.
"""


def stages_at_once(cluster: Cluster, bundle: Resources, *, workers: int, running: int) -> int:
    """Return how many stages may run at once, at least 1.

    Nodes that the autoscaler can still add count too. Ray lets workers wait for resources, and the autoscaler adds
    nodes for those that wait.

    Args:
        workers: number of workers per stage.
        running: number of stages that already run; their workers may not hold their resources yet.
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
    check: Callable[[], None] = lambda: None,
    seconds_between_looks: float = SECONDS_BETWEEN_LOOKS,
) -> None:
    """Run every stage once, each in its own thread. Among those that can start, earlier stages go first.

    If a stage fails, stages that need none of its states still run. Its error is raised when they are done.

    Args:
        run: trains a stage, and returns when it is done.
        ready: returns whether the state that a stage starts from exists.
        at_once: returns how many stages may run, given how many are running.
        held: returns who else is training a stage or a part of it, or None. Such a stage waits.
        check: called before each check for stages that can start; an error that it raises ends the call at once, even while stages run.

    Raises:
        BaseException: the first error that `run` raised.
        EnvironmentFault: if stages are left whose starting states never appeared.
    """
    waiting, running = list(stages), 0
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    failures: list[BaseException] = []
    announced: set[Stage] = set()

    def attempt(stage: Stage) -> None:
        try:
            run(stage)
        except BaseException as error:
            ended.put(error)
        else:
            ended.put(None)

    while True:
        check()
        held_elsewhere = 0
        for stage in [stage for stage in waiting if ready(stage)]:
            holder = held(stage)
            if holder is not None:
                held_elsewhere += 1
                if stage not in announced:
                    say(f"{stage.title}: waiting for {holder}, which trains it")
                    announced.add(stage)
                continue
            if running >= at_once(running):
                break
            waiting.remove(stage)
            running += 1
            # A daemon thread, so that an interrupted driver can exit. The end of its Ray session also ends the workers.
            threading.Thread(target=attempt, args=(stage,), name=f"mlmclm {stage.title}", daemon=True).start()
        # Nothing runs here or in another process, so no further state will appear: waiting stages would wait forever.
        if running == 0 and held_elsewhere == 0:
            break
        try:
            error = ended.get(timeout=seconds_between_looks)
        except queue.Empty:  # no stage has ended, but a running one may have saved a checkpoint that others wait for
            continue
        running -= 1
        if error is not None:
            failures.append(error)
            if running or any(ready(stage) for stage in waiting):
                say(f"{error} Independent stages continue.")
    if failures:
        raise failures[0]
    if waiting:
        titles = ", ".join(stage.title for stage in waiting)
        raise EnvironmentFault(f"the states that these stages start from are not in the store: {titles}; run again.")

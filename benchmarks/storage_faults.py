"""The fault table of an object store: fault x stage x outcome, on an S3 server behind a proxy that causes the faults."""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.results import machine, write_section

if TYPE_CHECKING:
    from fault_table import Scene

MOST = 6
"""Maximum number of a stage's requests that a fault hits, one in each run."""
MOST_KILLS = 4
OUTAGE_SECONDS = 8.0
AT_A_REQUEST = {
    "an answer after 0.5 s": ("delay", 0.5),
    "no answer": ("hang", 3.0),
    "status 500": ("500", 0.0),
    "status 503": ("503", 0.0),
    "connection cut before the request": ("cut", 0.0),
    "answer lost": ("lost response", 0.0),
    "body cut off": ("truncated", 0.0),
    "a wrong byte in the body": ("damaged", 0.0),
}
"""Title of a fault -> its kind and length in seconds; the client gives up a request after 1 s."""


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` of the first `count` numbers, evenly spread."""
    if count <= most:
        return list(range(count))
    return [round(place * (count - 1) / (most - 1)) for place in range(most)]


def tally(outcomes: Sequence[str]) -> str:
    """Return how many of the runs had no deviation; print the others."""
    for outcome in filter(None, outcomes):
        print(outcome[:2000], file=sys.stderr, flush=True)
    return f"{outcomes.count('')} of {len(outcomes)}"


def runs_of(scene: Scene, stage: str, wanted: Any, requests: int, *, killed: bool) -> Iterator[tuple[str, list[str]]]:
    """Cause every fault at a stage; yield each one's title and the outcomes of its runs."""
    for title, (kind, seconds) in AT_A_REQUEST.items():
        yield title, [scene.outcome(kind, stage, at, wanted, seconds=seconds) for at in spread(requests, MOST)]
    yield f"outage of {OUTAGE_SECONDS:.0f} s", [scene.outcome("down", stage, 0, wanted, seconds=OUTAGE_SECONDS)]
    yield "outage longer than the retry timeout, then run again", [scene.refused("503", stage, wanted)]
    yield "no such bucket, then run again", [scene.refused("no bucket", stage, wanted)]
    kills = spread(requests, MOST_KILLS) if killed else []
    yield "process killed, then run again", [scene.killed(stage, at, wanted) for at in kills]


def measure() -> None:
    """Cause every fault at every stage, and write the section."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from fault_proxy import FaultProxy
    from fault_table import GIVEN_UP_AFTER, KILLED, LEASE, STAGES, Scene
    from object_stores import s3_server, use_endpoint

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    began = time.perf_counter()
    rows: dict[str, list[str]] = {}
    requests = []
    with s3_server() as endpoint, FaultProxy(endpoint) as proxy, tempfile.TemporaryDirectory() as temporary:
        use_endpoint(proxy.endpoint, GIVEN_UP_AFTER)
        scene = Scene(proxy, Path(temporary), "s3://bucket/faults")
        for stage in STAGES:
            wanted, count = scene.undisturbed(stage)
            requests.append(str(count))
            for title, outcomes in runs_of(scene, stage, wanted, count, killed=stage in KILLED):
                rows.setdefault(title, []).append(tally(outcomes) if outcomes else "-")
                print(f"{stage}, {title}: {rows[title][-1]}", file=sys.stderr, flush=True)
    lines = [
        f"Command: `python -m benchmarks.faults`. Machine: {machine()}; an S3 server (moto) behind a proxy.",
        "Each fault hits requests of each stage, one in each run. A cell counts the runs that returned and left behind "
        "(results, examples, claims, unfiled results) exactly what an undisturbed run does. "
        "In a long outage and without a bucket the stage must first end with an error that says so. "
        "A request without an answer is carried out after the client has given it up. What it left behind is looked at "
        f"{LEASE / 2:g} s later (the lease of claims is {LEASE:g} s).",
        "",
        f"| fault | {' | '.join(STAGES)} |",
        f"|---|{'---|' * len(STAGES)}",
        f"| (requests of the stage) | {' | '.join(requests)} |",
        *(f"| {title} | {' | '.join(cells)} |" for title, cells in rows.items()),
        "",
        f"Seconds: {time.perf_counter() - began:.0f}.",
    ]
    write_section("Faults of the object store", lines)

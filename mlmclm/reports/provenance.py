"""Provenance of a report's numbers: when, on what hardware, with which software and data, and at what cost.

All of it is read from the stored results, so the same store gives the same text whenever the report is written.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from mlmclm.reports import text

UNKNOWN = "unrecorded hardware"
COMMIT_DIGITS = 12


@dataclass(frozen=True)
class ComputedWork:
    """A pretraining stage or a cell, as it was computed."""

    began: float  # in seconds since 1970, as `ended`
    ended: float
    seconds: float  # of one worker, without waits between attempts
    workers: int = 1  # at a time
    device: str = UNKNOWN  # the name of the processor or the GPU
    host: str = ""  # the machine that computed it; empty if there may have been several
    versions: Mapping[str, str] = field(default_factory=dict)  # of software, by package
    commit: str = ""  # mlmclm's


def cell_work(result: Mapping[str, Any]) -> ComputedWork:
    """Return how a cell was computed, from its result's JSON object."""
    cost = result["cost"]
    ended = datetime.fromisoformat(cost["finished"]).timestamp()
    return ComputedWork(
        began=ended - cost["seconds"],
        ended=ended,
        seconds=cost["seconds"],
        device=cost.get("device", UNKNOWN),
        host=cost["worker"].rpartition("/")[0],  # HOST/PROCESS
        versions=cost.get("versions", {}),
        commit=cost.get("commit", ""),
    )


def stage_work(rows: Sequence[Mapping[str, Any]], system: Mapping[str, Any]) -> ComputedWork | None:
    """Return how a stage was computed, or None if it has no line of metrics.

    Args:
        rows: the stage's lines of `metrics.jsonl`.
        system: `system_facts` from the end of the stage.
    """
    if not rows:
        return None
    gpus = system.get("gpus") if str(system.get("device", "")).startswith("cuda") else None
    return ComputedWork(
        # A line is written at the end of its step.
        began=rows[0]["time"] - rows[0].get("step_seconds", 0.0),
        ended=rows[-1]["time"],
        seconds=sum(row.get("step_seconds", 0.0) for row in rows),
        workers=system.get("workers", 1),
        device=gpus[0] if gpus else system.get("processor", UNKNOWN),
        versions=system.get("versions", {}),
        commit=system.get("commit", ""),
    )


def provenance_facts(
    stages: Sequence[ComputedWork], cells: Sequence[ComputedWork], *, corpus: str | None, tasks: Mapping[str, str]
) -> dict[str, str]:
    """Return the provenance as a mapping of label to text, in display order.

    Args:
        corpus: the hash of the pretraining corpus; None if nothing was pretrained.
        tasks: the hash of each task's data.
    """
    all_work = [*stages, *cells]
    facts = {}
    if all_work:
        facts["Computed"] = f"{_when(min(w.began for w in all_work))} to {_when(max(w.ended for w in all_work))} UTC"
    for label, works, unit in (("Pretraining", stages, "stage"), ("Fine-tuning", cells, "cell")):
        if works:
            facts[label] = f"{text.plural(len(works), unit)}, {_cost(works)}, {_hardware(works)}"
    if all_work:
        facts["Software"] = _software(all_work)
    if corpus is not None:
        facts["Corpus"] = corpus
    return facts | {"Task data": ", ".join(f"{name} {fingerprint}" for name, fingerprint in tasks.items())}


def _when(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M}"


def _cost(works: Sequence[ComputedWork]) -> str:
    seconds = math.fsum(work.seconds * work.workers for work in works)
    return f"{seconds / 3600:,.1f} worker hours" if seconds >= 3600 else f"{seconds / 60:.1f} worker minutes"


def _hardware(works: Sequence[ComputedWork]) -> str:
    devices = Counter(work.device for work in works)
    parts = [name if len(devices) == 1 else f"{name} ({number:,})" for name, number in sorted(devices.items())]
    hosts = {work.host for work in works}
    # With an unknown host the number of machines is unknown.
    machines = "" if "" in hosts else f"{text.plural(len(hosts), 'machine')}: "
    return f"on {machines}{text.listing(parts)}"


def _software(works: Sequence[ComputedWork]) -> str:
    """List each package with all of its versions, and mlmclm's commits."""
    versions: dict[str, set[str]] = defaultdict(set)
    for work in works:
        for package, version in work.versions.items():
            versions[package].add(version)
    # A "+" after the 40 digits means that files differed from the commit.
    commits = {work.commit[:COMMIT_DIGITS] + work.commit[40:] for work in works if work.commit}
    parts = [f"{package} {' and '.join(sorted(numbers))}" for package, numbers in sorted(versions.items())]
    if commits:
        parts.append(f"mlmclm's commit {text.listing(sorted(commits))}")
    return ", ".join(parts) or "versions were not recorded"

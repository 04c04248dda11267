"""How results were computed: when, on what hardware, with which software and data, at what cost; and what more of them would take.

All of it is read from the stored results, so the same store gives the same text whenever the report is written.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from mlmclm.reports import text

QUICKSTART = "quickstart"
"""The packaged study that `mlmclm init` writes to a folder."""
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
            cost = worker_time(math.fsum(work.seconds * work.workers for work in works))
            facts[label] = f"{text.plural(len(works), unit)}, {cost}, {_hardware(works)}"
    if all_work:
        facts["Software"] = _software(all_work)
    if corpus is not None:
        facts["Corpus"] = corpus
    return facts | {"Task data": ", ".join(f"{name} {fingerprint}" for name, fingerprint in tasks.items())}


def _when(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M}"


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


@dataclass(frozen=True)
class Basis:
    """The basis of a study's results, and how the study is run.

    Attributes:
        seconds: the mean time of a cell by (model, task), in seconds of one worker.
        devices: the devices that computed the cells.
        test_examples: the number of test examples by task, as far as known.
        pretraining: how each model was pretrained in its first pretraining run, as far as recorded.
        setting: the file to edit in order to ask for more seeds or pretraining runs; empty if there is none.
        command: the command that computes the missing results after the edit.
        preparation: the command to run before the edit, such as one that writes the file; empty if there is none.
        command_now: the command that computes the missing results of the study without an edit.
        again: a clause that says what a run of `command` computes again.
    """

    seconds: Mapping[tuple[str, str], float] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    test_examples: Mapping[str, int] = field(default_factory=dict)
    pretraining: tuple[ComputedWork, ...] = ()
    setting: str = ""
    command: str = ""
    preparation: str = ""
    command_now: str = ""
    again: str = "what is there is not computed again"

    def cost(self, cells: Mapping[tuple[str, str], int]) -> str:
        """Return what cells by (model, task) would take: ", about 2.1 worker hours on A GPU"; empty if nothing is recorded."""
        if (total := self.time(cells)) is None:
            return ""
        on = f" on {text.listing(self.devices, most=3)}" if self.devices else ""
        return f", about {worker_time(total)}{on}"

    def time(self, cells: Mapping[tuple[str, str], int]) -> float | None:
        """Return the seconds of one worker that cells by (model, task) would take; None if nothing is recorded."""
        if not self.seconds:
            return None
        usual = math.fsum(self.seconds.values()) / len(self.seconds)
        return math.fsum(number * self.seconds.get(pair, usual) for pair, number in cells.items())

    def pretraining_cost(self, rounds: float) -> str:
        """Return what pretraining all models a number of times would take, or that it is not known."""
        if not self.pretraining:
            return ", whose time is not known"
        total = rounds * math.fsum(work.seconds * work.workers for work in self.pretraining)
        return f", about {worker_time(total)} on {text.listing(sorted({work.device for work in self.pretraining}), most=3)}"

    def with_costs(
        self,
        results: Iterable[Mapping[str, Any]],
        *,
        test_examples: Mapping[str, int] | None = None,
        pretraining: Sequence[ComputedWork] = (),
    ) -> Basis:
        """Return this basis with what results, given as JSON objects, have cost; the other arguments are as for `Basis`."""
        taken: dict[tuple[str, str], list[float]] = {}
        devices: dict[str, None] = {}
        for result in results:
            cost = result.get("cost") or {}
            if "seconds" in cost:
                taken.setdefault((result["model"], result["task"]), []).append(cost["seconds"])
            if "device" in cost:
                devices[cost["device"]] = None
        return replace(
            self,
            seconds={pair: math.fsum(seconds) / len(seconds) for pair, seconds in taken.items()},
            devices=tuple(sorted(devices)),
            test_examples=test_examples or {},
            pretraining=tuple(pretraining),
        )


NO_BASIS = Basis()
"""The basis of a study of which nothing is known."""


def worker_time(seconds: float) -> str:
    """Format the time of all workers together in hours, or in minutes below one hour."""
    if seconds >= 3600:
        return f"{seconds / 3600:,.1f} worker hours"
    minutes = max(1, math.ceil(seconds / 60))
    return text.plural(minutes, "worker minute")


def asked_for(command: str, packaged: Collection[str] = ()) -> Basis:
    """Return the basis of a study as far as it follows from its command: how it is run and how to ask for more, without costs.

    Args:
        command: the command that computes the study, as the report shows it: `mlmclm study FILE ...`.
        packaged: names of studies that come with the package, whose files are not the user's.
    """
    basis, words = Basis(command_now=command), shlex.split(command)
    if len(words) < 3 or words[0] != "mlmclm" or words[2].startswith("-"):  # it names no file
        return basis
    verb, file = words[1], words[2]
    if file not in packaged:
        return replace(basis, setting=file, command=command)
    if file != QUICKSTART:
        return replace(basis, setting=f"a copy of the packaged {file}.yaml", command=f"mlmclm {verb} {file}.yaml")
    copy = f"my-{file}/study.yaml"
    return replace(
        basis, setting=copy, command=shlex.join([*words[:2], copy, *words[3:]]), preparation=f"mlmclm init my-{file}"
    )

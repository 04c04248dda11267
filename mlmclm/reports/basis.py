"""Facts that advice needs beside an analysis: the cost of the results, their basis, and how to ask for more."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlmclm.reports import text
from mlmclm.reports.provenance import ComputedWork

QUICKSTART = "quickstart"
"""The packaged study that `mlmclm init` writes to a folder."""


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

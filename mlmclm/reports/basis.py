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
        seconds: of one worker that a cell took, on average, by (model, task).
        devices: those that computed the cells.
        test_examples: their number by task, as far as it is known.
        pretraining: how the models were pretrained once, each with its first seeds, as far as it is recorded.
        setting: the file in which seeds and pretraining runs are asked for; empty if there is none.
        command: the command that computes what the study then lacks.
        preparation: a command that comes before it, such as one that writes a file to edit; empty if there is none.
        command_now: the command that computes what the study lacks as it is.
        again: what a run of `command` computes again, as the end of a sentence.
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
"""Nothing is known."""


def worker_time(seconds: float) -> str:
    """Format the time of all workers together in hours, or in minutes below one hour."""
    if seconds >= 3600:
        return f"{seconds / 3600:,.1f} worker hours"
    minutes = max(1, math.ceil(seconds / 60))
    return text.plural(minutes, "worker minute")


def asked_for(command: str, packaged: Collection[str] = ()) -> Basis:
    """Return how a study is run and how more results are asked for; nothing of what they have cost.

    Args:
        command: computes the study, as the report shows it: `mlmclm study FILE ...`.
        packaged: names of studies that come with the package, whose files are not the user's.
    """
    setting, next_command, preparation = _asked_for(command, packaged)
    return Basis(setting=setting, command=next_command, preparation=preparation, command_now=command)


def _asked_for(command: str, packaged: Collection[str]) -> tuple[str, str, str]:
    """Return the file to edit, the command after that, and the one before it; empty where the command names no file."""
    words = shlex.split(command)
    if len(words) < 3 or words[0] != "mlmclm" or words[2].startswith("-"):
        return "", "", ""
    verb, file = words[1], words[2]
    if file not in packaged:
        return file, command, ""
    if file != QUICKSTART:
        return f"a copy of the packaged {file}.yaml", f"mlmclm {verb} {file}.yaml", ""
    copy = f"my-{file}/study.yaml"
    return copy, shlex.join([*words[:2], copy, *words[3:]]), f"mlmclm init my-{file}"

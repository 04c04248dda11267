"""Model names. A name is a training plan: it states everything in which the models of a study differ.

An example is `610m-clm-10k-mlm40-42k`. Grammar (the study's, arXiv 2507.00994; `untrained` is this project's addition):

    name       = (size "-untrained" | size 1*("-" objective "-" ["dec"] steps) ["-" step]) ["-r" replicate]
    size       = a size of `models.sizes`, or a study file's name for a model to continue from
    objective  = "clm" | "mlm" ratio | ...      as the classes of `mlmclm.objectives` write it; ratio in per cent, 1-99
    steps      = total optimiser steps at the end of the phase; a multiple of 1,000 is written with k (42k)
               | share "%"                      of the last phase's total; not allowed for the last phase itself
    dec        = the phase ends with its learning-rate decay; the next phase starts from the decayed weights
    step       = an intermediate checkpoint, written in full (1000)
    replicate  = 2, 3, ...: the same plan trained again with other seeds (`Recipe.seeds_of`); the first has no number

`parse_name` and `str` are inverses. A plan has exactly one name; any other spelling is refused with an error that gives the
right one. The only exception is a share: `1m-clm-25%-mlm40-1k` is read as `1m-clm-250-mlm40-1k`, which is the model's name from
then on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise, zip_longest
from math import ceil, floor, gcd

from mlmclm.errors import UserError, unknown
from mlmclm.models.sizes import SIZES
from mlmclm.objectives.objective import Objective, parse_objective

_SHARE = re.compile(r"(dec)?((?:0|[1-9]\d*)(?:\.\d*[1-9])?)%")
_DECIMALS = 3
"""Maximum number of decimals in a share (in per cent) that an error message proposes."""
_GRAMMAR = "SIZE-OBJECTIVE-STEPS, SIZE-OBJECTIVE-STEPS-OBJECTIVE-TOTAL or SIZE-untrained, such as 2m-clm-150-mlm40-600"


@dataclass(frozen=True)
class Phase:
    """A period of training under one objective, up to a total number of steps."""

    objective: Objective
    until: int
    """Total optimiser steps at the end of the phase, counted from initialisation."""
    decayed: bool = False
    """`dec` in the name: the phase ends with its learning-rate decay although another phase follows."""


@dataclass(frozen=True)
class ModelName:
    """A parsed model name."""

    size: str
    phases: tuple[Phase, ...] = ()
    """Empty for an untrained model."""
    checkpoint: int | None = None
    """The step of an intermediate checkpoint, or None for the end of training."""
    replicate: int = 1
    """Number among the runs of the same plan that differ in their seeds only."""

    def __str__(self) -> str:
        parts = [self.size] if self.phases else [self.size, "untrained"]
        for phase in self.phases:
            parts += [str(phase.objective), ("dec" if phase.decayed else "") + format_steps(phase.until)]
        if self.checkpoint is not None:
            parts.append(str(self.checkpoint))
        if self.replicate > 1:
            parts.append(f"r{self.replicate}")
        return "-".join(parts)

    @property
    def steps(self) -> int:
        """Optimiser steps that the named weights have taken."""
        if self.checkpoint is not None:
            return self.checkpoint
        return self.phases[-1].until if self.phases else 0

    @property
    def last_objective(self) -> Objective | None:
        """The objective of the last step taken, or None for an untrained model."""
        return next((phase.objective for phase in self.phases if self.steps <= phase.until), None)


def format_steps(steps: int) -> str:
    """Format a number of steps as in names: 42000 -> `42k`, 600 -> `600`."""
    return f"{steps // 1000}k" if steps % 1000 == 0 else str(steps)


def parse_name(name: str, sizes: Iterable[str] = SIZES) -> ModelName:
    """Parse a model name.

    Raises:
        UserError: if the size or objective is unknown, a mask ratio is outside 1 to 99, steps do not increase, a share
            is not a whole number of steps, or the name is not the one that `str` gives for this plan.
    """
    size, *rest = name.split("-")
    replicate = _replicate(name, rest)
    if size not in (allowed := tuple(sizes)):
        raise unknown("size", size, allowed, where=f"model {name!r}")
    if not rest:
        raise UserError(f"model {name!r}: the objective and the number of steps are missing; expected {_GRAMMAR}.")
    if rest == ["untrained"]:
        return ModelName(size, replicate=replicate)
    rest = list(_in_steps(name, rest))
    # Parts come in pairs of objective and steps. A number in an objective's place is the intermediate checkpoint.
    phases: list[Phase] = []
    checkpoint: int | None = None
    for part, steps in zip_longest(rest[::2], rest[1::2]):
        if phases and part[:1].isdigit():
            _, checkpoint = _steps(name, part)
            if checkpoint >= phases[-1].until:
                raise UserError(
                    f"model {name!r}: the intermediate checkpoint {checkpoint} must lie before the end at step {phases[-1].until}."
                )
            if steps is not None:
                raise UserError(f"model {name!r}: {steps!r} follows the intermediate step; nothing may.")
            break
        objective = parse_objective(part, where=f"model {name!r}")
        if steps is None:
            raise UserError(f"model {name!r}: the number of steps after {part!r} is missing; expected {_GRAMMAR}.")
        decayed, until = _steps(name, steps)
        if phases and until <= phases[-1].until:
            raise UserError(
                f"model {name!r}: steps must increase from phase to phase (they are totals), but {until} comes after {phases[-1].until}."
            )
        phases.append(Phase(objective, until, decayed))
    if phases[-1].decayed:
        raise UserError(
            f"model {name!r}: 'dec' says that another phase starts from the decayed weights, but none follows; the last phase always decays."
        )
    for before, after in pairwise(phases):
        if before.objective == after.objective and not before.decayed:
            raise UserError(
                f"model {name!r}: two phases of {before.objective} without a decay between them are one; leave out "
                f"'{before.objective}-{format_steps(before.until)}-'."
            )
    parsed = ModelName(size, tuple(phases), checkpoint)
    # One spelling per plan, so that names can be compared and searched for as text.
    if str(parsed) != "-".join([size, *rest]):
        raise UserError(
            f"model {name!r}: a plan has one name only; write {str(replace(parsed, replicate=replicate))!r}."
        )
    return replace(parsed, replicate=replicate)


def replicates_among(names: Mapping[str, ModelName]) -> dict[str, str]:
    """Map each further pretraining run of a plan to the first run of that plan, by their names.

    Args:
        names: parsed model names, by the names of the runs.
    """
    firsts: dict[ModelName, str] = {}
    for called in sorted(names, key=lambda called: names[called].replicate):
        firsts.setdefault(replace(names[called], replicate=1), called)
    first_of = {called: firsts[replace(name, replicate=1)] for called, name in names.items()}
    return {called: first for called, first in first_of.items() if called != first}


def _replicate(name: str, parts: list[str]) -> int:
    """Remove the number of a replicate from the end of a name's parts and return it; 1 if there is none."""
    if not parts or re.fullmatch(r"r\d+", parts[-1]) is None:
        return 1
    number = parts.pop()[1:]
    if number in ("0", "1") or number.startswith("0"):
        raise UserError(
            f"model {name!r}: replicates are numbered from r2 on; the first has no number: {name[: -len(number) - 2]!r}."
        )
    return int(number)


def _in_steps(name: str, parts: list[str]) -> Iterator[str]:
    """Yield a name's parts, with each share replaced by its number of steps."""
    last = (len(parts) // 2) * 2 - 1  # index of the last phase's steps
    for index, part in enumerate(parts):
        match = _SHARE.fullmatch(part)
        if match is None:
            yield part
            continue
        if index % 2 == 0 or index == last:
            raise UserError(
                f"model {name!r}: {part!r} is a share of the last phase's end, and stands for the steps of an earlier phase only."
            )
        total = _steps(name, parts[last])[1]
        # Exact arithmetic, so that the test for whole steps below is not subject to rounding.
        steps = Fraction(match[2]) * total / 100
        if steps.denominator != 1 or not 0 < steps < total:
            raise UserError(
                f"model {name!r}: {match[2]} % of {total} steps are {float(steps):g}; {_nearest(steps, total)}."
            )
        yield (match[1] or "") + format_steps(int(steps))


def _nearest(steps: Fraction, total: int) -> str:
    """Name the percentages nearest to `steps` that are whole steps of `total`, with at most `_DECIMALS` decimals."""
    stride = total // gcd(total, 100 * 10**_DECIMALS)  # multiples of this are such percentages
    below = min((ceil(steps / stride) - 1) * stride, total - stride)
    above = (floor(steps / stride) + 1) * stride
    near = [f"{float(Fraction(100 * step, total)):g}% ({step} steps)" for step in (below, above) if 0 < step < total]
    return f"nearest: {' and '.join(near)}" if near else "write the steps themselves"


def _steps(name: str, text: str) -> tuple[bool, int]:
    match = re.fullmatch(r"(dec)?(\d+)(k?)", text)
    if match is None or int(match.group(2)) == 0:
        raise UserError(
            f"model {name!r}: {text!r} is not a number of steps; allowed: such as 600, 42k, dec42k, or 25% before a later phase."
        )
    return match.group(1) is not None, int(match.group(2)) * (1000 if match.group(3) else 1)

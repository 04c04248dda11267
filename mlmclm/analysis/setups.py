"""Differences in how results that are compared were computed: settings of the protocol, engine, backend and device.

Models of a study may be fine-tuned with settings of their own, and cells on different machines. A difference of scores then
holds the effect of these too, so it is said wherever such results are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PACKAGES = ("torch", "transformers")
"""Those whose versions may change a score a little."""
COMPUTED = ("engine", "backend", "device", *(f"{package} version" for package in PACKAGES))
"""The setup that computed a result: the version of its definition, the kernels, the processor or GPU, and packages."""


@dataclass(frozen=True)
class SetupDifference:
    """Something in which the results of a comparison differ beside what is compared.

    Attributes:
        what: one of `COMPUTED`, or a setting of the protocol.
        values: the value or values of each side, as text; none of a side whose results don't record it, while those of others do.
        tasks: those on which it differs.
    """

    what: str
    values: Mapping[str, tuple[str, ...]]
    tasks: tuple[str, ...]

    @property
    def apart(self) -> bool:
        """Whether the sides differ in it, rather than each having several values alike."""
        return len(set(self.values.values())) > 1

    @property
    def several(self) -> bool:
        """Whether several values are recorded, rather than one for some sides and none for the others."""
        return len({value for own in self.values.values() for value in own}) > 1

    @property
    def may_differ(self) -> bool:
        """Whether sides have several values, or some have one and others don't record any."""
        return self.several or (any(self.values.values()) and not all(self.values.values()))


def setup_differences(sides: Mapping[str, Iterable[Mapping[str, Any]]]) -> tuple[SetupDifference, ...]:
    """Return in what the results of each side differ, task by task, in a fixed order; empty if they were computed alike.

    Results at different points of a grid's other settings are not compared with each other. Something that no side records
    differs in nothing; what only some sides record is a difference, as the others may have had another value.

    Args:
        sides: model or cell -> its results, as JSON objects.
    """
    compared: dict[tuple[str, str], dict[str, list[Mapping[str, Any]]]] = {}
    for side, results in sides.items():
        for result in results:
            place = result["task"], result.get("setting", "")
            compared.setdefault(place, {}).setdefault(side, []).append(result)
    tasks: dict[tuple[str, tuple[tuple[str, tuple[str, ...]], ...]], dict[str, None]] = {}
    for (task, _), own in sorted(compared.items()):
        for what, values in _differing(own):
            tasks.setdefault((what, tuple(values.items())), {})[task] = None
    return tuple(SetupDifference(what, dict(values), tuple(own)) for (what, values), own in tasks.items())


def _differing(sides: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterable[tuple[str, dict[str, tuple[str, ...]]]]:
    """Yield each thing in which some sides' results differ, with its values on each side."""
    known = {side: [_described(result) for result in results] for side, results in sides.items()}
    names = dict.fromkeys(name for own in known.values() for each in own for name in each)
    for name in sorted(names, key=lambda name: (name not in COMPUTED, name)):
        values = {side: tuple(sorted({each[name] for each in own if name in each})) for side, own in known.items()}
        if SetupDifference(name, values, ()).may_differ:
            yield name, values


def _described(result: Mapping[str, Any]) -> dict[str, str]:
    """Return the `COMPUTED` and the settings of a result, as far as it says them."""
    cost = result.get("cost") or {}
    found = {"engine": result.get("engine"), "backend": cost.get("backend"), "device": cost.get("device")}
    found |= {f"{package} version": (cost.get("versions") or {}).get(package) for package in PACKAGES}
    return {name: str(value) for name, value in found.items() if value is not None} | {
        name: str(value) for name, value in (result.get("protocol") or {}).items()
    }

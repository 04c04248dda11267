"""Differences in how results that are compared were computed: settings of the protocol, engine, backend and device.

Models of a study may be fine-tuned with different settings, and their cells may run on different machines. A difference of scores
then includes the effect of these too, so they are reported wherever such results are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PACKAGES = ("torch", "transformers")
"""Packages whose versions may change a score a little."""
COMPUTED = ("engine", "backend", "device", *(f"{package} version" for package in PACKAGES))
"""The setup that computed a result: the version of its definition, the kernels, the processor or GPU, and packages."""


@dataclass(frozen=True)
class SetupDifference:
    """A difference in how the results of a comparison were computed, beside the one that is studied.

    Attributes:
        what: one of `COMPUTED`, or a setting of the protocol.
        values: the value or values of each side, as text; empty for a side whose results don't record it.
        tasks: the tasks on which it differs.
    """

    what: str
    values: Mapping[str, tuple[str, ...]]
    tasks: tuple[str, ...]

    @property
    def apart(self) -> bool:
        """Whether the sides differ from each other, rather than all having the same several values."""
        return len(set(self.values.values())) > 1

    @property
    def several(self) -> bool:
        """Whether several values are recorded, rather than one for some sides and none for the others."""
        return len({value for texts in self.values.values() for value in texts}) > 1

    @property
    def may_differ(self) -> bool:
        """Whether sides have several values, or some have one and others don't record any."""
        return self.several or (any(self.values.values()) and not all(self.values.values()))


def setup_differences(sides: Mapping[str, Iterable[Mapping[str, Any]]]) -> tuple[SetupDifference, ...]:
    """Return how the computation of the sides' results differs, task by task, in a fixed order; empty if they were computed alike.

    Results at different points of a grid's other settings are not compared with each other. An entry that no side records is no
    difference; one that only some sides record is, as the others may have had another value.

    Args:
        sides: model or cell -> its results, as JSON objects.
    """
    compared: dict[tuple[str, str], dict[str, list[Mapping[str, Any]]]] = {}
    for side, results in sides.items():
        for result in results:
            key = result["task"], result.get("setting", "")
            compared.setdefault(key, {}).setdefault(side, []).append(result)
    tasks: dict[tuple[str, tuple[tuple[str, tuple[str, ...]], ...]], dict[str, None]] = {}
    for (task, _), by_side in sorted(compared.items()):
        for what, values in _differing(by_side):
            tasks.setdefault((what, tuple(values.items())), {})[task] = None
    return tuple(SetupDifference(what, dict(values), tuple(names)) for (what, values), names in tasks.items())


def _differing(sides: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterable[tuple[str, dict[str, tuple[str, ...]]]]:
    """Yield the name of each entry in which the sides' results may differ, with its values on each side."""
    setups = {side: [_described(result) for result in results] for side, results in sides.items()}
    names = dict.fromkeys(name for rows in setups.values() for row in rows for name in row)
    for name in sorted(names, key=lambda name: (name not in COMPUTED, name)):
        values = {side: tuple(sorted({row[name] for row in rows if name in row})) for side, rows in setups.items()}
        if SetupDifference(name, values, ()).may_differ:
            yield name, values


def _described(result: Mapping[str, Any]) -> dict[str, str]:
    """Return the entries of `COMPUTED` and the protocol's settings of a result, as far as it records them."""
    cost = result.get("cost") or {}
    setup = {"engine": result.get("engine"), "backend": cost.get("backend"), "device": cost.get("device")}
    setup |= {f"{package} version": (cost.get("versions") or {}).get(package) for package in PACKAGES}
    return {name: str(value) for name, value in setup.items() if value is not None} | {
        name: str(value) for name, value in (result.get("protocol") or {}).items()
    }

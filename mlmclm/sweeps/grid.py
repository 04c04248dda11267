"""The grid of a sweep as plain values, and its difference from an earlier one in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlmclm.seeds import seed_value
from mlmclm.sweeps.space import Space

AXES = {"models": "model", "tasks": "task", "learning_rates": "learning rate", "seeds": "seed"}
"""Parts of a grid to which items may be added, and the word for one item."""


def grid_of(space: Space, models: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return a grid as plain values.

    Args:
        models: the models by name, each with its hashes (`SweepModel.hashes`); with "" if the study trains it.
    """
    earlier = {name: hashes[1:] for name, hashes in models.items() if len(hashes) > 1}
    return {
        "models": {name: hashes[0] for name, hashes in models.items()},
        **({"earlier": earlier} if earlier else {}),
        "tasks": {
            task: {
                name: point.model_dump(mode="json", exclude_defaults=True)
                for name, point in space.settings_for(task).items()
            }
            for task in space.tasks
        },
        "learning_rates": list(space.learning_rates),
        **({"extend": space.learning_rates.most} if space.learning_rates.most else {}),
        "seeds": [seed_value(seed) for seed in space.seeds],
        "per_model": space.per_model,
        "start_from": space.start_from,
    }


@dataclass(frozen=True)
class Difference:
    """Difference of a grid from an earlier one, in words: what was added, and what is lost or changed."""

    added: tuple[str, ...]
    lost: tuple[str, ...]


def grid_difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> Difference:
    """Compare two grids (`grid_of`)."""
    added, lost = [], []
    for key, word in AXES.items():
        added += _listed(f"{word} added", (item for item in now[key] if item not in before[key]))
        lost += _listed(f"{word} left out", (item for item in before[key] if item not in now[key]))
    most, most_now = (grid.get("extend", 0) for grid in (before, now))
    if most != most_now:
        (added if most_now > most else lost).append(f"{_extended(most_now)} (was {_extended(most)})")
    changed: dict[str, dict[str, None]] = {}  # what changed -> the tasks or models for which it did, in order
    for model in _both("models", before, now):
        if before["models"][model] not in (now["models"][model], *now.get("earlier", {}).get(model, ())):
            changed.setdefault("other weights", {})[model] = None
        for words in _changed(*(grid["per_model"].get(model, {}) for grid in (before, now))):
            changed.setdefault(words, {})[model] = None
    for task in _both("tasks", before, now):
        old, new = before["tasks"][task], now["tasks"][task]
        added += _listed(f"setting of {task} added", (point for point in new if point not in old))
        lost += _listed(f"setting of {task} left out", (point for point in old if point not in new))
        starts = [{"start_from": grid["start_from"].get(task)} for grid in (before, now)]
        for pair in (starts, *([old[point], new[point]] for point in old if point in new)):
            for words in _changed(*pair):
                changed.setdefault(words, {})[task] = None
    lost += [f"{', '.join(names)}: {words}" for words, names in changed.items()]
    return Difference(tuple(added), tuple(lost))


def _extended(most: int) -> str:
    return f"up to {most} learning rates added at each end" if most else "no learning rates added"


def _both(key: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [name for name in before[key] if name in now[key]]


def _listed(words: str, items: Iterable[Any]) -> list[str]:
    names = ", ".join(str(item) or "the protocol's own" for item in items)
    return [f"{words}: {names}"] if names else []


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [
        f"{key} {now.get(key, 'as by default')} (was {before.get(key, 'as by default')})"
        for key in dict.fromkeys((*before, *now))
        if before.get(key) != now.get(key)
    ]

"""The grid that a study or sweep was last run over, as `store/studies/NAME/run.json` has it.

A folder holds one report. If another grid under an old name would leave something out of the report, the user must
decide. A grid that only grew replaces nothing. Metrics and rule are not part of a grid: if they change, the same
command reports the same cells again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlmclm.errors import UserError
from mlmclm.progress import say
from mlmclm.seeds import seed_value
from mlmclm.storage.checksums import read_sealed

if TYPE_CHECKING:
    from mlmclm.sweeps.space import Space

FILE = "run.json"
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


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> Difference:
    """Compare two grids (`grid_of`)."""
    added, lost = [], []
    for key, word in AXES.items():
        added += _listed(f"{word} added", (each for each in now[key] if each not in before[key]))
        lost += _listed(f"{word} left out", (each for each in before[key] if each not in now[key]))
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
    return [each for each in before[key] if each in now[key]]


def _listed(words: str, items: Iterable[Any]) -> list[str]:
    found = ", ".join(str(item) or "the protocol's own" for item in items)
    return [f"{words}: {found}"] if found else []


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [
        f"{key} {now.get(key, 'as by default')} (was {before.get(key, 'as by default')})"
        for key in dict.fromkeys((*before, *now))
        if before.get(key) != now.get(key)
    ]


def since_last(folder: Path, grid: Mapping[str, Any]) -> Difference:
    """Compare a grid with the last one of a study's or sweep's folder, if any; a `UserError` if its record is damaged."""
    if not (folder / FILE).is_file():
        return Difference((), ())
    again = "Delete it, or run with --replace: the report is then replaced, whatever its grid was."
    last = read_sealed(folder / FILE, again).get("grid", {})
    if not {*AXES, "per_model", "start_from"} <= last.keys():
        raise UserError(f"{folder / FILE}: it has no grid. {again}")
    return difference(last, grid)


def check_last(folder: Path, grid: Mapping[str, Any], *, replace: bool) -> None:
    """Raise a `UserError` for a grid that lacks something of the last one in the folder, or if the record of the last
    one is damaged; say if the grid only grew.

    Args:
        replace: whether the user has decided that it may.
    """
    try:
        found = since_last(folder, grid)
    except UserError as error:
        if not replace:
            raise
        say(f"{error} It is written anew.")
        return
    if found.lost and not replace:
        raise UserError(
            f"name {folder.name!r}: it was last run over another grid, whose report in {folder} would be replaced.\n"
            + "".join(f"  {line}\n" for line in (*found.lost, *found.added))
            + "Give this one another name (--name, or `name` in the file), or add --replace. Results of cells are kept "
            "either way."
        )
    if found.added and not found.lost:
        say(f"{folder.name}: the grid has grown: {'; '.join(found.added)}")

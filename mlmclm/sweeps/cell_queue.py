"""Queue of the cells of a sweep, from which workers take one at a time."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping

from mlmclm.finetuning.cell import Cell


class CellQueue:
    """Gives each worker cells of one model for as long as there are any, because a worker caches one model's weights.

    A worker without a model gets the one with the most cells left per worker, which keeps the models' ends together.
    Within a model, cells come in their given order.

    Args:
        cells: the cells by key, in the order of the grid.
    """

    def __init__(self, cells: Mapping[str, Cell]) -> None:
        self._weights = {key: cell.weights for key, cell in cells.items()}
        self._waiting: dict[str, deque[str]] = {}
        for key, weights in self._weights.items():
            self._waiting.setdefault(weights, deque()).append(key)
        self._model_of: dict[str, str] = {}
        self._held: dict[str, str] = {}

    def __len__(self) -> int:
        """Return the number of cells that no worker has taken."""
        return sum(map(len, self._waiting.values()))

    def take(self, worker: str) -> str | None:
        """Give a worker its next cell's key, or None if no cell is left."""
        model = self._model_of.get(worker)
        if model is None or not self._waiting[model]:
            self._model_of.pop(worker, None)
            workers = Counter(self._model_of.values())
            # Of equals, `max` returns the first, in the order of the grid.
            model = max(self._waiting, key=lambda each: len(self._waiting[each]) / (1 + workers[each]))
            if not self._waiting[model]:
                return None
            self._model_of[worker] = model
        self._held[worker] = self._waiting[model].popleft()
        return self._held[worker]

    def give_up(self, worker: str) -> str | None:
        """Return the key of the cell that a worker holds, if any, which it holds no more."""
        return self._held.pop(worker, None)

    def forget(self, worker: str) -> None:
        """Note that a worker is gone, and with it the model that it had cached."""
        self._model_of.pop(worker, None)

    @property
    def held(self) -> int:
        """Number of cells that workers hold."""
        return len(self._held)

    def put_back(self, key: str) -> None:
        """Make a cell the next one of its model."""
        self._waiting[self._weights[key]].appendleft(key)

"""Queue of a sweep's trainings, from which workers take one at a time."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from mlmclm.sweeps.trainings import Training


class CellQueue:
    """Gives each worker trainings of one model for as long as there are any, because a worker caches one model's weights.

    A worker without a model gets the one with the most work left per worker, which keeps the models' ends together.
    Within a model the longest trainings come first, so that none of them is left alone at the end; equally long ones,
    such as those of one task, come in their given order.
    """

    def __init__(self, trainings: Iterable[Training]) -> None:
        self._waiting: dict[str, deque[Training]] = {}
        for training in sorted(trainings, key=lambda each: -each.work):
            self._waiting.setdefault(training.first.weights, deque()).append(training)
        self._work = {model: sum(each.work for each in waiting) for model, waiting in self._waiting.items()}
        self._model_of: dict[str, str] = {}
        self._held: dict[str, Training] = {}

    def __len__(self) -> int:
        """Return the number of trainings that no worker has taken."""
        return sum(map(len, self._waiting.values()))

    def take(self, worker: str) -> Training | None:
        """Give a worker its next training, or None if none is left."""
        model = self._model_of.get(worker)
        if model is None or not self._waiting[model]:
            self._model_of.pop(worker, None)
            workers = Counter(self._model_of.values())
            models = [each for each, waiting in self._waiting.items() if waiting]
            if not models:
                return None
            # On ties, `max` returns the first: the one with the longest training, or else the grid's first.
            model = max(models, key=lambda each: self._work[each] / (1 + workers[each]))
            self._model_of[worker] = model
        training = self._waiting[model].popleft()
        self._work[model] -= training.work
        self._held[worker] = training
        return training

    def give_up(self, worker: str) -> Training | None:
        """Take back the training that a worker holds, if any."""
        return self._held.pop(worker, None)

    def forget(self, worker: str) -> None:
        """Note that a worker is gone, and with it the model that it had cached."""
        self._model_of.pop(worker, None)

    def put_back(self, training: Training) -> None:
        """Make a training the next one of its model."""
        self._waiting[training.first.weights].appendleft(training)
        self._work[training.first.weights] += training.work

    @property
    def waiting(self) -> list[Training]:
        """The trainings that no worker has taken."""
        return [training for waiting in self._waiting.values() for training in waiting]

    @property
    def held(self) -> dict[str, Training]:
        """The trainings that workers hold, by worker."""
        return dict(self._held)

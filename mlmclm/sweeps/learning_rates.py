"""Learning rates of a space: a list, a list that a sweep extends, or a sample of a Ray Tune domain.

`{values: [1.0e-3, 2.0e-3, 4.0e-3], extend: true}` begins with three rates. While the best rate of a model on a task is
the lowest or the highest, the sweep adds the next one on that side for all models on this task (`analysis.extension`).

`{loguniform: [1.0e-5, 1.0e-3], samples: 8, seed: 0}` is eight rates between the two bounds. They are drawn when the
file is read, from a generator with that seed, so the file stands for the same rates everywhere and always. All models
and tasks of the sweep share them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, GetCoreSchemaHandler, WrapValidator

from mlmclm.configuration import Frozen, Role, parse
from mlmclm.errors import UserError

MOST_ADDED, MOST_STATED = 3, 10
"""The most rates that `extend: true` adds at each end of the list, and the most that a file may state instead."""
DRAWS = 1000
"""Draws per sample after which a domain counts as having too few different values."""


def without_duplicates(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the values unchanged.

    Raises:
        ValueError: a value is listed more than once.
    """
    twice = [value for value in dict.fromkeys(values) if values.count(value) > 1]
    if twice:
        raise ValueError(f"{', '.join(map(str, twice))} is listed more than once")
    return values


Rate = Annotated[float, Field(gt=0, lt=1)]


class RateSample(Frozen):
    """A number of learning rates from one of Ray Tune's domains, whose arguments are those of `ray.tune.loguniform` etc."""

    uniform: Annotated[tuple[Rate, Rate] | None, Role.CHOICE] = None
    """Lower and upper bound."""
    quniform: Annotated[tuple[Rate, Rate, Rate] | None, Role.CHOICE] = None
    """Lower and upper bound, and the step to whose multiples rates are rounded."""
    loguniform: Annotated[tuple[Rate, Rate] | None, Role.CHOICE] = None
    """Lower and upper bound; the logarithm is uniform between them."""
    qloguniform: Annotated[tuple[Rate, Rate, Rate] | None, Role.CHOICE] = None
    """Lower and upper bound, and the step to whose multiples rates are rounded."""
    randn: Annotated[tuple[Rate, Rate] | None, Role.CHOICE] = None
    """Mean and standard deviation of a normal distribution."""
    qrandn: Annotated[tuple[Rate, Rate, Rate] | None, Role.CHOICE] = None
    """Mean, standard deviation, and the step to whose multiples rates are rounded."""
    choice: Annotated[
        Annotated[tuple[Rate, ...], Field(min_length=1), AfterValidator(without_duplicates)] | None, Role.CHOICE
    ] = None
    """The rates to choose from."""
    samples: Annotated[int, Role.CHOICE] = Field(ge=1)
    """Number of different rates to draw."""
    seed: Annotated[int, Role.CHOICE] = Field(default=0, ge=0, lt=2**32)
    """Seed of the draws; it has nothing to do with the seeds of the cells."""

    def draw(self) -> list[float]:
        """Return the rates, in ascending order.

        A rate that was drawn before is drawn again. Rates have six significant digits, as in reports, so that
        `mlmclm finetune --lr` finds the same cell; a `choice` is left as it is.

        Raises:
            ValueError: there isn't exactly one domain, Ray Tune refuses its arguments, or it has too few rates.
        """
        domains = self.model_dump(exclude={"samples", "seed"}, exclude_none=True)
        if len(domains) != 1:
            names = ", ".join(name for name in type(self).model_fields if name not in ("samples", "seed"))
            raise ValueError(f"name one domain of {names} (got {', '.join(domains) or 'none'})")
        ((name, arguments),) = domains.items()
        if name.endswith("uniform") and arguments[0] >= arguments[1]:
            raise ValueError(f"{name}: the lower bound {arguments[0]:g} is not below the upper bound {arguments[1]:g}")
        # Imported late because most spaces list their rates, and Ray takes seconds to load.
        import numpy as np
        from ray import tune

        domain = tune.choice(list(arguments)) if name == "choice" else getattr(tune, name)(*arguments)
        # Unlike the streams of numpy's newer generators, those of RandomState never change between versions.
        chance = np.random.RandomState(self.seed)
        drawn: set[float] = set()
        for _ in range(DRAWS * self.samples):
            rate = float(domain.sample(random_state=chance))
            drawn.add(rate if name == "choice" else float(f"{rate:.6g}"))
            if len(drawn) == self.samples:
                return sorted(drawn)
        raise ValueError(f"{name} has only {len(drawn)} different rates, but samples is {self.samples}")


Rates = Annotated[
    tuple[Rate, ...],
    Field(min_length=1, json_schema_extra={"uniqueItems": True}),
    AfterValidator(without_duplicates),
]


class ExtendedRates(Frozen):
    """Learning rates to which a sweep adds others while the best one of a model on a task is the lowest or the highest."""

    values: Annotated[Rates | None, Role.CHOICE] = None
    """The rates to begin with; by default those of the named protocol."""
    extend: Annotated[bool | Annotated[int, Field(ge=0, le=MOST_STATED)], Role.CHOICE]
    """Whether to add rates; a number is the most at each end, in place of 3."""


def further(rates: Sequence[float], number: int, *, higher: bool) -> tuple[float, ...]:
    """Return the next rates beyond the highest or the lowest one by the list's own step, the nearest first.

    If the list repeats itself in each decade (1e-5, 2e-5, 5e-5, 1e-4, ...) or at another constant factor, it goes on so.
    Otherwise the ratio of its two outermost rates goes on. Rates have six significant digits, as in reports, and are below 1.
    """
    found = sorted(rates, reverse=not higher)
    if len(found) < 2:  # a single rate has no step
        return ()
    periods = [period for period in range(1, len(found)) if _repeats(found, period)]
    period = min(periods, key=lambda each: (not _is_decade(found, each), each), default=1)
    factor, first = found[-1] / found[-1 - period], len(found)
    while len(found) < first + number:
        rate = float(f"{found[-period] * factor:.6g}")
        if not 0 < rate < 1:
            break
        found.append(rate)
    return tuple(found[first:])


def _repeats(rates: Sequence[float], period: int) -> bool:
    """Return whether rates that are this far apart in the list have one ratio: that of two pairs, or a decade."""
    ratios = [later / rate for rate, later in zip(rates, rates[period:], strict=False)]
    shown = len(ratios) > 1 or _is_decade(rates, period)
    return shown and all(math.isclose(ratio, ratios[0], rel_tol=1e-6) for ratio in ratios)


def _is_decade(rates: Sequence[float], period: int) -> bool:
    return math.isclose(abs(math.log10(rates[period] / rates[0])), 1)


class RateGrid(tuple[float, ...]):
    """The learning rates of a space, in their order.

    Attributes:
        most: the most rates that a sweep adds on a task at each end; 0 if it adds none.
    """

    most: int

    def __new__(cls, values: Iterable[float] = (), most: int = 0) -> Self:
        """Make the grid."""
        made = super().__new__(cls, values)
        made.most = most
        return made

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return handler.generate_schema(Rates)

    @property
    def lower(self) -> tuple[float, ...]:
        """The rates that may be added below the lowest, in this order."""
        return further(self, self.most, higher=False)

    @property
    def higher(self) -> tuple[float, ...]:
        """The rates that may be added above the highest, in this order."""
        return further(self, self.most, higher=True)

    @property
    def widest(self) -> RateGrid:
        """The grid with all rates that may be added."""
        return RateGrid((*self, *self.lower, *self.higher))


def read_rates(value: Any, handler: Callable[[Any], tuple[float, ...]]) -> RateGrid:
    """Read learning rates in any of their forms.

    Args:
        handler: checks a list of rates.

    Raises:
        ValueError: a rate, the domain or `extend` is wrong.
    """
    most = value.most if isinstance(value, RateGrid) else 0
    if isinstance(value, Mapping):
        try:
            if value.keys() & ExtendedRates.model_fields.keys():
                given = parse(ExtendedRates, dict(value), where="rates")
                most = MOST_ADDED if given.extend is True else int(given.extend)
                value = given.values
                if value is None:
                    raise ValueError("values: list the rates to begin with; the protocol brings none")
            else:
                value = parse(RateSample, dict(value), where="sample").draw()
        except UserError as error:
            raise ValueError(str(error).rstrip(".")) from error
    rates = handler(value)
    if most and len(rates) == 1:
        raise ValueError("extend: one rate has no step by which others could be added; list at least two")
    return RateGrid(rates, most)


LearningRates = Annotated[
    RateGrid, WrapValidator(read_rates, json_schema_input_type=Rates | ExtendedRates | RateSample)
]

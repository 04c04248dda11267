"""Learning rates of a space: a list, or a sample of a Ray Tune domain.

`{loguniform: [1.0e-5, 1.0e-3], samples: 8, seed: 0}` is eight rates between the two bounds. They are drawn when the
file is read, from a generator with that seed, so the file stands for the same rates everywhere and always. All models
and tasks of the sweep share them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from mlmclm.configuration import Frozen, Role, parse
from mlmclm.errors import UserError

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


def drawn_rates(value: Any) -> Any:
    """Replace a sample of a domain by the rates that it stands for; return anything else unchanged.

    Raises:
        ValueError: the domain is wrong.
    """
    if not isinstance(value, Mapping):
        return value
    try:
        return parse(RateSample, dict(value), where="sample").draw()
    except UserError as error:
        raise ValueError(str(error).rstrip(".")) from error


Rates = Annotated[tuple[Rate, ...], Field(min_length=1, json_schema_extra={"uniqueItems": True})]
LearningRates = Annotated[
    Rates, AfterValidator(without_duplicates), BeforeValidator(drawn_rates, json_schema_input_type=Rates | RateSample)
]

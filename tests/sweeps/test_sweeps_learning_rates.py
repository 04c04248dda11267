"""Learning rates of a space, and how a sweep extends them."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from mlmclm.configuration import parse_config
from mlmclm.errors import UserError
from mlmclm.sweeps.axes import RateGrid, next_rates
from mlmclm.sweeps.space import Space

VALUES: dict[str, Any] = {"tasks": ["sst2", "mnli"], "seeds": [0], "protocol": {"max_steps": 5}}


def space_with(rates: Any) -> Space:
    return parse_config(Space, {**VALUES, "learning_rates": rates}, where="space.yaml")


@pytest.mark.parametrize(
    ("rates", "lower", "higher"),
    [
        ([1e-3, 2e-3, 4e-3], (5e-4, 2.5e-4, 1.25e-4), (8e-3, 1.6e-2, 3.2e-2)),
        ([4e-3, 1e-3, 2e-3], (5e-4, 2.5e-4, 1.25e-4), (8e-3, 1.6e-2, 3.2e-2)),
        ([1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4], (5e-6, 2e-6, 1e-6), (1e-3, 2e-3, 5e-3)),
        ([1e-5, 2e-5, 5e-5, 1e-4], (5e-6, 2e-6, 1e-6), (2e-4, 5e-4, 1e-3)),
        ([1e-4, 3e-4, 1e-3, 3e-3], (3e-5, 1e-5, 3e-6), (1e-2, 3e-2, 0.1)),
        ([1e-4, 3e-4, 1e-3], (3e-5, 1e-5, 3e-6), (3e-3, 1e-2, 3e-2)),
        ([1e-5, 3e-5, 5e-5, 8e-5], (3.33333e-6, 1.11111e-6, 3.7037e-7), (1.28e-4, 2.048e-4, 3.2768e-4)),
        ([0.1, 0.3], (3.33333e-2, 1.11111e-2, 3.7037e-3), (0.9,)),
    ],
)
def test_a_list_goes_on_by_its_own_step(
    rates: list[float], lower: tuple[float, ...], higher: tuple[float, ...]
) -> None:
    assert next_rates(rates, 3, higher=False) == pytest.approx(lower, rel=1e-5)
    assert next_rates(rates, 3, higher=True) == pytest.approx(higher, rel=1e-12)
    for rate in (*next_rates(rates, 3, higher=False), *next_rates(rates, 3, higher=True)):
        assert rate == float(f"{rate:.6g}"), "so that `mlmclm finetune --lr` finds the same cell"


def test_rates_are_extended_as_the_space_says() -> None:
    plain = space_with([1e-3, 2e-3])
    assert plain.learning_rates.most == 0 and plain.learning_rates.widest == plain.learning_rates
    for given, most in ((True, 3), (False, 0), (0, 0), (1, 1), (5, 5)):
        found = space_with({"values": [1e-3, 2e-3], "extend": given}).learning_rates
        assert found == (1e-3, 2e-3) and found.most == most
        assert len(found.widest) == 2 + 2 * most
    again = pickle.loads(pickle.dumps(RateGrid((1e-3, 2e-3), 2)))
    assert (again, again.most) == ((1e-3, 2e-3), 2)


def test_the_rates_of_a_named_protocol_are_extended() -> None:
    space = parse_config(
        Space, {"tasks": ["sst2"], "learning_rates": {"extend": True}, "protocol": "standard"}, where="space.yaml"
    )
    assert space.learning_rates == (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4)
    assert space.learning_rates.higher == (1e-3, 2e-3, 5e-3)


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ({"extend": True}, "values: list the rates to begin with; the protocol brings none"),
        ({"values": [1e-3], "extend": True}, "extend: one rate has no step by which others could be added"),
        ({"values": [1e-3, 1e-3], "extend": True}, "0.001 is listed more than once"),
        ({"values": [1e-3, 2e-3], "extend": 11}, "less than or equal to 10"),
        ({"values": [1e-3, 2e-3], "extend": -1}, "greater than or equal to 0"),
        ({"values": [1e-3, 2e-3], "extent": True}, "unknown key 'extent'. Did you mean 'extend'?"),
        ({"values": [1e-3, 2e-3]}, "key 'extend' is missing"),
        ({"loguniform": [1e-5, 1e-3], "samples": 4, "extend": True}, "unknown key 'loguniform'"),
    ],
)
def test_a_wrong_extension_is_refused_with_the_key(rates: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        space_with(rates)
    assert str(caught.value).startswith("space.yaml: learning_rates") and message in str(caught.value)

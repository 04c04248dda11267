"""Learning rates drawn from Ray Tune's domains: which they are, that they stay, and what a wrong domain is told."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlmclm.configuration import parse
from mlmclm.errors import UserError
from mlmclm.sweeps.cells import SweepModel, expand
from mlmclm.sweeps.learning_rates import RateGrid, further
from mlmclm.sweeps.space import Space

VALUES: dict[str, Any] = {"tasks": ["sst2", "mnli"], "seeds": [0], "protocol": {"max_steps": 5}}


def space_with(rates: Any) -> Space:
    return parse(Space, {**VALUES, "learning_rates": rates}, where="space.yaml")


def rounded(values: Any) -> list[float]:
    return sorted(float(f"{value:.6g}") for value in values)


def test_rates_are_the_domain_s_own_distribution_from_the_seed_of_the_file() -> None:
    low, high = np.log(1e-5), np.log(1e-3)
    for seed in (0, 7):
        found = space_with({"loguniform": [1e-5, 1e-3], "samples": 8, "seed": seed}).learning_rates
        assert list(found) == rounded(np.exp(np.random.RandomState(seed).uniform(low, high, 8)))
    normal = space_with({"randn": [1e-3, 1e-5], "samples": 5, "seed": 3}).learning_rates
    assert list(normal) == rounded(np.random.RandomState(3).normal(1e-3, 1e-5, 5))
    # The seed is 0 unless the file names another.
    flat = space_with({"uniform": [1e-5, 1e-3], "samples": 4}).learning_rates
    assert list(flat) == rounded(np.random.RandomState(0).uniform(1e-5, 1e-3, 4))


def test_a_choice_and_a_step_give_each_rate_once() -> None:
    chosen = space_with({"choice": [1e-5, 1.23456789e-4, 1e-3], "samples": 3}).learning_rates
    assert chosen == (1e-5, 1.23456789e-4, 1e-3)
    stepped = space_with({"quniform": [1e-4, 5e-4, 1e-4], "samples": 5}).learning_rates
    assert stepped == (1e-4, 2e-4, 3e-4, 4e-4, 5e-4)
    multiples = np.array(space_with({"qloguniform": [1e-5, 1e-3, 1e-5], "samples": 6}).learning_rates) / 1e-5
    assert np.allclose(multiples, multiples.round()) and len(set(multiples)) == 6


def test_all_models_and_tasks_have_the_same_rates() -> None:
    space = space_with({"loguniform": [1e-5, 1e-3], "samples": 4})
    models = [SweepModel(name, Path(name), f"hash of {name}") for name in ("a", "b")]
    cells = expand(space, models, {"sst2": "x", "mnli": "y"})
    by_pair: dict[tuple[str, str], list[float]] = {}
    for cell in cells:
        by_pair.setdefault((cell.model, cell.task), []).append(cell.learning_rate)
    assert len(by_pair) == 4 and all(rates == list(space.learning_rates) for rates in by_pair.values())


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ({"logunifrom": [1e-5, 1e-3], "samples": 2}, "unknown key 'logunifrom'. Did you mean 'loguniform'?"),
        ({"loguniform": [1e-5, 1e-3]}, "key 'samples' is missing"),
        ({"loguniform": [1e-5, 1e-3], "samples": 0}, "samples: Input should be greater than or equal to 1 (got 0)"),
        ({"loguniform": [1e-5, 1e-3], "samples": 2, "seed": -1}, "seed"),
        ({"loguniform": [1e-3, 1e-5], "samples": 2}, "lower bound 0.001 is not below the upper bound 1e-05"),
        ({"loguniform": [0, 1e-3], "samples": 2}, "loguniform.0: Input should be greater than 0"),
        ({"uniform": [1e-5, 2.0], "samples": 2}, "uniform.1: Input should be less than 1"),
        ({"samples": 2}, "name one domain of uniform, quniform, loguniform"),
        ({"choice": [1e-3], "uniform": [1e-5, 1e-3], "samples": 1}, "(got uniform, choice)"),
        ({"choice": [1e-3, 1e-4], "samples": 3}, "choice has only 2 different rates, but samples is 3"),
        ({"choice": [], "samples": 1}, "choice"),
        ({"quniform": [1e-4, 1e-3, 3e-4], "samples": 2}, "is not divisible by"),
        ({"randn": [1e-4, 1e-2], "samples": 8}, "Input should be greater than 0"),
    ],
)
def test_a_wrong_domain_is_refused_with_the_key(rates: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        space_with(rates)
    assert str(caught.value).startswith("space.yaml: learning_rates") and message in str(caught.value)


def test_ray_is_loaded_only_for_a_space_that_draws() -> None:
    code = "import sys; from mlmclm.sweeps.space import find_space; find_space('paper'); print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


def test_more_samples_keep_the_rates_that_were_there() -> None:
    few, many = (space_with({"loguniform": [1e-5, 1e-3], "samples": n}).learning_rates for n in (5, 12))
    assert set(few) < set(many)


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
    assert further(rates, 3, higher=False) == pytest.approx(lower, rel=1e-5)
    assert further(rates, 3, higher=True) == pytest.approx(higher, rel=1e-12)
    for rate in (*further(rates, 3, higher=False), *further(rates, 3, higher=True)):
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
    space = parse(
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

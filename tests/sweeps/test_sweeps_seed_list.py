"""Seeds of a space: how they are read, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from mlmclm.configuration import parse_config
from mlmclm.errors import UserError
from mlmclm.sweeps.space import Space, find_space

VALUES: dict[str, Any] = {
    "tasks": ["mnli", "rte"],
    "learning_rates": [1e-3, 2e-3],
    "seeds": [0, 1, 2],
    "protocol": {"max_steps": 5},
}


def space_of(**changes: Any) -> Space:
    return parse_config(Space, {**VALUES, **changes}, where="space.yaml")


def test_a_number_of_seeds_stands_for_a_list_from_zero() -> None:
    assert space_of(seeds=7).seeds == (0, 1, 2, 3, 4, 5, 6)
    assert space_of(seeds=1).seeds == (0,) and space_of(seeds=[4, 2]).seeds == (4, 2)
    assert space_of(seeds=3).cells_of("rte") == 2 * 3 and space_of(seeds=3) == space_of()
    assert find_space(VALUES, seeds=2).seeds == (0, 1)  # type: ignore[arg-type]  # as a study's file gives it


@pytest.mark.parametrize(
    ("seeds", "message"),
    [
        (0, r"0: the number of seeds is from 1 to 10,000; a single seed is a list, \[0\]"),
        (-3, "-3: the number of seeds is from 1 to 10,000"),
        (20_000, "20000: the number of seeds is from 1 to 10,000"),
        (True, "expected a list"),
        (2.5, "expected a list"),
        ([0, 0], "0 is listed more than once"),
        ({"power": 0.8}, "unknown stream 'power'"),
    ],
)
def test_wrong_seeds_are_refused(seeds: Any, message: str) -> None:
    with pytest.raises(UserError, match=rf"space\.yaml: seeds: .*{message}"):
        space_of(seeds=seeds)


def test_a_space_with_other_tasks_keeps_what_is_about_them() -> None:
    assert find_space({**VALUES, "noise": {"rte": {"seeds": 2}}}, ["mnli"]).noise == {}


def test_noise_of_a_space_is_checked() -> None:
    with pytest.raises(UserError, match=r"noise: unknown task 'mnl'\. Did you mean 'mnli'"):
        space_of(noise={"mnl": {"seeds": 1.0}})
    with pytest.raises(UserError, match=r"noise\.rte\.seeds: Input should be greater than 0"):
        space_of(noise={"rte": {"seeds": 0.0}})
    with pytest.raises(UserError, match="noise: Input should be a valid dictionary"):
        find_space({**VALUES, "noise": [1]}, ["rte"])

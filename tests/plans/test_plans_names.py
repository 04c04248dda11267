"""Names are plans: parsing and printing are inverse, and a wrong name says what is allowed."""

from __future__ import annotations

import itertools
import re

import pytest

from mlmclm.errors import UserError
from mlmclm.models.sizes import SIZES
from mlmclm.objectives.clm import Causal
from mlmclm.objectives.mlm import Masked
from mlmclm.objectives.objective import Objective
from mlmclm.plans.names import ModelName, Phase, parse_name

CLM, MLM = Causal(), Masked(40)


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("610m-clm-42k", ModelName("610m", (Phase(CLM, 42_000),))),
        ("610m-mlm40-42k", ModelName("610m", (Phase(MLM, 42_000),))),
        ("610m-clm-10k-mlm40-42k", ModelName("610m", (Phase(CLM, 10_000), Phase(MLM, 42_000)))),
        ("610m-clm-dec42k-mlm40-64k", ModelName("610m", (Phase(CLM, 42_000, True), Phase(MLM, 64_000)))),
        ("610m-mlm40-dec42k-mlm40-44k", ModelName("610m", (Phase(MLM, 42_000, True), Phase(MLM, 44_000)))),
        ("610m-mlm40-42k-1000", ModelName("610m", (Phase(MLM, 42_000),), 1000)),
        ("2m-clm-150-mlm40-600", ModelName("2m", (Phase(CLM, 150), Phase(MLM, 600)))),
        ("2m-clm-150-mlm40-600-300", ModelName("2m", (Phase(CLM, 150), Phase(MLM, 600)), 300)),
        ("2m-untrained", ModelName("2m")),
        ("2m-untrained-r2", ModelName("2m", replicate=2)),
        ("2m-clm-150-mlm40-600-r12", ModelName("2m", (Phase(CLM, 150), Phase(MLM, 600)), replicate=12)),
        ("2m-mlm40-600-300-r2", ModelName("2m", (Phase(MLM, 600),), 300, replicate=2)),
    ],
)
def test_a_name_of_the_study_parses_to_its_plan(name: str, plan: ModelName) -> None:
    assert parse_name(name) == plan
    assert str(plan) == name


def test_printing_and_parsing_are_inverse_over_the_whole_grammar() -> None:
    names = 0
    for size, first, second in itertools.product(SIZES, ["clm", "mlm1", "mlm40", "mlm99"], [None, "clm", "mlm15"]):
        for steps, dec, tail in itertools.product([1, 999, 1000, 2500, 42_000], [False, True], [None, 1, 1000]):
            phases = [Phase(_objective(first), steps, dec and second is not None)]
            if second is not None:
                if second == first and not dec:
                    continue
                phases.append(Phase(_objective(second), steps + 2000))
            if tail is not None and tail >= phases[-1].until:
                continue
            plan = ModelName(size, tuple(phases), tail)
            assert parse_name(str(plan)) == plan
            names += 1
    assert names > 500


def _objective(text: str) -> Objective:
    return CLM if text == "clm" else Masked(int(text[3:]))


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("611m-clm-42k", "Did you mean '610m'"),
        ("2m", "number of steps are missing"),
        ("2m-clm", "number of steps after 'clm' is missing"),
        ("2m-cml-600", "unknown objective 'cml'"),
        ("2m-mlm-600", "unknown objective 'mlm'"),
        ("2m-mlm0-600", "allowed: 1 to 99"),
        ("2m-mlm100-600", "allowed: 1 to 99"),
        ("2m-mlm040-600", "write '2m-mlm40-600'"),
        ("2m-clm-42000", "write '2m-clm-42k'"),
        ("2m-clm-0", "not a number of steps"),
        ("2m-clm-x", "not a number of steps"),
        ("2m-clm-600-mlm40-600", "steps must increase"),
        ("2m-clm-600-mlm40-300", "steps must increase"),
        ("2m-clm-300-clm-600", "leave out 'clm-300-'"),
        ("2m-clm-dec600", "no"),
        ("2m-clm-600-600", "must lie before the end"),
        ("2m-clm-600-300-200", "nothing may"),
        ("2m-untrained-3", "unknown objective"),
        ("2m-clm-12.55%-mlm40-1k", "12.55 % of 1000 steps are 125.5; nearest: 12.5% (125 steps) and 12.6% (126 steps)"),
        ("2m-clm-50%-mlm40-7", "50 % of 7 steps are 3.5; write the steps themselves"),
        ("2m-clm-0%-mlm40-1k", "nearest: 0.1% (1 steps)"),
        ("2m-clm-100%-mlm40-1k", "nearest: 99.9% (999 steps)"),
        ("2m-clm-150%-mlm40-1k", "nearest: 99.9% (999 steps)"),
        ("2m-clm-025%-mlm40-1k", "not a number of steps"),
        ("2m-clm-25.0%-mlm40-1k", "not a number of steps"),
        ("2m-clm-25%", "an earlier phase only"),
        ("2m-clm-1k-25%", "an earlier phase only"),
        ("2m-clm-25%-mlm40-1000", "write '2m-clm-250-mlm40-1k'"),
        ("2m-clm-50%-mlm40-25%-clm-1k", "steps must increase"),
        ("2m-clm-600-r1", "the first has no number: '2m-clm-600'"),
        ("2m-clm-600-r02", "numbered from r2 on"),
        ("2m-r2", "number of steps are missing"),
        ("2m-clm-1000-r2", "write '2m-clm-1k-r2'"),
    ],
)
def test_a_wrong_name_is_a_user_error_that_says_why(name: str, part: str) -> None:
    with pytest.raises(UserError, match="model") as caught:
        parse_name(name)
    assert part in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("share", "steps"),
    [
        ("1m-clm-25%-mlm40-1k", "1m-clm-250-mlm40-1k"),
        ("1m-clm-12.5%-mlm40-1k", "1m-clm-125-mlm40-1k"),
        ("1m-clm-dec50%-mlm40-42k", "1m-clm-dec21k-mlm40-42k"),
        ("1m-clm-25%-mlm40-75%-clm-1k", "1m-clm-250-mlm40-750-clm-1k"),
        ("1m-clm-250-mlm40-75%-clm-1k-300", "1m-clm-250-mlm40-750-clm-1k-300"),
        ("1m-clm-25%-mlm40-1k-r3", "1m-clm-250-mlm40-1k-r3"),
    ],
)
def test_a_share_of_the_whole_is_the_steps_that_it_stands_for(share: str, steps: str) -> None:
    assert parse_name(share) == parse_name(steps)
    assert str(parse_name(share)) == steps


def test_every_share_that_an_error_proposes_is_accepted() -> None:
    proposed = 0
    for total, share in itertools.product([600, 999, 1024, 42_000], ["33.3", "0.0001", "99.99999", "7.77777"]):
        with pytest.raises(UserError) as caught:
            parse_name(f"1m-clm-{share}%-mlm40-{total}")
        for near, steps in re.findall(r"([\d.]+)% \((\d+) steps\)", str(caught.value)):
            found = parse_name(f"1m-clm-{near}%-mlm40-{total if total % 1000 else f'{total // 1000}k'}")
            assert found.phases[0].until == int(steps)
            proposed += 1
    assert proposed > 10


def test_a_study_s_own_names_are_sizes_too() -> None:
    sizes = [*SIZES, "smol", "bert.base_2"]
    assert str(parse_name("smol-clm-50%-mlm40-1k", sizes)) == "smol-clm-500-mlm40-1k"
    assert parse_name("bert.base_2-untrained", sizes).size == "bert.base_2"
    with pytest.raises(UserError, match=r"unknown size 'smoll'\. Did you mean 'smol'\? Allowed: .*smol, bert\.base_2"):
        parse_name("smoll-clm-1k", sizes)
    with pytest.raises(UserError, match="unknown size 'smol'"):
        parse_name("smol-clm-1k")


def test_the_last_objective_is_that_of_the_last_step_taken() -> None:
    assert parse_name("2m-clm-150-mlm40-600").last_objective == MLM
    assert parse_name("2m-clm-150-mlm40-600-100").last_objective == CLM
    assert parse_name("2m-untrained").last_objective is None

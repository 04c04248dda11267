"""Each law of decay against its closed form, and against transformers' own schedule where that has it."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import get_wsd_schedule

from mlmclm.configuration import parse_config
from mlmclm.errors import UserError
from mlmclm.plans.recipe import Recipe
from mlmclm.schedules.decay import DECAYS, learning_rate

PEAK, WARMUP, DECAY, TOTAL = 3e-4, 20, 50, 200


def rates(law: str) -> list[float]:
    return [
        learning_rate(step, peak=PEAK, warmup=WARMUP, origin=0, decay=DECAY, decay_end=TOTAL, law=law)
        for step in range(TOTAL)
    ]


CLOSED = {
    "linear": lambda over: 1 - over,
    "1-sqrt": lambda over: 1 - math.sqrt(over),
    "1-square": lambda over: 1 - over**2,
    "cosine": lambda over: (1 + math.cos(math.pi * over)) / 2,
    "constant": lambda over: 1.0,
}


@pytest.mark.parametrize("law", [*DECAYS])
def test_a_law_is_its_closed_form(law: str) -> None:
    """The factor as a function of the share of the decay that is over."""
    found = rates(law)
    assert found[:WARMUP] == pytest.approx([PEAK * (step + 1) / WARMUP for step in range(WARMUP)])
    assert set(found[WARMUP : TOTAL - DECAY]) == {PEAK}
    assert found[TOTAL - DECAY :] == pytest.approx([PEAK * CLOSED[law](step / DECAY) for step in range(DECAY)])


@pytest.mark.parametrize("law", ["linear", "1-sqrt", "cosine"])
def test_a_law_is_that_of_transformers(law: str) -> None:
    """Whose step n, counted from 0, warms up to n / warm-up, one step behind ours."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    schedule = get_wsd_schedule(
        optimizer, num_warmup_steps=WARMUP, num_decay_steps=DECAY, num_training_steps=TOTAL, decay_type=law
    )
    theirs = []
    for _ in range(TOTAL):
        theirs.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    found = rates(law)
    assert found[WARMUP:] == pytest.approx(theirs[WARMUP:], abs=1e-12)
    assert found[: WARMUP - 1] == pytest.approx(theirs[1:WARMUP])


def test_the_recipe_names_a_law_and_keys_of_states_know_it_only_where_it_is_not_the_usual_one() -> None:
    assert "decay" not in Recipe().identity()
    assert Recipe(decay="cosine").identity()["decay"] == "cosine"
    with pytest.raises(UserError, match=r"decay: unknown schedule 'cosin'\. Did you mean 'cosine'\?"):
        parse_config(Recipe, {"decay": "cosin"}, where="study.yaml")

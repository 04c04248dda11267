"""The recipe's DeepSpeed block: passed through, and never against the recipe."""

from __future__ import annotations

from typing import Any

import pytest

from mlmclm.configuration import parse_config
from mlmclm.errors import UserError
from mlmclm.plans.recipe import RECIPE_KEYS, Recipe
from mlmclm.pretraining.engine import deepspeed_config
from mlmclm.pretraining.partitioning import WAYS, PartitionedMoments


def nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


@pytest.mark.parametrize("key", RECIPE_KEYS)
def test_a_deepspeed_key_that_the_recipe_decides_is_an_error_that_names_the_recipe_s_field(key: str) -> None:
    with pytest.raises(UserError) as error:
        parse_config(Recipe, {"deepspeed": nested(key, 77)}, where="study.yaml")
    text = str(error.value)
    assert text.startswith(f"study.yaml: deepspeed: {key}: 77 contradicts the recipe")
    fields = [part for part in RECIPE_KEYS[key].split("'") if part in Recipe.model_fields]
    assert fields and all(f"'{field}'" in text for field in fields)


def test_other_deepspeed_keys_are_passed_through_beside_the_recipe_s_own() -> None:
    block = {"zero_optimization": {"overlap_comm": True, "sub_group_size": 1000}, "wall_clock_breakdown": True}
    plain, given = Recipe(batch=8), Recipe(batch=8, deepspeed=block)
    expected = deepspeed_config(plain, 2, PartitionedMoments, 1000)
    expected["zero_optimization"] |= block["zero_optimization"]
    assert deepspeed_config(given, 2, PartitionedMoments, 1000) == {**expected, "wall_clock_breakdown": True}
    assert plain.identity() == given.identity(), "it changes no key of a state"


@pytest.mark.parametrize(
    "block",
    [
        {"data_types": {"grad_accum_dtype": "bf16"}},
        {"communication_data_type": "fp16"},
        {"zero_optimization": {"zero_quantized_gradients": True, "overlap_comm": True}},
    ],
)
def test_deepspeed_keys_that_can_change_the_weights_change_the_key_of_a_state(block: dict[str, Any]) -> None:
    assert Recipe(deepspeed=block).identity() != Recipe().identity()


@pytest.mark.parametrize("apart", [False, True])
def test_messages_go_beside_the_computation_only_on_devices_of_their_own_and_without_a_wait_for_it(apart: bool) -> None:
    plain = Recipe(batch=8, workers=2)
    overlaps = {
        stage: deepspeed_config(plain, 2, way, 10**6, apart=apart)["zero_optimization"]["overlap_comm"]
        for stage, way in WAYS.items()
    }
    assert overlaps == {0: False, 1: False, 2: False, 3: apart}
    asked = plain.model_copy(update={"deepspeed": {"zero_optimization": {"overlap_comm": True}}})
    assert deepspeed_config(asked, 2, WAYS[1], 10**6, apart=apart)["zero_optimization"]["overlap_comm"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"workers": 2, "fewest_workers": 3}, "fewest_workers 3 is more than workers 2"),
        ({"workers": 4, "fewest_workers": 2}, "batch 32 does not divide by 3 workers"),
        ({"workers": 2, "fewest_workers": 1, "micro_batch": 3, "batch": 6}, None),
        ({"workers": 8, "fewest_workers": 8}, None),
    ],
)
def test_any_number_of_workers_between_the_fewest_and_all_must_divide_the_batch(
    values: dict[str, Any], said: str | None
) -> None:
    if said is None:
        assert Recipe.model_validate({"batch": 32, **values}).fewest_workers == values["fewest_workers"]
    else:
        with pytest.raises(ValueError, match=said):
            Recipe.model_validate({"batch": 32, **values})

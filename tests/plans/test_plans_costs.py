"""Costs: steps, tokens, FLOPs and hours equal a count by hand, with and without sharing."""

from __future__ import annotations

import numpy as np
import pytest

from mlmclm.errors import UserError
from mlmclm.models.sizes import SIZES
from mlmclm.plans.costs import Pricing, segment_flops
from mlmclm.plans.devices import DEVICES, HERE, PUBLISHED, Device, published_device
from mlmclm.plans.names import parse_name
from mlmclm.plans.recipe import Recipe
from mlmclm.plans.stages import Plan, make_plan

RECIPE = Recipe(block_length=16, batch=4, warmup_steps=1, decay_steps=10)
VOCABULARY = 1000
TOKENS_A_STEP = 4 * 16


def plan(*names: str) -> Plan:
    return make_plan([parse_name(name) for name in names], RECIPE)


def flops_a_step(*, causal: bool, labelled: float) -> float:
    """One step of the size 1m by hand: matrix by matrix, two FLOPs a weight and token forward, four backward."""
    hidden, feed_forward, layers = 128, 384, 2
    matrices = [(hidden, hidden)] * 4 + [(hidden, feed_forward)] * 3
    weights = layers * sum(rows * columns for rows, columns in matrices)
    # Scores and weighted values: 2 products of length x length x hidden a layer and sequence, each of 2 FLOPs, and twice that backward.
    attention = layers * 2 * 2 * 16 * 16 * hidden * 3 * 4 * (0.5 if causal else 1)
    return 6 * weights * TOKENS_A_STEP + attention + 6 * hidden * VOCABULARY * TOKENS_A_STEP * labelled


def test_the_flops_of_a_plan_equal_a_count_by_hand() -> None:
    made = plan("1m-clm-100", "1m-clm-50-mlm40-100")
    pricing = Pricing(RECIPE, VOCABULARY, "h100")
    causal, masked = flops_a_step(causal=True, labelled=15 / 16), flops_a_step(causal=False, labelled=0.4)
    together, alone = pricing.plan(made), pricing.states(made.alone)
    assert together.flops == pytest.approx(100 * causal + 50 * masked, rel=1e-6)
    assert alone.flops == pytest.approx(150 * causal + 50 * masked, rel=1e-6)
    assert (together.steps, alone.steps) == (150, 200)
    assert together.tokens == 150 * TOKENS_A_STEP
    assert sum(pricing.stage(stage).flops for stage in made.stages) == together.flops


def test_isolated_documents_have_fewer_labels_and_less_attention() -> None:
    (stage,) = plan("1m-clm-10").stages
    documents = np.array([10, 6, 16])  # 3 of 32 tokens begin a document
    found = segment_flops(SIZES["1m"], stage.segments[0], RECIPE, VOCABULARY, documents)
    labels = 6 * 128 * VOCABULARY * 10 * TOKENS_A_STEP * 29 / 32
    keys = sum(length * length / 2 for length in (10, 6, 16)) / 32
    blocks = 6 * 2 * (128 * 128 * 4 + 128 * 384 * 3) + 2 * 12 * 128 * keys
    assert found == pytest.approx(labels + blocks * 10 * TOKENS_A_STEP, rel=1e-6)


def test_hours_are_flops_over_the_device_s_peak_times_the_utilisation() -> None:
    made = plan("1m-mlm40-100")
    cost = Pricing(RECIPE, VOCABULARY, "a100", 0.25).plan(made)
    assert cost.device_hours == pytest.approx(cost.flops / (0.25 * 312e12 * 3600))
    both, one = (Pricing(RECIPE, VOCABULARY, name).plan(made).device_hours for name in ("mi250x", "mi250x-gcd"))
    assert one == pytest.approx(2 * both)


@pytest.mark.parametrize(
    ("title", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756.5e12),
        ("NVIDIA H100 NVL", 835.5e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H200 NVL", 835.5e12),
        ("NVIDIA GH200 480GB", 989.4e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362.05e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("Tesla V100-SXM2-16GB", None),
        ("Intel(R) Xeon(R) Processor @ 2.10GHz, 2 cores", None),
    ],
)
def test_a_gpu_s_published_peak_is_found_by_its_name_in_cuda(title: str, peak: float | None) -> None:
    found = published_device(title)
    assert (found and found.peak) == peak
    assert all(device.source for device in (*DEVICES.values(), *PUBLISHED.values()))


def test_an_unknown_device_or_an_impossible_utilisation_is_refused() -> None:
    with pytest.raises(UserError, match=r"unknown device 'h1000'\. Did you mean 'h100'"):
        Pricing(RECIPE, VOCABULARY, "h1000")
    for share in (0.0, -0.1, 1.01, float("nan")):
        with pytest.raises(UserError, match="more than 0 and at most 1"):
            Pricing(RECIPE, VOCABULARY, "h100", share)


def test_an_untrained_model_costs_nothing() -> None:
    assert Pricing(RECIPE, VOCABULARY, "h100").plan(plan("1m-untrained")).device_hours == 0


def test_hours_on_this_machine_are_by_what_was_measured_of_it() -> None:
    here = Device("a laptop", 2e12, "measured")
    made = plan("1m-clm-100")
    hours = [
        Pricing(RECIPE, VOCABULARY, *device).plan(made).device_hours for device in ((HERE, 0.4, SIZES, here), ("h100",))
    ]
    assert hours[0] == pytest.approx(hours[1] * DEVICES["h100"].peak / 2e12)

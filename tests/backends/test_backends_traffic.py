"""Bounds on the bytes, casts, dense masks, waits and graph breaks of a step on the CUDA path, by counting."""

from __future__ import annotations

import importlib.util

import pytest

MISSING = [name for name in ("liger_kernel", "triton") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}")

BOUNDS = {
    # size, precision: kB a token and layer, MB a labelled token in the head with MLM and with CLM
    ("610m", "bf16-autocast"): (147, 1.12, 1.03),
    ("610m", "bf16-residual"): (119, 1.12, 1.03),
    ("ettin150m", "bf16-autocast"): (79, 0.46, 0.40),
    ("ettin150m", "bf16-residual"): (61, 0.46, 0.40),
}
HALF = [(size, precision, causal) for (size, precision), causal in zip(BOUNDS, (False, True, True, False), strict=True)]


@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize(("size", "precision", "causal"), HALF)
def test_a_step_moves_no_more_bytes_than_it_did(size: str, precision: str, causal: bool, isolated: bool) -> None:
    from benchmarks.traffic import Case, per_layer
    from mlmclm.models.sizes import SIZES

    activations, *heads = BOUNDS[size, precision]
    found = per_layer(Case(SIZES[size], causal, isolated, precision))
    assert found.activations <= 1e3 * activations, "bytes a token and layer"
    assert found.casts == 0, "casts of activations a layer"
    assert found.dense_masks == 0, "masks of [length, length] a layer"
    assert found.head <= 1e6 * heads[causal], "bytes a labelled token in the head"
    assert found.waits == 0, "waits for the device a pass"
    assert found.flops == 6 * SIZES[size].products, "FLOPs of a token's products in a layer, by the closed form"


@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize(("architecture", "causal"), [("eurobert", True), ("modernbert", False)])
def test_compiled_layers_have_no_graph_breaks(architecture: str, causal: bool, isolated: bool) -> None:
    from benchmarks.traffic import Case, graph_breaks
    from mlmclm.models.sizes import Size

    window = 8 if architecture == "modernbert" else None
    size = Size(3, 64, 96, heads=2, key_value_heads=2, architecture=architecture, window=window)
    assert graph_breaks(Case(size, causal, isolated)) == 0

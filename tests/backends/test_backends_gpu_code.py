"""The project's Triton kernels compile to machine code of GPUs, which takes none."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

MISSING = [name for name in ("liger_kernel", "triton") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}")


def kernels() -> list[tuple[Any, dict[str, str], dict[str, Any]]]:
    """Each kernel with the types of its tensors and its constants, as bf16 autocast calls it."""
    from mlmclm.backends.cuda import add_and_norm, modernbert, rotation

    wide, narrow = "*fp32", "*bf16"
    forward = {"hidden": wide, "pending": narrow, "weight": wide, "added": wide, "normed": narrow, "scales": wide}
    forward |= {"centres": wide, "epsilon": "fp32", "width": "i32"}
    backward = {"to_normed": narrow, "to_added": wide, "added": wide, "weight": wide, "scales": wide, "parts": wide}
    backward |= {"to_hidden": wide, "to_pending": narrow, "rows": "i32", "width": "i32"}
    norms = {"BLOCK": 2048, "CENTRED": True}
    gelu = {"joined": narrow, "gated": narrow, "width": "i32"}
    to_gelu = {"joined": narrow, "to_gated": narrow, "width": "i32"}
    rotated = {"source": narrow, "target": narrow, "cos": wide, "sin": wide}
    rotated |= dict.fromkeys(rotation._rotated.arg_names[1:12], "i32") | rotated
    return [
        (add_and_norm._forward, forward, norms),
        (add_and_norm._forward, forward, norms | {"CENTRED": False}),
        (add_and_norm._backward, backward | {"centres": wide}, norms | {"MORE": True, "BOTH": True}),
        (add_and_norm._backward, backward, norms | {"CENTRED": False, "MORE": True, "BOTH": True, "centres": None}),
        (modernbert._gated_gelu, gelu, {"BLOCK": 1024}),
        (modernbert._gated_gelu_backward, to_gelu, {"BLOCK": 1024}),
        (rotation._rotated, rotated, {"BACK": False, "HEADS": 32, "HALF": 32}),
        (rotation._rotated, rotated, {"BACK": True, "HEADS": 32, "HALF": 32}),
    ]


@pytest.mark.parametrize("capability", [80, 90])
def test_own_kernels_compile_for_an_a100_and_an_h100(
    capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for kernel, types, constants in kernels():
        names = kernel.arg_names
        source = ASTSource(
            kernel,
            {name: types.get(name, "constexpr") for name in names},
            {(names.index(name),): value for name, value in constants.items()},
        )
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        assert len(compiled.asm["cubin"]) > 1000, kernel.__name__
        assert compiled.metadata.shared < 48 << 10, "bytes of shared memory"

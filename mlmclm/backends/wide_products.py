"""Products of bfloat16 tensors on processors without instructions for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.overrides import TorchFunctionMode

PRODUCTS = frozenset({
    functional.linear, functional.scaled_dot_product_attention, torch.matmul, torch.mm, torch.bmm, torch.addmm,
    torch.baddbmm, torch.einsum, Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm,
})  # fmt: skip


@cache
def processor_has_bf16() -> bool:
    """Return whether this processor has instructions that torch uses for products of bfloat16 matrices.

    Most laptops have none (x86-64 without AVX-512), nor have many ARM CPUs. There torch multiplies bfloat16 matrices
    element by element, 60 to 100 times more slowly than float32 (measured with AVX2: 0.6 to 1.0 GFLOP/s against 61 to 67).
    """
    library: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return library and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class WideProducts(TorchFunctionMode):
    """In this context, products of bfloat16 tensors are computed in float32 and rounded to bfloat16.

    The results are those of the instructions that the processor lacks, except for the order of sums.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # With `out`, the caller has chosen the dtype of the result.
        if func not in PRODUCTS or "out" in kwargs or not any(map(_is_bf16, (*args, *kwargs.values()))):
            return func(*args, **kwargs)
        result: Tensor = func(
            *(part.float() if _is_bf16(part) else part for part in args),
            **{name: part.float() if _is_bf16(part) else part for name, part in kwargs.items()},
        )
        return result.to(torch.bfloat16)


def _is_bf16(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.bfloat16

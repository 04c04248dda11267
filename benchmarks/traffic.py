"""Counts of what a training step of the CUDA path would do on a GPU, taken without one.

The step runs on torch's fake tensors, which have shapes and dtypes but no memory. They claim to be on the CPU, because
torch without CUDA has no autograd for fake GPU tensors; the backend `cuda` computes with them all the same. Triton's
kernels are not launched: their tensor arguments are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig, PreTrainedModel
from triton.runtime.jit import JITFunction

from mlmclm.backends import choice
from mlmclm.backends.cuda import Cuda
from mlmclm.backends.packing import Packing
from mlmclm.models.architectures import ARCHITECTURES
from mlmclm.models.build import PretrainingModel
from mlmclm.models.cross_entropy import LabelledCrossEntropyHead
from mlmclm.models.sizes import GLOBAL_EVERY, PUBLISHED_VOCABULARY, Size

UNIT = 43
"""A prime that divides every count of tokens here and no width: a tensor whose size it divides holds activations."""
LENGTH = 16 * UNIT
SEQUENCES = 20
"""20 x 688 tokens are 5 x 64 x 43, so that 40 % of them and packed rows are divisible by 43."""
LABELLED = 0.4
DOCUMENTS = 5
"""Documents of a sequence where they are isolated."""

PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"})
ALLOCATIONS = frozenset({
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided",
    "aten::_unsafe_view", "aten::detach", "aten::lift_fresh", "aten::_reshape_alias",
})  # fmt: skip
READS_WHAT_IT_WRITES = frozenset({"aten::embedding", "aten::index", "aten::index_select", "aten::gather"})
"""Operations that read as many elements of their first argument as they write."""
WAITS = frozenset({"aten::_local_scalar_dense", "aten::nonzero"})
"""Operations whose result the host needs, so that it waits for the GPU."""
TIMES = {
    "liger_cross_entropy_kernel": {"X_ptr": 3},
    "_swiglu_backward_kernel": {"a_ptr": 2, "b_ptr": 2},
    "_gated_gelu_backward": {"joined": 2},
}
"""How often a Triton kernel visits an argument, where it is not once."""


@dataclass
class Counts:
    """Counts of a forward and backward pass."""

    activations: int = 0
    """Bytes that operations other than products and attention read and write of tensors with a row for each token."""
    weights: int = 0
    """The same for tensors of the weights' shapes: casts, and sums of gradients."""
    head: int = 0
    """The same within the LM head, its weight included."""
    casts: int = 0
    """Casts of activations outside the head."""
    dense_masks: int = 0
    """Calls of attention with a mask of [length, length]."""
    waits: int = 0
    flops: int = 0
    """FLOPs of matrix products, attention's not among them."""


class Traffic(TorchDispatchMode):
    """Within this context operations on fake tensors are counted in `counts`.

    Args:
        labelled: the number of labelled tokens, which `nonzero` finds.
    """

    def __init__(self, labelled: int) -> None:
        super().__init__()
        self.counts, self.labelled, self.in_head = Counts(), labelled, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name: str = func._schema.name
        if name in WAITS:
            self.counts.waits += 1
            return args[0].new_empty((self.labelled, 1), dtype=torch.int64) if name == "aten::nonzero" else 1
        result = func(*args, **kwargs)
        if name in PRODUCTS:
            self.counts.flops += 2 * result.numel() * args[name.endswith(("addmm", "baddbmm"))].shape[-1]
        if "scaled_dot_product" in name and "backward" not in name:
            mask = kwargs.get("attn_mask")
            self.counts.dense_masks += mask is not None and mask.shape[-2] > 1
        elif _is_elementwise(func):
            self._add(name, args, kwargs, result)
        return result

    def launch(self, kernel: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> None:
        """Count a launch of a Triton kernel."""
        name = kernel.__name__
        named = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        for argument, value in named.items():
            if isinstance(value, Tensor):
                self._count(value, TIMES.get(name, {}).get(argument, 1))

    def _add(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        read, written = _tensors((args, kwargs)), _tensors(result)
        if name in READS_WHAT_IT_WRITES:
            read = [*written, *read[1:]]
        elif name in ("aten::zero_", "aten::fill_"):
            read = []
        elif name == "aten::copy_":
            read = read[1:]
        if name in ("aten::_to_copy", "aten::copy_") and read[0].dtype != written[0].dtype:
            self.counts.casts += not self.in_head and _is_activation(read[0])
        for tensor in (*read, *written):
            self._count(tensor, 1)

    def _count(self, tensor: Tensor, times: int) -> None:
        size = times * tensor.numel() * tensor.itemsize
        if self.in_head:
            self.counts.head += size
        elif _is_activation(tensor):
            self.counts.activations += size
        else:
            self.counts.weights += size


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _is_activation(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and tensor.numel() % UNIT == 0


def _is_elementwise(func: Any) -> bool:
    name = func._schema.name
    if not name.startswith("aten::") or name in PRODUCTS | ALLOCATIONS or "scaled_dot_product" in name:
        return False
    aliases = [alias.alias_info for alias in func._schema.returns]
    return not aliases or any(alias is None or alias.is_write for alias in aliases)  # others are views


class Case(NamedTuple):
    """A kind of training."""

    size: Size
    causal: bool = False
    isolated: bool = False
    precision: str = "bf16-autocast"


def configuration(size: Size, layers: int, length: int) -> PreTrainedConfig:
    """Return the configuration of a size with its published vocabulary, this many layers, and sequences of this length."""
    names = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    shape: dict[str, Any] = {
        "vocab_size": PUBLISHED_VOCABULARY[size.architecture], "hidden_size": size.hidden,
        "intermediate_size": size.intermediate, "num_hidden_layers": layers, "num_attention_heads": size.heads,
        "max_position_embeddings": length,
    }  # fmt: skip
    if size.architecture == "modernbert":
        kinds = ["sliding_attention" if layer % GLOBAL_EVERY else "full_attention" for layer in range(layers)]
        shape |= {
            "layer_types": kinds,
            "local_attention": 2 * (size.window or length),
            "cls_token_id": 1,
            "sep_token_id": 2,
        }
    else:
        shape |= {"num_key_value_heads": size.key_value_heads, "tie_word_embeddings": False, "mask_token_id": 3}
    return ARCHITECTURES[size.architecture].model.config_class(**names, **shape)


def fake_model(size: Size, layers: int) -> PreTrainedModel:
    """Return a model of a size's widths with this many layers; the caller is in a `FakeTensorMode`."""
    # Weights without memory need no values, and drawing ModernBERT's would read them.
    with patch.object(PreTrainedModel, "init_weights"):
        return ARCHITECTURES[size.architecture].model(configuration(size, layers, LENGTH))


@contextmanager
def as_cuda(traffic: Traffic) -> Iterator[None]:
    """Within this context the CPU's backend is `cuda`, and Triton's kernels are counted in place of launched."""

    def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
        traffic.launch(kernel, *args, **kwargs)

    def new_tensor(*args: Any, made: Callable[..., Tensor] = Tensor.new_tensor, **kwargs: Any) -> Tensor:
        traffic.counts.waits += 1  # the host waits until its numbers are on the GPU
        return made(*args, **kwargs)

    with (
        patch.dict(choice._chosen, {("cpu", ""): Cuda()}),
        patch.object(JITFunction, "run", run),
        patch.object(Tensor, "new_tensor", new_tensor),
    ):
        try:
            yield
        finally:
            Packing.uniform.cache_clear()  # these may have fake index tensors


def count(case: Case, layers: int) -> Counts:
    """Count a forward and backward pass over `SEQUENCES` sequences of `LENGTH` tokens."""
    tokens = SEQUENCES * LENGTH
    labelled = tokens if case.causal else round(LABELLED * tokens)
    traffic = Traffic(labelled)
    with FakeTensorMode(allow_non_fake_inputs=True), as_cuda(traffic):
        model = PretrainingModel(fake_model(case.size, layers), precision=case.precision)
        ids, labels = (torch.zeros(SEQUENCES, LENGTH, dtype=torch.int64) for _ in range(2))
        packing = None
        if case.isolated:
            # One token less, so that the row with its padding is as long as the sequences together.
            lengths = [LENGTH // DOCUMENTS] * (DOCUMENTS * SEQUENCES)
            lengths += [tokens - 1 - sum(lengths)]
            packing = Packing.of([length for length in lengths if length > 0])
            ids, labels = ids.view(1, -1)[:, : packing.tokens], labels.view(1, -1)[:, : packing.tokens]
        where = torch.zeros(
            labelled, dtype=torch.int64
        )  # the host knows which positions have labels, as in `Engine.step`
        with _head_of(model, traffic), traffic:
            model(ids, labels, case.causal, packing, where=where).backward()
    return traffic.counts


def graph_breaks(case: Case, layers: int = GLOBAL_EVERY) -> int:
    """Count the breaks in the graphs of a small model's layers under torch.compile, which here traces and runs none."""

    def zeros(graph: GraphModule, _: Any) -> Callable[..., tuple[Tensor, ...]]:
        results = [node.meta["example_value"] for node in graph.graph.output_node().args[0]]  # type: ignore[union-attr]
        return lambda *_: tuple(torch.zeros(example.shape, dtype=example.dtype) for example in results)

    torch._dynamo.reset()
    counters.clear()
    ids = torch.zeros(2, LENGTH, dtype=torch.int64)
    packing = Packing.of([LENGTH, LENGTH // 2, LENGTH // 2]) if case.isolated else None
    with as_cuda(Traffic(0)), patch.object(torch, "compile", partial(torch.compile, backend=zeros)):
        model = PretrainingModel(fake_model(case.size, layers), precision=case.precision, compiled=True)
        model(ids, ids, case.causal, packing)
    assert counters["stats"]["unique_graphs"], "nothing was traced"
    return sum(counters["graph_break"].values())


@contextmanager
def _head_of(model: PretrainingModel, traffic: Traffic) -> Iterator[None]:
    """Within this context `traffic.in_head` is set while the LM head computes."""
    head: LabelledCrossEntropyHead = model.model.get_output_embeddings()
    handles = (
        head.register_forward_pre_hook(lambda *_: setattr(traffic, "in_head", True)),
        head.register_forward_hook(lambda *_: setattr(traffic, "in_head", False)),
    )
    yield
    for handle in handles:
        handle.remove()


class LayerCounts(NamedTuple):
    """Counts of a layer, the mean over ModernBERT's three kinds, and of what is around the layers."""

    activations: float
    """Bytes a token and layer."""
    casts: float
    """Casts of activations a layer."""
    weights: float
    """Bytes of weights and their gradients a layer and pass."""
    dense_masks: float
    waits: int
    """Waits a pass."""
    around: float
    """Bytes a token outside layers and head. MLM's last layer computes half of its work for labelled tokens alone, which is
    subtracted here."""
    head: float
    """Bytes a labelled token."""
    flops: float
    """FLOPs of a token's products in a layer."""
    flops_around: float
    """FLOPs of a token's products outside layers, less what MLM's last layer saves."""


def per_layer(case: Case) -> LayerCounts:
    """Count two models, one of which has one more layer of each kind, and return the counts of these layers."""
    kinds = GLOBAL_EVERY if case.size.local_layers else 1
    few, more = (count(case, layers) for layers in (kinds, 2 * kinds))
    tokens = SEQUENCES * LENGTH
    labelled = tokens if case.causal else round(LABELLED * tokens)

    def of_layer(name: str) -> float:
        return (getattr(more, name) - getattr(few, name)) / kinds

    return LayerCounts(
        of_layer("activations") / tokens, of_layer("casts"), of_layer("weights"), of_layer("dense_masks"), more.waits,
        (few.activations - kinds * of_layer("activations")) / tokens, more.head / labelled, of_layer("flops") / tokens,
        (few.flops - kinds * of_layer("flops")) / tokens,
    )  # fmt: skip

"""Accelerators by name, for estimates of device-hours.

The command line's help lists these names, so this module imports nothing heavy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

DEFAULT_DEVICE = "h100"
DEFAULT_UTILISATION = 0.4
"""Assumed share of a device's peak that training reaches. Well-tuned public training loops report 0.4 to 0.5."""


@dataclass(frozen=True)
class Device:
    """An accelerator, in the unit that a scheduler counts."""

    title: str
    peak: float
    """FLOP/s of dense bf16 matrix products with fp32 accumulation, by the vendor's data sheet; measured for `HERE`."""
    source: str


DEVICES: dict[str, Device] = {
    "a100": Device("NVIDIA A100", 312e12, "NVIDIA A100 data sheet, BF16 Tensor Core"),
    "h100": Device("NVIDIA H100 SXM", 989.4e12, "NVIDIA H100 data sheet, BF16 Tensor Core, half of the figure with sparsity"),
    "h200": Device("NVIDIA H200 SXM", 989.4e12, "NVIDIA H200 data sheet, BF16 Tensor Core, half of the figure with sparsity"),
    "mi250x": Device("AMD MI250X, both dies", 383e12, "AMD Instinct MI250X data sheet, peak bfloat16"),
    "mi250x-gcd": Device("AMD MI250X, one of two dies", 191.5e12, "half of the MI250X; a die is what software sees as a GPU"),
}  # fmt: skip
"""Devices that `--device` accepts besides `HERE`."""
_SPARSE = "BF16 Tensor Core, half of the figure with sparsity"
PUBLISHED: dict[tuple[str, ...], Device] = {
    ("B200",): Device("NVIDIA B200", 2.25e15, f"NVIDIA HGX B200 data sheet, {_SPARSE}"),
    ("GH200",): Device("NVIDIA GH200", 989.4e12, f"NVIDIA GH200 data sheet, {_SPARSE}"),
    ("H200", "NVL"): Device("NVIDIA H200 NVL", 835.5e12, f"NVIDIA H200 data sheet, {_SPARSE}"),
    ("H200",): DEVICES["h200"],
    ("H100", "NVL"): Device("NVIDIA H100 NVL", 835.5e12, f"NVIDIA H100 data sheet, {_SPARSE}"),
    ("H100", "PCIe"): Device("NVIDIA H100 PCIe", 756.5e12, f"NVIDIA H100 PCIe data sheet, {_SPARSE}"),
    ("H100", "HBM3"): DEVICES["h100"],
    ("A100",): DEVICES["a100"],
    ("A40",): Device("NVIDIA A40", 149.7e12, "NVIDIA A40 data sheet, BF16 Tensor Core"),
    ("A30",): Device("NVIDIA A30", 165e12, "NVIDIA A30 data sheet, BF16 Tensor Core"),
    ("A10",): Device("NVIDIA A10", 125e12, "NVIDIA A10 data sheet, BF16 Tensor Core"),
    ("L40S",): Device("NVIDIA L40S", 362.05e12, "NVIDIA L40S data sheet, BF16 Tensor Core"),
    ("L4",): Device("NVIDIA L4", 121e12, f"NVIDIA L4 data sheet, {_SPARSE}"),
}
"""Words of a GPU's name in CUDA -> the device. The first entry whose words are all in the name applies."""
HERE = "here"
"""The machine that runs the command, as measured by `pretraining.speed.this_machine`."""


def published_device(title: str) -> Device | None:
    """Return the GPU of this name in CUDA, such as `NVIDIA H100 80GB HBM3`, with its published peak; None if unknown.

    A part of a GPU (MIG) has none.
    """
    words = set(re.split(r"[ -]", title))
    if "MIG" in words:
        return None
    return next((device for name, device in PUBLISHED.items() if words.issuperset(name)), None)

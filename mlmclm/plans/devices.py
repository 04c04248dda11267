"""Accelerators by name, for estimates of device-hours.

The command line's help lists these names, so this module imports nothing heavy.
"""

from __future__ import annotations

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
HERE = "here"
"""The machine that runs the command, as measured by `pretraining.speed.this_machine`."""

"""The one door to the hardware: attention, losses, fused blocks, optimizers and shared memory, chosen once for each device.

| backend | device | computes by |
|---|---|---|
| `reference` | any | torch's operations |
| `cpu` | CPU | loops that numba compiles, and memory that a machine's workers share |
| `cpu+amx` | CPU | the same, with matrix products by the tile instructions of Intel's CPUs |
| `cuda` | NVIDIA GPU | torch's variable-length attention; otherwise as `reference` |

A backend is a subclass of `Reference` that overrides what it computes better; no caller looks at the type of a device. A device's best backend
is taken unless `MLMCLM_BACKEND` names another.
"""

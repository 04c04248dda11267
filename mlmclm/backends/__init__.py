"""Hardware backends: attention, losses, fused blocks, optimisers and shared memory, chosen once per device.

| backend | device | computes with |
|---|---|---|
| `reference` | any | torch's operations |
| `cpu` | CPU | loops compiled with numba, and memory shared by a machine's workers |
| `cpu+amx` | CPU | the same, with matrix products by the tile instructions of Intel's CPUs |
| `cuda` | NVIDIA GPU | torch's variable-length attention, and Liger's kernels; otherwise the same as `reference` |

A backend is a subclass of `Reference` that overrides the operations it computes better. To add one, add a file or a
folder here, or register one (`mlmclm.registry`). Callers never look at the type of a device. A device gets its best
backend unless `MLMCLM_BACKEND` names another.
"""
